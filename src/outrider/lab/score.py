"""What a draft model would have offered all along the recorded answers, and what its calls cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from outrider.core.data import StepRecord
from outrider.drafters.model import ModelDrafter
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.record import Case, request_of
from outrider.lab.replay import Offers, record_offers
from outrider.lab.rows import AnswerRow, OffersRow, PairRow
from outrider.models.vocab import AlignmentReport
from outrider.policy import FixedPolicy
from outrider.policy.pretrained import PretrainedCalibration

_PROBED_LENGTH = 4
_PROBED_TOKENS = 24


def pair_row(
    target: str,
    draft: str,
    report: AlignmentReport,
    *,
    identical: bool = False,
    why_not: str | None = None,
    prior: PretrainedCalibration | None = None,
) -> PairRow:
    """How two tokenizers line up, and why the draft takes no part if it does not; `prior`: the draft's."""
    if why_not is None and not report.usable:
        why_not = report.map_fault or (
            f"the tokenizers do not line up: {report.text_ratio:.1%} of the text tokens are common, "
            f"{report.cuts.ratio:.1%} of sample pieces are cut alike"
        )
    return PairRow(
        target=target,
        draft=draft,
        usable=why_not is None,
        identical=identical,
        common_tokens=report.common_tokens,
        text_ratio=report.text_ratio,
        cut_ratio=report.cuts.ratio,
        reduced_from=report.target_tokens if report.is_reduced else None,
        why_not=why_not,
        prior=dict(prior) if prior is not None else None,
    )


def score_case(target: LoadedTarget, draft: LoadedDraft, case: Case, answer: AnswerRow) -> OffersRow:
    """A draft's offers along one answer. Raises BackendError when a call fails or the text does not fit."""
    before = perf_counter()
    constrain = target.constrain(case.prompt.grammar)
    offers = record_offers(draft.model, draft.alignment, answer.prompt, answer.tokens, constrain=constrain)
    return OffersRow(
        target=target.name,
        draft=draft.name,
        workload=answer.workload,
        case=answer.case,
        tokens=offers.tokens,
        confidence=offers.confidence,
        departures=dict(offers.departures),
        seconds=perf_counter() - before,
    )


def offers_of(row: OffersRow) -> Offers:
    """The offers that a row holds."""
    return Offers(row.tokens, row.confidence, row.departures)


def probe_draft(
    target: LoadedTarget, draft: LoadedDraft, cases: Sequence[tuple[Case, AnswerRow]]
) -> Iterator[StepRecord]:
    """Steps in which the draft model drafts a few tokens each time, on the first tokens of these cases."""
    for case, answer in cases:
        drafter = ModelDrafter(draft.model, draft.alignment)
        target.engine.equip((drafter,), FixedPolicy(_PROBED_LENGTH, 0, 0.0))
        target.engine.reset()
        request = request_of(case, answer.prompt, answer.seed)
        most = min(request.max_tokens or _PROBED_TOKENS, _PROBED_TOKENS)
        completion = target.engine.generate(replace(request, max_tokens=most, ignore_end=False))
        yield from completion.records
        drafter.reset()
