"""Pacing in simulated time: what is guaranteed for any steps, and what is claimed for the usual ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.data import Piece
from outrider.session.pacing import Pacer
from outrider.session.readout import Emission, character_gaps

SOURCES = ("target", "draft", "lookup")


@dataclass(frozen=True)
class Step:
    end_s: float
    text: str


@dataclass(frozen=True)
class Shown:
    at_s: float
    piece: Piece


def pieces_of(step: Step) -> list[Piece]:
    """Tokens of three characters from changing sources."""
    tokens = [step.text[start : start + 3] for start in range(0, len(step.text), 3)]
    return [Piece(token, SOURCES[index % 3]) for index, token in enumerate(tokens)]


def play(steps: Sequence[Step], pacer: Pacer | None = None, wake_s: float = 0.0) -> list[Shown]:
    """What is shown when, with a driver that wakes up `wake_s` after something was due."""
    pacer = pacer or Pacer()
    shown: list[Shown] = []
    for step, end_s in zip(steps, [step.end_s for step in steps[1:]] + [math.inf], strict=True):
        pacer.push(step.end_s, pieces_of(step))
        now_s = step.end_s
        while now_s < end_s:
            shown += [Shown(now_s, piece) for piece in pacer.due(now_s)]
            if end_s == math.inf or pacer.next_s is None:
                break
            now_s = max(pacer.next_s + wake_s, now_s)
    return shown + [Shown(steps[-1].end_s, piece) for piece in pacer.flush()]


def delays_s(steps: Sequence[Step], shown: Sequence[Shown]) -> list[float]:
    """How long each character waited."""
    arrived = [step.end_s for step in steps for _ in step.text]
    out = [part.at_s for part in shown for _ in part.piece.text]
    return [later - earlier for earlier, later in zip(arrived, out, strict=True)]


def p95(emissions: Sequence[Emission]) -> float:
    gaps = character_gaps(emissions)
    assert gaps is not None
    return gaps.p95


def unpaced_p95(steps: Sequence[Step]) -> float:
    return p95([Emission(step.end_s, len(step.text)) for step in steps])


def paced_p95(steps: Sequence[Step]) -> float:
    return p95([Emission(part.at_s, len(part.piece.text)) for part in play(steps)])


TEXTS = st.text(alphabet="abcé漢🙂 \n", max_size=40)
DURATIONS = st.floats(1e-4, 10)
STEPS = st.lists(st.tuples(DURATIONS, TEXTS), min_size=1, max_size=60).map(
    lambda rows: [
        Step(end_s, text) for end_s, (_, text) in zip(accumulate(row[0] for row in rows), rows, strict=True)
    ]
)


# What is guaranteed, whatever the steps do


@given(STEPS)
def test_the_text_is_complete_in_order_and_keeps_its_sources(steps: list[Step]) -> None:
    shown = play(steps)
    assert [(c, part.piece.source) for part in shown for c in part.piece.text] == [
        (c, piece.source) for step in steps for piece in pieces_of(step) for c in piece.text
    ]
    assert all(part.piece.text for part in shown)


@given(STEPS)
def test_nothing_is_early_and_nothing_waits_for_more_than_one_step(steps: list[Step]) -> None:
    waits = iter(delays_s(steps, play(steps)))
    for step, following in pairwise([*steps, steps[-1]]):  # the last one is flushed at once
        for _ in step.text:
            assert 0 <= next(waits) <= following.end_s - step.end_s + 1e-9


@given(STEPS)
def test_nothing_waits_longer_than_the_slowest_step_so_far(steps: list[Step]) -> None:
    """A step that hangs does not take the text before it along."""
    spoken = [step for step in steps if step.text]
    slowest = list(accumulate([0.0, *(b.end_s - a.end_s for a, b in pairwise(spoken))], max))
    waits = iter(delays_s(steps, play(steps)))
    for step, bound_s in zip(spoken, slowest, strict=False):
        for _ in step.text:
            assert next(waits) <= bound_s + 1e-9


@given(STEPS)
def test_all_that_is_held_goes_out_at_once_at_the_end(steps: list[Step]) -> None:
    pacer = Pacer()
    for step in steps:
        pacer.push(step.end_s, pieces_of(step))
    assert "".join(piece.text for piece in pacer.flush()) == "".join(step.text for step in steps)
    assert pacer.next_s is None and pacer.flush() == ()


def test_the_pause_before_another_stream_is_no_step() -> None:
    pacer = Pacer()
    for end_s in (0.0, 1.0):
        pacer.push(end_s, [Piece("abcd", "target")])
    pacer.flush()
    pacer.push(1000.0, [Piece("abcd", "target")])
    pacer.due(1000.9)
    assert pacer.next_s is None


def test_what_is_left_goes_out_with_a_step_that_brings_no_text() -> None:
    pacer = Pacer()
    for end_s in (0.0, 1.0, 2.0):
        pacer.push(end_s, [Piece("abcd", "target")])
    pacer.due(2.1)
    pacer.push(2.2, ())
    assert pacer.next_s == 2.2 and "".join(piece.text for piece in pacer.due(2.2)).endswith("d")


def test_the_pace_is_that_of_the_pauses_between_texts() -> None:
    """Half a character takes steps that show nothing: readers wait for the whole one."""
    pacer = Pacer()
    for end_s, text in ((0.0, "ab"), (0.9, ""), (1.0, "cd")):
        pacer.push(end_s, [Piece(text, "target")] if text else ())
        pacer.due(end_s)
    assert pacer.next_s == 1.75


# What is claimed for the usual steps: p95 of the character gaps below plain decoding's

STAIRS = {1: 1.0, 2: 1.5, 3: 1.9, 4: 1.5, 5: 2.1, 8: 3.2, 16: 3.3}
"""A target call over so many tokens, in units of one over a single token, as measured on a CPU."""
FLAT = dict.fromkeys(STAIRS, 1.1)
"""The same on a machine that has compute to spare."""


def characters(random_: random.Random) -> int:
    """Of a token of English text: four on average, now and then one."""
    return max(1, min(12, round(random_.gauss(4, 2))))


def plain_steps(seed: int, noise: float) -> list[Step]:
    return steps_of(seed, noise, STAIRS, lambda _number: (0, 0.0))


def steps_of(
    seed: int, noise: float, costs: dict[int, float], draft: Callable[[int], tuple[int, float]]
) -> list[Step]:
    """Steps whose n-th drafts so many tokens, each accepted with this probability."""
    random_ = random.Random(seed)
    now_s, steps = 0.0, []
    for number in range(200):
        length, rate = draft(number)
        accepted = next((i for i in range(length) if random_.random() >= rate), length)
        now_s += costs[length + 1] * math.exp(random_.gauss(0, noise))
        steps.append(Step(now_s, "x" * sum(characters(random_) for _ in range(accepted + 1))))
    return steps


PATTERNS = {
    "nothing is ever drafted": (STAIRS, lambda _number: (0, 0.0)),
    "short drafts, mostly accepted": (STAIRS, lambda _number: (3, 0.8)),
    "short drafts, half accepted": (STAIRS, lambda _number: (3, 0.55)),
    "long drafts, accepted": (STAIRS, lambda _number: (15, 0.95)),
    "an edit: long copies between plain steps": (
        STAIRS,
        lambda number: (15, 0.98) if number % 5 else (0, 0.0),
    ),
    "plain for a while, then copies, then plain": (
        STAIRS,
        lambda number: (15, 0.97) if number // 40 % 2 else (0, 0.0),
    ),
    "lengths change with every step": (STAIRS, lambda number: ((0, 3, 15, 3)[number % 4], 0.9)),
    "a fast machine": (FLAT, lambda _number: (7, 0.7)),
}


@pytest.mark.parametrize("noise", [0.02, 0.25])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_paced_gaps_are_below_those_of_plain_decoding(pattern: str, noise: float) -> None:
    costs, draft = PATTERNS[pattern]
    for seed in range(2):
        steps = steps_of(seed, noise, costs, draft)
        assert paced_p95(steps) < 0.7 * unpaced_p95(plain_steps(seed + 100, noise))
        assert max(delays_s(steps, play(steps))) <= max(b.end_s - a.end_s for a, b in pairwise(steps))


@pytest.mark.parametrize("rate", [0.55, 0.8])
def test_unpaced_bursts_of_short_drafts_are_above_plain_decoding(rate: float) -> None:
    """There is something to gain: what the tests above hold is not so by itself."""
    steps = steps_of(1, 0.02, STAIRS, lambda _number: (3, rate))
    assert unpaced_p95(steps) > 1.3 * unpaced_p95(plain_steps(2, 0.02))


def test_the_pace_is_that_of_a_slow_step() -> None:
    """That of a quick one would let the text run dry in every slow one."""
    ends_s = accumulate(1.0 + number % 2 for number in range(100))
    assert paced_p95([Step(end_s, "x" * 8) for end_s in ends_s]) < 0.5


def test_a_pause_has_not_all_of_its_time_on_one_side() -> None:
    """Single characters between long texts would else stand alone for a whole step."""
    steps = [Step(float(number), "x" if number % 2 else "x" * 16) for number in range(100)]
    assert paced_p95(steps) < 0.6


def test_steps_that_do_not_pay_cannot_be_paced_below_plain() -> None:
    """Most drafts rejected, each step three plain ones long: only the guarantees are left."""
    steps = steps_of(3, 0.25, STAIRS, lambda _number: (7, 0.1))
    assert paced_p95(steps) > unpaced_p95(plain_steps(4, 0.25))
    assert max(delays_s(steps, play(steps))) <= max(b.end_s - a.end_s for a, b in pairwise(steps))


def test_a_driver_that_wakes_up_late_loses_nothing() -> None:
    steps = steps_of(6, 0.1, STAIRS, lambda _number: (3, 0.8))
    shown = play(steps, wake_s=0.3)
    assert "".join(part.piece.text for part in shown) == "".join(step.text for step in steps)
    assert min(delays_s(steps, shown)) >= 0
