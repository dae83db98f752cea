"""The coefficients that the policy's estimates start from: logistic regressions on recorded answers.

    python benchmarks/policy/fit.py RECORDINGS.jsonl… --test HELDOUT.jsonl --costs costs.json…

Fitted on the even recordings, tested on the odd ones and on held-out ones: log-loss of what lookups and the
draft model offered at every position of the answers, and replayed seconds of the automatic policy (each
recording starts cold) with the fitted coefficients over those with the built-in ones.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, run_program
from outrider.core.data import Request
from outrider.costs import CallCosts
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.lookup import SuffixDrafter
from outrider.lab.recording import Recording
from outrider.lab.replay import replay
from outrider.policy.auto import AutoPolicy
from outrider.policy.state import INITIAL_WEIGHTS, RequestBias, features, initial_weights
from policy.curves import read_costs
from policy.recorded import read_recordings

LENGTH = 32
"""tokens of a lookup's offer that are looked at"""
RIDGE = 1.0
STEPS = 30
READ_S = (0.009, 0.0033)
"""a token of the prompt for target and draft, where a curve has none"""

Samples = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def samples_of(recordings: Sequence[Recording]) -> dict[str, Samples]:
    """By drafter: features, shape (tokens, features), and whether each token was correct."""
    rows: dict[str, list[tuple[tuple[float, ...], bool]]] = defaultdict(list)
    earlier = EarlierDrafter()
    for recording in recordings:
        answer = recording.tokens
        for lookup in (SuffixDrafter(), earlier):
            bias = RequestBias()
            lookup.begin(0, Request(recording.prompt))
            for at, token in enumerate(answer):
                offer = list(islice(lookup.propose(0, ()), LENGTH))
                for i, found in enumerate(offer[: len(answer) - at]):
                    correct = found.token == answer[at + i]
                    rows[lookup.name].append((features(found.evidence, bias.recently_right), correct))
                    if not correct:
                        break
                if offer:
                    bias.note_first(offer[0].token == token)
                lookup.observe(0, (token,))
            lookup.end(0)
        for name, offers in recording.offers.items():
            pairs = zip(offers.tokens, offers.confidence, answer, strict=True)
            rows[name] += [(features((p,), 0.0), mine == token) for mine, p, token in pairs]
    return {
        name: (np.array([x for x, _ in found]), np.array([float(y) for _, y in found]))
        for name, found in rows.items()
    }


def fitted(samples: Samples) -> tuple[float, ...]:
    """Coefficients of greatest likelihood, by Newton's method with a small ridge."""
    x, y = samples
    weights = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-(x @ weights)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(x.shape[1])
        weights += np.linalg.solve(hessian, x.T @ (y - p) - RIDGE * weights)
    return tuple(round(float(w), 3) for w in weights)


def log_loss(samples: Samples, weights: Sequence[float]) -> float:
    x, y = samples
    scores = x @ np.array(weights)
    return float(np.mean(np.logaddexp(0, scores) - y * scores))


def seconds(
    recordings: Sequence[Recording], costs: Path, priors: Mapping[str, Sequence[float]]
) -> list[float]:
    """Replayed, with these starting coefficients."""
    pair, before = read_costs(costs), dict(INITIAL_WEIGHTS)
    curves = []
    for curve, read_s in zip((pair.target, pair.draft), READ_S, strict=True):
        data = curve.as_json() if curve is not None else {}
        curves.append({**data, "prefill_token_s": data.get("prefill_token_s") or read_s})
    target, draft = (CallCosts.from_json(curve) for curve in curves)
    INITIAL_WEIGHTS.update({name: tuple(weights) for name, weights in priors.items()})
    try:
        return [
            replay(
                recording,
                AutoPolicy(CallCosts.from_json(curves[0]), CallCosts.from_json(curves[1])),
                target,
                {"draft": draft},
            ).seconds
            for recording in recordings
        ]
    finally:
        INITIAL_WEIGHTS.update(before)


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--test", nargs="+", type=Path, default=[], help="held-out recordings")
    parser.add_argument("--costs", nargs="+", type=Path, default=[])
    arguments = parser.parse_args()
    known = [r for path in arguments.recordings for r in read_recordings(path) if r.tokens]
    tests = {"odd": known[1::2]}
    tests |= {path.name: [r for r in read_recordings(path) if r.tokens] for path in arguments.test}
    samples = samples_of(known[::2])
    test_samples = {name: samples_of(found) for name, found in tests.items()}
    priors = {}
    for name, found in samples.items():
        old, new = initial_weights(name, found[0].shape[1]), fitted(found)
        priors[name] = new
        print(f"{name}: {len(found[1])} tokens, built in {old}, fitted {new}")
        for test, others in {"even": samples, **test_samples}.items():
            if name in others:
                losses = [log_loss(others[name], weights) for weights in (old, new)]
                print(f"  log-loss on {test}: {losses[0]:.4f}, {losses[1]:.4f}")
    for costs in arguments.costs:
        for test, answers in tests.items():
            before = seconds(answers, costs, {})
            for names in (*([name] for name in priors), list(priors)):
                after = seconds(answers, costs, {name: priors[name] for name in names})
                ratio = math.exp(float(np.mean(np.log(after) - np.log(before))))
                print(f"{costs.name}, {test}, {' and '.join(names)}: {100 * (ratio - 1):+.2f} %", flush=True)


if __name__ == "__main__":
    run_program(main)
