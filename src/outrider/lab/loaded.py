"""Model files that are loaded for an experiment: a target that answers prompts, draft models beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from outrider.backends.gguf import GgufModel, LoadOptions
from outrider.backends.tuning.scoring import costs_of
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.costs import CallCosts
from outrider.costs.timer import Rows
from outrider.engine import Engine
from outrider.formats import ToolSpec, format_of
from outrider.lab.models import ModelFacts, ModelFile, card_fields
from outrider.lab.prompts import Prompt
from outrider.lab.replay import Offers, Recording, record_offers
from outrider.lab.rows import ModelRow, Role
from outrider.models.chat import ChatTemplate
from outrider.models.vocab import Alignment
from outrider.policy.pretrained import PretrainedCalibration
from outrider.session import Session
from outrider.session.loading import load_draft, load_weights, template_of
from outrider.session.session import close_model

Progress = Callable[[str, float | None], None]
"""Called with what is being done, and which part of it is done (None: not known)."""


class Loaded:
    """Weights, and a context once it is opened; leaving it frees both.

    Lines for the user go to `notices`. A draft is loaded `beside` its target. Raises ModelFileError or
    OutOfMemory.
    """

    def __init__(
        self,
        file: ModelFile,
        options: LoadOptions,
        notices: list[str],
        progress: Progress = lambda _what, _part: None,
        *,
        beside: Model | None = None,
    ) -> None:
        self._progress = progress
        self._notices = notices
        self._file = file
        self._before = resident_bytes()
        self._model: GgufModel | None = None
        self.opened_bytes: int | None = None
        """the memory that weights and context took at first; None where that is not known"""
        progress(f"loading {file.name}", None)
        if isinstance(beside, GgufModel):
            self.weights = load_draft(beside.weights, file.path, file.card, options, notices)
        else:
            self.weights = load_weights(file.path, file.card, options, notices, draft=beside is not None)
        try:
            self.template = None if beside else template_of(self.weights, file.card.chat_template)
        except BaseException:
            self.weights.close()
            raise

    def open(self, context_length: int) -> GgufModel:
        """A context of so many tokens for one sequence (0: as trained). Raises OutOfMemory."""
        self._model = self.weights.open(context_length)
        self.opened_bytes = self._grown()
        return self._model

    def _grown(self) -> int | None:
        """The bytes that the process has grown by so far."""
        now = resident_bytes()
        return None if now is None or self._before is None else max(now - self._before, 0)

    def costs(self, rows: Rows, seconds: float) -> CallCosts:
        """What calls of the open model cost: known here, or measured for so many seconds. Its sequences are
        empty afterwards. Raises BackendError."""
        assert self._model is not None, "open it first"
        what = f"measuring the calls of {self._file.name}"
        costs, lines = costs_of(
            self._model, rows=rows, seconds=seconds, progress=lambda part: self._progress(what, part)
        )
        self._notices += lines
        return costs

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

    def row(self, role: Role) -> ModelRow:
        """What a sweep writes down about the open model."""
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
            effective=effective | ({"notices": list(self._notices)} if self._notices else {}),
            backend=model.options.backend,
            memory_bytes=self.opened_bytes or None,
            **card_fields(self._file.card),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.weights.close()


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
        """The tokens of a prompt, or of its follow-up after so many answers.

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

    def close(self) -> None:
        """Free the model and its weights."""
        self._session.close()


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model beside a target, and how their tokenizers line up."""

    name: str
    model: Model
    alignment: Alignment
    prior: PretrainedCalibration | None = None
    """what its file says of its acceptance"""

    def offers(self, recording: Recording) -> Offers:
        """What it would offer along an answer. Raises BackendError when a call fails or the text does not
        fit."""
        prompt, answer, constrain = recording.prompt, recording.tokens, recording.constrain
        return record_offers(self.model, self.alignment, prompt, answer, constrain=constrain)

    def close(self) -> None:
        """Free the model and its weights."""
        close_model(self.model)


def resident_bytes() -> int | None:
    """Memory that this process holds, mapped files included; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
