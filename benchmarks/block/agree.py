"""Do answers that block drafters, assistants and chained MTP layers draft for stay as they are, and do the
drafts agree with llama-server's? On tiny files of random weights: no real file was at hand.

    python benchmarks/block/agree.py --out benchmarks/block/agree.jsonl [--answers 100]

A row for each answer: tokens that differ from plain decoding's, drafted and accepted tokens, and for the
first of them what llama-server (in the package xllamacpp) made of the same prompt and files: its tokens,
drafted and accepted. Drafts have a fixed length in both; here a draft ends at an end token, so it may be
shorter. Here eight answers run at once (two of a hybrid target), there one after the other.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from engines import run
from harness import append, argument_parser, describe, run_program
from head_files import OPTIONS, Files, write_files
from outrider.core.data import Request
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions

KINDS = {
    "dflash llama": ("DFLASH", 7),
    "dflash qwen35": ("DFLASH", 7),
    "dflash2 llama": ("DFLASH", 7),
    "dspark llama": ("DSPARK", 8),
    "assistant gemma4": ("MTP", 5),
    "chain hy_v3": ("MTP", 2),
}
"""by drafter and target: llama-server's type, and the length of drafts"""
CONTEXT, AT_ONCE = 512, 8
ASCII = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "ĠĊ"
"""the letters of the vocabularies: llama-server's answers are UTF-8"""


def prompts(count: int) -> list[tuple[int, ...]]:
    """Random tokens, 12 to 40 of them."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, len(ASCII), rng.integers(12, 41)).tolist()) for _ in range(count)]


def request(prompt: Sequence[int], num_tokens: int) -> Request:
    return Request(tuple(prompt), SamplingParams(temperature=0), num_tokens, ignore_end=True)


def plain_answers(files: Files, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    with (
        closing(Pair.load(files.target, "none", options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(CONTEXT, lookup=False)) as session,
    ):
        return [session.engine.generate(one).tokens for one in asked]


@contextmanager
def drafting(files: Files, length: int) -> Iterator[Engine]:
    policy = FixedPolicy(draft_max=length, p_min=0.0)
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


def rows(kind: str, given: Any, folder: Path) -> Iterator[dict[str, Any]]:
    what, length = KINDS[kind]
    files = write_files(folder, kind, letters=ASCII)
    asked = [request(prompt, given.tokens) for prompt in prompts(given.answers)]
    theirs: list[dict[str, Any]] = []
    with server(files, what, length) as address:
        theirs = [served(address, one) for one in asked[: given.server]]
    plain = plain_answers(files, asked)
    with drafting(files, length) as engine:
        parts = [asked[i : i + AT_ONCE] for i in range(0, len(asked), AT_ONCE)]
        answers = [found for part in parts for found in run(engine, *part)]
        for i, (found, expected) in enumerate(zip(answers, plain, strict=True)):
            row: dict[str, Any] = {
                "kind": kind,
                "answer": i,
                "tokens": len(found.tokens),
                "differing": sum(a != b for a, b in zip(found.tokens, expected, strict=True)),
                "drafted": sum(len(record.draft) for record in found.records),
                "accepted": sum(record.num_accepted for record in found.records),
            }
            if i < len(theirs):
                other = theirs[i]
                row |= {
                    "server_differing": sum(
                        a != b for a, b in zip(other["tokens"], found.tokens, strict=True)
                    ),
                    "server_drafted": other["drafted"],
                    "server_accepted": other["accepted"],
                }
            yield row


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
        asked = [row for row in found if "server_drafted" in row]
        same = sum(
            row["server_differing"] == 0
            and row["accepted"] == row["server_accepted"]
            and row["drafted"] <= row["server_drafted"]
            for row in asked
        )
        drafted, accepted = (sum(row[of] for row in found) for of in ("drafted", "accepted"))
        tokens, differing = (sum(row[of] for row in found) for of in ("tokens", "differing"))
        print(f"{kind}: {differing} of {tokens} tokens differ from plain decoding's; {accepted} of {drafted}")
        print(f"drafted tokens were accepted; {same} of {len(asked)} answers are llama-server's, counts too")


if __name__ == "__main__":
    run_program(main)
