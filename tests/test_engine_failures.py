"""Models that cannot rewind, calls that fail, and what is left after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engines import (
    GREEDY,
    LANGUAGE,
    PROMPT,
    VOCABULARY,
    CheckedEngine,
    ScriptedDrafter,
    language_model,
    oracle,
    plain,
    result,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel, NextLogits, random_logits
from outrider.core.data import Logits, Request, Span
from outrider.core.errors import BackendError, RewindUnsupported
from outrider.core.notices import collect_notices
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine


def recurrent_model() -> FakeModel:
    return FakeModel(VOCABULARY, LANGUAGE, rewind="none", max_sequences=1)


def test_a_target_that_cannot_rewind_decodes_plainly() -> None:
    with collect_notices() as notices:
        engine = Engine(recurrent_model(), [ScriptedDrafter(oracle(LANGUAGE))])
    assert ["decoding plainly" in notice for notice in notices] == [True]
    request = Request(PROMPT, GREEDY, max_tokens=9, ignore_end=True)
    first = engine.generate(request)
    assert first.tokens == plain(language_model(), request)[0]
    assert sum(record.kind == "decode" for record in first.records) == 9
    following = Request((*PROMPT, *first.tokens, 2), GREEDY, max_tokens=9, ignore_end=True)
    second = engine.generate(following)
    assert second.tokens == plain(language_model(), following)[0]
    assert second.reused_tokens == len(PROMPT) + 8
    other = Request((*PROMPT, 3, 3), GREEDY, max_tokens=9, ignore_end=True)
    third = engine.generate(other)
    assert (third.tokens, third.reused_tokens) == (plain(language_model(), other)[0], 0)


class ForgetfulModel(FakeModel):
    """A sliding window: it can take back no more than `most_back` tokens."""

    most_back = 3

    def truncate(self, sequence: int, length: int) -> None:
        if 0 < length < self.length(sequence) - self.most_back:
            raise RewindUnsupported(self.name, "the window no longer holds it")
        super().truncate(sequence, length)


def test_a_window_that_cannot_be_rewound_far_enough_is_evaluated_anew() -> None:
    target = ForgetfulModel(VOCABULARY, LANGUAGE, rewind="window")
    request = Request(PROMPT, GREEDY, max_tokens=20, ignore_end=True)
    completion = Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 1))]).generate(request)
    assert completion.tokens == plain(language_model(), request)[0]
    assert any(record.num_evaluated > 1 + len(record.draft) for record in completion.records[1:])


class FailingModel(FakeModel):
    """Fails at chosen calls: before or after storing the tokens, as an interrupt may come."""

    def __init__(self, logits: NextLogits, error: BaseException, *, stored: bool, **options: Any) -> None:
        super().__init__(VOCABULARY, logits, **options)
        self.fail_at: int | None = None
        self._error = error
        self._after = stored

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        failing = len(self.calls) + 1 == self.fail_at
        if failing and not self._after:
            self.calls.append(tuple(spans))
            raise self._error
        rows = super().decode(spans)
        if failing:
            raise self._error
        return rows


ERRORS = [BackendError("model", "it failed"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("failing", ["target", "draft"])
@pytest.mark.parametrize("call", range(1, 10))
def test_a_call_that_fails_costs_nothing_but_itself(
    failing: str, stored: bool, error: BaseException, call: int
) -> None:
    drafts = random_logits(VOCABULARY.size, seed=12)
    target = FailingModel(LANGUAGE, error, stored=stored, max_batch_tokens=16)
    draft = FailingModel(drafts, error, stored=stored, max_batch_tokens=16)
    (target if failing == "target" else draft).fail_at = call
    engine = CheckedEngine(target, [SuffixDrafter(), ModelDrafter(draft, same_vocabulary())])
    requests = [
        Request(PROMPT * 3, GREEDY, max_tokens=14, ignore_end=True),
        Request((2, 3), GREEDY, max_tokens=14, ignore_end=True),
    ]
    ids = [engine.submit(request) for request in requests]
    num_failures = 0
    for _ in range(60):
        try:
            if not engine.step():
                break
        except (BackendError, KeyboardInterrupt):
            num_failures += 1
            for i in ids:
                engine.check(engine.outcomes[i], decoding=False)
    assert num_failures == 1
    for request, i in zip(requests, ids, strict=True):
        assert result(engine.outcomes[i]) == plain(language_model(), request)


@pytest.mark.parametrize("call", range(1, 7))
def test_an_interrupted_target_that_cannot_rewind_keeps_the_interrupt(call: int) -> None:
    target = FailingModel(LANGUAGE, KeyboardInterrupt(), stored=True, rewind="none")
    target.fail_at = call
    engine = Engine(target)
    request = Request(PROMPT, GREEDY, max_tokens=8, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


def test_an_interrupted_submit_holds_no_sequence() -> None:
    class Interrupted(SuffixDrafter):
        asked = 0

        def begin(self, sequence: int, request: Request) -> None:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            super().begin(sequence, request)

    engine = Engine(language_model(max_sequences=1), [Interrupted()])
    request = Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]
