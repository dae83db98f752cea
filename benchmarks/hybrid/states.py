"""What it costs to be able to take a recurrent state back: calls of a hybrid with snapshots and with
checkpoints, beside calls without either, in turn; and what its own head costs.

    python benchmarks/hybrid/states.py make wide-F32.gguf     # 24 layers, 1024 wide, random weights
    outrider quantize wide-F32.gguf --to Q4_K_M
    python benchmarks/hybrid/states.py time wide-Q4_K_M.gguf --out states.jsonl

    python benchmarks/hybrid/states.py eagle3 eagle-F32.gguf  # a head for it: one layer, random weights
    outrider quantize eagle-F32.gguf --to Q4_K_M
    python benchmarks/hybrid/states.py time wide-Q4_K_M.gguf --eagle3 eagle-Q4_K_M.gguf --out eagle3.jsonl

A row for each way and number of tokens: median seconds of a call at 64 to 256 tokens of context, the
quartiles, and the ratio to the same call without. "rejected" is a call over that many tokens of which all but
the first are taken back, and the call over one token after it; the ratio is to two calls without. "hidden"
are calls that give the hidden states that a head reads, "head" are calls of the head. With --eagle3 there are
"none" and these two alone: "hidden" gives what goes into the three layers that the file reads.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from harness import append, argument_parser, describe, in_turn, resume, run_program
from head_files import write_eagle
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.head_model import HeadModel, HeadWeights
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.rewinding import Rewinding
from outrider.core.data import Span
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from tiny.sizes import Sizes
from tiny_gguf import write_tiny

WAYS = ("none", "checkpoints", "snapshots 4", "snapshots 8", "snapshots 16", "hidden", "head")
SIZES = (1, 2, 4, 8, 16)
PROMPT, MOST = 64, 256


def main() -> None:
    if sys.argv[1] in ("make", "eagle3"):
        return make(Path(sys.argv[2]), is_head=sys.argv[1] == "eagle3")
    del sys.argv[1:2]
    parser = argument_parser(__doc__, repetitions=40, threads=2)
    parser.add_argument("target", type=Path)
    parser.add_argument("--eagle3", type=Path, help="an EAGLE-3 head to time instead of the model's own")
    arguments = parser.parse_args()
    weights = Weights(arguments.target, LoadOptions(backend="llama.cpp", threads=arguments.threads))
    assert weights.num_heads, "make the file again: it has no head"
    state = {"threads": arguments.threads, "state_bytes": weights.rewinding.state_bytes}
    eagle = arguments.eagle3
    files = [arguments.target, *([eagle] if eagle else [])]
    resume(arguments.out, describe(*files) | state, ["models", "threads"])
    ways = ("none", "hidden", "head") if eagle else WAYS
    head = HeadWeights(read_head(*map(read_card, files[::-1])), weights.options) if eagle else None
    models = {way: open_with(weights, way, head) for way in ways}
    kinds = [(way, n, rejected) for way in ways for n in SIZES for rejected in (False, True)]
    kinds = [(way, n, rejected) for way, n, rejected in kinds if not rejected or is_possible(way, n)]
    seconds: dict[tuple[str, int, bool], list[float]] = {kind: [] for kind in kinds}
    rng = random.Random(0)
    for _, (way, n, rejected) in in_turn(kinds, arguments.repetitions, rng):
        seconds[way, n, rejected].append(call_s(models[way], n, rng, rejected=rejected))
    for (way, n, rejected), found in seconds.items():
        low, _, high = quantiles(found, n=4)
        plain_s = median(seconds["none", n, False]) + rejected * median(seconds["none", 1, False])
        append(
            arguments.out,
            {"kind": "rejected" if rejected else "calls", "way": way, "tokens": n, "seconds": median(found),
             "low": low, "high": high, "ratio": median(found) / plain_s},
        )  # fmt: skip


def is_possible(way: str, num_tokens: int) -> bool:
    """Whether all but the first of so many tokens can be taken back."""
    name, _, count = way.partition(" ")
    return num_tokens > 1 and (name == "checkpoints" or (name == "snapshots" and num_tokens <= int(count)))


def open_with(weights: Weights, way: str, head: HeadWeights | None) -> GgufModel:
    """A context that is taken back in this way, that gives hidden states, or that is the head's, of the model
    or of a file."""
    name, _, count = way.partition(" ")
    if name == "head":
        target = open_with(weights, "hidden", head)
        return head.open_beside(target, 512) if head else HeadModel(target, 512)
    options = LoadOptions(backend="llama.cpp", threads=weights.options.threads, snapshots=int(count or 0))
    kinds = {kind: Rewinding(kind) for kind in ("none", "checkpoints", "snapshots")}
    model = GgufModel(weights, 512, 1, options, rewinding=kinds.get(name, kinds["none"]))
    if name == "hidden":
        model.keep_hidden_states(head.head.target_layers if head else ())
    return model


def make(path: Path, *, is_head: bool) -> None:
    """Write the model, or a head for it: the tests' tiny one at the width of a real one."""
    sizes = replace(Sizes.wide(1024), kv_heads=2, head=256)  # those of Qwen3.5-0.8B
    if is_head:
        write_eagle(
            path, layers=(2, 12, 21), agrees=False, sizes=sizes, metadata={"target_hidden_size": 1024}
        )
        return
    write_tiny(path, arch="qwen35", sizes=sizes, layers=24, mtp_layers=1, context_length=4096)


def call_s(model: GgufModel, num_tokens: int, rng: random.Random, *, rejected: bool) -> float:
    """Seconds of a call of so many tokens, all rows wanted, at the end of what is stored; and of the call
    after it, where all but the first token are taken back in between."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(count))

    if not PROMPT <= model.length(0) <= MOST - num_tokens:
        model.truncate(0, 0)
        model.decode([Span(0, tokens(PROMPT), 0, 0)])
        model.decode([Span(0, tokens(1), PROMPT, 1)])  # a prompt leaves the caches otherwise
    start, drafted, following = model.length(0), tokens(num_tokens), tokens(1)
    started = perf_counter()
    num_rows = 1 if model.is_head else num_tokens
    model.decode([Span(0, drafted, start, num_rows, checkpoint=num_tokens > 1)])
    if rejected:
        model.truncate(0, model.reach(0, start + 1))
        lost = drafted[: start + 1 - model.length(0)]
        model.decode([Span(0, (*lost, *following), model.length(0), 1)])
    return perf_counter() - started


if __name__ == "__main__":
    run_program(main)
