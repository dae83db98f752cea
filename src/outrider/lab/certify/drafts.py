"""Whether heads draft what they would draft of a text that they read afresh. A fault in what a head reads
shows in no text: only drafts become worse, and nobody knows why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from outrider.backends.gguf.heads import State
from outrider.backends.tuning import Loaded, native_of
from outrider.core.contracts import Model
from outrider.core.data import Block, Completion, DraftToken, Request, Span
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.faults import SHIFTED, STALE
from outrider.lab.certify.texts import Wrapped
from outrider.models.vocab import Alignment
from outrider.policy.fixed import FixedPolicy

_LENGTH = 4
_EVERY = 3
"""Of the steps of a text one in so many is compared."""
_MAX_ODDS = 0.5
"""in which the confidence in a token differs by rounding, as log odds"""
_MIN_SAME = 0.9
"""of drafts: rounding changes some tokens"""


@dataclass(frozen=True, slots=True)
class DraftsTest:
    """How many drafts of a head were compared, and how many are as those of one that read the text afresh."""

    compared: int
    same: int

    @property
    def holds(self) -> bool:
        return self.same >= _MIN_SAME * self.compared


def model_drafter(engine: Engine) -> ModelDrafter | None:
    """The drafter of an engine that asks a model."""
    return next((drafter for drafter in engine.drafters if isinstance(drafter, ModelDrafter)), None)


def head_drafter(engine: Engine) -> ModelDrafter | None:
    """The drafter of a head that drafts whatever it read before: beside a target of checkpoints, which loses
    states of accepted tokens, none does."""
    drafter = model_drafter(engine)
    is_head = drafter is not None and getattr(drafter.model, "is_head", False)
    return drafter if is_head and not engine.target.rewinding.recomputes else None


def compare_drafts(
    target: Model,
    head: Model,
    alignment: Alignment,
    requests: Sequence[Request],
    fault: str | None,
) -> DraftsTest:
    """Compare the drafts of a head in the middle of these texts."""
    policy = FixedPolicy(_LENGTH, p_min=0.0, hand_over=0.0)

    def generate(request: Request, broken: str | None) -> Completion:
        model = cast(Model, _Shifted(head)) if broken == SHIFTED else head
        engine = Engine(target, (ModelDrafter(model, alignment),), policy)
        with _stale_states(target) if broken == STALE else nullcontext():
            found = engine.generate(request)
        engine.reset()
        return found

    compared = same = 0
    for request in requests:
        plain = replace(request, grammar=None, ignore_end=True)
        found = generate(plain, fault)
        text = (*request.prompt, *found.tokens)
        for record in [record for record in found.records if record.draft][1::_EVERY]:
            # After a prompt the target's first token is drafted for by nobody: it is generated again.
            prompt, most = text[: record.position - 1], 2 + _LENGTH
            again = generate(replace(plain, prompt=prompt, max_tokens=most), None).records
            fresh = [
                other.draft.items for other in again if other.position == record.position and other.draft
            ]
            compared += len(fresh)
            same += sum(_are_same(record.draft.items, items) for items in fresh)
    return DraftsTest(compared, same)


def _are_same(ours: Sequence[DraftToken], theirs: Sequence[DraftToken]) -> bool:
    return all(
        one.token == other.token and abs(_odds(one.evidence[0]) - _odds(other.evidence[0])) < _MAX_ODDS
        for one, other in zip(ours, theirs, strict=False)
    )


def _odds(probability: float) -> float:
    clipped = min(max(probability, 1e-6), 1 - 1e-6)
    return math.log(clipped / (1 - clipped))


class _Shifted(Wrapped):
    def decode(self, spans: Sequence[Span]) -> list[Any]:
        return [self._moved(rows) if isinstance(rows, Block) else rows for rows in self.inner.decode(spans)]

    def _moved(self, block: Block) -> Block:
        parts = block.rows, block.candidates, block.confidence
        moved: list[Any] = [None if part is None else np.roll(part, -1, axis=0) for part in parts]
        return Block(*moved)


@contextmanager
def _stale_states(target: Model) -> Iterator[None]:
    """Meanwhile a head reads the state of a rejected token for that of the one in its place."""
    hidden = native_of(cast(Loaded, target)).hidden
    assert hidden is not None, "a head reads them"
    sound, sound_truncate = hidden.before, hidden.truncate
    stale: dict[tuple[int, int], State | None] = {}

    def truncate(sequence: int, length: int) -> None:
        stale[sequence, length + 1] = sound(sequence, length + 1) if length else None
        sound_truncate(sequence, length)

    def before(sequence: int, position: int) -> State | None:
        found, old = sound(sequence, position), stale.get((sequence, position))
        return found if found is None or old is None else old

    vars(hidden).update(truncate=truncate, before=before)
    try:
        yield
    finally:
        del vars(hidden)["truncate"], vars(hidden)["before"]
