"""The sampling chain against llama.cpp's own samplers, on random logits without ties."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llama_cpp_models import SMALL, Load, tiny
from outrider.backends.gguf.c_types import functions, structure
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.top_logits import ChainParams
from outrider.core.data import Distribution, Row
from outrider.core.params import SamplingParams
from outrider.sampling import RequestSampler

__all__ = ["tiny"]  # pytest finds the fixture by its name

MAINLINE = replace(SMALL, backend="llama.cpp")

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
LARGE = 151_936

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_Bias = structure("llama_logit_bias", "i32 token\nf32 bias")
_Array = structure("llama_token_data_array", "ptr data\nsize size\ni64 selected\nbool sorted")
_SAMPLERS = functions(
    """
    params llama_sampler_chain_default_params
    ptr llama_sampler_chain_init (params)
    void llama_sampler_chain_add llama_sampler_apply (ptr ptr)
    void llama_sampler_accept (ptr i32)
    void llama_sampler_free (ptr)
    ptr llama_sampler_init_logit_bias (i32 i32 ptr)
    ptr llama_sampler_init_penalties (i32 i32 f32 f32 f32)
    ptr llama_sampler_init_dry (ptr f32 f32 i32 i32 ptr size)
    ptr llama_sampler_init_top_n_sigma (f32)
    ptr llama_sampler_init_top_k (i32)
    ptr llama_sampler_init_typical llama_sampler_init_top_p llama_sampler_init_min_p (f32 size)
    ptr llama_sampler_init_xtc (f32 f32 size u32)
    ptr llama_sampler_init_temp_ext (f32 f32 f32)
    """,
    params=ChainParams,
)
library = next(candidates(MAINLINE))
library.declare(_SAMPLERS)
lib = library.functions


def samplers(params: SamplingParams, vocab: Any, size: int, num_tokens: int) -> list[Any]:
    """llama.cpp's samplers in the order of its own default chain."""
    biases = [*params.logit_bias, *((token, -math.inf) for token in params.banned)]
    breakers = [string.encode() for string in params.dry_sequence_breakers]
    repeat_window = num_tokens if params.repeat_last_n < 0 else params.repeat_last_n
    dry_window = num_tokens if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    return [
        lib.llama_sampler_init_logit_bias(
            size,
            len(biases),
            (_Bias * len(biases))(*(_Bias(*b) for b in biases)),
        ),
        lib.llama_sampler_init_penalties(
            size, repeat_window, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        ),
        lib.llama_sampler_init_dry(
            vocab,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            dry_window,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        ),
        lib.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        lib.llama_sampler_init_top_k(params.top_k),
        lib.llama_sampler_init_typical(params.typical_p, 0),
        lib.llama_sampler_init_top_p(params.top_p, 0),
        lib.llama_sampler_init_min_p(params.min_p, 0),
        lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
        lib.llama_sampler_init_temp_ext(params.temperature, params.dynatemp_range, params.dynatemp_exponent),
    ]


def one_outcome(row: Row, params: SamplingParams, vocab: Any, history: Sequence[int]) -> dict[int, float]:
    """What llama.cpp's chain leaves of a row, and its probabilities; XTC must be certain or off."""
    data = np.zeros(len(row), dtype=TOKEN_DATA)
    data["id"], data["logit"] = np.arange(len(row)), row
    array = _Array(data=data.ctypes.data, size=len(row), selected=-1, sorted=False)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers(params, vocab, len(row), len(history)):
        lib.llama_sampler_chain_add(chain, sampler)
    for token in history:
        lib.llama_sampler_accept(chain, token)
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    left = ctypes.string_at(array.data, array.size * TOKEN_DATA.itemsize)
    lib.llama_sampler_free(chain)
    survivors = np.frombuffer(left, dtype=TOKEN_DATA)
    logits = survivors["logit"].astype(np.float64)
    weights = np.exp(logits - logits.max())
    return {int(t): float(p) for t, p in zip(survivors["id"], weights / weights.sum(), strict=True) if p > 0}


def theirs(row: Row, params: SamplingParams, vocab: Any, history: Sequence[int]) -> dict[int, float]:
    """llama.cpp's distribution, over both outcomes of the coin that XTC tosses."""
    share = params.xtc_probability
    mixed: dict[int, float] = {}
    for certainty, weight in ((1.0, share), (0.0, 1 - share)):
        if weight:
            outcome = one_outcome(row, replace(params, xtc_probability=certainty), vocab, history)
            for token, p in outcome.items():
                mixed[token] = mixed.get(token, 0.0) + weight * p
    return mixed


