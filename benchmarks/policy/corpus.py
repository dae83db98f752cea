"""What a corpus costs: to index, to open, and to look up in at every step.

    python benchmarks/policy/corpus.py --out corpus.jsonl

The corpus is Python source: the standard library and the installed packages, copied with one word in
33 replaced by another until it has the wanted size. One file in 20 stays out of it and is written
token by token as an answer would be: a draft of up to 8 tokens is looked up at each step, and what
agrees with the file is committed with the token after it. Steps are timed with the processor's
caches as the step before left them, and again with 64 MB read in between, as a model call does.

The time on the clock stands beside that on the processor, which other processes do not add to, and
beside a loop of fixed work: how much of the spread is the machine's.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from harness import argument_parser, describe, run_program
from outrider import Pair, SamplingParams
from outrider.core.contracts import DraftRequest, Vocabulary
from outrider.core.data import Draft, Request, TokenEstimate
from outrider.drafters.corpus import CorpusDrafter, open_corpus
from outrider.sampling import RequestSampler

DRAFT_TOKENS = 8
ACCEPTANCE = 0.5
HELD_OUT_EVERY = 20
CHANGED_RATIO = 0.03
FIXED_WORK = 4000
"""passes of an empty loop, which take about as long as a step"""


def sources() -> list[str]:
    """The texts of all modules that are installed here."""
    paths = {
        path for place in ("stdlib", "purelib") for path in Path(sysconfig.get_path(place)).rglob("*.py")
    }
    return [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(paths)]


def copies(texts: Sequence[str], num_bytes: int) -> Iterator[str]:
    """The texts, and changed copies of them, until there are so many bytes."""
    rng = random.Random(0)
    words = [word for text in texts[::10] for word in re.findall(r"\w+", text)]
    done, changed_ratio = 0, 0.0
    while True:
        for text in texts:
            cut = re.split(r"(\w+)", text)
            for i in range(1, len(cut), 2):
                if rng.random() < changed_ratio:
                    cut[i] = rng.choice(words)
            yield "".join(cut)
            done += len(text.encode())
            if done >= num_bytes:
                return
        changed_ratio = CHANGED_RATIO


def write_files(folder: Path, num_bytes: int) -> list[str]:
    """Write the corpus; returns the first part of each text that stays out of it."""
    texts = sources()
    known = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY]
    for i, text in enumerate(copies(known, num_bytes)):
        (folder / f"{i:06}.py").write_text(text, encoding="utf-8")
    return [text[:10_000] for text in texts[::HELD_OUT_EVERY]]


class Threshold:
    """Takes what is likelier than not."""

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        return len(drafted) < request.max_tokens

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        return len(drafted) < request.max_tokens and estimate.acceptance >= ACCEPTANCE

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        del request, drafted
        return Draft()


def write(
    drafter: CorpusDrafter, vocabulary: Vocabulary, answers: Sequence[list[int]], num_steps: int,
    between: Callable[[], object],
) -> dict[str, Any]:  # fmt: skip
    """Write the answers, so many steps in all, and time them."""
    request = DraftRequest(0, DRAFT_TOKENS, RequestSampler(SamplingParams(temperature=0), vocabulary, ()))
    steps_s: list[float] = []
    own_s: list[float] = []
    faults: list[tuple[int, int]] = []
    control_s: list[float] = []
    drafted = accepted = emitted = 0
    for answer in answers:
        place = 32
        drafter.begin(0, Request(tuple(answer[:place])))
        while place < len(answer) and len(steps_s) < num_steps:
            between()
            faults_before = page_faults()
            cpu_before, before = thread_time(), perf_counter()
            [draft], _ = drafter.propose([request], Threshold())
            looked_up_s, own_looked_up_s = perf_counter() - before, thread_time() - cpu_before
            right = 0
            while right < len(draft) and draft.tokens[right : right + 1] == tuple(
                answer[place + right :][:1]
            ):
                right += 1
            final = answer[place : place + right + 1]
            cpu_before, before = thread_time(), perf_counter()
            drafter.observe(0, final)
            steps_s.append(looked_up_s + perf_counter() - before)
            own_s.append(own_looked_up_s + thread_time() - cpu_before)
            minor, major = page_faults()
            faults.append((minor - faults_before[0], major - faults_before[1]))
            between()
            before = perf_counter()
            for _ in range(FIXED_WORK):
                pass
            control_s.append(perf_counter() - before)
            drafted, accepted, emitted = drafted + len(draft), accepted + right, emitted + len(final)
            place += len(final)
    return {
        "steps": len(steps_s),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "tokens_per_step": emitted / len(steps_s),
        **{f"step_{name}_us": value for name, value in spread(steps_s).items()},
        **{f"step_{name}_of_cpu_us": value for name, value in spread(own_s).items()},
        "steps_with_page_faults": sum(any(counts) for counts in faults),
        "page_faults_minor": sum(minor for minor, _ in faults),
        "page_faults_major": sum(major for _, major in faults),
        **{f"fixed_work_{name}_us": value for name, value in spread(control_s).items()},
    }


def page_faults() -> tuple[int, int]:
    """Of this process so far: minor (the page was in memory) and major (it was read from the disk)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt


def spread(seconds: list[float]) -> dict[str, float]:
    percentiles = statistics.quantiles(seconds, n=100)
    return {
        "median": 1e6 * statistics.median(seconds),
        "p99": 1e6 * percentiles[98],
        "max": 1e6 * max(seconds),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, help="whose tokenizer cuts the text; none: the embedded default"
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--cold-steps", type=int, default=1000)
    arguments = parser.parse_args()
    pair = Pair.load(arguments.model)
    vocabulary = pair.target.vocabulary
    rows = [describe(pair.target.path)]
    with tempfile.TemporaryDirectory() as place:
        os.environ["OUTRIDER_CACHE"] = place
        files = Path(place) / "files"
        files.mkdir()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its memory is not the index's
            held_out = pool.submit(write_files, files, arguments.megabytes * 1_000_000).result()
        rows.append(index(files, vocabulary))
        before = perf_counter()
        corpus = open_corpus([files], vocabulary)
        rows.append({"kind": "open", "seconds": perf_counter() - before})
        print(rows[-1], flush=True)
        answers = [vocabulary.tokenize(text, add_special=False) for text in held_out]
        random.Random(1).shuffle(answers)
        memory = np.ones(64_000_000 // 8)
        for caches, steps, between in (
            ("warm", arguments.steps, int),
            ("cold", arguments.cold_steps, memory.sum),
        ):
            found = write(CorpusDrafter(corpus), vocabulary, answers, steps, between)
            rows.append({"kind": "look up", "caches": caches, **found})
            print(rows[-1], flush=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def index(files: Path, vocabulary: Vocabulary) -> dict[str, Any]:
    """Index the files, and say how long each stage took and what came out."""
    started = perf_counter()
    reached: dict[str, float] = {}

    def progress(stage: str, _done: int, _total: int) -> None:
        reached.setdefault(stage, perf_counter())

    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    corpus = open_corpus([files], vocabulary, progress)
    ended = perf_counter()
    row = {
        "kind": "index",
        "files": corpus.num_files,
        "text_bytes": sum(path.stat().st_size for path in files.iterdir()),
        "tokens": corpus.num_tokens,
        "index_bytes": sum(path.stat().st_size for path in (files.parent / "corpus").iterdir()),
        "tokenize_s": reached["sorting"] - started,
        "sort_and_save_s": ended - reached["sorting"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_before_mib": before_mib,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    run_program(main)
