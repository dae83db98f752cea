"""Model files that are loaded for an experiment: a target that answers prompts, draft models beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.backends.gguf.head_model import HeadWeights, open_own
from outrider.backends.gguf.heads import HiddenStates, why_no_heads
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.curves import costs_of
from outrider.core.contracts import FREE, Constraint, Model, Rewinding
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
from outrider.session import DEFAULT_CONTEXT_TOKENS, Session
from outrider.session.learned import prior_in
from outrider.session.loading import load_draft, load_head, load_weights, template_of, why_no_draft

_ROOM_TOKENS = 8
"""of a context beyond the longest text: a call's draft is cut to what is left of it"""

Progress = Callable[[str, float | None], None]
"""Called with what is being done, and which part of it is done (None: not known)."""


class Loaded(ExitStack):
    """Weights, and a context once it is opened; leaving or closing it frees both, but not the weights that a
    head shares with its target.

    A draft is loaded `beside` its target. For a head, which has the target's weights or those of a file, the
    target is opened once more: what else is measured of it does without the hidden states that a head reads.
    Raises ModelFileError or OutOfMemory, for a head of a file BackendCrash.
    """

    def __init__(self, file: ModelFile, options: LoadOptions, *, beside: Model | None = None) -> None:
        super().__init__()
        self._file = file
        self._model: GgufModel | None = None
        self._feeder: LoadedTarget | None = None
        self._beside = beside
        if isinstance(beside, GgufModel) and file.is_head and file.path == beside.weights.path:
            self.weights = beside.weights
        elif isinstance(beside, GgufModel) and file.is_head:
            self.weights = load_head(beside.weights, read_card(beside.weights.path), file.card, options)
        elif isinstance(beside, GgufModel):
            self.weights = load_draft(beside.weights, file.card, options, measure=True)
        else:
            self.weights = load_weights(file.card, options, draft=beside is not None, measure=True)
        if not file.is_head or isinstance(self.weights, HeadWeights):
            self.callback(self.weights.close)
        try:
            self.template = None if beside else template_of(self.weights, file.card.chat_template)
        except BaseException:
            self.close()
            raise

    @property
    def rewinding(self) -> Rewinding:
        """How far a context goes back; a head's layers are attention alone."""
        return FREE if self._file.is_head else self.weights.rewinding

    @property
    def why_not(self) -> str:
        """Why it cannot draft, whatever the target; empty where it can."""
        if not self._file.is_head or isinstance(self.weights, HeadWeights) or self.weights.num_heads:
            return ""
        title = self.weights.library.title
        if why_no_heads(self.weights.library):
            return f"{title} as it is here lacks the calls for a model's own head"
        return f"it is one of {self._file.card.mtp_layers}, and {title} runs no more than one in such a model"

    def open(self, context_length: int | None) -> GgufModel:
        """A context for one sequence (0 tokens: as trained, None: as usual); not for what cannot draft.
        Raises OutOfMemory."""
        assert not self.why_not, self.why_not
        if context_length is None:
            context_length = min(DEFAULT_CONTEXT_TOKENS, self.weights.trained_context)
        if self._file.is_head and isinstance(self._beside, GgufModel):
            feeding = self.enter_context(closing(self._beside.weights.open(context_length)))
            self._feeder = LoadedTarget(self._file.name, feeding)
            capacity = feeding.context_length + LONGEST_DRAFT
            weights = self.weights if isinstance(self.weights, HeadWeights) else None
            self._model = weights.open_beside(feeding, capacity) if weights else open_own(feeding, capacity)
            self.callback(self._model.close)
        else:
            self._model = self.weights.open(context_length)
        return self._model

    def draft(self, alignment: Alignment) -> LoadedDraft:
        """The open model as a draft that lines up so, and that is closed with this."""
        assert self._model is not None, "open it first"
        is_own_head = self._feeder is not None and not isinstance(self.weights, HeadWeights)
        prior = None if is_own_head else prior_in(self._model)
        return LoadedDraft(self._file.name, self._model, alignment, prior, self._feeder, self.close)

    def row(self, role: Role, notices: Sequence[str], target: str | None = None) -> ModelRow:
        """What a sweep writes down about the open model, of a draft for this target."""
        model = self._model
        assert model is not None, "open it first"
        effective = asdict(model.options) | {
            "threads": model.threads,
            "threads_batch": model.threads_batch,
            "batch_tokens": model.max_batch_tokens,
            "micro_batch_tokens": model.micro_batch_tokens,
            "context_length": model.context_length,
        }
        return ModelRow(
            model=self._file.name,
            role=role,
            path=str(self._file.path),
            fingerprint=self._file.fingerprint,
            effective=effective | ({"notices": list(notices)} if notices else {}),
            backend=model.options.backend,
            beside=target if self._file.is_head else None,
            **card_fields(self._file.card),
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
    why_not = why_not or tokenizer_fault(report)
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
        """Raises ModelFileError and HubError, which name the reference that leads nowhere."""
        return find_models(references, hub=self.hub, taken=taken)

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no library here is of this backend."""
        next(candidates(replace(self.options, backend=backend)))

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices:
            loaded = Loaded(file, replace(self.options, backend=file.backend))
            try:
                longest = self.context and min(self.context + _ROOM_TOKENS, loaded.weights.trained_context)
                model = loaded.open(longest)
            except BaseException:
                loaded.close()
                raise
        notify(*notices)
        return LoadedTarget(file.name, model, loaded.template), loaded.row("target", notices)

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices, ExitStack() as stack:
            loaded = stack.enter_context(Loaded(file, self.draft_options, beside=target.model))
            alignment = compare(target.model.vocabulary, loaded.weights.vocabulary)
            useless = loaded.why_not or None
            if isinstance(target.model, GgufModel) and not file.is_head:
                useless = why_no_draft(target.model.weights, loaded.weights)
            row = pair_row(target.name, file.name, alignment.report, why_not=useless)
            if not row.usable:
                return row
            length = target.model.context_length
            loaded.open(length if file.is_head else min(length, loaded.weights.trained_context))
            draft = loaded.draft(alignment)
            stack.pop_all()  # it is the caller's now
        notify(*notices)
        return draft, loaded.row("draft", notices, target.name)

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
