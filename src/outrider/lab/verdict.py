"""From numbers to a verdict and to what else could be tried. Pure: nothing is measured or shown here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.core.numbers import Interval
from outrider.costs.expected_speed import StepCosts

Outcome = Literal["pays", "undecided", "does not pay", "cannot work"]

PAYS_FROM = 1.02
"""A gain below this is none: it is within what a busy machine makes of plain decoding."""

_EXPENSIVE_STEP = 0.2
"""A draft step that costs more, in target steps, leaves room for a smaller draft."""
_CHEAP_STEP = 0.1
_WORTH_SAYING = 1.1
_STEEP_CALLS = 2.2
"""Calls over 4 tokens that cost more, in calls of one, waste most of what drafts save."""
_POOR_ACCEPTANCE = 0.5
_LARGE_OUTPUT = 0.2
"""of the bytes that a draft step reads"""
_TRIMMED_PART = 0.75
"""of an output layer that a trim takes away, about"""

_LOOK_UP = "more to look up: `outrider run` takes --corpus FILES and --prediction FILE"
_BENCH = "`outrider bench` runs the candidates for real and tells"
_WANTED = f", where {PAYS_FROM:.2f}x pays"
_TELL_MORE = "a firmer answer: more of your own prompts (--prompts FILE), more time (--seconds)"


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """`sentence` says it, `advice` what else to try; `pays` is the outcome, an undecided one by its
    middle."""

    outcome: Outcome
    pays: bool
    sentence: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftNumbers:
    """What decides about a draft. `calls` are the costs of target calls over 1, 2, … tokens and `step` that
    of a draft step, in target steps; `needed` the least acceptance at which some draft length breaks even
    (None: at none). `lookup` is what lookup alone gives over plain decoding, `over_plain` and `over_lookup`
    what the automatic choice with the draft gives over either. `output_ratio`: the output layer's part of
    the bytes that a draft step reads."""

    calls: Sequence[float]
    step: float
    acceptance: Interval
    needed: float | None
    lookup: Interval
    over_plain: Interval
    over_lookup: Interval
    output_ratio: float = 0.0
    is_head: bool = False


def judge_lookup(speedup: Interval, calls: Sequence[float]) -> DraftVerdict:
    """Whether lookup alone pays; `calls` as in DraftNumbers."""
    outcome, number = _outcome(speedup), f"{as_text(speedup)} plain decoding"
    if outcome == "pays":
        return DraftVerdict(outcome, True, f"lookup alone pays: {number}")
    if outcome == "undecided":
        sentence = f"undecided: lookup alone gives {number}{_WANTED}"
        return DraftVerdict(
            outcome, speedup.value >= PAYS_FROM, sentence, (_TELL_MORE, _BENCH, *_flatter(calls))
        )
    sentence = f"lookup alone does not pay on these prompts: {number}"
    return DraftVerdict(outcome, False, sentence, (_LOOK_UP, *_flatter(calls)))


def judge_draft(numbers: DraftNumbers) -> DraftVerdict:
    """Whether the draft pays: over plain decoding and over lookup alone, which needs no draft."""
    gains = {"plain decoding": numbers.over_plain, "lookup alone": numbers.over_lookup}
    outcomes = {_outcome(gain) for gain in gains.values()}
    if outcomes == {"pays"}:
        sentence = f"pays: {', '.join(f'{as_text(gain)} {rival}' for rival, gain in gains.items())}"
        return DraftVerdict("pays", True, sentence, _cheaper(numbers))
    if "does not pay" not in outcomes:
        rival, gain = min(gains.items(), key=lambda item: item[1].value)
        sentence = f"undecided: the draft gives {as_text(gain)} {rival}{_WANTED}"
        advice = (_BENCH, _TELL_MORE, *_cheaper(numbers))
        return DraftVerdict("undecided", gain.value >= PAYS_FROM, sentence, advice)
    without = f"lookup alone gives {as_text(numbers.lookup)} on these prompts"
    if _outcome(numbers.lookup) == "does not pay":
        without = f"nor does lookup alone: {as_text(numbers.lookup)}"
    sentence = f"will not pay here: {_reason(numbers)}; {without}"
    return DraftVerdict("does not pay", False, sentence, _instead(numbers))


def cannot_work(why: str, advice: Sequence[str]) -> DraftVerdict:
    """A pair, or a target, that cannot speculate at all."""
    return DraftVerdict("cannot work", False, f"cannot work: {why}", tuple(advice))


def overall(
    lookup: DraftVerdict | None, drafts: Sequence[tuple[str, DraftVerdict, Interval | None]]
) -> tuple[str, bool]:
    """One sentence over all drafts (name, verdict, expected speed-up), and whether anything pays.

    Where none of the drafts can work the answer is no, even if lookup pays: the drafts were asked about.
    """
    said = [lookup.sentence] if lookup is not None else []
    pays = lookup is not None and lookup.pays
    able = [draft for draft in drafts if draft[1].outcome != "cannot work"]
    paying = [draft for draft in able if draft[1].pays and draft[2] is not None]
    if not drafts:
        return "".join(said) or "nothing can be drafted for this target", pays
    if paying:
        name, verdict, _ = max(paying, key=lambda draft: draft[2].value if draft[2] else 0.0)
        return (verdict.sentence if len(drafts) == 1 else f"best with {name}: {verdict.sentence}"), True
    if len(drafts) == 1 or len(able) == 1:
        name, verdict, _ = (able or drafts)[0]
        sentence = verdict.sentence if len(drafts) == 1 else f"{name}: {verdict.sentence}"
        # A draft that does not pay says by itself what lookup does.
        more = [] if verdict.outcome == "does not pay" else said
        return "; ".join([sentence, *more]), pays and bool(able)
    if not able:
        return "; ".join(["none of the drafts can work with this target", *said]), False
    is_open = any(verdict.outcome == "undecided" for _, verdict, _ in able)
    return "; ".join([f"none of the drafts {'is likely to pay' if is_open else 'pays'}", *said]), pays


def as_text(interval: Interval) -> str:
    """A speed-up for people: "1.20x (1.05 to 1.36)"; of a single answer no interval is known."""
    if not math.isfinite(interval.high):
        return f"{interval.value:.2f}x (one answer: it may be anything)"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def _outcome(gain: Interval) -> Outcome:
    if gain.low >= PAYS_FROM:
        return "pays"
    return "does not pay" if gain.high < PAYS_FROM else "undecided"


def _reason(numbers: DraftNumbers) -> str:
    cost = f"a draft step costs {numbers.step:.2f} of a target step"
    right = f"{numbers.acceptance.value:.0%}"
    if numbers.needed is None:
        return f"{cost}, so that even drafts that are always right are slower"
    if numbers.acceptance.value < numbers.needed and right != f"{numbers.needed:.0%}":
        return f"{cost}, so {numbers.needed:.0%} of its tokens must be right, and {right} are"
    if _outcome(numbers.over_plain) != "does not pay":
        return f"{cost}, and it adds nothing to lookup"
    return f"{cost} and {right} of its tokens are right, which saves too little"


def _instead(numbers: DraftNumbers) -> tuple[str, ...]:
    """What to try in the draft's place."""
    found = [*_cheaper(numbers)]
    if numbers.step <= _EXPENSIVE_STEP and numbers.acceptance.value < _POOR_ACCEPTANCE:
        found.append(
            "a draft that is closer to the target: of its own family and tuning, larger or less quantized"
        )
    alone = f"lookup alone ({'--no-mtp' if numbers.is_head else 'leave the draft out'})"
    return (*found, alone if _outcome(numbers.lookup) != "does not pay" else _LOOK_UP)


