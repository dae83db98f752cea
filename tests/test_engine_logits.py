"""Logits that are not numbers, and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines import (
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
)
from outrider.backends.fake import FakeModel
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Request, Row
from outrider.core.errors import BackendError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.policy.fixed import FixedPolicy

SAMPLED = SamplingParams()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_commit_nothing(bad: float) -> None:
    """Not even after accepted tokens; and they end no request but their own."""
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


def test_tokens_after_the_end_are_not_scored() -> None:
    asked = Request(PROMPT, GREEDY, max_tokens=30, logprobs=1, stop=("c",))
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
