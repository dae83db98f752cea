"""Sampled requests: their seeds, and what comes out of many of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from engines import (
    LANGUAGE,
    PROMPT,
    ScriptedDrafter,
    language_model,
    model_drafter,
    other_vocabulary_drafter,
    reduced_drafter,
)
from exactness import plain as plain_texts
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Request, Row
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare as compare_vocabularies
from outrider.policy.fixed import FixedPolicy

AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
KINDS: tuple[DraftSampling, ...] = ("greedy", "sampled", "auto")
RULES: tuple[Rule, ...] = ("token", "block", "stable")
RULES_AND_KINDS = [
    pytest.param(rule, kind, marks=[pytest.mark.slow] if kind == "auto" and rule != "block" else [])
    for rule in RULES
    for kind in KINDS
]
"""Under the stable rule "auto" is "sampled"; which of the two it is elsewhere does not hang on the rule."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_text(rule: Rule, kind: DraftSampling) -> None:
    def run(seed: int | None) -> Completion:
        engine = Engine(language_model(), [other_vocabulary_drafter()], FixedPolicy(p_min=0))
        sampling = replace(AS_IT_IS, seed=seed)
        verification = Verification(rule, kind)
        return engine.generate(
            Request(PROMPT, sampling, max_tokens=40, ignore_end=True, verification=verification)
        )

    free = run(None)
    assert run(free.seed).tokens == free.tokens
    assert run(free.seed + 1).tokens != free.tokens
    assert run(7).seed == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_length_of_zero_is_plain_decoding(temperature: float, rule: Rule) -> None:
    sampling = replace(AS_IT_IS, temperature=temperature, seed=3)
    verification = Verification(rule, "sampled")
    request = Request(PROMPT, sampling, max_tokens=40, ignore_end=True, verification=verification)
    drafters = [model_drafter(LANGUAGE)]
    off = Engine(language_model(), drafters, FixedPolicy(draft_max=0)).generate(request)
    engine = Engine(language_model(), drafters, FixedPolicy(draft_max=5))
    plainly = engine.generate(replace(request, speculate=False))
    assert (off.tokens, off.text, off.seed) == (plainly.tokens, plainly.text, plainly.seed)
    assert all(not record.draft for record in plainly.records)


# The seed-stable rule: one text, whoever drafts


def drafter_sets() -> list[list[Drafter]]:
    near = random_logits(6, seed=12, order=3, scale=1.0)

    def like_it(tokens: Sequence[int]) -> Row:
        return (LANGUAGE(tokens) + near(tokens)).astype(np.float32)

    return [
        [],
        [SuffixDrafter(1)],
        [model_drafter(LANGUAGE)],
        [model_drafter(like_it)],
        [other_vocabulary_drafter()],
        [reduced_drafter()],
        [ScriptedDrafter(lambda _text, n: [3, 3, 3][:n]), model_drafter(like_it)],
    ]


STABLE = {
    "mild": SamplingParams(temperature=0.7, repeat_penalty=1.3, frequency_penalty=0.2, top_k=4),
    "hot": SamplingParams(temperature=1.3, presence_penalty=0.5, top_k=0, top_p=1, min_p=0, min_tokens=10),
    "repeats": SamplingParams(temperature=1.0, dry_multiplier=0.8, xtc_probability=0.5, banned=(2,)),
}


