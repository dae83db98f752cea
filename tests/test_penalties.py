"""What a request adds to the logits: bias, bans, penalties, DRY; at drafted positions as at others."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.fake import FakeVocabulary
from outrider.core.data import Row
from outrider.core.errors import BackendError, SettingError
from outrider.core.params import SamplingParams
from outrider.sampling import RequestSampler, point_mass
from vocabularies import TableVocabulary, Token, bytes_and

LETTERS = FakeVocabulary("abcdef,")
END = LETTERS.size - 1
TOKENS = st.integers(0, LETTERS.size - 1)


def ids(text: str) -> list[int]:
    return LETTERS.tokenize(text)


def row_of(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def flat() -> Row:
    return np.zeros(LETTERS.size, dtype=np.float32)


def changes(params: SamplingParams, prompt: Sequence[int], drafted: Sequence[int] = ()) -> dict[int, float]:
    """What is added to each logit of a flat row."""
    adjusted = RequestSampler(params, LETTERS, prompt).adjust(flat(), drafted)
    return {token: float(x) for token, x in enumerate(adjusted) if x}


# Bias and bans


def test_biases_add_up_and_bans_win() -> None:
    params = SamplingParams(logit_bias=((0, 1.5), (1, 9.0), (0, -0.5), (2, -math.inf)), banned=(1,))
    assert changes(params, [3]) == {0: 1.0, 1: -math.inf, 2: -math.inf}


def test_end_tokens_are_barred_until_enough_was_generated() -> None:
    vocabulary = TableVocabulary([Token(b"a"), Token(b"b", end=True), Token(b"c", end=True), Token(b"d")])
    sampler = RequestSampler(SamplingParams(temperature=0, min_tokens=3), vocabulary, [0, 0, 0, 0])
    row = row_of(0, 3, 2, 1)
    chosen = [int(sampler.distribution(row, [0] * n).tokens[0]) for n in range(5)]
    assert chosen == [3, 3, 3, 1, 1]
    sampler.accept([0, 0])
    assert [int(sampler.distribution(row, [0] * n).tokens[0]) for n in range(2)] == [3, 1]


@pytest.mark.parametrize(
    "settings", [SamplingParams(logit_bias=((99, 1.0),)), SamplingParams(banned=(-1,))], ids=["bias", "ban"]
)
def test_tokens_that_the_vocabulary_lacks_are_refused(settings: SamplingParams) -> None:
    with pytest.raises(SettingError, match="has no token"):
        RequestSampler(settings, LETTERS, [0])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_when_nothing_is_left_the_setting_is_to_blame(temperature: float) -> None:
    everything = SamplingParams(temperature=temperature, banned=tuple(range(LETTERS.size)))
    sampler = RequestSampler(everything, LETTERS, [0])
    for call in (sampler.distribution, sampler.adjust):
        with pytest.raises(SettingError, match="banned: no token is left"):
            call(flat(), ())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias=((0, 3e38), (0, 3e38))),
        SamplingParams(repeat_penalty=1e-44),
        SamplingParams(presence_penalty=-1e300),
    ],
)
def test_settings_that_overflow_are_to_blame(params: SamplingParams) -> None:
    with pytest.raises(SettingError, match="beyond all numbers"):
        RequestSampler(params, LETTERS, [0]).distribution(row_of(*[5.0] * LETTERS.size), ())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_the_models_fault(bad: float) -> None:
    row = flat()
    row[2 if bad != -math.inf else slice(None)] = bad
    for params in (SamplingParams(banned=(2,)), SamplingParams(repeat_penalty=1.2)):
        with pytest.raises(BackendError, match="logits"):
            RequestSampler(params, LETTERS, [2]).distribution(row, ())


# Penalties


def test_the_prompt_counts_and_so_does_the_draft() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    assert changes(params, ids("aab")) == {0: -1.25, 1: -0.75}
    assert changes(params, ids("aab"), ids("bc")) == {0: -1.25, 1: -1.25, 2: -0.75}


def test_the_repetition_penalty_divides_what_is_positive() -> None:
    sampler = RequestSampler(SamplingParams(repeat_penalty=2.0), LETTERS, ids("abc"))
    row = row_of(4, -4, 0, 4, 0, 0, 0, 0)
    assert sampler.adjust(row, ()).tolist() == [2, -8, 0, 4, 0, 0, 0, 0]
    assert row.tolist() == [4, -4, 0, 4, 0, 0, 0, 0]


def test_windows() -> None:
    def penalised(last: int, prompt: str, drafted: str = "") -> set[int]:
        params = SamplingParams(presence_penalty=1, repeat_last_n=last)
        return set(changes(params, ids(prompt), ids(drafted)))

    assert penalised(2, "abc") == {1, 2}
    assert penalised(2, "abc", "d") == {2, 3}
    assert penalised(2, "abc", "def") == {4, 5}
    assert penalised(9, "abc", "d") == {0, 1, 2, 3}
    assert penalised(-1, "abc", "d") == {0, 1, 2, 3}
    assert penalised(0, "abc", "d") == set()


def test_a_row_to_which_nothing_applies_is_not_copied() -> None:
    row = flat()
    for params in (SamplingParams(), SamplingParams(min_tokens=1)):
        sampler = RequestSampler(params, LETTERS, [0])
        sampler.accept([1])
        assert sampler.adjust(row, [2]) is row


# DRY


def test_a_breaker_ends_the_repetition() -> None:
    params = SamplingParams(
        dry_multiplier=1.0, dry_base=2.0, dry_sequence_breakers=(",",), dry_penalty_last_n=-1
    )
    assert changes(params, ids("abcdabc")) == {3: -2.0}
    assert changes(params, ids("a,bcda,bc")) == {3: -1.0}
    assert changes(params, ids("abc,dabc,")) == {}
    assert changes(params, ids("abc,abc")) == {}, "the breaker itself is never penalised"


def repeats(text: Sequence[int], last: int, allowed: int) -> dict[int, int]:
    """The longest repetition that each token would go on, by comparing every pair of suffixes."""
    window = text[len(text) - min(last, len(text)) :] if last >= 0 else text
    found: dict[int, int] = {}
    for end in range(1, len(window)):
        n = 0
        while n < end and window[end - 1 - n] == window[len(window) - 1 - n]:
            n += 1
        if n >= allowed and len(window) > allowed:
            found[window[end]] = max(n, found.get(window[end], 0))
    return found


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    accepted=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=4),
    drafted=st.lists(st.integers(0, 2), max_size=6),
    last=st.sampled_from([-1, 1, 2, 7, 100]),
    allowed=st.integers(0, 4),
)
def test_dry_against_all_pairs_of_suffixes(
    prompt: list[int], accepted: list[list[int]], drafted: list[int], last: int, allowed: int
) -> None:
    params = SamplingParams(
        dry_multiplier=0.5,
        dry_base=1.5,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last,
        dry_sequence_breakers=(),
    )
    sampler = RequestSampler(params, LETTERS, prompt)
    for tokens in accepted:
        sampler.accept(tokens)
    text = [*prompt, *(token for tokens in accepted for token in tokens), *drafted]
    expected = flat()
    for token, n in repeats(text, last, allowed).items():
        expected[token] = -0.5 * 1.5 ** (n - allowed)
    np.testing.assert_allclose(sampler.adjust(flat(), drafted), expected, rtol=1e-6)


def test_a_long_repetition_neither_overflows_nor_takes_quadratic_time() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=3.0, dry_sequence_breakers=(), dry_penalty_last_n=-1)
    text = [0] * 50_000
    ours = RequestSampler(params, LETTERS, text).adjust(flat(), [0])
    assert math.isfinite(ours[0]) and ours[0] < -1e37 and not ours[1:].any()


def test_a_cut_inside_a_character_spells_no_breaker() -> None:
    vocabulary = TableVocabulary(bytes_and("é!"))
    params = SamplingParams(
        dry_multiplier=1.0, dry_base=2.0, dry_sequence_breakers=("é",), dry_penalty_last_n=-1
    )
    unbroken, broken = vocabulary.tokenize("abcdabc"), vocabulary.tokenize("abé!cdabé!c")
    row = np.zeros(vocabulary.size, dtype=np.float32)
    assert RequestSampler(params, vocabulary, unbroken).adjust(row, ())[ord("d")] == -2
    assert not RequestSampler(params, vocabulary, broken).adjust(row, ()).any()


# Drafted positions


@st.composite
def settings(draw: st.DrawFn) -> SamplingParams:
    def one_of(*values: float) -> float:
        return draw(st.sampled_from(values))

    return SamplingParams(
        temperature=one_of(0, 0.7, 1.0),
        dynatemp_range=one_of(0, 0.5),
        top_k=int(one_of(0, 1, 4)),
        top_p=one_of(0.8, 1.0),
        min_p=one_of(0, 0.1),
        typical_p=one_of(0.6, 1.0),
        top_n_sigma=one_of(0, 1.5),
        xtc_probability=one_of(0, 0.5, 1.0),
        repeat_penalty=one_of(1.0, 1.4),
        presence_penalty=one_of(0, 0.3),
        frequency_penalty=one_of(0, 0.2, -0.2),
        repeat_last_n=int(one_of(-1, 0, 1, 3, 64)),
        dry_multiplier=one_of(0, 0.8),
        dry_allowed_length=int(one_of(0, 1, 2)),
        dry_penalty_last_n=int(one_of(-1, 0, 3, 64)),
        dry_sequence_breakers=(",",),
        logit_bias=draw(st.sampled_from([(), ((1, 2.0), (2, -1.0))])),
        banned=draw(st.sampled_from([(), (0, 3)])),
        min_tokens=draw(st.integers(0, 6)),
    )


@given(
    params=settings(),
    prompt=st.lists(TOKENS, min_size=1, max_size=12),
    accepted=st.lists(TOKENS, max_size=6),
    drafted=st.lists(TOKENS, max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_drafted_position_has_the_distribution_of_plain_decoding(
    params: SamplingParams, prompt: list[int], accepted: list[int], drafted: list[int], seed: int
) -> None:
    row = np.random.default_rng(seed).normal(0, 2, LETTERS.size).astype(np.float32)
    before = row.copy()
    ahead, plain = (RequestSampler(params, LETTERS, prompt) for _ in range(2))
    ahead.accept(accepted)
    for token in [*accepted, *drafted]:
        plain.accept([token])
    for _ in range(2):  # looking ahead leaves no trace
        ours, theirs = ahead.distribution(row, drafted), plain.distribution(row, ())
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.probs.tolist() == theirs.probs.tolist()
        np.testing.assert_array_equal(ahead.adjust(row, drafted), plain.adjust(row, ()))
    np.testing.assert_array_equal(row, before)
    assert (np.diff(ours.tokens) > 0).all() and ours.probs.min() > 0
    assert abs(ours.probs.sum() - 1) < 1e-12


def test_greedy_takes_the_lower_id_of_a_tie_after_the_penalties() -> None:
    sampler = RequestSampler(SamplingParams(temperature=0, presence_penalty=1), LETTERS, [0])
    ours = sampler.distribution(row_of(2, 0.5, 1, 1, 0, 0, 0, 0), ())
    assert ours.tokens.tolist() == point_mass(0).tokens.tolist()
    assert sampler.distribution(row_of(1.5, 0.5, 1, 1, 0, 0, 0, 0), ()).tokens.tolist() == [2]
