"""Does a head draft from what was accepted alone? Rejected tokens in its states, or in those of the target
that it reads, cannot change a text: they only make its drafts worse, which nothing else would show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from outrider.backends.gguf.head_model import HeadModel
from outrider.core.contracts import Model
from outrider.core.data import Logits, Request, Row, Span
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.plan import HeadTest
from outrider.lab.certify.runs import Wrapped, run
from outrider.lab.teacher_forced import teacher_forced

_COMPARED = 24
"""places of a text at most"""


class _Recorder(Wrapped):
    """A head that keeps the logits after each token that it reads with its target's state, by length."""

    def __init__(self, head: HeadModel) -> None:
        super().__init__(head)
        self.rows: dict[int, Row] = {}

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found: list[Logits] = self.inner.decode(spans)
        for span, rows in zip(spans, found, strict=True):
            end = span.start + len(span.tokens)
            if span.rows and self.inner.read_with_targets(span.sequence, end):
                self.rows[end] = rows[-1].copy()
        return found


def compare_head(engine: Engine, head: HeadModel, request: Request, prompt: int) -> HeadTest:
    """Run a request with drafts, and read its text again without. Uses sequence 0 and empties it."""
    recorder = _Recorder(head)
    drafters = [each for each in engine.drafters if isinstance(each, ModelDrafter) and each.model is head]
    for drafter in drafters:
        drafter.model = cast(Model, recorder)
    try:
        text = run(engine, replace(request, speculate=True)).text
    finally:
        for drafter in drafters:
            drafter.model = head
    engine.reset()
    ends = [end for end in sorted(recorder.rows) if 1 < end <= len(text)][-_COMPARED:]
    fresh = dict(zip(ends, _rows(engine.target, head, text, ends), strict=True))
    engine.reset()
    head.truncate(0, 0)
    places = [(recorder.rows[end], fresh[end]) for end in ends]
    between = np.mean([_distance(fresh[a], fresh[b]) for a, b in pairwise(ends)] or [1.0])
    difference = max((_distance(*pair) for pair in places), default=0.0) / max(float(between), 1e-9)
    return HeadTest(prompt, len(places), difference)


def _rows(target: Model, head: HeadModel, text: tuple[int, ...], ends: Sequence[int]) -> list[Row]:
    """The head's logits after so many tokens of a text, of which the target has read all but the last."""
    found = []
    for end in ends:
        for model in (target, head):
            model.truncate(0, model.reach(0, min(model.length(0), end - 1)))
        for _ in teacher_forced(target, text[: end - 1], end - 1):
            pass
        *_, logits = teacher_forced(head, text[:end], end - 1)
        found.append(logits[-1].copy())
    return found


def _distance(a: Row, b: Row) -> float:
    """Root mean square of the differences, of the tokens that a head knows."""
    known = np.isfinite(a) & np.isfinite(b)
    return float(np.sqrt(np.mean((a[known].astype(np.float64) - b[known]) ** 2))) if known.any() else np.inf
