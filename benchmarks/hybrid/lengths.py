"""How far to draft for a hybrid: the automatic choice against fixed lengths, replayed at measured costs.

    python benchmarks/hybrid/lengths.py states.jsonl --out lengths.jsonl

`states.jsonl` is what `states.py` wrote. A drafter with the measured step of the model's own head is right at
each position with a chance of 0.5, 0.7 or 0.85: the same chance everywhere ("even"), or one that differs and
that it knows ("known"). Answers are made up and do not repeat themselves, so lookup adds nothing. A row for
each way to take a state back, each acceptance and each setting ("0" drafts nothing): the speed-up over plain
decoding that keeps no states, as a geometric mean over answers, and over the last half of them, when most is
learned. Answers are decoded by one policy, one after another, as in a session; it knows the costs at first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, geometric_mean, read_rows, resume, run_program
from outrider.core.contracts import UNLIMITED, Policy
from outrider.costs import CallCosts, CallPoint
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import Replayed, replay
from outrider.policy import AutoPolicy, FixedPolicy

ACCEPTANCE = (0.5, 0.7, 0.85)
SETTINGS = ("auto", "0", "1", "2", "3", "4", "5", "6")
WAYS = {"checkpoints": UNLIMITED, "snapshots 4": 4, "snapshots 8": 8}
"""and the longest draft of each"""
ANSWER_TOKENS, PROMPT_TOKENS = 256, 100


def main() -> None:
    parser = argument_parser(__doc__, seed=1, answers=12)
    parser.add_argument("states", type=Path)
    arguments = parser.parse_args()
    rows = [row for row in read_rows(arguments.states) if row["kind"] == "calls"]
    resume(arguments.out, describe() | {"states": arguments.states.name}, ["states"])
    for way in WAYS:
        machine = Machine(rows, way)
        for kind in ("even", "known"):
            for acceptance in ACCEPTANCE:
                answers = list(recordings(kind, acceptance, arguments.answers, arguments.seed))
                for setting in SETTINGS:
                    found = machine.play(answers, setting)
                    row = {"kind": "replay", "way": way, "confidence": kind, "acceptance": acceptance}
                    append(arguments.out, row | {"setting": setting} | machine.summary(found))


@dataclass(frozen=True, slots=True)
class Machine:
    """What calls cost where states are taken back in this way; `rows` are those of `states.py`."""

    rows: list[Row]
    way: str

    def seconds(self, way: str) -> dict[int, float]:
        """Seconds of a call by its tokens."""
        return {row["tokens"]: row["seconds"] for row in self.rows if row["way"] == way}

    def costs(self, way: str) -> CallCosts:
        """The same as a curve."""
        return CallCosts([CallPoint(n, seconds) for n, seconds in self.seconds(way).items()])

    def play(self, answers: list[Recording], setting: str) -> list[Replayed]:
        """Decode the answers one after another under one policy."""
        target, drafts = self.costs(self.way), {"draft": self.costs("head")}
        # With curves of its own: what it learns of them must not change what calls take.
        policy: Policy = AutoPolicy(self.costs(self.way), {"draft": self.costs("head")}, free=False)
        if setting != "auto":
            policy = FixedPolicy(draft_max=int(setting), p_min=0.0)
        rereads = self.way == "checkpoints"
        return [
            replay(each, policy, target, drafts, free=[], rereads=rereads, max_draft=WAYS[self.way])
            for each in answers
        ]

    def summary(self, played: list[Replayed]) -> Row:
        """Speed-ups over plain decoding that keeps no states, and tokens per call of the target."""
        plain_s = self.costs("none").call_s(1, context=PROMPT_TOKENS) * ANSWER_TOKENS
        speedups = [plain_s / each.seconds for each in played]
        calls = sum(len(each.records) for each in played)
        return {
            "speedup": geometric_mean(speedups),
            "later": geometric_mean(speedups[len(speedups) // 2 :]),
            "lowest": min(speedups),
            "tokens_per_call": ANSWER_TOKENS * len(played) / calls,
        }


def recordings(kind: str, acceptance: float, count: int, seed: int) -> Iterator[Recording]:
    """Answers with the offers of a drafter that is right with this chance on average."""
    rng = random.Random(seed)
    for number in range(count):
        prompt = tuple(rng.randrange(10**6) for _ in range(PROMPT_TOKENS))
        answer = tuple(rng.randrange(10**6) for _ in range(ANSWER_TOKENS))
        tokens, confidence = [], []
        departures: dict[int, tuple[tuple[int, float], ...]] = {}
        for i, token in enumerate(answer):
            chance = acceptance if kind == "even" else rng.betavariate(3 * acceptance, 3 * (1 - acceptance))
            chance = min(max(chance, 1e-3), 1 - 1e-3)
            is_right = rng.random() < chance
            tokens.append(token if is_right else token + 1)
            confidence.append(chance)
            if not is_right:
                departures[i] = tuple((10**6 + j, chance) for j in range(8))
        offers = Offers(tuple(tokens), tuple(confidence), departures)
        yield Recording(str(number), "made up", prompt, answer, "length", {"draft": offers})


if __name__ == "__main__":
    run_program(main)
