"""Strict greedy decoding on a model whose numbers depend on the batch, and log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engines import (
    END,
    GREEDY,
    LANGUAGE,
    PROMPT,
    VOCABULARY,
    CheckedEngine,
    ScriptedDrafter,
    language_model,
    model_drafter,
    oracle,
    other_vocabulary_drafter,
    plain,
    random_guess,
    result,
)
from outrider.backends.fake import FakeModel
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Logits, Request, Row, Span
from outrider.core.errors import BackendError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy

SHIFT = 0.05
MARGIN = 0.15  # more than two shifts: what leads by so much leads in a call of its own too
SAMPLED = SamplingParams()
STRICT = Verification(strict_margin=MARGIN)


def close(tokens: Sequence[int]) -> Row:
    """`LANGUAGE` in few steps, so that the best tokens are often nearly alike."""
    steps = np.round(LANGUAGE(tokens)) + 0.01 * np.arange(VOCABULARY.size)
    steps[END] = -9
    return steps.astype(np.float32)


class Shifting(FakeModel):
    """Its logits move a little when a call holds more than one token."""

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        if (size := sum(len(span.tokens) for span in spans)) > 1:
            for span_rows in rows:
                span_rows += SHIFT * np.sin(np.arange(VOCABULARY.size) * 2.4 + size).astype(np.float32)
        return rows


def shifting() -> Shifting:
    return Shifting(VOCABULARY, close)


DRAFTERS: dict[str, Callable[[], list[Drafter]]] = {
    "right": lambda: [ScriptedDrafter(oracle(close))],
    "half right": lambda: [ScriptedDrafter(oracle(close, 2))],
    "random": lambda: [ScriptedDrafter(random_guess(4))],
    "model": lambda: [model_drafter(close)],
    "lookup": lambda: [SuffixDrafter(1)],
}


def request(verification: Verification = STRICT, start: int = 0, length: int = 60) -> Request:
    return Request((start, *PROMPT), GREEDY, max_tokens=length, ignore_end=True, verification=verification)


def test_without_strict_the_batch_changes_the_text() -> None:
    different = 0
    for make in DRAFTERS.values():
        [outcome] = CheckedEngine(shifting(), make()).run(request(Verification()))
        different += result(outcome) != plain(shifting(), request())
    assert different > 0


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("start", range(3))
def test_strict_text_is_plain_decodings(drafters: str, start: int) -> None:
    engine = CheckedEngine(shifting(), DRAFTERS[drafters]())
    [outcome] = engine.run(request(start=start))
    assert result(outcome) == plain(shifting(), request(start=start))
    decided = [record for record in outcome.records if record.kind == "decode"]
    assert any(len(record.tokens) == record.num_accepted for record in decided), "nothing was put off"
    for before, record in pairwise(decided):
        if len(before.tokens) == before.num_accepted:  # the target's own token was put off
            assert (record.batch_tokens, len(record.tokens), len(record.draft)) == (1, 1, 0)


def test_strict_holds_for_requests_side_by_side() -> None:
    """A call that other requests share is no call of its own, even for one token."""
    for make in (DRAFTERS["random"], DRAFTERS["half right"], list):
        requests = [request(start=i, length=40 + i) for i in range(3)]
        for asked, outcome in zip(requests, CheckedEngine(shifting(), make()).run(*requests), strict=True):
            assert result(outcome) == plain(shifting(), asked)


def test_strict_costs_a_call_only_where_it_is_close() -> None:
    """Where nothing is close, there are as many calls as without."""

    def calls(verification: Verification) -> int:
        model = FakeModel(VOCABULARY, LANGUAGE)
        Engine(model, [ScriptedDrafter(oracle(LANGUAGE))]).generate(request(verification))
        return len(model.calls)

    assert calls(Verification(strict_margin=1e-6)) == calls(Verification()) < calls(STRICT) < 60


def test_a_model_that_never_shifts_is_left_as_it_is() -> None:
    for margin in (0.01, 1.0, 100.0):
        asked = request(Verification(strict_margin=margin))
        [outcome] = CheckedEngine(language_model(), [ScriptedDrafter(oracle(LANGUAGE, 3))]).run(asked)
        assert result(outcome) == plain(language_model(), asked)


def test_strict_leaves_sampling_alone() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)

    def tokens(verification: Verification) -> tuple[int, ...]:
        asked = Request(PROMPT, sampling, max_tokens=30, ignore_end=True, verification=verification)
        return Engine(language_model(), [model_drafter(LANGUAGE)]).generate(asked).tokens

    assert tokens(Verification()) == tokens(STRICT)


def test_a_call_that_fails_while_a_token_is_put_off_loses_nothing() -> None:
    model = shifting()
    engine = Engine(model, DRAFTERS["right"]())
    engine.submit(request())
    tokens: tuple[int, ...] = ()
    put_off = failed = 0
    while len(tokens) < 60:
        if put_off % 3 == 1:
            model.fail_at_call = len(model.calls) + 1
            with pytest.raises(BackendError):
                engine.step()
            failed += 1
        for update in engine.step():
            tokens += update.record.tokens
            put_off += (
                update.record.kind == "decode" and len(update.record.tokens) == update.record.num_accepted
            )
            assert model.length(0) == update.record.position + len(update.record.tokens) - 1 or not tokens
    assert failed and tokens == plain(shifting(), request())[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_commit_nothing(bad: float) -> None:
    """Not even behind accepted tokens; and they end no request but their own."""
    spoiled = [False]

    def logits(tokens: Sequence[int]) -> Row:
        row = LANGUAGE(tokens).copy()
        if spoiled[0] and tokens[0] == 1 and len(tokens) > 9:
            row[2] = bad
        return row

    cases: list[tuple[Rule, SamplingParams]] = [("auto", GREEDY), ("block", SAMPLED), ("stable", SAMPLED)]
    for rule, params in cases:
        spoiled[0] = False
        model = FakeModel(VOCABULARY, logits)
        engine = CheckedEngine(model, [ScriptedDrafter(oracle(LANGUAGE, 3))])
        ids = [
            engine.submit(
                Request((i, *PROMPT), replace(params, seed=1), 20, (), True, True, Verification(rule))
            )
            for i in range(2)
        ]
        while not all(engine.outcomes[i].tokens for i in ids):
            engine.step()
        spoiled[0] = True
        good, broken = (engine.outcomes[i] for i in ids)
        while broken.finish_reason is None:
            before = list(broken.tokens)
            engine.step()
        assert (broken.finish_reason, broken.tokens) == ("error", before)
        assert isinstance(broken.error, BackendError)
        while engine.step():
            pass
        assert good.finish_reason == "length"


# Log probabilities


def scored(sampling: SamplingParams, drafters: Sequence[Drafter], **settings: Any) -> Completion:
    asked = Request(PROMPT, sampling, max_tokens=30, ignore_end=True, logprobs=3)
    engine = Engine(language_model(), drafters, FixedPolicy(p_min=0, hand_over=0))
    return engine.generate(replace(asked, **settings))


SCORED = {
    "greedy": GREEDY,
    "penalties": replace(GREEDY, repeat_penalty=1.5, banned=(1,)),
    "stable": SamplingParams(temperature=1.2, seed=4, top_k=3),
}


@pytest.mark.parametrize("settings", SCORED)
def test_every_token_has_plain_decodings_log_probability(settings: str) -> None:
    verification = Verification("stable")
    expected = scored(SCORED[settings], [], speculate=False, verification=verification)
    num_accepted = 0
    for drafters in ([SuffixDrafter(1)], [model_drafter(LANGUAGE)], [other_vocabulary_drafter()]):
        found = scored(SCORED[settings], drafters, verification=verification)
        assert found.tokens == expected.tokens and found.logprobs == expected.logprobs
        num_accepted += sum(record.num_accepted for record in found.records)
    assert num_accepted > 10
    assert [entry.token for entry in expected.logprobs] == list(expected.tokens)
    text = list(PROMPT)
    for entry in expected.logprobs:
        row = LANGUAGE(text).astype(np.float64)
        logs = row - np.log(np.exp(row).sum())
        best = np.argsort(-logs)[:3]
        assert entry.logprob == pytest.approx(logs[entry.token], abs=1e-5)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(logs[best].tolist(), abs=1e-5)
        assert not entry.forced
        text.append(entry.token)


def test_log_probabilities_are_asked_for() -> None:
    assert scored(GREEDY, [], logprobs=None).logprobs == ()
    only = scored(GREEDY, [], logprobs=0)
    assert len(only.logprobs) == 30 and all(entry.top == () for entry in only.logprobs)


def test_tokens_behind_the_end_are_not_scored() -> None:
    asked = Request(PROMPT, GREEDY, max_tokens=30, logprobs=1, stop=("c",), verification=STRICT)
    for drafters in ([], [ScriptedDrafter(oracle(LANGUAGE))]):
        completion = Engine(language_model(), drafters).generate(asked)
        assert [entry.token for entry in completion.logprobs] == list(completion.tokens)
        for record in completion.records:
            assert len(record.logprobs) == len(record.tokens)


def test_forced_tokens_say_so() -> None:
    only = SamplingParams(temperature=1.0, banned=tuple(t for t in range(VOCABULARY.size) if t != 3))
    completion = scored(only, [SuffixDrafter(1)])
    assert set(completion.tokens) == {3}
    assert all(entry.forced and entry.logprob < 0 for entry in completion.logprobs)
    two = SamplingParams(temperature=1.0, banned=tuple(t for t in range(VOCABULARY.size) if t not in (2, 3)))
    assert not any(entry.forced for entry in scored(two, []).logprobs)


def test_strict_tokens_are_scored_once() -> None:
    asked = replace(request(), logprobs=2)
    completion = Engine(shifting(), DRAFTERS["right"]()).generate(asked)
    assert [entry.token for entry in completion.logprobs] == list(completion.tokens)
    assert any(len(record.tokens) == 0 for record in completion.records if record.kind == "decode")
