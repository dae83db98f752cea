"""A target whose calls were measured and whose answers were recorded, and drafts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from outrider.backends.gguf import LoadOptions
from outrider.core.contracts import RewindKind
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.curves import draft_costs, own_times, target_costs
from outrider.lab.facts import ModelFacts, tokenizer_fault
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.opened import Loaded, Progress
from outrider.lab.predict import DRAFT, OwnTimes, Prices
from outrider.lab.record import Answer
from outrider.lab.score import offers_of, probe_draft, score_case
from outrider.models.vocab import Alignment, compare
from outrider.policy.pretrained import PretrainedCalibration
from outrider.session.learned import prior_in

_MIN_ANSWERS = 4
_PROBED_ANSWERS = 2
_OTHER_FAMILY = "a draft of the target's own model family, whose tokenizer is the same"
LOOKUP = "lookup, which needs no second model"
TOO_LONG = (
    "none of the prompts fits the draft's context",
    ("shorter prompts (--prompts FILE)", "a draft with a longer context", LOOKUP),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A target that was measured: what its calls cost, and its own answers (at least one)."""

    target: LoadedTarget
    facts: ModelFacts
    costs: CallCosts
    answers: tuple[Answer, ...]

    def corrected(self, answers: Sequence[Answer]) -> Subject:
        """With answers, and what their calls say about the costs."""
        rows = [answer.row for answer in answers]
        return replace(self, costs=target_costs(self.costs, rows), answers=tuple(answers))

    def prices(self, draft: CallCosts | None = None, prior: PretrainedCalibration | None = None) -> Prices:
        """What calls cost, and the engine's own time beside them; `prior`: the draft's."""
        plain_s, token_s = own_times([answer.row for answer in self.answers])
        return Prices(self.costs, draft, OwnTimes({"plain": plain_s}, token_s), prior)


def why_unusable(
    subject: Subject, rewind: RewindKind, alignment: Alignment
) -> tuple[str, tuple[str, ...]] | None:
    """Why a draft, whose own rewinding is `rewind`, cannot work with this target, and what to try instead;
    None for one that can."""
    if subject.target.model.rewind == "none":
        why = "the target cannot take rejected drafts back (recurrent or hybrid state)"
        return why, ("a target of another architecture, with attention alone",)
    if (fault := tokenizer_fault(alignment.report)) is not None:
        return fault, (_OTHER_FAMILY, LOOKUP)
    if rewind == "none":
        why = "the draft cannot forget tokens (recurrent or hybrid state), so rejected ones would stay"
        return why, ("a draft of another architecture, with attention alone", LOOKUP)
    return None


@dataclass(frozen=True, slots=True)
class DraftOffers:
    """A draft beside a subject: how its tokens line up, what its calls cost, and the answers that fit its
    context, with its offers. `refusal`: why it takes no part, and what to try instead; there is no more then.
    """

    facts: ModelFacts
    rewind: RewindKind
    alignment: Alignment
    refusal: tuple[str, tuple[str, ...]] | None = None
    costs: CallCosts | None = None
    answers: tuple[Answer, ...] = ()
    prior: PretrainedCalibration | None = None


def offers_along(
    subject: Subject,
    file: ModelFile,
    options: LoadOptions,
    notices: list[str],
    progress: Progress,
    *,
    seconds: float,
    costs_s: float = DEFAULT_SECONDS,
    known: CallCosts | None = None,
) -> DraftOffers:
    """Load a draft, and let it draft along the subject's answers for so many seconds in all.

    Its calls are measured for up to `costs_s` where they are not known here; `known`: the costs of a draft of
    the same shape and types. Raises ModelFileError, OutOfMemory or BackendError.
    """
    started = perf_counter()
    with Loaded(file, options, notices, progress, beside=subject.target.model) as draft:
        alignment = compare(subject.target.model.vocabulary, draft.weights.vocabulary)
        found = DraftOffers(draft.facts(), draft.weights.rewind, alignment)
        if refusal := why_unusable(subject, draft.weights.rewind, alignment):
            return replace(found, refusal=refusal)
        model = draft.open(min(subject.target.model.context_length, draft.weights.trained_context))
        costs = known or draft.costs("last", costs_s)
        loaded = LoadedDraft(file.name, model, alignment, prior_in(model, notices))
        answers, skipped = offered(
            subject,
            loaded,
            seconds=max(seconds - (perf_counter() - started), 1.0),
            progress=lambda part: progress(f"{file.name} scores the answers", part),
        )
        if not answers:
            return replace(found, facts=draft.facts(), refusal=TOO_LONG)
        if skipped:
            notices.append(f"{file.name}: {skipped} of the answers do not fit its context")
        if known is None:
            progress(f"{file.name} drafts", None)
            costs = probed(subject, loaded, costs, answers)
        prior = loaded.prior
        return replace(found, facts=draft.facts(), costs=costs, answers=tuple(answers), prior=prior)


def offered(
    subject: Subject,
    draft: LoadedDraft,
    *,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[float], None] = lambda _part: None,
) -> tuple[list[Answer], int]:
    """As many of the answers as the time allows (a few at least; none where none fits its context) with the
    draft model's offers, and how many did not fit. Raises BackendError when a call fails."""
    started = clock()
    found: list[Answer] = []
    skipped = 0
    for done, answer in enumerate(subject.answers):
        if clock() - started > seconds and len(found) >= _MIN_ANSWERS:
            break
        recording = answer.scored.recording
        if len(recording.prompt) + 2 * len(recording.tokens) > draft.model.context_length:
            skipped += 1
            continue
        offers = offers_of(score_case(subject.target, draft, answer.question.case, answer.row))
        recording = replace(recording, offers={DRAFT: offers})
        found.append(replace(answer, scored=replace(answer.scored, recording=recording)))
        progress((done + 1) / len(subject.answers))
    return found, skipped


def probed(subject: Subject, draft: LoadedDraft, costs: CallCosts, answers: Sequence[Answer]) -> CallCosts:
    """The draft model's costs, corrected by drafting for real after the first of these answers' prompts.
    Raises BackendError when a call fails."""
    few = [(answer.question.case, answer.row) for answer in answers[:_PROBED_ANSWERS]]
    records = list(probe_draft(subject.target, draft, few))
    return draft_costs(costs, records, subject.costs)
