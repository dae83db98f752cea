"""Model files that are loaded for an experiment: a target that answers prompts, draft models beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from outrider.backends.gguf.head_model import HeadWeights, open_own
from outrider.backends.gguf.heads import HiddenStates, why_no_heads
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.curves import costs_of
from outrider.core.contracts import FREE, Constraint, Model, Rewinding
from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.engine import Engine
from outrider.formats import ToolSpec, format_of
from outrider.lab.comparison import teacher_forced
from outrider.lab.models import ModelFacts, ModelFile, card_fields
from outrider.lab.prompts import Prompt
from outrider.lab.recording import Offers, Recording, record_offers
from outrider.lab.rows import ModelRow, Role
from outrider.models.chat import ChatTemplate
from outrider.models.gguf import read_card
from outrider.models.vocab import Alignment
from outrider.policy.auto import LONGEST_DRAFT
from outrider.policy.state import PretrainedCalibration
from outrider.session import DEFAULT_CONTEXT_TOKENS, Session
from outrider.session.drafts import load_head
from outrider.session.learned import prior_in
from outrider.session.loading import load_draft, load_weights, template_of

Progress = Callable[[str, float | None], None]
"""Called with what is being done, and which part of it is done (None: not known)."""


class Loaded(ExitStack):
    """Weights, and a context once it is opened; leaving or closing it frees both, but not the weights that a
    head shares with its target.

    A draft is loaded `beside` its target. For a head, which has the
    target's weights or those of a file, the target is opened once more: what else is measured of it does
    without the hidden states that a head reads. Raises ModelFileError or OutOfMemory, for a head of a file
    BackendCrash.
    """

    def __init__(
        self,
        file: ModelFile,
        options: LoadOptions,
        progress: Progress = lambda _what, _part: None,
        *,
        beside: Model | None = None,
    ) -> None:
        super().__init__()
        self._progress = progress
        self._file = file
        self._before = resident_bytes()
        self._model: GgufModel | None = None
        self._feeder: LoadedTarget | None = None
        self._beside = beside
        self.opened_bytes: int | None = None
        """the memory that weights and context took at first; None where that is not known"""
        progress(f"loading {file.name}", None)
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
        self.opened_bytes = self._grown()
        return self._model

    def draft(self, alignment: Alignment) -> LoadedDraft:
        """The open model as a draft that lines up so, and that is closed with this."""
        assert self._model is not None, "open it first"
        is_own_head = self._feeder is not None and not isinstance(self.weights, HeadWeights)
        prior = None if is_own_head else prior_in(self._model)
        return LoadedDraft(self._file.name, self._model, alignment, prior, self._feeder, self.close)

    def _grown(self) -> int | None:
        now = resident_bytes()
        return None if now is None or self._before is None else max(now - self._before, 0)

    def costs(self, rows: Rows, seconds: float) -> CallCosts:
        """What calls of the open model cost: known here, or measured for `seconds`. Its sequences are
        empty afterwards. Raises BackendError."""
        assert self._model is not None, "open it first"
        what = f"measuring the calls of {self._file.name}"
        return costs_of(self._model, rows=rows, seconds=seconds, progress=partial(self._progress, what))

    def facts(self) -> ModelFacts:
        """The model as it is now: its memory grows with use."""
        card = self._file.card
        return ModelFacts(
            name=self._file.name,
            path=str(card.path),
            experts=card.expert_count,
            experts_used=card.expert_used_count,
            bytes_per_token=card.bytes_per_token,
            memory_bytes=None if self._model is None else self._grown(),
            library=self.weights.library_line,
            **card_fields(card),
        )

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
            memory_bytes=self.opened_bytes or None,
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
        """The tokens of a prompt, or of the follow-up that comes after these answers.

        Raises PromptError where the chat template cannot hold it, or where there is none.
        """
        messages = prompt.after(answers)
        if isinstance(messages, str):
            return self._session.encode(messages)
        if self.template is None:
            why = f"{self.name} has no chat template"
            raise PromptError(prompt.id, why, "Sweep it with prompts of plain text.")
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


def resident_bytes() -> int | None:
    """Memory that this process holds, mapped files included; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
