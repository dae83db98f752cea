"""The certificate on exact models: it holds for a sound engine, and not for any broken one."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from engines import PROMPT, VOCABULARY, ScriptedDrafter, greedy_continuation, oracle, same_vocabulary
from exactness import offer
from outrider.backends.bitwise import TRIED, BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel, random_logits
from outrider.cli.verify import print_verdict
from outrider.core.contracts import Drafter, RewindKind
from outrider.core.data import Distribution, Grammar, Logits, Request, Row, Span
from outrider.core.errors import SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.certificate import (
    BESIDE,
    GREEDY,
    REPEATED,
    STABLE,
    Certificate,
    Findings,
    as_json,
    certify,
    reasons,
)
from outrider.lab.certify.decisions import ERRORS, KINDS, RULES, Decisions, ScoreTest, ScoreTests, _Law
from outrider.lab.certify.faults import (
    MASK_FAULT,
    RULE_FAULTS,
    break_calls,
    check_fault,
    check_shown,
    unequal_sizes,
    verifier_with,
)
from outrider.lab.certify.sampled import (
    MIN_EXPECTED,
    CachedModel,
    CertifyPlan,
    exact_distribution,
    pool,
    simulate_null,
)
from outrider.lab.certify.texts import Compared, Constrain, compare_texts, generate, repeat
from outrider.lab.comparison import compare, find_divergence
from outrider.lab.statistics import holm
from outrider.models.vocab import compare as align
from outrider.policy.fixed import FixedPolicy
from outrider.verify import Verifier
from rounded import NearTie, Rounding, bitwise

LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3, scale=1.0)
OTHER = random_logits(VOCABULARY.size, seed=3, order=2, scale=1.0)
QUICK = CertifyPlan(
    num_tokens=24, num_seeded=24, num_repeated=1, num_sampled=1, samples=100, significance=0.01
)
PROMPTS = [PROMPT, (2, 3, 1, 1)]
EAGER = FixedPolicy(draft_max=4, p_min=0, hand_over=0)


def subject_of(drafters: Sequence[Drafter] = (), **options: Any) -> Engine:
    return Engine(FakeModel(VOCABULARY, LANGUAGE, **options), drafters, EAGER)


def certificate_of(findings: Findings, plan: CertifyPlan = QUICK) -> Certificate:
    started = "2024-01-01T00:00:00+00:00"
    return Certificate(plan, findings, ("a", "b"), {}, {"outrider": "0"}, {"cpu": "none"}, {}, started, 1.0)


@pytest.fixture(scope="module")
def sound() -> Findings:
    return certify(subject_of([SuffixDrafter(min_match=1)]), PROMPTS, replace(QUICK, samples=50))


def test_a_sound_engine_holds(sound: Findings) -> None:
    assert sound.holds and reasons(sound) == []
    assert sound.speculates and sound.stand_in
    assert {name: len(parts) for name, parts in sound.texts.items()} == {GREEDY: 2, REPEATED: 4, STABLE: 2}
    assert len(sound.sampled) == 15 and all(test.drafted_tokens > 0 for test in sound.sampled)
    assert sum(test.accepted_tokens for test in sound.sampled) > 0


def test_the_same_seed_gives_the_same_findings() -> None:
    plans = [replace(QUICK, rule="stable", samples=30, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (certify(subject_of([SuffixDrafter(min_match=1)]), PROMPTS, plan) for plan in plans)
    assert first == again
    assert [test.p_value for test in other.sampled] != [test.p_value for test in first.sampled]


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_every_fault_is_found(fault: str) -> None:
    plan = replace(QUICK, fault=fault, rule="token")
    findings = certify(subject_of([SuffixDrafter(min_match=1)]), PROMPTS, plan)
    assert not findings.holds
    assert any(test.rejected for test in findings.sampled) and "sampled" in " ".join(reasons(findings))


@pytest.mark.parametrize("rewind", ["free", "checkpoints"])
def test_a_rejected_token_that_stays_is_found(rewind: RewindKind) -> None:
    def compared(fault: str | None) -> Compared:
        model = FakeModel(VOCABULARY, LANGUAGE, rewind=rewind)
        target = break_calls(fault, model)
        request = Request(PROMPT, SamplingParams(temperature=0), 40, ignore_end=True)
        found = compare_texts(Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 1))], EAGER), request)
        check_shown(fault, target)
        return found

    assert compared(None).holds
    assert not compared("short-rewind").holds


def test_a_fault_of_rewinding_needs_a_draft_that_is_rejected() -> None:
    right = subject_of([ScriptedDrafter(oracle(LANGUAGE, 1000))])
    with pytest.raises(SettingError, match="no draft was checked"):
        certify(right, PROMPTS[:1], replace(QUICK, num_tokens=1, num_seeded=1, fault="short-rewind"))


def test_a_draft_model_of_ones_own_is_tested() -> None:
    draft = FakeModel(VOCABULARY, OTHER)
    subject = subject_of([ModelDrafter(draft, same_vocabulary())])
    plan = replace(QUICK, rule="block", samples=60)
    findings = certify(subject, PROMPTS, plan)
    assert findings.holds and not findings.stand_in and draft.calls
    assert {test.setting.split(",")[0] for test in findings.sampled} == {"block"}
    assert STABLE not in findings.texts
    assert not certify(subject, PROMPTS, replace(plan, fault="no-residual")).holds


def test_a_target_that_cannot_rewind_speculates_nothing() -> None:
    findings = certify(subject_of([SuffixDrafter()], rewind="none"), PROMPTS, QUICK)
    assert findings.holds and not findings.speculates and findings.sampled == ()
    assert as_json(certificate_of(findings))["speculates"] is False


# Rounding and faults told apart


REQUEST = Request(PROMPT, SamplingParams(temperature=0), max_tokens=20, ignore_end=True)


def shaky_engine(*at: int, fault: str | None = None) -> Engine:
    """An engine whose drafter is right for two tokens, then wrong."""
    target = NearTie(VOCABULARY, LANGUAGE, *at)
    return Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 2))], EAGER, verifier=verifier_with(fault))


def test_near_ties_are_reported_and_every_token_is_compared() -> None:
    compared = compare_texts(shaky_engine(9, 15), REQUEST)
    assert compared.holds and compared.tokens == 20
    first = compared.differences[0]
    assert first.position == 9 - len(PROMPT) and first.near_tie
    text = greedy_continuation(LANGUAGE, PROMPT, first.position)
    best, second = np.argsort(LANGUAGE([*PROMPT, *text]))[[-1, -2]]
    assert (first.plain_token, first.speculative_token) == (int(best), int(second))
    assert first.plain_margin == pytest.approx(NearTie.MARGIN)
    assert first.speculative_margin == pytest.approx(NearTie.MARGIN)
    assert len(compared.differences) == 2 and compared.differences[1].position == 15 - len(PROMPT)
    assert compared.differences[1].near_tie


def test_a_fault_is_no_near_tie() -> None:
    compared = compare_texts(shaky_engine(9, 15, fault="kept-rejected"), REQUEST)
    assert not compared.holds and not compared.differences[-1].near_tie


def test_a_fault_at_a_close_call_is_still_a_fault() -> None:
    """The margin alone excuses nothing: the replay must give the token by itself."""

    class Close(NearTie):
        MARGIN = 0.0001

        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            rows = FakeModel.decode(self, spans)
            for logits in rows:
                for row in logits:
                    best, second = np.argsort(row)[[-1, -2]]
                    row[best] = row[second] + self.MARGIN  # level everywhere, but never flipped
            return rows

    def second_best(tokens: Sequence[int], length: int) -> list[int]:
        return [int(np.argsort(LANGUAGE(tokens))[-2])][:length]

    verifier = verifier_with("kept-rejected")
    engine = Engine(Close(VOCABULARY, LANGUAGE), [ScriptedDrafter(second_best)], EAGER, verifier=verifier)
    compared = compare_texts(engine, REQUEST)
    [difference] = compared.differences
    assert not difference.near_tie and difference.speculative_margin == pytest.approx(1e-4, rel=0.1)


def test_a_token_that_its_own_replay_does_not_give_is_no_near_tie() -> None:
    class Once(NearTie):
        """Wrong the first time that the token is evaluated alone."""

        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            rows = FakeModel.decode(self, spans)
            [span] = spans
            if self.at and len(span.tokens) == 1 and span.start + 1 in self.at:
                self.at = ()
                rows[0][0] = -rows[0][0]
            return rows

    engine = Engine(Once(VOCABULARY, LANGUAGE, 12), [ScriptedDrafter(oracle(LANGUAGE, 4))], EAGER)
    [difference] = compare_texts(engine, REQUEST).differences
    assert difference.position == 12 - len(PROMPT) and not difference.near_tie


def test_the_stable_rule_is_audited_by_its_scores() -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=5)
    request = replace(REQUEST, sampling=sampling, verification=Verification("stable"))
    assert compare_texts(shaky_engine(), request).differences == ()
    flipped = [compare_texts(shaky_engine(at), request) for at in range(6, 24)]
    assert all(compared.holds for compared in flipped)
    assert any(compared.differences for compared in flipped)
    assert not compare_texts(shaky_engine(fault="kept-rejected"), request).holds


def test_runs_that_differ_under_one_seed_are_found() -> None:
    class Drifting(FakeModel):
        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            rows = super().decode(spans)
            for logits in rows:
                logits += np.float32(5 * (len(self.calls) > 12)) * LANGUAGE((len(self.calls),))
            return rows

    sampling = SamplingParams(temperature=1.0, seed=1)
    request = replace(REQUEST, sampling=sampling)
    assert repeat(Engine(FakeModel(VOCABULARY, LANGUAGE)), request).holds
    assert not repeat(Engine(Drifting(VOCABULARY, LANGUAGE)), request).holds


# Bit-equal text: no near-tie is excused, and the bits of the logits count

BIT_EQUAL = replace(QUICK, num_seeded=16, num_repeated=2, samples=40)
PADDED = Rounding((1,)), TRIED[1:]
"""single tokens have another kernel"""
SHORT = Rounding((7,)), TRIED[:7]
"""long calls have another kernel"""
ONE_RULE = replace(BIT_EQUAL, rule="token")
NEEDED = replace(ONE_RULE, fault="unequal-calls")


def bit_subject(model: BitwiseModel | FakeModel) -> Engine:
    drafters = (SuffixDrafter(min_match=1), ScriptedDrafter(oracle(LANGUAGE, 3)))
    return Engine(model, drafters, EAGER)


@pytest.mark.parametrize(("kernels", "num_sequences"), [(PADDED, 2), (SHORT, 1)])
def test_equal_calls_hold_bit_for_bit(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = certify(bit_subject(bitwise(LANGUAGE, *kernels, num_sequences)), PROMPTS, BIT_EQUAL)
    assert findings.holds and reasons(findings) == []
    assert len(findings.texts.get(BESIDE, ())) == (2 if num_sequences == 2 else 0)
    tokens = sum(part.tokens for name, parts in findings.texts.items() if name != REPEATED for part in parts)
    document = as_json(certificate_of(findings))
    assert document["kind"] == "bit-equal"
    assert document["compared_logits"] == tokens
    assert sum(part.counts["accepted_tokens"] for part in findings.all_texts) > 0
    print_verdict(certificate_of(findings, BIT_EQUAL), None)
    said = " ".join(capsys.readouterr().out.split())
    assert "bit for bit" in said and f"{tokens} positions, with drafts and without: the same bits" in said
    assert ("while another request runs" in said) == (num_sequences == 2)


@pytest.mark.parametrize(("kernels", "num_sequences"), [(PADDED, 2), (SHORT, 1)])
def test_unequal_calls_are_found(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bitwise(LANGUAGE, *kernels, num_sequences)
    findings = certify(bit_subject(model), PROMPTS, NEEDED)
    assert not findings.holds and any(
        "other bits at" in reason and "first in greedy" in reason for reason in reasons(findings)
    )
    document = as_json(certificate_of(findings, NEEDED))
    assert document["verdict"] == "does not hold" and document["plan"]["fault"] == "unequal-calls"
    rows = [part["rows"] for part in document["texts"][GREEDY]]
    assert any(0 < row["differing"] <= row["positions"] and row["first"] is not None for row in rows)
    print_verdict(certificate_of(findings, NEEDED), None)
    assert "DOES NOT HOLD" in capsys.readouterr().out
    assert model.sizes.sizes == tuple(kernels[1])  # the fault is gone with the test


class Whispering(FakeModel):
    """In calls over several tokens every logit is off by its last bit, and no token is ever another one."""

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found = super().decode(spans)
        if sum(len(span.tokens) for span in spans) > 1:
            for rows in found:
                rows[:] = np.nextafter(rows, np.float32(np.inf))
        return found


def test_bits_that_differ_fail_where_every_text_is_equal() -> None:
    model = BitwiseModel(
        lambda length: Whispering(VOCABULARY, LANGUAGE, context_length=length, max_sequences=1),
        EqualSizes((1, 2, 3, 4, 5)),
        context_length=256,
    )
    findings = certify(bit_subject(model), PROMPTS, ONE_RULE)
    assert not any(part.differences for part in findings.all_texts)
    assert not findings.holds and all(reason.startswith("logits: ") for reason in reasons(findings))


def test_a_near_tie_is_no_excuse() -> None:
    def make(length: int) -> FakeModel:
        return NearTie(VOCABULARY, LANGUAGE, *range(0, 256, 3), context_length=length, max_sequences=1)

    parts = certify(bit_subject(make(256)), PROMPTS, ONE_RULE).texts[GREEDY]
    assert all(part.holds for part in parts) and any(part.differences for part in parts)
    kept = BitwiseModel(make, EqualSizes((1, 2, 3, 4, 5)), context_length=256)
    findings = certify(bit_subject(kept), PROMPTS, ONE_RULE)
    assert not findings.holds and "differ, first in prompt" in reasons(findings)[0]
    assert not any(tie.near_tie for part in findings.texts[GREEDY] for tie in part.differences)


def test_the_fault_is_refused_where_it_cannot_show() -> None:
    with pytest.raises(SettingError, match="Add --bitwise"):
        certify(bit_subject(FakeModel(VOCABULARY, LANGUAGE)), PROMPTS, NEEDED)
    whole = bitwise(LANGUAGE, Rounding(()), TRIED)
    assert unequal_sizes(whole) == ()
    with pytest.raises(SettingError, match="changes nothing"):
        certify(bit_subject(whole), PROMPTS, NEEDED)
    with pytest.raises(SettingError, match="nothing is drafted"):
        certify(Engine(bitwise(LANGUAGE, *PADDED)), PROMPTS, NEEDED)
    unable = Engine(bitwise(LANGUAGE, *PADDED), (SuffixDrafter(min_match=50),), EAGER)
    with pytest.raises(SettingError, match="no draft was checked"):
        certify(unable, PROMPTS, NEEDED)


# Constrained outputs: it holds for sound masks, and not for broken ones

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
END = WORDS.size - 1
WORD_LANGUAGE = random_logits(WORDS.size, seed=4, order=2)
WORD_PROMPTS = [(0, 1), (2, 3, 1, 1)]
GRAMMAR = Grammar("choice")
LIMITED = replace(QUICK, samples=60, grammar=GRAMMAR)
TEXTS = ("abcabbcacab", "abcabbbab", "abcbcacabb", "abcc")
"""Forced at first, then open, then forced again; every text can be spelled in several ways."""


def constrained(texts: Collection[str] = TEXTS, **settings: bool) -> Constrain:
    return lambda _grammar: OneOf(WORDS, texts, **settings)


def limited_subject(constrain: Constrain | None = None, drafters: Sequence[Drafter] | None = None) -> Engine:
    used = (SuffixDrafter(min_match=1),) if drafters is None else drafters
    return Engine(FakeModel(WORDS, WORD_LANGUAGE), used, EAGER, constrain=constrain or constrained())


@pytest.fixture(scope="module")
def limited() -> Findings:
    return certify(limited_subject(), WORD_PROMPTS, LIMITED)


def test_a_sound_constrained_engine_holds(limited: Findings) -> None:
    assert limited.holds and limited.speculates
    assert len(limited.sampled) == 17, "two more than without a grammar: forced text alone"
    alone = [test for test in limited.sampled if "forced text" in test.setting]
    assert len(alone) == 2 and all(test.drafted_tokens > 0 for test in alone)
    assert all(test.drafted_tokens >= test.accepted_tokens for test in limited.sampled)
    assert all(test.cells > 1 for test in limited.sampled), "else nothing is tested"
    assert sum(part.counts["drafted_tokens"] for part in limited.texts[GREEDY]) > 0


@pytest.mark.parametrize("fast_forward", ["canonical", "off"])
def test_the_other_modes_hold(fast_forward: str) -> None:
    canonical = fast_forward == "canonical"
    grammar = replace(GRAMMAR, fast_forward=fast_forward)  # type: ignore[arg-type]
    constrain = constrained(forcing=canonical, canonical=canonical)
    plan = replace(LIMITED, rule="block", grammar=grammar)
    findings = certify(limited_subject(constrain), WORD_PROMPTS, plan)
    assert findings.holds
    assert len(findings.sampled) == (9 if canonical else 7)


def test_forced_text_is_tested_without_any_drafter() -> None:
    findings = certify(limited_subject(drafters=()), WORD_PROMPTS, replace(LIMITED, rule="block"))
    assert findings.holds and findings.speculates
    assert sum(part.counts["accepted_tokens"] for part in findings.texts[GREEDY]) > 0
    off = replace(LIMITED, grammar=replace(GRAMMAR, fast_forward="off"))
    nothing = certify(limited_subject(constrained(forcing=False), drafters=()), WORD_PROMPTS, off)
    assert nothing.holds and not nothing.speculates


@pytest.mark.parametrize("fault", [MASK_FAULT, "kept-rejected"])
def test_every_fault_is_found_under_a_mask(fault: str) -> None:
    plan = replace(LIMITED, rule="token", fault=fault)
    findings = certify(limited_subject(), WORD_PROMPTS, plan)
    assert not findings.holds and any(test.rejected for test in findings.sampled)
    if fault == MASK_FAULT:
        assert any(test.impossible for test in findings.sampled)
        assert any(not found.near_tie for part in findings.texts[GREEDY] for found in part.differences)


# Dead ends


def test_a_dead_end_is_an_end_like_another() -> None:
    texts = ("abcx", "abbx")  # no token spells an x
    engine = Engine(FakeModel(WORDS, WORD_LANGUAGE), [], EAGER, constrain=constrained(texts))
    done = generate(engine, Request((0, 1), SamplingParams(temperature=0), 9, grammar=GRAMMAR))
    assert WORDS.text(done.tokens) in ("abc", "abb") and done.text == (0, 1, *done.tokens)
    assert sum(len(record.tokens) for record in done.records) == len(done.tokens)
    findings = certify(limited_subject(constrained(texts)), WORD_PROMPTS, replace(LIMITED, rule="block"))
    assert findings.holds and all(test.impossible == 0 for test in findings.sampled)


# Rounding under a mask


class Level(NearTie):
    """`a` and `b` lie a margin apart everywhere, and below `c`, which no text has."""

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        for logits in rows:
            logits[:, 2] = 9
        return rows


def level(tokens: Sequence[int]) -> Row:
    del tokens
    return np.array([0, -NearTie.MARGIN, *[-5] * (WORDS.size - 2)], dtype=np.float32)


LEVEL = ["aabab", "abab", "aaaa", "abbb"]
WORD_REQUEST = Request((1, 1), SamplingParams(temperature=0), 12, grammar=GRAMMAR)


def test_a_near_tie_is_one_of_allowed_tokens_and_plain_decoding_goes_on_behind_it() -> None:
    constrain = constrained(LEVEL)
    at = len(WORD_REQUEST.prompt) + 1
    engine = Engine(Level(WORDS, level, at), [], EAGER, constrain=constrain)
    compared = compare_texts(engine, WORD_REQUEST, 0, constrain)
    assert compared.holds and compared.tokens == len("aaaa")
    [tie] = compared.differences
    assert (tie.position, tie.plain_token, tie.speculative_token) == (1, 0, 1)
    assert tie.plain_margin == tie.speculative_margin == pytest.approx(Level.MARGIN)


def test_a_divergence_is_measured_under_the_mask() -> None:
    constrain = constrained(LEVEL)
    target = Level(WORDS, level, len(WORD_REQUEST.prompt) + 1)
    engine = Engine(target, [], EAGER, constrain=constrain)
    comparison = compare(engine, WORD_REQUEST, repetitions=1)
    assert comparison.divergence is not None and not comparison.equal
    assert comparison.divergence.margin == pytest.approx(Level.MARGIN)
    plain = engine.generate(replace(WORD_REQUEST, speculate=False))
    other = replace(plain, tokens=(*plain.tokens[:1], 2))
    engine.reset()
    found = find_divergence(engine.target, WORD_REQUEST, plain, other, constrain)
    assert found is not None and found.margin is None, "the mask rules it out, however likely it is"


# Where it is tested, and against what


def test_the_exact_distribution_is_the_chain_rule_under_the_mask() -> None:
    memory = CachedModel(FakeModel(WORDS, WORD_LANGUAGE))
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
    make = partial(constrained(["ab", "abc", "cab"]), GRAMMAR)
    exact = exact_distribution(memory, (0,), sampling, 10**7, 0.01, np.random.default_rng(0), make)

    def chance(*tokens: int) -> float:
        product = 1.0
        for i, token in enumerate(tokens):
            mask = make().allowed(tokens[:i])
            assert mask is not None
            weights = np.where(mask, np.exp(WORD_LANGUAGE((0, *tokens[:i])).astype(np.float64)), 0)
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
        engine = Engine(FakeModel(WORDS, WORD_LANGUAGE), [drafter], EAGER, constrain=constrained(TEXTS))
        sampling = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=seed)
        request = Request((0, 1), sampling, 30, verification=Verification("token"), grammar=GRAMMAR)
        assert repeat(engine, request).holds


# The statistics: p-values that hold, errors of the stated size that are found

DRAFTED = 2
SIGNIFICANCE = 0.001


def distribution(rng: np.random.Generator) -> Distribution:
    return Distribution(np.arange(6), rng.dirichlet(np.full(6, 2.0)))


def decided(rule: Rule, fault: str | None, seed: int, *, contexts: int = 40, times: int = 40) -> ScoreTests:
    """Decisions about random drafts, each of which is drawn from its distributions."""
    rng = np.random.default_rng(seed)
    tests: ScoreTests = {(name, kind): ScoreTest() for name in RULES for kind in KINDS}
    verification = Verification(rule, "sampled")
    request = Request(PROMPT, SamplingParams(temperature=1.0), verification=verification)
    make = verifier_with(fault)
    for number in range(contexts):
        decisions = Decisions(rule)
        offered = tuple(distribution(rng) for _ in range(DRAFTED))
        targets = [distribution(rng) for _ in range(DRAFTED + 1)]
        verifier = decisions.recorded(make)(request, 1000 * seed + number)
        pick = verifier.drawing(0)
        assert pick is not None
        drafted = tuple(pick(q, i) for i, q in enumerate(offered))
        draft = offer(drafted, offered)
        verifier.verify(targets, draft, 0)  # type: ignore[arg-type]
        decisions.repeat(make, request, times, seed + number)
        decisions.add_to(tests)
    return tests


def test_an_error_of_the_ratio_is_one_of_drafts_that_were_not_drawn_too() -> None:
    targets = [Distribution(np.arange(4), np.full(4, 0.25))] * 2
    request = Request(PROMPT, SamplingParams(temperature=1.0))

    def accepted(fault: str | None) -> float:
        verifiers = (verifier_with(fault)(request, seed) for seed in range(800))
        return float(np.mean([v.verify(targets, offer((1,)), 0).num_accepted for v in verifiers]))  # type: ignore[arg-type]

    assert [accepted(None), accepted("acceptance=2")] == pytest.approx([0.25, 0.5], abs=0.06)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_laws_are_what_the_rules_do(rule: Rule) -> None:
    """Enumerated by frequency: 20,000 verdicts of one draft."""
    rng = np.random.default_rng(3)
    offered = tuple(distribution(rng) for _ in range(DRAFTED))
    targets = [distribution(rng) for _ in range(DRAFTED + 1)]
    draft = offer((1, 4), offered)
    verifier = Verifier(Verification(rule, "sampled"), 1, greedy=False)
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(20_000):
        verdict = verifier.verify(targets, draft, 0)  # type: ignore[arg-type]
        assert verdict.token is not None
        found[verdict.num_accepted, verdict.token] += 1
    law = _Law(rule, targets, draft)
    for i, chance in enumerate(law.accepted(0.0)):
        for token, follows in enumerate(law.following(i, 0.0)):
            share = found[i, token] / 20_000
            assert share == pytest.approx(chance * follows, abs=4.5 * np.sqrt(0.25 / 20_000))


@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_no_false_alarm(rule: Rule) -> None:
    """P-values of sound rules are not smaller than uniform ones, over many seeds."""
    found = [decided(rule, None, seed) for seed in range(20)]
    values = [test.p_value() for tests in found for test in tests.values() if test.outcomes]
    assert not any(test.impossible for tests in found for test in tests.values())
    assert min(values) > 0.001 / len(values)
    assert sum(value < 0.05 for value in values) <= 0.05 * len(values)


@pytest.mark.parametrize(
    ("rule", "sign"),
    [
        ("token", 1),
        ("block", -1),
        pytest.param("token", -1, marks=pytest.mark.slow),
        pytest.param("block", 1, marks=pytest.mark.slow),
    ],
)
def test_the_stated_error_is_found(rule: Rule, sign: int) -> None:
    found, errors = [], []
    for seed in range(6):
        error = decided(rule, None, seed)[rule, "acceptance"].detectable_error(SIGNIFICANCE)
        assert error is not None and 0.04 < error < 0.15
        errors.append(error)
        wrong = decided(rule, f"acceptance={1 + sign * error}", seed)
        found.append(wrong[rule, "acceptance"].p_value() <= SIGNIFICANCE)
    assert sum(found) >= 5
    if sign > 0:  # with a factor below 1 a token that must be accepted is rejected, which decides at once
        small = [
            decided(rule, f"acceptance={1 + errors[seed] / 8}", seed)[rule, "acceptance"] for seed in range(3)
        ]
        assert sum(test.p_value() <= SIGNIFICANCE for test in small) <= 1


def test_an_impossible_outcome_decides_at_once() -> None:
    test = ScoreTest()
    laws = [np.array([1.0, 0.0])] * len(ERRORS)
    test.add(laws, np.array([9, 0]))
    assert test.p_value() == 1.0 and test.detectable_error(SIGNIFICANCE) is None
    test.add(laws, np.array([9, 1]))
    assert test.p_value() == 0.0 and test.impossible == 1 and test.statistic is None


# Texts

PROBS = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


def test_p_values_are_uniform_under_the_null() -> None:
    rng = np.random.default_rng(1)
    null = simulate_null(PROBS, 400, 4000, rng)
    p = np.sort([null.p_value(null.statistic(rng.multinomial(400, PROBS))) for _ in range(2000)])
    distance = np.abs(p - (np.arange(2000) + 0.5) / 2000).max()
    assert distance < 0.05  # 1.63 / sqrt(2000) = 0.036 is Kolmogorov's 1 % bound, the null's noise on top


def test_p_values_never_reach_zero_and_count_the_sample_itself() -> None:
    null = simulate_null(PROBS, 400, 99, np.random.default_rng(2))
    assert null.p_value(np.inf) == pytest.approx(1 / 100)
    assert null.p_value(0.0) == 1.0
    assert null.p_value(float(null.statistics[-1])) == pytest.approx(2 / 100)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30), st.integers(20, 3000))
def test_pooled_cells_keep_the_mass_and_are_large_enough(weights: list[float], num_samples: int) -> None:
    probs = np.array(weights) / sum(weights)
    groups = pool(probs, num_samples)
    masses = np.bincount(groups, weights=probs)
    assert masses.sum() == pytest.approx(1.0)
    assert (masses * num_samples >= MIN_EXPECTED - 1e-6).all()


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert holm([0.01, 0.02, 0.03], 0.06) == [True, True, True]
    assert holm([], 0.05) == []


# The certificate as a whole

PLAN = CertifyPlan(num_tokens=8, num_seeded=8, num_repeated=1, num_sampled=1, samples=60, repeats=20)


def findings(**changes: object) -> Findings:
    drafter = ModelDrafter(FakeModel(VOCABULARY, OTHER), same_vocabulary())
    return certify(subject_of([drafter]), [PROMPT], replace(PLAN, **changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_power_is_in_the_certificate() -> None:
    found = findings()
    assert found.holds
    document = as_json(certificate_of(found))
    assert 0.01 < document["detectable_acceptance_error"] < 0.12
    more = findings(rule="token", repeats=100).power
    assert more is not None and more < 0.6 * document["detectable_acceptance_error"]
    kinds = {(test["rule"], test["kind"]) for test in document["decisions"]}
    assert {(rule, kind) for rule in ("token", "block") for kind in ("acceptance", "bonus")} < kinds
    assert ("block", "recovered") in kinds


def test_wrong_recovered_tokens_are_found() -> None:
    found = findings(rule="token", fault="no-residual")
    rejected = {test.kind for test in found.decisions if test.rejected}
    assert rejected == {"recovered"}
    alone = replace(found, texts={}, sampled=())
    assert not alone.holds and reasons(alone), "decisions alone decide"


@pytest.mark.parametrize(
    "fault", ["sloppy", "acceptance", "acceptance=", "acceptance=1", "acceptance=-1", "acceptance=x"]
)
def test_a_factor_that_makes_no_sense_is_refused(fault: str) -> None:
    with pytest.raises(SettingError, match="not a known fault"):
        check_fault(fault)
