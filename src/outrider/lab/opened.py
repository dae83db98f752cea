"""A model file that is loaded for as long as it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from outrider.backends.gguf import GgufModel, LoadOptions
from outrider.backends.tuning import costs_of
from outrider.core.contracts import Model
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.lab.facts import ModelFacts, model_facts
from outrider.lab.loaded import resident_bytes, weights_of
from outrider.lab.models import ModelFile
from outrider.session.loading import template_of

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
        progress: Progress,
        *,
        beside: Model | None = None,
    ) -> None:
        self._progress = progress
        self._notices = notices
        self._file = file
        self._before = resident_bytes()
        progress(f"loading {file.name}", None)
        self.weights = weights_of(file, options, notices, beside)
        try:
            self.template = None if beside else template_of(self.weights, file.card)
        except BaseException:
            self.weights.close()
            raise
        self._model: GgufModel | None = None

    def open(self, context_length: int) -> GgufModel:
        """A context of so many tokens for one sequence (0: as trained). Raises OutOfMemory."""
        self._model = self.weights.open(context_length)
        return self._model

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
        now = resident_bytes()
        known = now is not None and self._before is not None and self._model is not None
        memory = max(now - self._before, 0) if known and now and self._before else None
        library = self.weights.library_line
        return replace(model_facts(self._file.name, self._file.card, memory), library=library)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.weights.close()
