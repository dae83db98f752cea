"""The certificate of constrained outputs: it holds for sound masks, and not for broken ones."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import test_certify
from constrained import OneOf, Pieces
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Grammar, Logits, Request, Span
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.certificate import GREEDY, Findings, certify
from outrider.lab.certify.distribution import CachedModel, exact_distribution, find_start
from outrider.lab.certify.faults import MASK_FAULT
from outrider.lab.certify.texts import Constrain, compare_texts, generate, repeat
from outrider.lab.comparison import compare, find_divergence
from outrider.models.vocab import compare as align
from test_certify import EAGER

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
END = WORDS.size - 1
LANGUAGE = random_logits(WORDS.size, seed=4, order=2)
PROMPTS = [(0, 1), (2, 3, 1, 1)]
GRAMMAR = Grammar("choice")
QUICK = replace(test_certify.QUICK, samples=60, grammar=GRAMMAR)
TEXTS = ("abcabbcacab", "abcabbbab", "abcbcacabb", "abcc")
"""Forced at first, then open, then forced again; every text can be spelled in several ways."""


def constrained(texts: Collection[str] = TEXTS, **settings: bool) -> Constrain:
    return lambda _grammar: OneOf(WORDS, texts, **settings)


def subject_of(constrain: Constrain | None = None, drafters: Sequence[Drafter] | None = None) -> Engine:
    used = (SuffixDrafter(min_match=1),) if drafters is None else drafters
    return Engine(FakeModel(WORDS, LANGUAGE), used, EAGER, constrain=constrain or constrained())


@pytest.fixture(scope="module")
def sound() -> Findings:
    return certify(subject_of(), PROMPTS, QUICK)


def test_a_sound_engine_holds(sound: Findings) -> None:
    assert sound.holds and sound.speculates
    assert len(sound.sampled) == 17, "two more than without a grammar: forced text alone"
    alone = [test for test in sound.sampled if "forced text" in test.setting]
    assert len(alone) == 2 and all(test.drafted_tokens > 0 for test in alone)
    assert all(test.drafted_tokens >= test.accepted_tokens for test in sound.sampled)
    assert all(test.cells > 1 for test in sound.sampled), "where nothing is left to chance nothing is tested"
    assert sum(part.counts["drafted_tokens"] for part in sound.texts[GREEDY]) > 0


@pytest.mark.parametrize("fast_forward", ["canonical", "off"])
def test_the_other_modes_hold(fast_forward: str) -> None:
    canonical = fast_forward == "canonical"
    grammar = replace(GRAMMAR, fast_forward=fast_forward)  # type: ignore[arg-type]
    constrain = constrained(forcing=canonical, canonical=canonical)
    findings = certify(subject_of(constrain), PROMPTS, replace(QUICK, rule="block", grammar=grammar))
    assert findings.holds
    assert len(findings.sampled) == (9 if canonical else 7)


def test_forced_text_is_tested_without_any_drafter() -> None:
    findings = certify(subject_of(drafters=()), PROMPTS, replace(QUICK, rule="block"))
    assert findings.holds and findings.speculates
    assert sum(part.counts["accepted_tokens"] for part in findings.texts[GREEDY]) > 0
    off = replace(QUICK, grammar=replace(GRAMMAR, fast_forward="off"))
    nothing = certify(subject_of(constrained(forcing=False), drafters=()), PROMPTS, off)
    assert nothing.holds and not nothing.speculates


@pytest.mark.parametrize("fault", [MASK_FAULT, "kept-rejected"])  # test_certify finds the others
def test_every_fault_is_found(fault: str) -> None:
    findings = certify(subject_of(), PROMPTS, replace(QUICK, rule="token", samples=100, fault=fault))
    assert not findings.holds and any(test.rejected for test in findings.sampled)
    if fault == MASK_FAULT:
        assert any(test.impossible for test in findings.sampled)
        assert any(not found.near_tie for part in findings.texts[GREEDY] for found in part.differences)


# Dead ends


def test_a_dead_end_is_an_end_like_another() -> None:
    texts = ("abcx", "abbx")  # no token spells an x
    engine = Engine(FakeModel(WORDS, LANGUAGE), [], EAGER, constrain=constrained(texts))
    done = generate(engine, Request((0, 1), SamplingParams(temperature=0), 9, grammar=GRAMMAR))
    assert WORDS.text(done.tokens) in ("abc", "abb") and done.text == (0, 1, *done.tokens)
    assert sum(len(record.tokens) for record in done.records) == len(done.tokens)
    findings = certify(subject_of(constrained(texts)), PROMPTS, replace(QUICK, rule="block"))
    assert findings.holds and all(test.impossible == 0 for test in findings.sampled)


# Rounding under a mask


class Level(FakeModel):
    """`a` and `b` lead each other by a margin everywhere but not so far as `c`, which no text has; in calls
    over several tokens rounding swaps them after so many tokens."""

    MARGIN = 0.125

    def __init__(self, at: int) -> None:
        super().__init__(WORDS, LANGUAGE)
        self._at = at

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        for span, logits in zip(spans, rows, strict=True):
            for i, row in enumerate(logits):
                swapped = span.start + len(span.tokens) - span.rows + i + 1 == self._at
                lead = -self.MARGIN if swapped and len(span.tokens) > 1 else self.MARGIN
                row[:] = -5
                row[:3] = 0, -lead, 9
        return rows


LEVEL = ["aabab", "abab", "aaaa", "abbb"]
REQUEST = Request((1, 1), SamplingParams(temperature=0), 12, grammar=GRAMMAR)


def test_a_near_tie_is_one_of_allowed_tokens_and_plain_decoding_goes_on_behind_it() -> None:
    constrain = constrained(LEVEL)
    at = len(REQUEST.prompt) + 1
    engine = Engine(Level(at), [], EAGER, constrain=constrain)
    compared = compare_texts(engine, REQUEST, 0, constrain)
    assert compared.holds and compared.tokens == len("aaaa")
    [tie] = compared.differences
    assert (tie.position, tie.plain_token, tie.speculative_token) == (1, 0, 1)
    assert tie.plain_margin == tie.speculative_margin == pytest.approx(Level.MARGIN)


def test_a_divergence_is_measured_under_the_mask() -> None:
    constrain = constrained(LEVEL)
    engine = Engine(Level(len(REQUEST.prompt) + 1), [], EAGER, constrain=constrain)
    comparison = compare(engine, REQUEST, repetitions=1)
    assert comparison.divergence is not None and not comparison.equal
    assert comparison.divergence.margin == pytest.approx(Level.MARGIN)
    plain = engine.generate(replace(REQUEST, speculate=False))
    other = replace(plain, tokens=(*plain.tokens[:1], 2))
    engine.reset()
    found = find_divergence(engine.target, REQUEST, plain, other, constrain)
    assert found is not None and found.margin is None, "the mask rules it out, however likely it is"


# Where it is tested, and against what


def test_the_start_has_open_and_forced_text_ahead() -> None:
    memory = CachedModel(FakeModel(WORDS, LANGUAGE))
    free = find_start(memory, PROMPTS[0], None)
    assert free.prompt == PROMPTS[0] and free.answer == () and free.entropy > 0
    start = find_start(memory, PROMPTS[0], partial(constrained(), GRAMMAR))
    assert start.prompt == (*PROMPTS[0], *start.answer)
    assert any(text.startswith(WORDS.text(start.answer)) for text in TEXTS)
    assert start.forced and start.entropy > free.entropy / 2
    certain = find_start(memory, PROMPTS[0], partial(constrained(["abb"], canonical=True), GRAMMAR))
    assert certain.entropy == 0 and certain.forced
    off = find_start(memory, PROMPTS[0], partial(constrained(forcing=False), GRAMMAR))
    assert not off.forced and off.entropy > 0


def test_the_exact_distribution_is_the_chain_rule_under_the_mask() -> None:
    memory = CachedModel(FakeModel(WORDS, LANGUAGE))
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
    make = partial(constrained(["ab", "abc", "cab"]), GRAMMAR)
    exact = exact_distribution(memory, (0,), sampling, 10**7, 0.01, np.random.default_rng(0), make)

    def chance(*tokens: int) -> float:
        product = 1.0
        for i, token in enumerate(tokens):
            mask = make().allowed(tokens[:i])
            assert mask is not None
            weights = np.where(mask, np.exp(LANGUAGE((0, *tokens[:i])).astype(np.float64)), 0)
            product *= float(weights[token] / weights.sum())
        return product

    for tokens in ((3, END), (3, 2), (0, 4), (0, 1, 2), (5,), (2, 3)):  # ab, its end, abc and cab in pieces
        cell = exact.cell(tokens)
        assert cell is not None and exact.null.probs[cell] == pytest.approx(chance(*tokens)), tokens
    assert exact.cell((5, END)) == exact.cell((5,)), "the text was over before the end token"
    assert exact.cell((0, 0)) is None
    assert math.isclose(sum(exact.null.probs), 1)


def test_a_seed_repeats_a_text_whatever_was_learned_about_its_spelling() -> None:
    language = random_logits(WORDS.size, seed=9, order=2)
    for seed in range(12):
        drafter = ModelDrafter(FakeModel(WORDS, language), align(WORDS, WORDS))
        engine = Engine(FakeModel(WORDS, LANGUAGE), [drafter], EAGER, constrain=constrained(TEXTS))
        sampling = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=seed)
        request = Request((0, 1), sampling, 30, verification=Verification("token"), grammar=GRAMMAR)
        assert repeat(engine, request).holds
