"""What side tokens at doubtful places would bring: trees of depth one against the best chain. No clock.

    python benchmarks/policy/trees.py [CURVE.json…]

A simulation over `top4.jsonl.gz`, not the policy itself. At each step the draft model extends a chain while
that is expected to pay (`objective.continuation_values`); the call then checks the tokens of the greatest
prefix acceptance probability. Of a chain these are its first ones; of a tree the model's second, third and
fourth token at each place of the chain are among them. What those would go on with is not recorded: a side
token ends its branch. With lookups, their candidate is taken instead where it is worth more. Chances are
calibrated on these same answers, the draft model's reading of the prompt is not counted, and λ is the best
of some parts of a plain step, for each way its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, geometric_mean, run_program, table
from outrider.costs import CallCosts
from outrider.lab.recording import Recording
from outrider.policy.estimates import MEAN_CONFIDENCE, TextConfidence
from outrider.policy.objective import StepCosts, continuation_values
from outrider.policy.state import MAX_MODEL_DRAFT, PolicyState
from policy.ahead import Found, offers_of
from policy.curves import read_costs
from policy.features import DRAFT, log_odds
from policy.fit import fitted
from policy.top4 import Position, read_top4

HERE = Path(__file__).parent
CURVES = ("datacentre", "consumer", "consumer_head", "consumer_steep_head")
REWARDS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.75)
"""λ in plain steps"""
UNKNOWN = 0.5
"""confidence where a draft went on beyond what was recorded of it"""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that may be checked."""

    prefix_prob: float
    at: int
    """its place in the draft"""
    is_right: bool
    """with all before it"""
    is_side: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded answer with calibrated chances at each position."""

    recording: Recording
    chances: list[list[float]]
    """of the four most likely tokens"""
    right: list[list[bool]]
    departures: list[list[float]]
    """of the tokens with which the draft would go on after its token there, where that is wrong"""
    lookups: list[Found]


@dataclass(slots=True)
class Growing:
    """A draft of the model's, token by token."""

    answer: Answer
    start: int
    has_sides: bool
    average: float
    chain: list[Token] = field(default_factory=list)
    sides: list[Token] = field(default_factory=list)
    compared: list[float] = field(default_factory=list)
    """chances of the tokens that were offered where the answer comes along"""

    def extend(self) -> None:
        """One more step of the model."""
        answer, at = self.answer, len(self.chain)
        wrong = next((token.at for token in self.chain if not token.is_right), None)
        prefix_prob = self.chain[-1].prefix_prob if self.chain else 1.0
        if wrong is None:
            position = self.start + at
            chances, right = answer.chances[position], answer.right[position]
            self.compared.append(chances[0])
        else:
            path = answer.departures[self.start + wrong]
            gone_on = at - wrong - 1
            chances, right = [path[gone_on] if gone_on < len(path) else UNKNOWN], [False]
        tokens = [
            Token(prefix_prob * chance, at, is_right, k > 0)
            for k, (chance, is_right) in enumerate(zip(chances, right, strict=True))
        ]
        self.chain.append(tokens[0])
        self.sides += tokens[1:] if self.has_sides else []
        self.average = TextConfidence.after(self.average, chances[0])

    def best(self, costs: StepCosts, room: int) -> tuple[float, list[Token]]:
        """The tokens to check, and the value of that in seconds without what is paid already."""
        tokens = sorted([*self.chain, *self.sides], key=lambda token: -token.prefix_prob)[:room]
        length, value_s = most_valuable([token.prefix_prob for token in tokens], costs)
        return value_s, tokens[:length]


def most_valuable(prefix_probs: Sequence[float], costs: StepCosts) -> tuple[int, float]:
    """How many tokens of a candidate to check, and what that is worth."""
    earned = np.cumsum([0.0, *prefix_probs])[: costs.max_length + 1] * costs.reward_s
    values = earned - costs.calls_s[: len(earned)]
    return int(values.argmax()), float(values.max())


def num_accepted(tokens: Sequence[Token]) -> int:
    """How many of the checked tokens stand: the chain as far as it is right, and a side token after it."""
    right = sum(token.is_right for token in tokens if not token.is_side)
    return right + any(token.is_side and token.is_right and token.at == right for token in tokens)