def _cheaper(numbers: DraftNumbers) -> tuple[str, ...]:
    """A smaller draft and flatter calls, where they would show."""
    right = numbers.acceptance.value

    def reach(step: float) -> float:
        return max(1.0, StepCosts(numbers.calls, step).best_speedup(right))

    now, cheap = reach(numbers.step), reach(_CHEAP_STEP)
    found = []
    if numbers.step > _EXPENSIVE_STEP and cheap > _WORTH_SAYING * now:
        found.append(
            f"a smaller draft: one whose step costs {_CHEAP_STEP} of the target's could reach {cheap:.1f}x "
            f"if it were right as often ({right:.0%})"
        )
    if numbers.output_ratio > _LARGE_OUTPUT:
        step = numbers.step * (1 - _TRIMMED_PART * numbers.output_ratio)
        found.append(
            f"`outrider trim`: {numbers.output_ratio:.0%} of what a draft step reads is the output layer; "
            f"with fewer tokens it costs about {step:.2f} of the target's, which could reach "
            f"{reach(step):.2f}x by the draft alone, not {now:.2f}x"
        )
    return (*found, *_flatter(numbers.calls))


def _flatter(calls: Sequence[float]) -> tuple[str, ...]:
    if len(calls) < 4 or calls[3] <= _STEEP_CALLS * calls[0]:
        return ()
    return (
        f"another quantization of the target: its calls over 4 tokens cost {calls[3] / calls[0]:.1f} steps; "
        "IQ4_NL, Q4_0 and (of small models) BF16 files are often flatter (`outrider quantize` makes them, "
        "`outrider costs --tune` tries kernels and threads)",
    )
