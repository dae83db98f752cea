"""Constraints in the engine: how a text ends, what becomes of one that cannot go on, what is recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from constrained import OneOf, Pieces
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Constraint
from outrider.core.data import Grammar, Request
from outrider.core.errors import ConstraintError, SettingError
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy
from outrider.vocab import compare

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
END = WORDS.size - 1
LOGITS = random_logits(WORDS.size, seed=4, order=2)
GREEDY = SamplingParams(temperature=0)
LONG = "abcabbcacab"


def constrained(texts: Collection[str], **settings: bool) -> Callable[[Grammar], Constraint]:
    return lambda _grammar: OneOf(WORDS, texts, **settings)


def engine(
    texts: Collection[str], *, draft: bool = False, max_sequences: int = 1, **settings: bool
) -> Engine:
    drafters = (
        [
            ModelDrafter(
                FakeModel(WORDS, random_logits(WORDS.size, seed=9), max_sequences=max_sequences),
                compare(WORDS, WORDS),
            )
        ]
        if draft
        else []
    )
    target = FakeModel(WORDS, LOGITS, max_sequences=max_sequences)
    return Engine(target, drafters, FixedPolicy(p_min=0), constrain=constrained(texts, **settings))


def asked(max_tokens: int | None = 30, **settings: object) -> Request:
    request = Request((0, 1), GREEDY, max_tokens, grammar=Grammar("choice"))
    return replace(request, **settings)  # type: ignore[arg-type]


def test_forced_text_takes_fewer_calls_and_ends_without_an_end_token() -> None:
    completion = engine([LONG]).generate(asked())
    assert completion.text == LONG and completion.finish_reason == "stop"
    assert END not in completion.tokens
    off = engine([LONG], forcing=False).generate(asked())
    assert off.tokens == completion.tokens and len(off.records) == len(off.tokens) + 1
    assert len(completion.records) < len(off.records)
    canonical = engine([LONG], canonical=True).generate(asked())
    assert canonical.text == LONG and len(canonical.records) == 2, "the prompt, and all of it in one call"


def test_an_end_token_where_the_text_may_go_on() -> None:
    completion = engine(["ab", "abc" * 20]).generate(asked(max_tokens=4))
    assert completion.finish_reason in ("stop", "length")
    assert completion.text == "ab" or ("abc" * 20).startswith(completion.text)
    ended = engine(["ab", "abc"]).generate(asked(sampling=replace(GREEDY, logit_bias=((END, 90.0),))))
    assert ended.tokens[-1] == END and ended.text == "ab"


def test_a_limit_in_the_middle_says_length() -> None:
    completion = engine([LONG]).generate(asked(max_tokens=3))
    assert completion.finish_reason == "length" and len(completion.tokens) == 3


def test_a_text_that_is_complete_with_its_last_token_says_stop() -> None:
    size = len(engine([LONG]).generate(asked()).tokens)
    assert engine([LONG]).generate(asked(max_tokens=size)).finish_reason == "stop"


@pytest.mark.parametrize("draft", [False, True])
def test_a_dead_end_carries_what_was_produced(draft: bool) -> None:
    dead = engine(["abc" + "x"], draft=draft)  # no token spells an x
    with pytest.raises(ConstraintError) as caught:
        dead.generate(asked())
    assert caught.value.text == "abc" and WORDS.text(caught.value.tokens) == "abc"
    again = dead.generate(asked(grammar=None, max_tokens=3))  # the engine is as it was
    assert len(again.tokens) == 3


def test_bans_that_leave_nothing_are_a_dead_end() -> None:
    with pytest.raises(ConstraintError, match="bans"):
        engine(["ab"]).generate(asked(sampling=replace(GREEDY, banned=(0, 3))))


def test_a_dead_end_ends_its_own_request_only() -> None:
    shared = engine(["abcx"], max_sequences=2)
    dead = shared.submit(asked())
    free = shared.submit(asked(grammar=None, max_tokens=9, ignore_end=True))
    updates = [update for _ in range(12) for update in shared.step()]
    ends = {u.record.request: u for u in updates if u.record.finish_reason}
    assert ends[dead].record.finish_reason == "error" and isinstance(ends[dead].error, ConstraintError)
    assert ends[free].record.finish_reason == "length" and ends[free].error is None


def test_a_constraint_needs_someone_to_compile_it() -> None:
    with pytest.raises(SettingError, match="without constraints"):
        Engine(FakeModel(WORDS, LOGITS)).submit(asked())


def test_an_end_that_is_ignored_does_not_go_with_a_grammar() -> None:
    with pytest.raises(SettingError, match="ignore end"):
        asked(ignore_end=True)


def test_plain_decoding_of_a_constrained_text_drafts_nothing() -> None:
    completion = engine([LONG], draft=True).generate(asked(speculate=False))
    assert completion.text == LONG
    assert not any(record.draft.tokens for record in completion.records)


def test_the_time_of_the_constraint_is_recorded() -> None:
    completion = engine([LONG]).generate(asked())
    decoding = [record for record in completion.records if record.kind == "decode"]
    assert all(0 < record.constraint_s < record.total_s for record in decoding)
    assert engine([LONG]).generate(asked(grammar=None)).records[-1].constraint_s == 0