@pytest.mark.parametrize("settings", STABLE)
@pytest.mark.parametrize("kind", ["greedy", "sampled", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_stable_text_does_not_depend_on_drafts(settings: str, kind: DraftSampling) -> None:
    sampling = replace(STABLE[settings], seed=11)
    request = Request(
        PROMPT, sampling, max_tokens=40, ignore_end=True, verification=Verification("stable", kind)
    )
    expected = Engine(language_model()).generate(replace(request, speculate=False))
    assert len(expected.tokens) == 40
    num_accepted = 0
    for drafters in drafter_sets():
        for draft_max in (1, 3, 8):
            engine = Engine(language_model(), drafters, FixedPolicy(draft_max, p_min=0, hand_over=0))
            found = engine.generate(request)
            assert (found.tokens, found.text) == (expected.tokens, expected.text)
            num_accepted += sum(record.num_accepted for record in found.records)
        plainly = engine.generate(replace(request, speculate=False))
        assert (plainly.tokens, plainly.text) == (expected.tokens, expected.text)
    assert num_accepted > 100
    other = Engine(language_model()).generate(replace(request, sampling=replace(sampling, seed=12)))
    assert other.tokens != expected.tokens


def test_a_drawn_stable_draft_that_is_the_target_always_stands() -> None:
    """Target and draft pick by the same noise, at the same place."""
    sampling = replace(AS_IT_IS, temperature=1.3, seed=5)
    request = Request(PROMPT, sampling, max_tokens=40, ignore_end=True, verification=Verification("stable"))
    completion = Engine(language_model(), [model_drafter(LANGUAGE)], FixedPolicy(3, p_min=0)).generate(
        request
    )
    assert all(record.num_accepted == len(record.draft) for record in completion.records)
    assert sum(record.num_accepted for record in completion.records) > 20


# Many requests


TINY = FakeVocabulary("ab")
TINY_LANGUAGE = random_logits(3, seed=2, order=2, scale=1.0)
TINY_PROMPT = (0, 1, 0, 1)
LENGTH = 3


def excess_over_chance(counts: Counter[tuple[int, ...]]) -> float:
    """How many standard deviations chi-square lies above what chance leads to."""
    exact = plain_texts(Request(TINY_PROMPT, AS_IT_IS, max_tokens=LENGTH), TINY_LANGUAGE, TINY)
    assert set(counts) <= set(exact)
    total = sum(counts.values())
    assert min(exact.values()) * total >= 5, "too few samples for the test"
    statistic = sum((counts[text] - p * total) ** 2 / (p * total) for text, p in exact.items())
    freedom = len(exact) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def sample(
    rule: Rule, kinds: Sequence[DraftSampling], num_samples: int, *, lookup: bool
) -> tuple[float, int]:
    """The excess over chance of so many requests, and how many drafted tokens stood."""
    memo = {text: TINY_LANGUAGE(text) for text in ((a, b) for a in range(3) for b in range(3))}
    theirs = random_logits(3, seed=9, order=2, scale=1.0)
    drafts = {text: theirs(text) for text in memo}
    draft = FakeModel(TINY, lambda tokens: drafts[tokens[-2], tokens[-1]])
    drafters: list[Drafter] = [ModelDrafter(draft, compare_vocabularies(TINY, TINY))]
    if lookup:
        drafters.insert(0, SuffixDrafter(1))
    target = FakeModel(TINY, lambda tokens: memo[tokens[-2], tokens[-1]])
    engine = Engine(target, drafters, FixedPolicy(draft_max=2, p_min=0, hand_over=0.3))
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for seed in range(num_samples):
        verification = Verification(rule, kinds[seed % len(kinds)])
        completion = engine.generate(
            Request(TINY_PROMPT, replace(AS_IT_IS, seed=seed), LENGTH, verification=verification)
        )
        counts[completion.tokens] += 1
        num_accepted += sum(record.num_accepted for record in completion.records)
        for model in (target, draft):
            model.calls.clear()
    return excess_over_chance(counts), num_accepted


# What a draft model alone leads to is enumerated in test_policy_exact.
@pytest.mark.parametrize(("rule", "kind"), RULES_AND_KINDS)
@pytest.mark.parametrize("lookup", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sampled_output_follows_the_model(rule: Rule, kind: DraftSampling, lookup: bool) -> None:
    excess, num_accepted = sample(rule, [kind], 700, lookup=lookup)
    assert excess < 4 and num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lookup", [False, True])
def test_much_sampled_output_follows_the_model(rule: Rule, lookup: bool) -> None:
    excess, num_accepted = sample(rule, KINDS, 200_000, lookup=lookup)
    assert excess < 4 and num_accepted > 30_000


def test_two_requests_at_once_do_not_share_their_chances() -> None:
    """Each has a generator of its own: what it says does not depend on its neighbours."""

    def tokens(engine: Engine, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        streams = [
            engine.stream(Request(PROMPT, replace(AS_IT_IS, seed=seed), max_tokens=20, ignore_end=True))
            for seed in seeds
        ]
        said: list[tuple[int, ...]] = [() for _ in seeds]
        for stream in streams:
            for update in islice(stream, 1):
                said[streams.index(stream)] += update.record.tokens
        for i, stream in enumerate(streams):
            for update in stream:
                said[i] += update.record.tokens
        return said

    def engine() -> Engine:
        return Engine(language_model(), [other_vocabulary_drafter()], FixedPolicy(3, p_min=0))

    alone = [tokens(engine(), [seed])[0] for seed in (1, 2)]
    assert tokens(engine(), [1, 2]) == alone and alone[0] != alone[1]