def assert_same(ours: Distribution, expected: dict[int, float]) -> None:
    tokens = ours.tokens.tolist()
    assert (np.diff(ours.tokens) > 0).all() and ours.probs.min() > 0
    assert abs(ours.probs.sum() - 1) < 1e-9
    # Large vocabularies are exponentiated in single precision, which ends at 1e-45.
    assert set(tokens) <= set(expected)
    assert {t for t, p in expected.items() if p > 1e-30} <= set(tokens)
    assert max(abs(p - expected[t]) for t, p in zip(tokens, ours.probs.tolist(), strict=True)) < 1e-5


Check = Callable[[Row, SamplingParams, Sequence[int]], None]


@pytest.fixture
def check(tiny: Load) -> Check:
    weights = tiny(options=MAINLINE)

    def run(row: Row, params: SamplingParams, history: Sequence[int]) -> None:
        ours = RequestSampler(params, weights.vocabulary, history).distribution(row, ())
        assert_same(ours, theirs(row, params, lib.llama_model_get_vocab(weights.handle), history))

    return run


def random_row(rng: np.random.Generator, size: int) -> Row:
    """Logits as models have them: most of them of no account, a few that stand out. (Were a large
    vocabulary flat, llama.cpp's running sums in single precision would move its boundaries.)"""
    row = rng.standard_normal(size) * rng.uniform(1.5, 3)
    few = rng.integers(0, size, 1 + size // 50)[:100]
    row[few] += rng.exponential(3, len(few)) + math.log(size) - 5
    return row.astype(np.float32)


def random_history(rng: np.random.Generator) -> list[int]:
    """A text of few distinct tokens and many repetitions; 0 to 279 are tokens of text."""
    phrases = [rng.integers(0, 280, rng.integers(1, 9)).tolist() for _ in range(4)]
    return [token for i in rng.integers(0, 4, 40) for token in phrases[i]]


ALONE = {
    "bias": {"logit_bias": ((3, 4.0), (5, -2.5), (3, 1.0))},
    "banned": {"banned": (0, 1, 2, 250)},
    "repeat": {"repeat_penalty": 1.3},
    "repeat below 1": {"repeat_penalty": 0.8, "repeat_last_n": 10},
    "presence": {"presence_penalty": 1.5, "repeat_last_n": -1},
    "frequency": {"frequency_penalty": 0.4, "repeat_last_n": 100},
    "dry": {"dry_multiplier": 0.8},
    "dry whole text": {
        "dry_multiplier": 0.3,
        "dry_penalty_last_n": -1,
        "dry_base": 1.2,
        "dry_sequence_breakers": (),
    },
    "dry from 0": {"dry_multiplier": 0.8, "dry_allowed_length": 0, "dry_sequence_breakers": ("he", "\n")},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "top-k": {"top_k": 40},
    "top-k of one": {"top_k": 1},
    "large top-k": {"top_k": 10_000},
    "typical": {"typical_p": 0.7},
    "narrow typical": {"typical_p": 0.2},
    "top-p": {"top_p": 0.9},
    "narrow top-p": {"top_p": 0.1},
    "min-p": {"min_p": 0.05},
    "xtc": {"xtc_probability": 1.0},
    "xtc by half": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "xtc too high": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "temperature": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "dynamic temperature": {"dynatemp_range": 0.9, "dynatemp_exponent": 1.7},
    "dynamic from 0": {"temperature": 0.0, "dynatemp_range": 0.7},
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize(("size", "rounds"), [(300, 20), (3000, 5), (LARGE, 1)])
def test_each_sampler_alone(check: Check, settings: dict[str, Any], size: int, rounds: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(rounds):
        check(random_row(rng, size), replace(OFF, **settings), random_history(rng))


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any of the samplers, each on or off by a coin."""
    choices: dict[str, Sequence[Any]] = {
        "temperature": (0.0, 0.4, 0.8, 1.0, 1.5),
        "dynatemp_range": (0.3, 1.0),
        "dynatemp_exponent": (0.5, 2.0),
        "top_k": (2, 10, 40, 500),
        "top_p": (0.2, 0.6, 0.95),
        "min_p": (0.01, 0.1, 0.5),
        "typical_p": (0.3, 0.8, 0.95),
        "top_n_sigma": (0.5, 1.0, 2.5),
        "xtc_probability": (0.25, 1.0),
        "xtc_threshold": (0.01, 0.2),
        "repeat_penalty": (0.9, 1.1, 1.5),
        "presence_penalty": (-0.5, 1.0),
        "frequency_penalty": (-0.2, 0.3),
        "repeat_last_n": (-1, 5, 500),
        "dry_multiplier": (0.5, 1.0),
        "dry_base": (1.0, 1.5),
        "dry_allowed_length": (1, 3),
        "dry_penalty_last_n": (-1, 20),
        "dry_sequence_breakers": ((), ("the", ":"), ("ab", "\n")),
        "logit_bias": (((7, 3.0), (8, -1.0)),),
        "banned": (tuple(rng.integers(0, 280, 5).tolist()),),
    }
    on = {
        name: values[int(rng.integers(len(values)))] for name, values in choices.items() if rng.random() < 0.5
    }
    if "typical_p" in on:
        # llama.cpp multiplies 0 by the logarithm of 0 where a token has no probability left.
        on = {name: value for name, value in on.items() if name not in ("banned", "top_n_sigma")}
        on["dry_base"] = 1.0
    return replace(OFF, **on)


@pytest.mark.parametrize(("size", "rounds", "seed"), [(300, 300, 1), (2000, 40, 2), (LARGE, 6, 3)])
def test_random_combinations(check: Check, size: int, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        params = random_params(rng)
        check(random_row(rng, size), params, random_history(rng))


@pytest.mark.parametrize(
    "breakers", [("\n", ":", '"', "*"), ("he",), ("The end", "return"), ("éa", "x€"), ("a" * 60,), ("",)]
)
def test_breakers_that_span_tokens_or_are_part_of_one(
    check: Check, breakers: tuple[str, ...], tiny: Load
) -> None:
    rng = np.random.default_rng(4)
    words = ["The end", "return", "the", "he", ":\n", " a", "a" * 50, "é", "éa", "x€", "x", "<|end|>", " and"]
    for _ in range(30):
        text = "".join(words[i] for i in rng.integers(0, len(words), 30))
        history = tiny().vocabulary.tokenize(text + text[: rng.integers(len(text))], parse_special=True)
        params = replace(
            OFF, dry_multiplier=0.2, dry_base=1.1, dry_penalty_last_n=-1, dry_sequence_breakers=breakers
        )
        check(random_row(rng, 300), params, history)


def test_typical_may_drop_the_top_token_of_a_greedy_choice(check: Check) -> None:
    row = np.array([3.0, *np.linspace(0.1, 0.2, 60)], dtype=np.float32)
    check(row, replace(OFF, temperature=0.0, typical_p=0.2), [1])
    check(row, replace(OFF, temperature=0.0), [1])


def test_a_coin_is_mixed_not_tossed(tiny: Load) -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    sampler = RequestSampler(replace(OFF, xtc_probability=0.4), tiny().vocabulary, [1])
    ours = sampler.distribution(row, ())
    # With the top two gone, the rest is 3 to 1.
    expected = [0.6 * 0.5, 0.6 * 0.3, 0.6 * 0.15 + 0.4 * 0.75, 0.6 * 0.05 + 0.4 * 0.25]
    assert ours.probs.tolist() == pytest.approx(expected, abs=1e-6)
    greedy = replace(OFF, temperature=0.0, xtc_probability=0.4)
    certain = RequestSampler(greedy, tiny().vocabulary, [1]).distribution(row, ())
    assert certain.tokens.tolist() == [0, 2] and certain.probs.tolist() == pytest.approx([0.6, 0.4])


def test_typical_goes_beyond_its_mass_and_top_p_only_reaches_it(tiny: Load) -> None:
    four = np.zeros(4, dtype=np.float32)
    vocab = lib.llama_model_get_vocab(tiny(options=MAINLINE).handle)
    for params, count in ((replace(OFF, typical_p=0.5), 3), (replace(OFF, top_p=0.5), 2)):
        ours = RequestSampler(params, tiny().vocabulary, [1]).distribution(four, ())
        assert ours.tokens.tolist() == list(range(count))
        assert len(theirs(four, params, vocab, [1])) == count


def test_barred_tokens_count_in_the_largest_possible_entropy(check: Check) -> None:
    rng = np.random.default_rng(5)
    for top_k in (0, 3, 10, 50):
        params = replace(OFF, top_k=top_k, banned=tuple(range(5, 280)), dynatemp_range=0.8)
        for filters in (params, replace(params, banned=(), top_n_sigma=1.0)):
            check(rng.standard_normal(280).astype(np.float32), filters, [1])
