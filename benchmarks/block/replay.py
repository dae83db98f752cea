"""What the automatic choice makes of a block drafter, against every fixed width, in replay.

    python benchmarks/block/replay.py --out benchmarks/block/replay.jsonl [--costs COSTS.jsonl]

Texts are simulated: no real file was at hand. A profile says how likely each place of a block is right if
those before it are; a token's own probability is drawn around that (Beta), and the drafter's confidence is
that with an error in its log odds. `code` and `prose` are such that seven fixed tokens gain +92 % and lose 11
% at the costs `card`, which is what was published of DFlash2 on an RTX 3090. `card` is assumed: a call over n
tokens costs 1 + 0.02 (n - 1), a block 0.15, reading a token 0.004. `--costs` adds the curves that costs.py
measured.

Each policy runs over all answers of a profile as a session does, and a row has its speed in plain ones.
`bound` knows before each step how many tokens will be accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, argument_parser, describe, read_rows, run_program, table
from outrider.core.contracts import Policy
from outrider.costs import CallCosts
from outrider.costs.curve import CallPoint
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import replay
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from policy.bound import num_right

PROFILES: dict[str, tuple[float, ...]] = {
    "code": (0.69, 0.60, 0.53, 0.48, 0.44, 0.40, 0.36),
    "chat": (0.55, 0.42, 0.35, 0.30, 0.26, 0.22, 0.20),
    "prose": (0.15, 0.13, 0.11, 0.10, 0.09, 0.08, 0.07),
    "level": (0.85,) * 7,
    "cliff": (0.95, 0.92, 0.15, 0.10, 0.10, 0.10, 0.10),
}
"""the probability that a place of a block is right if those before it are"""
PLACES = 7
CONCENTRATION = 2.0
"""of the Beta distribution: 2 spreads widely, as real confidences do"""
DISTORTION = (0.85, 0.3, 0.4)
"""of confidences: a factor, a constant and noise, in log odds"""
PROMPT = 64


@dataclass(frozen=True)
class Costs:
    """Calls of the target and of the drafter."""

    name: str
    target: CallCosts
    block: CallCosts

    def fresh(self) -> tuple[CallCosts, CallCosts]:
        """Copies, which policies go on correcting."""
        return CallCosts.from_json(self.target.as_json()), CallCosts.from_json(self.block.as_json())


def card() -> Costs:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    target = CallCosts([CallPoint(n, 0.02 * (1 + 0.02 * (n - 1))) for n in sizes], prefill_token_s=0.0004)
    block = CallCosts([CallPoint(n, 0.02 * (0.15 + 0.004 * (n - 1))) for n in sizes], prefill_token_s=0.00008)
    return Costs("card", target, block)


def measured(path: Path) -> list[Costs]:
    """Those of costs.py, by the models' width; the last of each."""
    found: dict[int, dict[str, CallCosts]] = {}
    for row in read_rows(path):
        if row["kind"] == "curve":
            found.setdefault(row["width"], {})[row["of"]] = CallCosts.from_json(row)
    return [
        Costs(f"width {width}", curves["target, states kept"], curves["block"])
        for width, curves in found.items()
    ]


def recording(number: int, profile: Sequence[float], length: int, rng: np.random.Generator) -> Recording:
    """An answer, and what the drafter offers at each of its positions."""
    answer = tuple(range(1000, 1000 + length))
    tokens, confidences, departures = [], [], {}
    factor, constant, noise = DISTORTION
    for at in range(length):
        means = np.array(profile[: min(PLACES, length - at)])
        chances = rng.beta(CONCENTRATION * means, CONCENTRATION * (1 - means)).clip(1e-3, 1 - 1e-3)
        odds = factor * np.log(chances / (1 - chances)) + constant + noise * rng.standard_normal(len(means))
        said = (1 / (1 + np.exp(-odds))).round(5).clip(1e-5, 1 - 1e-5).tolist()
        right = rng.random(len(means)) < chances
        path = [(answer[at + i] if right[i] else 7, said[i]) for i in range(len(means))]
        tokens.append(path[0][0])
        confidences.append(path[0][1])
        departures[at] = tuple(path[1:])
    offers = Offers(tuple(tokens), tuple(confidences), departures, PLACES)
    prompt = tuple(range(PROMPT))
    return Recording(f"{number}", "simulated", prompt, answer, "length", {"draft": offers})


def policies(costs: Costs) -> Iterator[tuple[str, Policy]]:
    yield "auto", AutoPolicy(*costs.fresh())
    for width in range(1, PLACES + 1):
        yield f"fixed {width}", FixedPolicy(draft_max=width, p_min=0.0)


def speed(policy: Policy, texts: Sequence[Recording], costs: Costs) -> dict[str, float]:
    """Over all texts together, in plain ones."""
    played = [replay(text, policy, costs.target, {"draft": costs.block}, free=()) for text in texts]
    records = [record for one in played for record in one.records]
    return {
        "speed": sum(one.plain_s for one in played) / sum(one.seconds for one in played),
        "drafted": sum(len(record.draft) for record in records) / len(records),
        "accepted": sum(record.num_accepted for record in records) / len(records),
        "blocks": sum(record.work.calls for record in records) / len(records),
    }


def bound(texts: Sequence[Recording], costs: Costs) -> float:
    """Speed where a step is known beforehand."""
    plain_s = spent_s = 0.0
    for text in texts:
        right, at = num_right(text.offers["draft"], text.tokens), 0
        plain_s += sum(costs.target.call_s(1, context=PROMPT + i) for i in range(len(text.tokens)))
        while at < len(text.tokens):
            plain, left = costs.target.call_s(1, context=PROMPT + at), len(text.tokens) - at - 1
            most = min(right[at], PLACES, left)
            drafted = costs.target.call_s(1 + most, context=PROMPT + at)
            drafted += costs.block.call_s(2, context=PROMPT + at)
            is_worth = drafted / (1 + most) < plain
            spent_s += drafted if is_worth else plain
            at += 1 + (most if is_worth else 0)
    return plain_s / spent_s


def main() -> None:
    parser = argument_parser(__doc__, answers=40, tokens=200, seed=1)
    parser.add_argument("--costs", type=Path, help="rows of costs.py")
    given = parser.parse_args()
    append(given.out, describe())
    for costs in (card(), *(measured(given.costs) if given.costs else ())):
        lines = []
        for name, profile in PROFILES.items():
            rng = np.random.default_rng(given.seed)
            texts = [recording(i, profile, given.tokens, rng) for i in range(given.answers)]
            found: dict[str, dict[str, Any]] = {
                who: speed(policy, texts, costs) for who, policy in policies(costs)
            }
            found["bound"] = {"speed": bound(texts, costs)}
            for who, figures in found.items():
                append(
                    given.out,
                    {"kind": "replay", "costs": costs.name, "profile": name, "policy": who, **figures},
                )
            speeds = {who: figures["speed"] for who, figures in found.items()}
            best = max((who for who in speeds if who.startswith("fixed")), key=speeds.__getitem__)
            lines.append(
                [
                    name,
                    f"{speeds['auto']:.3f}",
                    f"{speeds[best]:.3f} ({best})",
                    f"{speeds['fixed 7']:.3f}",
                    f"{speeds['bound']:.3f}",
                    f"{found['auto']['drafted']:.2f}",
                    f"{found['auto']['blocks']:.2f}",
                ]
            )
        header = ["profile", "auto", "best fixed", "seven", "bound", "drafted a step", "blocks a step"]
        print(costs.name, *table(header, lines), sep="\n")


if __name__ == "__main__":
    run_program(main)
