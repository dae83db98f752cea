"""Models that are loaded for a sweep: a target that answers prompts, and draft models beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.engine import Engine
from outrider.formats import ToolSpec, format_of
from outrider.lab.models import ModelFile
from outrider.lab.prompts import Prompt
from outrider.lab.rows import ModelRow, Role
from outrider.models.chat import ChatTemplate
from outrider.models.vocab import Alignment
from outrider.policy.pretrained import PretrainedCalibration
from outrider.session import Session
from outrider.session.loading import load_draft, load_weights

_ROOM_TOKENS = 8
"""of a context beyond the longest text: a call's draft is cut to what is left of it"""


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
        tools = [_tool(tool) for tool in prompt.tools]
        turns, listed = self._format.conversation(messages, tools)
        tokens = self.template.tokenize(self.template.render(turns, tools=listed), self.model.vocabulary)
        return tuple(tokens)

    def constrain(self, grammar: Grammar | None) -> Callable[[], Constraint] | None:
        """What makes a fresh constraint of a prompt's grammar; None where it has none."""
        if grammar is None:
            return None
        compiled = self._session.compile(grammar)
        return compiled.start

    def close(self) -> None:
        """Free the model and its weights."""
        self._session.close()


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool.get("function", tool)
    return ToolSpec(function["name"], function.get("description", ""), function.get("parameters") or {})


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model beside a target, and how their tokenizers line up."""

    name: str
    model: Model
    alignment: Alignment
    prior: PretrainedCalibration | None = None
    """what its file says of its acceptance"""

    def close(self) -> None:
        """Free the model and its weights."""
        self.model.close()
        if isinstance(self.model, GgufModel):
            self.model.weights.close()


def weights_of(file: ModelFile, options: LoadOptions, notices: list[str], beside: Model | None) -> Weights:
    """The weights of a file; those of a draft `beside` its target. Raises ModelFileError or OutOfMemory."""
    if isinstance(beside, GgufModel):
        return load_draft(beside.weights, file.path, file.card, options, notices)
    return load_weights(file.path, file.card, options, notices, draft=beside is not None)


def load_model(
    file: ModelFile,
    options: LoadOptions,
    context: int,
    notices: list[str],
    *,
    beside: Model | None = None,
) -> tuple[GgufModel, int | None]:
    """The model of a file with a context of so many tokens (0: what it was trained with), and the bytes by
    which the process grew; None where that is not known. A draft is loaded `beside` its target.

    Raises ModelFileError or OutOfMemory.
    """
    before = resident_bytes()
    weights = weights_of(file, options, notices, beside)
    try:
        longest = min(context + _ROOM_TOKENS, weights.trained_context) if context else 0
        model = weights.open(longest)
    except BaseException:
        weights.close()
        raise
    after = resident_bytes()
    return model, max(after - before, 0) or None if before is not None and after is not None else None


def model_row(
    file: ModelFile, role: Role, model: GgufModel, memory_bytes: int | None, notices: Sequence[str]
) -> ModelRow:
    """What is written down about a loaded model; `notices` are lines about how it was loaded."""
    effective = asdict(model.options) | {
        "threads": model.threads,
        "threads_batch": model.threads_batch,
        "batch_tokens": model.max_batch_tokens,
        "micro_batch_tokens": model.micro_batch_tokens,
        "context_length": model.context_length,
        **({"notices": list(notices)} if notices else {}),
    }
    return ModelRow(
        model=file.name,
        role=role,
        path=str(file.path),
        fingerprint=file.fingerprint,
        architecture=file.card.architecture,
        quantization=file.card.quantization,
        parameters=file.card.parameters,
        active_parameters=file.card.active_parameters,
        file_bytes=file.card.file_bytes,
        trained_context=file.card.context_length,
        effective=effective,
        backend=model.options.backend,
        memory_bytes=memory_bytes,
    )


def resident_bytes() -> int | None:
    """Memory that this process holds, mapped files included; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
