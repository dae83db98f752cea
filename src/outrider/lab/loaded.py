"""Model files that are loaded for an experiment: a target that answers prompts, draft models beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.backends.gguf.head_model import HeadWeights, open_own
from outrider.backends.gguf.heads import HiddenStates, why_no_heads
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import costs_of
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices, notify
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.store import import_costs
from outrider.engine import Engine
from outrider.formats import ToolSpec, format_of
from outrider.lab.comparison import teacher_forced
from outrider.lab.models import ModelFile, card_fields, find_models
from outrider.lab.prompts import Prompt
from outrider.lab.recording import Offers, Recording, record_offers
from outrider.lab.rows import ModelRow, PairRow, Role
from outrider.models.chat import ChatTemplate
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions
from outrider.models.vocab import Alignment, AlignmentReport, compare
from outrider.policy.auto import LONGEST_DRAFT
from outrider.policy.state import PretrainedCalibration
from outrider.session.learned import prior_in
from outrider.session.loading import load_draft, load_head, load_weights, template_of, why_no_draft
from outrider.session.options import DEFAULT_CONTEXT_TOKENS
from outrider.session.session import Session, in_force

_ROOM_TOKENS = 8
"""of a context beyond the longest text: a call's draft is cut to what is left of it"""


def _draft_weights(file: ModelFile, target: Weights, options: LoadOptions) -> Weights:
    if not file.is_head:
        return load_draft(target, file.card, options, measure=True)
    if file.path == target.path:
        return target
    return load_head(target, read_card(target.path), file.card, options)


def _why_no_draft(file: ModelFile, target: Weights, weights: Weights) -> str | None:
    """Why it cannot draft, whatever its tokenizer; None where it can."""
    if isinstance(weights, HeadWeights):
        return None
    if not file.is_head:
        return why_no_draft(target, weights)
    if weights.num_heads:
        return None
    title = weights.library.title
    if why_no_heads(weights.library):
        return f"{title} as it is here lacks the calls for a model's own head"
    return f"it is one of {file.card.mtp_layers}, and {title} runs no more than one in such a model"


def _model_row(
    file: ModelFile, model: GgufModel, role: Role, notices: Sequence[str], target: str
) -> ModelRow:
    """What a sweep writes down about an open model."""
    return ModelRow(
        model=file.name,
        role=role,
        path=str(file.path),
        fingerprint=file.fingerprint,
        effective=in_force(model) | ({"notices": list(notices)} if notices else {}),
        backend=model.options.backend,
        beside=target if file.is_head else None,
        **card_fields(file.card),
    )


