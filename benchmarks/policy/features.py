"""What else tells whether a draft model's token is right, beside its confidence. No clock.

    python benchmarks/policy/features.py

Logistic regressions on `top4.jsonl.gz`: whether the draft model's most likely token is the target's, by its
confidence alone and with further features. Fitted on one half of the answers, log-loss on the other, both
ways.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import run_program, table
from outrider.core.data import Request
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.recording import Recording
from outrider.policy.estimates import CONFIDENCE_MEMORY, MEAN_CONFIDENCE
from policy.fit import Samples, fitted, log_loss
from policy.top4 import Position, read_top4

DRAFT = "draft"
NAMES = (
    "bias",
    "confidence",
    "moving average of confidence",
    "moving average of correctness",
    "margin",
    "entropy",
    "lookup agrees",
    "lookup disagrees",
    "odds of the agreeing match",
    "odds of the disagreeing match",
    "length of the agreeing match",
    "length of the disagreeing match",
    "lookup has the second token",
)
"""of the features, in the order of `features_of`"""
ALONE = (0, 1)
SETS = ((), (2,), (3,), (2, 3), (4,), (5,), (4, 5), (6, 7), (6, 7, 8, 9), (6, 7, 10, 11), tuple(range(2, 13)))
"""what is added to the confidence"""


def log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def features_of(recording: Recording, positions: list[Position]) -> Iterator[tuple[list[float], bool]]:
    """At each position of the answer the features, and whether the draft model's token is the target's."""
    offers, lookup = recording.offers[DRAFT], SuffixDrafter()
    lookup.begin(0, Request(recording.prompt))
    average, correctness = MEAN_CONFIDENCE, 0.5
    offered = zip(offers.tokens, offers.confidence, recording.tokens, positions, strict=True)
    for mine, confidence, token, position in offered:
        match = next(lookup.propose(0, ()), None)
        agrees, disagrees = float(match is not None and match.token == mine), 0.0
        odds, length, is_second = 0.0, 0.0, 0.0
        if match is not None:
            disagrees = 1.0 - agrees
            odds, length = log_odds(max(match.acceptance, 0.01)), math.log(match.evidence[0])
            is_second = float(match.token == position.tokens[1])
        first, second = (max(p, 1e-4) for p in position.probabilities[:2])
        x = [1.0, log_odds(confidence), log_odds(average), correctness, math.log(first / second)]
        x += [position.entropy, agrees, disagrees, agrees * odds, disagrees * odds]
        x += [agrees * length, disagrees * length, is_second]
        yield x, mine == token
        average = CONFIDENCE_MEMORY * average + (1 - CONFIDENCE_MEMORY) * confidence
        correctness = CONFIDENCE_MEMORY * correctness + (1 - CONFIDENCE_MEMORY) * (mine == token)
        lookup.observe(0, (token,))


def samples_of(answers: list[tuple[Recording, list[Position]]]) -> Samples:
    found = [sample for recording, positions in answers for sample in features_of(recording, positions)]
    return np.array([x for x, _ in found]), np.array([float(correct) for _, correct in found])


def main() -> None:
    answers = sorted(read_top4(), key=lambda answer: (answer[0].category, answer[0].id))
    halves = [samples_of(answers[::2]), samples_of(answers[1::2])]
    tokens = sum(len(y) for _, y in halves)
    print(
        f"{len(answers)} answers, {tokens} tokens, {sum(y.sum() for _, y in halves) / tokens:.1%} correct\n"
    )
    lines, alone = [], [0.0, 0.0]
    for extra in SETS:
        columns = [*ALONE, *extra]
        (x_1, y_1), (x_2, y_2) = ((x[:, columns], y) for x, y in halves)
        losses = [log_loss((x_1, y_1), fitted((x_2, y_2))), log_loss((x_2, y_2), fitted((x_1, y_1)))]
        alone = alone if extra else losses
        gains = [f"{loss:.4f} ({loss / before - 1:+.1%})" for loss, before in zip(losses, alone, strict=True)]
        lines.append([" + ".join(NAMES[i] for i in columns[1:]) if len(extra) < 11 else "all", *gains])
    for line in table(["features", "first half", "second half"], lines):
        print(line)


if __name__ == "__main__":
    run_program(main)
