"""Constraints in the engine: how a text ends, what becomes of one that cannot go on, what is recorded."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from constrained import OneOf, Pieces
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Constraint
from outrider.core.data import Grammar, Request
from outrider.core.errors import ConstraintError, SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare
from outrider.policy.fixed import FixedPolicy

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
END = WORDS.size - 1
LOGITS = random_logits(WORDS.size, seed=4, order=2)
GREEDY = SamplingParams(temperature=0)
LONG = "abcabbcacab"


def constrained(texts: Collection[str], **settings: bool) -> Callable[[Grammar], Constraint]:
    return lambda _grammar: OneOf(WORDS, texts, **settings)


def engine(texts: Collection[str], *, draft: bool = False, **settings: bool) -> Engine:
    model = FakeModel(WORDS, random_logits(WORDS.size, seed=9), max_sequences=1)
    drafters = [ModelDrafter(model, compare(WORDS, WORDS))] if draft else []
    target = FakeModel(WORDS, LOGITS, max_sequences=1)
    return Engine(target, drafters, FixedPolicy(p_min=0), constrain=constrained(texts, **settings))


def asked(max_tokens: int | None = 30, **settings: object) -> Request:
    request = Request((0, 1), GREEDY, max_tokens, grammar=Grammar("choice"))
    return replace(request, **settings)  # type: ignore[arg-type]


def test_forced_text_takes_fewer_calls_and_ends_without_an_end_token() -> None:
    completion = engine([LONG]).generate(asked())
    assert completion.text == LONG and completion.finish_reason == "stop"
    assert END not in completion.tokens
    off = engine([LONG], forcing=False).generate(asked())
    assert off.tokens == completion.tokens and len(off.records) == len(off.tokens)
    assert len(completion.records) < len(off.records)
    canonical = engine([LONG], canonical=True).generate(asked())
    assert canonical.text == LONG and len(canonical.records) == 1, "the prompt, and all of it, in one call"


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


@pytest.mark.parametrize("verification", [Verification(), Verification("stable")])
@pytest.mark.parametrize("draft", [False, True])
def test_a_dead_end_carries_what_was_produced(draft: bool, verification: Verification) -> None:
    dead = engine(["abc" + "x"], draft=draft)  # no token spells an x
    with pytest.raises(ConstraintError) as caught:
        dead.generate(asked(verification=verification))
    assert caught.value.text == "abc" and WORDS.text(caught.value.tokens) == "abc"
    again = dead.generate(asked(grammar=None, max_tokens=3))  # the engine is as it was
    assert len(again.tokens) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["token", "block", "stable"])
def test_forced_tokens_that_are_banned_are_a_dead_end(rule: Rule, temperature: float) -> None:
    settings = replace(GREEDY, temperature=temperature, seed=1, banned=(0,))
    for speculate in (True, False):
        request = asked(sampling=settings, verification=Verification(rule), speculate=speculate)
        with pytest.raises(ConstraintError, match="bans"):
            engine(["ac"]).generate(request)


def test_log_probabilities_reach_up_to_a_dead_end() -> None:
    dead = engine(["abcx"])
    dead.submit(asked(logprobs=0))
    records = [update.record for _ in range(6) for update in dead.step()]
    assert records[-1].finish_reason == "error"
    assert sum(len(record.draft) for record in records), "some of it was drafted"
    assert all(len(record.logprobs) == len(record.tokens) for record in records)


class Limited(OneOf):
    """Fails after three characters, in a question that the engine asks while it commits."""

    def __init__(self, where: str) -> None:
        super().__init__(WORDS, [LONG])
        self._where = where

    @property
    def is_complete(self) -> bool:
        self._check("is_complete")
        return super().is_complete

    def accept(self, tokens: Sequence[int]) -> None:
        self._check("accept")
        super().accept(tokens)

    def _check(self, where: str) -> None:
        if where == self._where and len(WORDS.text(self.final)) >= 3:
            raise ConstraintError("output", "a limit is reached")


@pytest.mark.parametrize("where", ["is_complete", "accept"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_limit_that_is_met_while_committing_ends_its_own_request_only(where: str, first: int) -> None:
    target = FakeModel(WORDS, LOGITS, max_sequences=2)
    shared = Engine(target, [], FixedPolicy(), constrain=lambda _grammar: Limited(where))
    requests = [asked(grammar=None, max_tokens=9, ignore_end=True)]
    requests.insert(first, asked())
    ids = [shared.submit(request) for request in requests]
    limited, other = ids[first], ids[1 - first]
    updates = [update for _ in range(12) for update in shared.step()]
    ends = {u.record.request: u for u in updates if u.record.finish_reason}
    assert ends[other].record.finish_reason == "length" and ends[other].error is None
    error = ends[limited].error
    assert ends[limited].record.finish_reason == "error" and isinstance(error, ConstraintError)
    assert "limit" in str(error) and error.text == "abc" == WORDS.text(error.tokens)
    assert "".join(u.text for u in updates if u.record.request == limited) == "abc"


@pytest.mark.parametrize("speculate", [True, False])
def test_a_text_that_a_stop_string_cuts_is_not_complete(speculate: bool) -> None:
    completion = engine(["abc"]).generate(asked(stop=("c",), speculate=speculate))
    assert completion.text == "ab" and completion.finish_reason == "stop" and not completion.is_complete
    assert engine(["abc"]).generate(asked(stop=("x",), speculate=speculate)).is_complete


@pytest.mark.parametrize("size", [10, 28, 31, 64])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_forced_text_longer_than_a_draft_models_batch(size: int, num_sequences: int) -> None:
    texts = ["ab" * size + end for end in ("a", "c", "b" + "ca" * size + "b", "b" + "ca" * size + "a")]
    draft = FakeModel(
        WORDS, random_logits(WORDS.size, seed=9), max_batch_tokens=32, max_sequences=num_sequences
    )
    target = FakeModel(WORDS, LOGITS, max_sequences=num_sequences)
    drafter = ModelDrafter(draft, compare(WORDS, WORDS))
    both = Engine(target, [drafter], FixedPolicy(p_min=0), constrain=constrained(texts))
    expected = both.generate(asked(max_tokens=200, speculate=False))
    ids = [both.submit(asked(max_tokens=200)) for _ in range(num_sequences)]
    updates = [update for _ in range(len(expected.tokens) + 9) for update in both.step()]
    for request_id in ids:
        assert tuple(t for u in updates for t in u.record.tokens if u.record.request == request_id) == (
            expected.tokens
        )
    assert any("draft" in update.record.draft.sources for update in updates)


def test_a_dead_end_after_a_rejected_token_ends_nothing() -> None:
    """The block rule looks at rows after the token that it rejects: there a banned token is forced."""
    ended = set()
    for seed in range(40):
        hot = SamplingParams(temperature=2.0, top_k=0, top_p=1, min_p=0, banned=(WORDS.pieces.index("c"),))
        request = asked(sampling=replace(hot, seed=seed), verification=Verification("block", "sampled"))
        try:
            ended.add(engine(["ac", "bbb"], draft=True).generate(request).text)
        except ConstraintError as error:
            ended.add(error.text)
    assert ended == {"a", "bbb"}


def test_an_end_that_is_ignored_does_not_go_with_a_grammar() -> None:
    with pytest.raises(SettingError, match="ignore end"):
        asked(ignore_end=True)
