"""Do answers that block drafters, assistants and chained MTP layers draft for stay as they are, and do the
drafts agree with llama-server's? On tiny files of random weights: no real file was at hand.

    python benchmarks/block/agree.py --out benchmarks/block/agree.jsonl [--answers 100]

A row for each answer: tokens that differ from plain decoding's, drafted and accepted tokens, and for the
first of them what llama-server (in the package xllamacpp) made of the same prompt and files: its tokens,
drafted and accepted. Where tokens differ, `margin` says by how much plain decoding preferred its own at the
first of them (in log probability), and `near_ties` counts the places of an answer where that is below 0.001.

Drafts have a fixed length in both. End tokens are never the most likely in these files: llama-server bans
them where an answer must not end, Outrider does not. Those that llama-server answers, too, run one after
the other, the rest eight at once: then the first steps of some go without a
draft, while others read their prompts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp  # type: ignore[import-untyped]
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from engines import run
from harness import append, argument_parser, describe, run_program
from head_files import OPTIONS, Files, write_files
from outrider import Pair, Session, SessionOptions
from outrider.core.data import Request
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.policy.fixed import FixedPolicy

KINDS = {
    "dflash llama": ("DFLASH", 7),
    "dflash2 llama": ("DFLASH", 7),
    "dspark llama": ("DSPARK", 8),
    "dspark-v4 llama": ("DSPARK", 8),
    "assistant gemma4": ("MTP", 5),
    "chain hy_v3": ("MTP", 2),
    "dflash qwen35": ("", 7),
}
"""by drafter and target: llama-server's type, and the length of drafts. llama-server has no checkpoints that
lose the states of accepted tokens, as Outrider's do."""
CONTEXT, AT_ONCE = 512, 8
ASCII = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "ĠĊ"
"""the letters of the vocabularies: llama-server's answers are UTF-8"""
OF_TOKENS = ("output.weight", "token_embd.weight", "markov_w2.weight")
NEAR = 1e-3
"""a margin that rounding in calls of other sizes may turn"""


def prompts(count: int) -> list[tuple[int, ...]]:
    """Random tokens, 12 to 40 of them."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, len(ASCII), rng.integers(12, 41)).tolist()) for _ in range(count)]


def request(prompt: Sequence[int], num_tokens: int) -> Request:
    return Request(tuple(prompt), SamplingParams(temperature=0), num_tokens, ignore_end=True)


def without_ends(files: Files) -> Files:
    """The same, in which the last token, which ends texts, has a logit of 0."""
    for path in [path for path in (files.target, files.head) if path is not None]:
        for tensor in GGUFReader(path, "r+").tensors:
            if tensor.name in OF_TOKENS:
                tensor.data[-1] = 0
    return files


Plain = tuple[tuple[int, ...], list[float]]
"""An answer's tokens, and by how much each was more likely than the next best."""