class LoadedTarget:
    """A target and everything that turns prompts into its tokens."""

    def __init__(self, name: str, model: Model, template: ChatTemplate | None = None) -> None:
        self.name = name
        self.model = model
        self.template = template
        self._session = Session(model, (), template=template)

    @property
    def engine(self) -> Engine:
        """Runs one request at a time; who drafts is changed between them (`Engine.equip`)."""
        return self._session.engine

    @cached_property
    def _format(self) -> Any:
        return format_of(self.template, self.model.vocabulary)

    def encode(self, prompt: Prompt, answers: Sequence[str] = ()) -> tuple[int, ...]:
        """The tokens of a prompt, or of the follow-up that comes after these answers. Without a chat template
        a conversation is one text, and a notice says so. Raises PromptError where the template refuses it.
        """
        messages = prompt.after(answers)
        if self.template is None and not isinstance(messages, str):
            notify(f"{self.name} has no chat template: conversations are read as text")
            messages = "".join(f"{message.get('content') or ''}\n\n" for message in messages)
        if isinstance(messages, str) or self.template is None:
            return self._session.encode(str(messages))
        functions = [tool.get("function", tool) for tool in prompt.tools]
        tools = [ToolSpec(f["name"], f.get("description", ""), f.get("parameters") or {}) for f in functions]
        turns, listed = self._format.conversation(messages, tools)
        tokens = self.template.tokenize(self.template.render(turns, tools=listed), self.model.vocabulary)
        return tuple(tokens)

    def constrain(self, grammar: Grammar | None) -> Callable[[], Constraint] | None:
        """What makes a fresh constraint of a prompt's grammar; None where it has none."""
        return None if grammar is None else self._session.compile(grammar).start

    def states_along(self, tokens: Sequence[int]) -> HiddenStates:
        """The hidden states of a text, for a head; only where one was opened on the model. Raises
        BackendError when a call fails or the text does not fit."""
        assert isinstance(self.model, GgufModel) and self.model.hidden is not None, "no head reads them"
        self.engine.reset()
        for _ in teacher_forced(self.model, tokens, len(tokens)):
            pass
        return self.model.hidden

    def close(self) -> None:
        self._session.close()


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model beside a target, and how their tokenizers line up."""

    name: str
    model: Model
    alignment: Alignment
    prior: PretrainedCalibration | None = None
    """what its file says of its acceptance"""
    feeder: LoadedTarget | None = None
    """of a head: the target in a context of its own, whose hidden states it reads"""
    close: Callable[[], None] = lambda: None
    """frees what was loaded for it"""

    def offers(self, recording: Recording) -> Offers:
        """What it would offer along an answer. Raises BackendError when a call fails or the text does not
        fit."""
        prompt, answer, constrain = recording.prompt, recording.tokens, recording.constrain
        states = None if self.feeder is None else self.feeder.states_along((*prompt, *answer))
        try:
            return record_offers(
                self.model, self.alignment, prompt, answer, constrain=constrain, states=states
            )
        finally:
            if self.feeder is not None:
                self.feeder.model.truncate(0, 0)


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
    why_not = why_not or report.fault or None
    return PairRow(
        target=target,
        draft=draft,
        usable=why_not is None,
        identical=identical,
        common_tokens=report.common_tokens,
        text_ratio=report.text_ratio,
        cut_ratio=report.cut_ratio,
        reduced_from=report.target_tokens if report.is_reduced else None,
        why_not=why_not,
        prior=dict(prior) if prior is not None else None,
    )


@dataclass
class Loader:
    """Finds and loads the models of a sweep through their native library, and measures what calls cost.

    Args:
        options: How targets are loaded, and `draft_options` drafts.
        context: In tokens; 0: as trained, None: as usual.
        costs_file: Cost curves to take instead of measuring them.
        costs_s: How long to measure a model's calls that are not known here; None: all anew.
    """

    options: LoadOptions
    draft_options: LoadOptions
    hub: HubOptions
    context: int | None = None
    costs_file: Path | None = None
    costs_s: float | None = None

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        return find_models(references, hub=self.hub, taken=taken)

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no library here is of this backend."""
        next(candidates(replace(self.options, backend=backend)))

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        with collect_notices() as notices, ExitStack() as stack:
            options = replace(self.options, backend=file.backend)
            weights = load_weights(file.card, options, measure=True)
            stack.callback(weights.close)
            template, trained = template_of(weights, file.card.chat_template), weights.trained_context
            length = min(DEFAULT_CONTEXT_TOKENS, trained)
            if self.context is not None:
                length = self.context and min(self.context + _ROOM_TOKENS, trained)
            model = weights.open(length)
            stack.pop_all()  # it is the caller's now
        notify(*notices)
        target = LoadedTarget(file.name, model, template)
        return target, _model_row(file, model, "target", notices, file.name)

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """A draft, or why it takes no part. For a head the target is opened once more: what else is measured
        of it does without the hidden states that a head reads. Raises ModelFileError or OutOfMemory, for a
        head of a file BackendCrash."""
        beside = target.model
        assert isinstance(beside, GgufModel), "it was loaded from a file"
        with collect_notices() as notices, ExitStack() as stack:
            weights = _draft_weights(file, beside.weights, self.draft_options)
            if weights is not beside.weights:
                stack.callback(weights.close)
            alignment = compare(beside.vocabulary, weights.vocabulary)
            why_not = _why_no_draft(file, beside.weights, weights)
            row = pair_row(target.name, file.name, alignment.report, why_not=why_not)
            if not row.usable:
                return row
            length = beside.context_length
            feeder: LoadedTarget | None = None
            if file.is_head:
                feeding = stack.enter_context(closing(beside.weights.open(length)))
                feeder, capacity = LoadedTarget(file.name, feeding), feeding.context_length + LONGEST_DRAFT
                model: GgufModel = (
                    weights.open_beside(feeding, capacity)
                    if isinstance(weights, HeadWeights)
                    else open_own(feeding, capacity)
                )
                stack.callback(model.close)
            else:
                model = weights.open(min(length, weights.trained_context))
            prior = None if weights is beside.weights else prior_in(model)
            close = stack.pop_all().close
        notify(*notices)
        draft = LoadedDraft(file.name, model, alignment, prior, feeder, close)
        return draft, _model_row(file, model, "draft", notices, target.name)

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        """Measured now, or those of `costs_file`. Raises SettingError, or BackendError when a call fails."""
        if self.costs_file is not None:
            pair = import_costs(self.costs_file)
            curve = pair.target if role == "target" else pair.draft
            if curve is None:
                why = "it has no costs of a draft model"
                raise SettingError(str(self.costs_file), why, "Write one with -md.")
            return curve
        assert isinstance(model.model, GgufModel), "it was loaded from a file"
        rows: Rows = "all" if role == "target" else "last"
        return costs_of(model.model, rows=rows, seconds=self.costs_s, fresh=self.costs_s is None)
