"""The draft model's own KV: nothing evaluated twice, nothing stale, and its limits respected."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import (
    GREEDY,
    VOCABULARY,
    CheckedEngine,
    Extending,
    asked,
    greedy_continuation,
    plain,
    result,
    sampler,
)
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.contracts import DraftRequest, RewindKind
from outrider.core.data import Distribution, Draft, DraftToken, DraftWork, Logits, Request, Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models.vocab import align
from outrider.models.vocab import compare as compare_vocabularies
from outrider.policy.fixed import FixedPolicy, grow
from outrider.sampling import draw, most_likely, probability


class _Endless(FakeVocabulary):
    def ends_generation(self, token: int) -> bool:
        del token
        return False


ENDLESS = _Endless("abcd ")  # drafts of any length can be asked for
LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3)
OTHER = random_logits(VOCABULARY.size, seed=12, order=3)
PROMPT = (0, 1, 2, 0, 1)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def drafter_of(model: FakeModel) -> ModelDrafter:
    return ModelDrafter(model, align(VOCABULARY, VOCABULARY))


def begun(model: FakeModel | None = None, prompt: Sequence[int] = PROMPT) -> ModelDrafter:
    drafter = drafter_of(model or FakeModel(ENDLESS, OTHER))
    drafter.begin(0, asked(prompt))
    return drafter


def propose(
    drafter: ModelDrafter,
    length: int,
    sampling: SamplingParams = GREEDY,
    *,
    p_min: float = 0,
    drawn: bool = False,
    with_mode_of: bool = False,
    prefix: Sequence[int] = (),
) -> tuple[Draft, DraftWork]:
    rng = np.random.default_rng(1)
    drawing = (lambda q, _i: draw(q, rng)) if drawn else None
    draft = Extending(DraftRequest(0, length, sampler(sampling), drawing, with_mode_of), tuple(prefix), p_min)
    work = grow(drafter, [draft])
    return Draft(tuple(draft.tokens)), work


def evaluated_tokens(model: FakeModel, since: int = 0) -> int:
    return sum(len(span.tokens) for call in model.calls[since:] for span in call)


@given(
    seed=st.integers(0, 10**6),
    rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=8),
)
def test_a_draft_of_checkpoints_reads_no_more_than_its_last_drafts_again(
    seed: int, rounds: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(seed)
    model = FakeModel(ENDLESS, OTHER, rewind="checkpoints")
    drafter = begun(model)
    text, read = list(PROMPT), 0
    for length, num_prefix in rounds:
        whole: tuple[int, ...] = ()
        if length:
            before, prefix = len(model.calls), tuple(rng.integers(0, 4, num_prefix).tolist())
            drafted = propose(drafter, length, prefix=prefix)[0].tokens
            assert list(drafted) == greedy_continuation(OTHER, [*text, *prefix], length)
            assert evaluated_tokens(model, before) <= len(text) - read + num_prefix + length - 1
            # It can go back to where the draft began, or before the call with a prefix in it.
            read = max(read, len(PROMPT) - 1) if prefix else len(text)
            whole = (*prefix, *drafted)
        new = (*whole[: rng.integers(0, len(whole) + 1)], int(rng.integers(0, VOCABULARY.size)))
        drafter.observe(0, new)
        text += new


# After what others have drafted


@given(
    seed=st.integers(0, 10**6),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=6),
)
def test_a_draft_follows_the_prefix_and_what_held_of_both_is_not_evaluated_again(
    seed: int, steps: list[tuple[int, int, bool]]
) -> None:
    """A prefix costs no call of its own, nor do steps that were sat out (without a length): these tokens are
    read with the last committed ones. What is evaluated again is only what was rejected."""
    rng = np.random.default_rng(seed)
    model = FakeModel(ENDLESS, OTHER)
    drafter = begun(model)
    text, in_vain = list(PROMPT), 0
    for num_prefix, length, is_right in steps:
        offered: list[int] = []
        if length:
            right = greedy_continuation(OTHER, text, num_prefix)
            prefix = right if is_right else [(token + 1) % VOCABULARY.size for token in right]
            before = len(model.calls)
            draft, work = propose(drafter, length, prefix=prefix)
            assert list(draft.tokens) == greedy_continuation(OTHER, [*text, *prefix], length)
            assert work.calls == length == len(work.call_tokens)
            calls = model.calls[len(model.calls) - work.calls :]
            assert work.call_tokens == tuple(len(call[0].tokens) for call in calls)
            assert work.prefill_calls == len(model.calls) - before - work.calls == (before == 0)
            offered = [*prefix, *draft.tokens]
        kept = int(rng.integers(0, len(offered) + 1))
        other = [t for t in range(VOCABULARY.size) if offered[kept : kept + 1] != [t]]
        final = [*offered[:kept], int(rng.choice(other))]
        drafter.observe(0, final)
        text += final
        in_vain += max(0, len(offered) - 1 - kept)
    propose(drafter, 1)
    assert model.stored(0) == tuple(text)
    assert evaluated_tokens(model) == len(text) + in_vain


def test_a_token_that_is_not_taken_has_cost_its_step_and_ends_the_draft() -> None:
    drafter = begun()
    draft, _ = propose(drafter, 6)
    least = min(draft.acceptance)
    place = draft.acceptance.index(least)
    for drawn in (False, True):  # whether it is taken hangs on the distribution, not on what was drawn
        drafter.begin(0, asked(PROMPT))
        short, work = propose(drafter, 6, p_min=least + 1e-9, drawn=drawn)
        assert work.calls == len(short) + 1
        assert drawn or short.tokens == draft.tokens[:place]
    drafter.begin(0, asked(PROMPT))
    none, work = propose(drafter, 6, p_min=1.0)
    assert (none, work.calls) == (Draft(), 1)
    drafter.observe(0, [draft.tokens[0], 3])  # its KV was of use all the same
    _, work = propose(drafter, 1)
    assert work.call_tokens == (2,)


def test_nobody_asked_for_costs_nothing() -> None:
    model = FakeModel(ENDLESS, OTHER)
    drafter = begun(model)
    drafter.begin(1, asked(PROMPT))
    draft = Extending(DraftRequest(1, 3, sampler()))
    work = grow(drafter, [draft])
    assert (len(draft.tokens), work.calls, model.length(0)) == (3, 3, 0)
    assert grow(drafter, []) == DraftWork()


@pytest.mark.parametrize("rewind", ["free", "none", "checkpoints"])
@pytest.mark.parametrize("draft_max", [1, 3, 8])
@pytest.mark.parametrize("logits", [LANGUAGE, OTHER], ids=["right", "wrong"])
def test_output_is_right_with_any_draft_model(rewind: RewindKind, draft_max: int, logits: NextLogits) -> None:
    for batch in (4, 16):
        draft = FakeModel(VOCABULARY, logits, rewind=rewind, max_batch_tokens=batch)
        policy = FixedPolicy(draft_max=draft_max, p_min=0)
        engine = CheckedEngine(FakeModel(ENDLESS, LANGUAGE), [drafter_of(draft)], policy)
        requests = [Request((i, *PROMPT * 3), GREEDY, max_tokens=20, ignore_end=True) for i in range(3)]
        for request, outcome in zip(requests, engine.run(*requests), strict=True):
            assert result(outcome) == plain(FakeModel(ENDLESS, LANGUAGE), request)
            # The draft holds a prefix of the text, and drafted tokens after it.
            text = (*outcome.prompt, *outcome.tokens)
            drafted = outcome.records[-1].draft.tokens
            before = text[: outcome.records[-1].position]
            assert draft.stored(outcome.slot) == (*before, *drafted)[: draft.length(outcome.slot)]


def test_the_drafts_context_ends_before_the_targets() -> None:
    draft = FakeModel(ENDLESS, LANGUAGE, context_length=12)
    engine = CheckedEngine(FakeModel(ENDLESS, LANGUAGE), [drafter_of(draft)])
    request = Request(PROMPT, GREEDY, max_tokens=30, ignore_end=True)
    [outcome] = engine.run(request)
    assert result(outcome) == plain(FakeModel(ENDLESS, LANGUAGE), request)
    offered = [len(record.draft) for record in outcome.records if record.kind == "decode"]
    assert offered[0] == 8 and not any(offered[1:])


def test_a_prompt_longer_than_the_drafts_context_is_not_read_by_it() -> None:
    model = FakeModel(ENDLESS, LANGUAGE, context_length=12)
    drafter = begun(model, PROMPT * 3)
    assert propose(drafter, 4) == (Draft(), DraftWork())
    assert model.calls == []


def windowed(model: FakeModel, window: int) -> ModelDrafter:
    return ModelDrafter(model, replace(align(ENDLESS, ENDLESS), window=window))


@given(
    seed=st.integers(0, 10**6),
    prompt_tokens=st.integers(1, 60),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_a_window_is_all_that_is_read_and_changes_nothing_else(
    seed: int, prompt_tokens: int, steps: list[tuple[int, int]]
) -> None:
    """The language depends on its last three tokens: whoever reads eight says the same."""
    rng = np.random.default_rng(seed)
    model = FakeModel(ENDLESS, OTHER)
    drafter = windowed(model, 8)
    text = rng.integers(0, ENDLESS.size, prompt_tokens).tolist()
    drafter.begin(0, asked(text))
    for length, final in steps:
        if length:
            before = len(model.calls)
            drafted, work = propose(drafter, length)
            assert list(drafted.tokens) == greedy_continuation(OTHER, text, length)
            assert evaluated_tokens(model, before) == sum(work.call_tokens) + work.prefill_tokens
            assert evaluated_tokens(model, before) <= 8 + length - 1
            stored = model.stored(0)
            assert stored == tuple([*text, *drafted.tokens[:-1]][-len(stored) :])
            assert len(stored) >= min(8, len(text))
        more = rng.integers(0, ENDLESS.size, final).tolist()
        drafter.observe(0, more)
        text += more


def test_a_window_goes_on_where_the_context_is_full() -> None:
    text = list(np.random.default_rng(3).integers(0, ENDLESS.size, 50))
    model = FakeModel(ENDLESS, OTHER, context_length=96)
    drafter = windowed(model, 16)
    drafter.begin(0, asked(text))
    for _ in range(100):
        drafted, _ = propose(drafter, 3)
        assert list(drafted.tokens) == greedy_continuation(OTHER, text, 3)
        drafter.observe(0, drafted.tokens)
        text += drafted.tokens
    # Now and then it begins again, which takes the window's 16 tokens: 280 of 300 are read once.
    assert 300 < evaluated_tokens(model) < 400


def test_a_window_stays_where_it_began_when_a_conversation_goes_on() -> None:
    text = list(np.random.default_rng(4).integers(0, ENDLESS.size, 50))
    model = FakeModel(ENDLESS, OTHER)
    drafter = windowed(model, 16)
    drafter.begin(0, asked(text))
    propose(drafter, 2)
    drafter.end(0)
    before = len(model.calls)
    drafter.begin(0, asked([*text, 1, 2, 3]))
    drafted, _ = propose(drafter, 1)
    assert list(drafted.tokens) == greedy_continuation(OTHER, [*text, 1, 2, 3], 1)
    assert evaluated_tokens(model, before) <= 4
    drafter.end(0)
    drafter.begin(0, asked(text[:20]))  # shorter than where it began
    drafted, _ = propose(drafter, 1)
    assert list(drafted.tokens) == greedy_continuation(OTHER, text[:20], 1)
    assert model.stored(0) == tuple(text[4:20])


def test_a_window_that_does_not_fit_the_context_is_none() -> None:
    text = list(np.random.default_rng(5).integers(0, ENDLESS.size, 50))
    model = FakeModel(ENDLESS, OTHER, context_length=70)
    drafter = windowed(model, 16)
    drafter.begin(0, asked(text))
    propose(drafter, 1)
    assert model.stored(0) == tuple(text)


def test_a_new_request_keeps_what_it_has_in_common() -> None:
    model = FakeModel(ENDLESS, OTHER)
    drafter = begun(model)
    propose(drafter, 3)
    drafter.end(0)
    drafter.begin(0, asked((*PROMPT[:4], 3, 3)))
    before = len(model.calls)
    draft, _ = propose(drafter, 2)
    assert evaluated_tokens(model, before) == 2 + 1
    assert list(draft.tokens) == greedy_continuation(OTHER, (*PROMPT[:4], 3, 3), 2)
    drafter.reset()
    assert model.length(0) == 0


def test_low_confidence_ends_a_draft_and_is_what_is_claimed() -> None:
    drafter = begun()
    draft, _ = propose(drafter, 8)
    sure = []
    for i, token in enumerate(draft.tokens):
        row = OTHER([*PROMPT, *draft.tokens[:i]])
        sure.append(most_likely(row)[1])
        assert token == int(row.argmax())
    assert draft.acceptance == pytest.approx(sure)
    limit = sorted(sure)[3]
    num_sure = next(i for i, p in enumerate(sure) if p < limit)
    again, _ = propose(drafter, 8, p_min=limit)
    assert again.tokens == draft.tokens[:num_sure]


def test_a_draft_stops_after_an_end_token() -> None:
    def ends_third(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        row = np.zeros(VOCABULARY.size, dtype=np.float32)
        row[VOCABULARY.size - 1 if len(tokens) == len(PROMPT) + 2 else 1] = 9
        return row

    model = FakeModel(VOCABULARY, ends_third)
    drafter = begun(model)
    draft, work = propose(drafter, 8)
    assert draft.tokens == (1, 1, VOCABULARY.size - 1)
    assert work.calls == 3


class Unreliable(FakeModel):
    """A call can fail; `forgets` drops the whole sequence then, as a recurrent state would be."""

    failing = False
    forgets = False
    stores = False

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        if not self.failing:
            return super().decode(spans)
        self.failing = False
        if self.stores:
            super().decode(spans)
        if self.forgets:
            for span in spans:
                self.truncate(span.sequence, 0)
        raise BackendError(self.name, "told to fail")


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("num_observed", [1, 5, 12])
def test_after_a_failed_call_it_catches_up(forgets: bool, stores: bool, num_observed: int) -> None:
    model = Unreliable(ENDLESS, OTHER, max_batch_tokens=8, max_sequences=2)
    drafter = begun(model)
    propose(drafter, 3)
    drafter.observe(0, [3, 3, 3])
    model.failing, model.forgets, model.stores = True, forgets, stores
    with pytest.raises(BackendError):
        propose(drafter, 3)
    more = [i % 3 for i in range(num_observed)]
    drafter.observe(0, more)
    draft, _ = propose(drafter, 3)
    assert list(draft.tokens) == greedy_continuation(OTHER, [*PROMPT, 3, 3, 3, *more], 3)


def test_after_a_failed_call_no_more_than_the_window_is_read() -> None:
    model = Unreliable(ENDLESS, OTHER)
    drafter = windowed(model, 8)
    text = [i % 3 for i in range(20)]
    drafter.begin(0, asked(text))
    for _ in range(10):
        drafted, _ = propose(drafter, 2)
        drafter.observe(0, drafted.tokens)
        text += drafted.tokens
    model.failing = model.forgets = True
    with pytest.raises(BackendError):
        propose(drafter, 2)
    before = len(model.calls)
    assert list(propose(drafter, 2)[0].tokens) == greedy_continuation(OTHER, text, 2)
    assert evaluated_tokens(model, before) == 8 + 1


# Vocabularies that differ


def test_a_draft_ends_before_a_token_that_the_target_lacks() -> None:
    vocabulary = FakeVocabulary("xabcd ")
    script = vocabulary.tokenize("abxcd")

    def says(tokens: Sequence[int]) -> Logits:
        row = np.zeros(vocabulary.size, dtype=np.float32)
        row[script[len(tokens) % 5]] = 5
        return row

    drafter = ModelDrafter(FakeModel(vocabulary, says), compare_vocabularies(VOCABULARY, vocabulary))
    drafter.begin(0, asked(VOCABULARY.tokenize("     ")))
    assert propose(drafter, 8)[0].tokens == tuple(VOCABULARY.tokenize("ab"))


def test_sampled_drafts_carry_the_distribution_over_common_tokens() -> None:
    vocabulary = FakeVocabulary("xdcyba")
    logits = random_logits(vocabulary.size, seed=4, order=1)
    drafter = ModelDrafter(FakeModel(vocabulary, logits), compare_vocabularies(VOCABULARY, vocabulary))
    drafter.begin(0, asked(VOCABULARY.tokenize("ab c")))  # the blank is left out: the draft has none
    draft, _ = propose(drafter, 3, SAMPLED, drawn=True)
    assert draft.probs is not None and len(draft) == len(draft.probs) == 3
    text = vocabulary.tokenize("abc")
    for token, offered in zip(draft.tokens, draft.probs, strict=True):
        weights = np.exp(logits(text).astype(np.float64))
        expected = {VOCABULARY.tokenize(c)[0]: float(weights[vocabulary.tokenize(c)[0]]) for c in "abcd"} | {
            VOCABULARY.size - 1: float(weights[-1])
        }
        total = sum(expected.values())
        assert offered.tokens.tolist() == sorted(expected)
        assert offered.probs == pytest.approx([expected[t] / total for t in sorted(expected)])
        text.append(
            vocabulary.size - 1 if token == VOCABULARY.size - 1 else vocabulary.tokenize("abcd"[token])[0]
        )


def test_a_draft_whose_common_tokens_are_all_barred_offers_nothing() -> None:
    """The target has other tokens, so the request goes on without it."""
    vocabulary = FakeVocabulary("ab")
    drafter = ModelDrafter(
        FakeModel(vocabulary, random_logits(3, seed=2)), compare_vocabularies(VOCABULARY, vocabulary)
    )
    request = Request(
        PROMPT, SamplingParams(banned=(0, 1, VOCABULARY.size - 1), seed=1), max_tokens=10, ignore_end=True
    )
    for drawn in (False, True):
        drafter.begin(0, asked(PROMPT))
        assert propose(drafter, 4, request.sampling, drawn=drawn)[0] == Draft()
    [outcome] = CheckedEngine(FakeModel(VOCABULARY, LANGUAGE), [drafter]).run(request)
    assert len(outcome.tokens) == 10


def test_a_damaged_draft_model_is_an_error_of_its_own() -> None:
    broken = FakeModel(VOCABULARY, lambda _tokens: np.full(VOCABULARY.size, np.nan, dtype=np.float32))
    for sampling in (GREEDY, SAMPLED, SamplingParams(banned=(1,))):
        drafter = begun(broken)
        with pytest.raises(BackendError):
            propose(drafter, 3, sampling, drawn=sampling is SAMPLED)


def test_bans_and_penalties_are_the_drafts_too() -> None:
    drafter = drafter_of(FakeModel(ENDLESS, OTHER))
    banned = (0, 2)
    for drawn in (False, True):
        sampling = SamplingParams(temperature=float(drawn), banned=banned, frequency_penalty=50.0)
        drafter.begin(0, asked(PROMPT))
        draft, _ = propose(drafter, 4, sampling, drawn=drawn)
        assert sorted(draft.tokens) == [1, 3, 4, 5]  # each once, as each use costs the next


def test_the_distributions_of_the_most_likely_tokens_are_given_on_request() -> None:
    drafter = begun()
    silent, _ = propose(drafter, 3, SAMPLED)
    assert silent.probs is None and silent.compared_probs == ()
    drafter.begin(0, asked(PROMPT))
    telling, _ = propose(drafter, 3, SAMPLED, with_mode_of=True)
    assert telling.tokens == silent.tokens and telling.probs is None and len(telling.compared_probs) == 3
    for token, probs in zip(telling.tokens, telling.compared_probs, strict=True):
        assert token == int(probs.tokens[np.argmax(probs.probs)])
    drafter.begin(0, asked(PROMPT))
    drawn, _ = propose(drafter, 3, SAMPLED, drawn=True, with_mode_of=True)
    assert drawn.compared_probs == drawn.probs is not None


def test_nothing_common_in_the_prompt_means_no_draft() -> None:
    vocabulary = FakeVocabulary("xyz")
    drafter = ModelDrafter(
        FakeModel(vocabulary, random_logits(4)), compare_vocabularies(VOCABULARY, vocabulary)
    )
    drafter.begin(0, asked(PROMPT))
    assert propose(drafter, 4) == (Draft(), DraftWork())


def test_other_sequences_do_not_disturb() -> None:
    model = FakeModel(ENDLESS, OTHER)
    drafter = drafter_of(model)
    prompts = [PROMPT, (2, 2), (3, *PROMPT)]
    for sequence, prompt in enumerate(prompts):
        drafter.begin(sequence, asked(prompt))
    drafts = [Extending(DraftRequest(i, n, sampler())) for i, n in enumerate((5, 1, 3))]
    work = grow(drafter, drafts)
    assert [[token.token for token in draft.tokens] for draft in drafts] == [
        greedy_continuation(OTHER, prompt, n) for prompt, n in zip(prompts, (5, 1, 3), strict=True)
    ]
    assert work.calls == 5


# Reading ahead in what others guess


@given(
    seed=st.integers(0, 10**6), steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1)
)
def test_a_guess_changes_no_token_and_spares_a_call_for_each_that_it_confirms(
    seed: int, steps: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(seed)
    model = FakeModel(ENDLESS, OTHER)
    drafter = begun(model)
    text = list(PROMPT)
    for length, num_right in steps:
        right = greedy_continuation(OTHER, text, length)
        wrong = (right[num_right] + 1) % VOCABULARY.size if num_right < length else 0
        draft = Extending(DraftRequest(0, length, sampler()), guess=[*right[:num_right], wrong, 1])
        work = grow(drafter, [draft])
        assert [token.token for token in draft.tokens] == right
        assert work.calls <= max(1, length - num_right)  # the tokens after a refused one may be right
        new = [*right[: rng.integers(0, length + 1)], int(rng.integers(0, VOCABULARY.size))]
        drafter.observe(0, new)
        text += new
    propose(drafter, 1)
    assert model.stored(0) == tuple(text)


def test_a_guess_changes_no_sampled_token() -> None:
    def place_draw(q: Distribution, place: int) -> int:
        return draw(q, np.random.default_rng(place))

    found: list[list[DraftToken]] = []
    for guess in ((), (1, 2, 3), None):
        drafter = begun()
        known = [token.token for token in found[0]] if guess is None else list(guess)
        draft = Extending(DraftRequest(0, 5, sampler(SAMPLED), place_draw), guess=known)
        found.append(draft.tokens)
        calls = grow(drafter, [draft]).calls
    assert calls == 1
    tokens, *others = [[token.token for token in draft] for draft in found]
    assert others == [tokens, tokens]
    for a, b in zip(found[0], found[2], strict=True):
        assert a.drawn_from is not None and b.drawn_from is not None
        assert np.array_equal(a.drawn_from.tokens, b.drawn_from.tokens)
        assert np.allclose(a.drawn_from.probs, b.drawn_from.probs)


@pytest.mark.parametrize("rewind", ["none", "checkpoints", "window"])
def test_what_cannot_be_forgotten_is_not_read(rewind: RewindKind) -> None:
    model = FakeModel(ENDLESS, OTHER, rewind=rewind)
    drafter = begun(model)
    right = greedy_continuation(OTHER, PROMPT, 3)
    draft = Extending(DraftRequest(0, 3, sampler()), guess=right)
    assert grow(drafter, [draft]).calls == 3
    assert [token.token for token in draft.tokens] == right


# After a prefix that others drafted


def test_a_sampled_draft_counts_its_places_and_its_penalties_from_the_prefix_on() -> None:
    drafter = begun()
    places: list[int] = []

    def first(distribution: Distribution, place: int) -> int:
        places.append(place)
        return int(distribution.tokens[0])

    penalized = replace(SAMPLED, presence_penalty=50.0)
    extending = Extending(DraftRequest(0, 3, sampler(penalized), first), (3, 3))
    grow(drafter, [extending])
    draft = Draft(tuple(extending.tokens))
    assert places == [2, 3, 4]
    assert draft.probs is not None and probability(draft.probs[0], 3) < 1e-9
    unpenalized, _ = propose(drafter, 3, SAMPLED, drawn=True, prefix=(3, 3))
    assert unpenalized.probs is not None and probability(unpenalized.probs[0], 3) > 1e-4


def test_the_prefix_takes_its_part_of_the_drafts_context() -> None:
    drafter = begun(FakeModel(ENDLESS, OTHER, context_length=10))
    assert len(propose(drafter, 8, prefix=(3, 3))[0]) == 10 - len(PROMPT) - 2 + 1  # the last one is not read


def test_nothing_is_copied_from_a_request_of_another_scope() -> None:
    prompt = PROMPT * 8
    for scope, held in (("mine", len(prompt) - 1), ("yours", 0)):
        model = FakeModel(ENDLESS, OTHER, max_sequences=2)
        drafter = drafter_of(model)
        drafter.begin(0, asked(prompt, scope="mine"))
        propose(drafter, 2)
        drafter.begin(1, asked(prompt, scope=scope))
        assert (model.length(1) >= held) if held else model.length(1) == 0