def plain_answers(files: Files, asked: Sequence[Request]) -> list[Plain]:
    with (
        closing(Pair.load(files.target, "none", options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(CONTEXT, lookup=False)) as session,
    ):
        answers = [session.engine.generate(replace(one, logprobs=2)) for one in asked]
    tops = [[token.top for token in answer.logprobs] for answer in answers]
    margins = [[best - second for (_, best), (_, second) in top] for top in tops]
    return [(answer.tokens, of) for answer, of in zip(answers, margins, strict=True)]


@contextmanager
def drafting(files: Files, kind: str) -> Iterator[Engine]:
    policy = FixedPolicy(draft_max=KINDS[kind][1], p_min=0.0)
    with (
        closing(Pair.load(files.target, files.head, options=OPTIONS)) as pair,
        Session.open(
            pair, SessionOptions(CONTEXT, policy=policy, lookup=False, max_running=AT_ONCE)
        ) as session,
    ):
        yield session.engine


@contextmanager
def server(files: Files, kind: str, length: int) -> Iterator[str]:
    """The address of llama-server over these files."""
    asked = xllamacpp.CommonParams()
    asked.model.path = str(files.target)
    asked.hostnames, asked.port = ["127.0.0.1"], 0
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
    asked.n_parallel, asked.n_ctx = 1, CONTEXT
    asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    types = xllamacpp.common_speculative_type
    asked.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
    draft = asked.speculative.draft
    if files.head is not None:
        draft.mparams.path = str(files.head)
    draft.n_max, draft.p_min = length, 0.0
    draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    found = xllamacpp.Server(asked)
    try:
        yield found.listening_address
    finally:
        del found


def served(address: str, one: Request) -> dict[str, Any]:
    """llama-server's answer."""
    given = {"prompt": [*one.prompt], "n_predict": one.max_tokens, "temperature": 0, "return_tokens": True}
    body = json.dumps(given | {"ignore_eos": True, "cache_prompt": False}).encode()
    header = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body, header)) as reply:
        found = json.loads(reply.read())
    times = found["timings"]
    return {
        "tokens": found["tokens"],
        "drafted": times.get("draft_n", 0),
        "accepted": times.get("draft_n_accepted", 0),
    }


def difference(found: Sequence[int], plain: Plain, of: str = "") -> dict[str, Any]:
    """Tokens that are not plain decoding's, and the margin at the first."""
    tokens, margins = plain
    wrong = [i for i, (one, other) in enumerate(zip(found, tokens, strict=True)) if one != other]
    return {f"{of}differing": len(wrong)} | ({f"{of}margin": margins[wrong[0]]} if wrong else {})


def rows(kind: str, given: Any, folder: Path) -> Iterator[dict[str, Any]]:
    what, length = KINDS[kind]
    files = without_ends(write_files(folder, kind, letters=ASCII))
    asked = [request(prompt, given.tokens) for prompt in prompts(given.answers)]
    theirs: list[dict[str, Any]] = []
    if what:
        with server(files, what, length) as address:
            theirs = [served(address, one) for one in asked[: given.server]]
    plain = plain_answers(files, asked)
    with drafting(files, kind) as engine:
        alone, together = asked[: given.server], asked[given.server :]
        parts = [[one] for one in alone]
        parts += [together[i : i + AT_ONCE] for i in range(0, len(together), AT_ONCE)]
        answers = [found for part in parts for found in run(engine, *part)]
    for i, (found, expected) in enumerate(zip(answers, plain, strict=True)):
        row: dict[str, Any] = {
            "kind": kind,
            "answer": i,
            "tokens": len(found.tokens),
            **difference(found.tokens, expected),
            "near_ties": sum(margin < NEAR for margin in expected[1]),
            "drafted": sum(len(record.draft) for record in found.records),
            "accepted": sum(record.num_accepted for record in found.records),
        }
        if i < len(theirs):
            other = theirs[i]
            row |= difference(other["tokens"], expected, "server_")
            row |= {f"server_{name}": other[name] for name in ("drafted", "accepted")}
        yield row


def is_agreed(row: dict[str, Any]) -> bool:
    names = ("differing", "drafted", "accepted")
    return all(row[name] == row[f"server_{name}"] for name in names)


def main() -> None:
    parser = argument_parser(__doc__, answers=100, tokens=100, server=50)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    if not given.out.exists():
        append(given.out, describe())
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            found = list(rows(kind, given, Path(folder)))
        append(given.out, *found)
        served_rows = [row for row in found if "server_drafted" in row]
        same = sum(map(is_agreed, served_rows))
        names = ("differing", "tokens", "near_ties", "accepted", "drafted")
        sums = {of: sum(row[of] for row in found) for of in names}
        of_server = f"{same} of {len(served_rows)} answers are llama-server's"
        print(
            kind, ", ".join(f"{of} {number}" for of, number in sums.items()), of_server, sep=": ", flush=True
        )


if __name__ == "__main__":
    run_program(main)
