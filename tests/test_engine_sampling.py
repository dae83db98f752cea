"""Sampled requests: their seeds, and the distribution of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engines import (
    LANGUAGE,
    PROMPT,
    language_model,
    model_drafter,
    other_vocabulary_drafter,
)
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.data import Completion, Request, SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy
from outrider.vocab import compare as compare_vocabularies


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_seed_gives_the_same_text(sampled: bool) -> None:
    def run(seed: int | None) -> Completion:
        engine = Engine(language_model(), [other_vocabulary_drafter(sampled=sampled)], FixedPolicy(p_min=0))
        sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed)
        return engine.generate(Request(PROMPT, sampling, max_tokens=40, ignore_end=True))

    free = run(None)
    assert run(free.seed).tokens == free.tokens
    assert run(free.seed + 1).tokens != free.tokens
    assert run(7).seed == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_length_of_zero_is_plain_decoding(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=3)
    request = Request(PROMPT, sampling, max_tokens=40, ignore_end=True)
    drafters = [model_drafter(LANGUAGE, sampled=True)]
    off = Engine(language_model(), drafters, FixedPolicy(draft_max=0)).generate(request)
    engine = Engine(language_model(), drafters, FixedPolicy(draft_max=5))
    plainly = engine.generate(replace(request, speculate=False))
    assert (off.tokens, off.text, off.seed) == (plainly.tokens, plainly.text, plainly.seed)
    assert all(not record.draft for record in plainly.records)


TINY = FakeVocabulary("ab")
TINY_LANGUAGE = random_logits(3, seed=2, order=2, scale=1.0)
AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def exact_text_probabilities(
    logits: NextLogits, prompt: Sequence[int], length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens, or shorter with an end token."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    done: dict[tuple[int, ...], float] = {}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            row = np.exp(logits([*prompt, *text]).astype(np.float64))
            for token, share in enumerate(row / row.sum()):
                (done if token == TINY.size - 1 else grown)[(*text, token)] = probability * share
        texts = grown
    return done | texts


def chi_square(counts: dict[tuple[int, ...], int], exact: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare texts pooled."""
    total = sum(counts.values())
    common = [text for text, p in exact.items() if p * total >= 5]
    observed = [counts.get(text, 0) for text in common]
    expected = [exact[text] * total for text in common]
    rest = total - sum(expected)
    if rest >= 5:
        observed.append(total - sum(observed))
        expected.append(rest)
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)), len(expected) - 1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("p_min", [0.0, 0.45])
def test_sampled_output_follows_the_model_exactly(sampled: bool, p_min: float) -> None:
    target = FakeModel(TINY, TINY_LANGUAGE)
    draft = FakeModel(TINY, random_logits(3, seed=9, order=2, scale=1.0))
    drafter = ModelDrafter(draft, compare_vocabularies(TINY, TINY), sampled=sampled)
    engine = Engine(target, [drafter], FixedPolicy(draft_max=3, draft_min=2, p_min=p_min))
    counts: dict[tuple[int, ...], int] = {}
    prompt, num_accepted = (0, 1), 0
    for seed in range(2000):
        sampling = replace(AS_IT_IS, seed=seed)
        completion = engine.generate(Request(prompt, sampling, max_tokens=4))
        counts[completion.tokens] = counts.get(completion.tokens, 0) + 1
        num_accepted += sum(record.num_accepted for record in completion.records)
    exact = exact_text_probabilities(TINY_LANGUAGE, prompt, 4)
    assert set(counts) <= set(exact) and num_accepted > 200
    statistic, freedom = chi_square(counts, exact)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
