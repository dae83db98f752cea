"""What is known beside speed: what calls cost, how two vocabularies line up, how often a draft is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.contracts import Vocabulary
from outrider.costs import CallCosts
from outrider.costs.break_even import break_even_of
from outrider.lab.record import Answer
from outrider.lab.recording import Recording
from outrider.lab.statistics import Interval, share_of
from outrider.models.vocab import Alignment, AlignmentReport

_SIZES = (1, 2, 4, 8, 16)
_DRAFTED = (1, 3, 8)
POSITIONS = 8
"""Places of a draft that are counted separately."""


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls cost: `call_s` over one token, `ratios` by number of tokens against that."""

    call_s: float
    ratios: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which acceptance drafts of so many tokens are no slower than plain decoding; None: never."""

    drafted_tokens: int
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """How two vocabularies line up. `lost_tokens` of the target's text tokens the draft cannot offer; they
    are `lost_ratio` of the tokens of the recorded answers. A `reduced` draft knows a part of the target's
    tokens by design."""

    usable: bool
    identical: bool
    reduced: bool
    target_tokens: int
    draft_tokens: int
    common_tokens: int
    text_ratio: float
    cut_ratio: float
    lost_tokens: int
    lost_ratio: float | None
    differences: tuple[str, ...]
    why_not: str | None


def calls_of(costs: CallCosts) -> Calls:
    """What calls over a few tokens cost at an empty context."""
    calls_s = costs.calls_s(max(_SIZES), context=0)
    return Calls(float(calls_s[0]), {n: float(calls_s[n - 1] / calls_s[0]) for n in _SIZES})


def break_evens(costs: CallCosts, draft: CallCosts | None = None) -> tuple[BreakEven, ...]:
    """By draft length, the acceptance from which drafts pay: looked-up ones, or a draft model's."""
    return tuple(BreakEven(n, break_even_of(costs, draft, n)) for n in _DRAFTED)


def tokenizers_of(alignment: Alignment, target: Vocabulary, answers: Sequence[Answer]) -> Tokenizers:
    """How a pair lines up, and how much of these answers the draft cannot offer."""
    report = alignment.report
    lost = [
        token for token in np.flatnonzero(alignment.to_draft < 0).tolist() if not target.is_control(token)
    ]
    missing = set(lost)
    tokens = [token for answer in answers for token in answer.row.tokens]
    return Tokenizers(
        usable=report.usable,
        identical=alignment.identical,
        reduced=report.is_reduced,
        target_tokens=report.target_tokens,
        draft_tokens=report.draft_tokens,
        common_tokens=report.common_tokens,
        text_ratio=report.text_ratio,
        cut_ratio=report.cuts.ratio,
        lost_tokens=len(lost),
        lost_ratio=sum(token in missing for token in tokens) / len(tokens) if tokens else None,
        differences=report.differences,
        why_not=tokenizer_fault(report),
    )


def tokenizer_fault(report: AlignmentReport) -> str | None:
    """Why the draft's tokenizer does not do for the target; None where it does."""
    if report.usable:
        return None
    if report.map_fault is not None:
        return report.map_fault
    kinds = f"the tokenizers do not line up ({report.target_kind}; {report.draft_kind})"
    if report.common_text_tokens < report.text_tokens:
        kinds += f": {report.common_text_tokens:,} of {report.text_tokens:,} text tokens agree"
    return f"{kinds}, and {report.cuts.ratio:.0%} of sample text is cut alike"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the draft's most likely token is the answer's: over all positions, and at the first,
    second, … place of a draft, those before it being right (None: never met). A head is less often right at
    later places, which it reads with states of its own."""

    rate: Interval
    positions: int
    by_position: tuple[float | None, ...]


def acceptance_of(recordings: Sequence[Recording], name: str) -> Acceptance:
    """The acceptance of the draft model's offers on at least one answer that is not empty."""
    runs = [recording.offers[name].num_right(recording.tokens) for recording in recordings]
    met, right = np.zeros(POSITIONS, dtype=int), np.zeros(POSITIONS, dtype=int)
    for answer in runs:
        for start, accepted in enumerate(answer):
            right[:accepted] += 1
            met[: min(accepted + 1, len(answer) - start)] += 1
    return Acceptance(
        rate=share_of([sum(map(bool, answer)) for answer in runs], list(map(len, runs))),
        positions=sum(map(len, runs)),
        by_position=tuple(float(r / m) if m else None for r, m in zip(right, met, strict=True)),
    )
