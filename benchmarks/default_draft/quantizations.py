"""Other quantizations of the embedded default: what calls over n tokens cost, and how near they are to it.

    python benchmarks/default_draft/quantizations.py --prompts heldout.jsonl --out quantizations.jsonl

The files are made from the default's own (Q4_1): none can be better than it. Every type's calls are timed in
turn with the others', after 200 tokens. Quality is the KL divergence of its next-token distribution from
that of the default's file, and how often both agree on the most likely token, along the default's answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, argument_parser, describe, resume, run_program
from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.backends.gguf.quantizer import quantize
from outrider.core.data import Span
from outrider.core.params import SamplingParams
from outrider.models import embedded_default
from outrider.session import Session

TYPES = ("BF16", "F16", "Q8_0", "Q4_K_M", "Q5_0", "IQ4_NL", "Q4_0")
SIZES = (1, 2, 3, 4, 6, 8)
CONTEXT = 200


def main() -> None:
    parser = argument_parser(__doc__, tokens=96, rounds=30, threads=2)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as heldout.py writes them")
    parser.add_argument("--answers", type=int, default=8)
    arguments = parser.parse_args()
    source = embedded_default()
    if resume(arguments.out, describe(source) | {"threads": arguments.threads}, ("threads", "cpu")):
        sys.exit(f"{arguments.out} has results already: name another file")
    texts = answers(source, arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = {"Q4_1": source}
        for to in TYPES:
            files[to] = Path(folder) / f"{to}.gguf"
            quantize(source, to, files[to], threads=arguments.threads, force=True)
        loaded = {to: Weights(path, LoadOptions(threads=arguments.threads)) for to, path in files.items()}
        models = {to: weights.open(1024, max_sequences=1) for to, weights in loaded.items()}
        times = calls(models, arguments.rounds)
        usual = distributions(models["Q4_1"], texts)
        for to, model in models.items():
            kl, agrees = nearness(usual, distributions(model, texts))
            ms = {str(n): 1e3 * median(times[to, n]) for n in SIZES}
            size = files[to].stat().st_size / 1e6
            append(
                arguments.out, {"kind": "type", "type": to, "mb": size, "kl": kl, "agrees": agrees, "ms": ms}
            )
            ratios = " ".join(f"{ms[str(n)] / ms['1']:.2f}" for n in SIZES)
            print(f"{to:8} {size:4.0f} MB  KL {kl:.4f}  agrees {agrees:.1%}  {ms['1']:.2f} ms  V(n) {ratios}")
        for weights in loaded.values():
            weights.close()


def answers(source: Path, arguments: argparse.Namespace) -> list[tuple[tuple[int, ...], int]]:
    """Prompts with their greedy answers, and where each answer begins."""
    session = Session.load(source, "none", options=LoadOptions(threads=arguments.threads))
    found = []
    for line in arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.answers]:
        prompt = session.encode(json.loads(line)["messages"])
        greedy = SamplingParams(temperature=0)
        text = session.generate(prompt, max_tokens=arguments.tokens, sampling=greedy, speculate=False)
        found.append(((*prompt, *text.tokens), len(prompt)))
    session.close()
    return found


def calls(models: dict[str, GgufModel], rounds: int) -> dict[tuple[str, int], list[float]]:
    text = tuple(range(100, 100 + CONTEXT + max(SIZES)))
    times: dict[tuple[str, int], list[float]] = {(to, n): [] for to in models for n in SIZES}
    for model in models.values():
        model.decode([Span(0, text[:CONTEXT], 0, 1)])
    for _ in range(rounds):
        for to, model in models.items():
            for n in SIZES:
                model.truncate(0, CONTEXT)
                before = perf_counter()
                model.decode([Span(0, text[CONTEXT : CONTEXT + n], CONTEXT, n)])
                times[to, n].append(perf_counter() - before)
    return times


def distributions(model: GgufModel, texts: list[tuple[tuple[int, ...], int]]) -> np.ndarray:
    """Logarithms of the probabilities along the answers, shape (positions, vocabulary)."""
    rows = []
    for tokens, begin in texts:
        model.truncate(0, 0)
        model.decode([Span(0, tokens[: begin - 1], 0, 0)])
        for at in range(begin - 1, len(tokens) - 1):  # one by one, as plain decoding does
            rows.append(model.decode([Span(0, (tokens[at],), at, 1)])[0][0].astype(np.float64))
    logits = np.stack(rows)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def nearness(usual: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean KL divergence in nats, and the share of positions whose most likely token is the same."""
    kl = (np.exp(usual) * (usual - other)).sum(axis=1).mean()
    return float(kl), float((usual.argmax(axis=1) == other.argmax(axis=1)).mean())


if __name__ == "__main__":
    run_program(main)