def seconds(answer: Answer, costs: StepCosts, *, has_sides: bool, has_lookups: bool) -> float:
    """What decoding an answer takes."""
    end, at, spent_s = len(answer.chances), 0, 0.0
    confidence = TextConfidence(MEAN_CONFIDENCE)
    while at < end:
        room = end - at - 1
        found = answer.lookups[at] if has_lookups else Found([], 0)
        looked_up, lookup_s = most_valuable(list(accumulate(found.chances[:room], mul)), costs)
        draft = Growing(answer, at, has_sides, confidence.average)
        longest = min(room, MAX_MODEL_DRAFT)
        stop_s = lookup_s
        while len(draft.chain) < longest:
            probs = [token.prefix_prob for token in draft.chain]
            last = probs[-1] if probs else 1.0
            [on_s] = continuation_values(len(probs), draft.average, last, costs, longest)
            on_s += costs.reward_s * sum(probs)
            if on_s <= stop_s:
                break
            draft.extend()
            spent_s += costs.draft_step_s
            stop_s = max(most_valuable([token.prefix_prob for token in draft.chain], costs)[1], lookup_s)
        drafted_s, checked = draft.best(costs, room)
        if drafted_s > lookup_s:
            length, accepted = len(checked), num_accepted(checked)
        else:
            length, accepted = looked_up, min(looked_up, found.right)
        spent_s += float(costs.calls_s[length])
        compared = draft.compared[: accepted + 1]
        for chance in compared:
            confidence.learn(chance)
        confidence.skip(accepted + 1 - len(compared))
        at += accepted + 1
    return spent_s


def calibrated(answers: Sequence[tuple[Recording, list[Position]]]) -> list[Answer]:
    """With the chances of first and of further tokens, each by a logistic regression on its probability."""
    samples: list[list[tuple[float, bool]]] = [[], []]
    for recording, positions in answers:
        for token, position in zip(recording.tokens, positions, strict=True):
            for k, (mine, p) in enumerate(zip(position.tokens, position.probabilities, strict=True)):
                samples[k > 0].append((log_odds(p), mine == token))
    first, further = (
        fitted((np.array([[1.0, x] for x, _ in found]), np.array([float(y) for _, y in found])))
        for found in samples
    )

    def chance(k: int, p: float) -> float:
        bias, slope = further if k else first
        return float(1 / (1 + np.exp(-bias - slope * log_odds(p))))

    knowledge = PolicyState(CallCosts())
    return [
        Answer(
            recording,
            [[chance(k, p) for k, p in enumerate(position.probabilities)] for position in positions],
            [
                [mine == token for mine in position.tokens]
                for token, position in zip(recording.tokens, positions, strict=True)
            ],
            [
                [chance(0, p) for _, p in recording.offers[DRAFT].departures.get(i, ())]
                for i in range(len(positions))
            ],
            [free[0] for free in offers_of(recording, knowledge, None).free],
        )
        for recording, positions in answers
    ]


def best_speedup(
    answers: Sequence[Answer], pair: tuple[CallCosts, CallCosts], *, has_sides: bool, has_lookups: bool
) -> float:
    """Over plain decoding, geometric mean, with the λ that is best."""
    target, draft = pair
    plain_s, step_s = target.call_s(1, context=0), draft.call_s(1, context=0)
    calls_s = target.calls_s(65, context=0)
    found = []
    for reward in REWARDS:
        costs = StepCosts(reward * plain_s, calls_s, step_s)
        found.append(
            geometric_mean(
                len(answer.chances)
                * plain_s
                / seconds(answer, costs, has_sides=has_sides, has_lookups=has_lookups)
                for answer in answers
            )
        )
    return max(found)


def main() -> None:
    curves = [HERE / f"curves/assumed_{name}.json" for name in CURVES]
    parser = argument_parser(__doc__, out=False, every=1)
    parser.add_argument("curves", nargs="*", type=Path, default=curves)
    arguments = parser.parse_args()
    answers = calibrated(list(read_top4())[:: arguments.every])
    lines = []
    for path in arguments.curves:
        costs = read_costs(path)
        if costs.draft is None:
            sys.exit(f"{path} has no draft model's costs")
        cells = [path.stem]
        for has_lookups in (False, True):
            chain, tree = (
                best_speedup(
                    answers, (costs.target, costs.draft), has_sides=has_sides, has_lookups=has_lookups
                )
                for has_sides in (False, True)
            )
            cells += [f"{chain:.3f}x", f"{tree:.3f}x", f"{tree / chain - 1:+.1%}"]
        lines.append(cells)
    print(f"{len(answers)} answers\n")
    header = ["", "chain", "tree", "", "chain, with lookups", "tree, with lookups", ""]
    for line in table(header, lines):
        print(line)


if __name__ == "__main__":
    run_program(main)
