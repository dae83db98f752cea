"""The certificate on exact models: it holds for a sound engine, and not for any broken one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import PROMPT, VOCABULARY, ScriptedDrafter, greedy_continuation, oracle, same_vocabulary
from outrider.backends.bitwise import TRIED, BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel, random_logits
from outrider.cli.verify import print_verdict
from outrider.core.contracts import Drafter, RewindKind
from outrider.core.data import Logits, Request, Span
from outrider.core.errors import PromptError, SettingError
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.certificate import (
    BESIDE,
    GREEDY,
    REPEATED,
    SCHEMA,
    STABLE,
    Certificate,
    Findings,
    as_json,
    certify,
    reasons,
    write_certificate,
)
from outrider.lab.certify.distribution import CachedModel, exact_distribution
from outrider.lab.certify.faults import (
    RULE_FAULTS,
    break_calls,
    check_fault,
    check_shown,
    unequal_sizes,
    verifier_with,
)
from outrider.lab.certify.sampled import CertifyPlan
from outrider.lab.certify.texts import Compared, compare_texts, repeat
from outrider.policy.fixed import FixedPolicy
from rounded import RoundedModel, Rounding

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
    return certify(subject_of([SuffixDrafter(min_match=1)]), PROMPTS, QUICK)


def test_a_sound_engine_holds(sound: Findings) -> None:
    assert sound.holds and reasons(sound) == []
    assert sound.speculates and sound.stand_in
    assert {name: len(parts) for name, parts in sound.texts.items()} == {GREEDY: 2, REPEATED: 4, STABLE: 2}
    assert len(sound.sampled) == 15 and all(test.drafted_tokens > 0 for test in sound.sampled)
    assert sum(test.accepted_tokens for test in sound.sampled) > 0
    assert 0 < sound.sampled_calls < 400  # thousands of texts, hardly any calls


def test_the_same_seed_gives_the_same_findings() -> None:
    plans = [replace(QUICK, rule="stable", samples=50, seed=seed) for seed in (0, 0, 1)]
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
    plan = replace(QUICK, rule="block")
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


class Shaky(FakeModel):
    """In calls over several tokens the rows after these numbers of tokens have their two best
    logits, `MARGIN` apart, swapped: what rounding does on real machines."""

    MARGIN = 0.125

    def __init__(self, *at: int, **options: Any) -> None:
        super().__init__(VOCABULARY, LANGUAGE, **options)
        self._at = at

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        for span, logits in zip(spans, rows, strict=True):
            for i, row in enumerate(logits):
                if span.start + len(span.tokens) - span.rows + i + 1 in self._at:
                    best, second = np.argsort(row)[[-1, -2]]
                    row[best] = row[second] + (self.MARGIN if len(span.tokens) == 1 else -self.MARGIN)
        return rows


REQUEST = Request(PROMPT, SamplingParams(temperature=0), max_tokens=20, ignore_end=True)


def shaky_engine(*at: int, fault: str | None = None) -> Engine:
    """An engine whose drafter is right for two tokens, then wrong."""
    return Engine(Shaky(*at), [ScriptedDrafter(oracle(LANGUAGE, 2))], EAGER, verifier=verifier_with(fault))


def test_near_ties_are_reported_and_every_token_is_compared() -> None:
    compared = compare_texts(shaky_engine(9, 15), REQUEST)
    assert compared.holds and compared.tokens == 20
    first = compared.differences[0]
    assert first.position == 9 - len(PROMPT) and first.near_tie
    text = greedy_continuation(LANGUAGE, PROMPT, first.position)
    best, second = np.argsort(LANGUAGE([*PROMPT, *text]))[[-1, -2]]
    assert (first.plain_token, first.speculative_token) == (int(best), int(second))
    assert first.plain_margin == pytest.approx(Shaky.MARGIN)
    assert first.speculative_margin == pytest.approx(Shaky.MARGIN)
    assert len(compared.differences) == 2 and compared.differences[1].position == 15 - len(PROMPT)
    assert compared.differences[1].near_tie


def test_a_fault_is_no_near_tie() -> None:
    compared = compare_texts(shaky_engine(9, 15, fault="kept-rejected"), REQUEST)
    assert not compared.holds and not compared.differences[-1].near_tie


def test_a_fault_at_a_close_call_is_still_a_fault() -> None:
    """The margin alone excuses nothing: the replay must give the token by itself."""

    class Close(Shaky):
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
    engine = Engine(Close(), [ScriptedDrafter(second_best)], EAGER, verifier=verifier)
    compared = compare_texts(engine, REQUEST)
    [difference] = compared.differences
    assert not difference.near_tie and difference.speculative_margin == pytest.approx(1e-4, rel=0.1)


def test_a_token_that_its_own_replay_does_not_give_is_no_near_tie() -> None:
    class Once(Shaky):
        """Wrong the first time that the token is evaluated alone."""

        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            rows = FakeModel.decode(self, spans)
            [span] = spans
            if self._at and len(span.tokens) == 1 and span.start + 1 in self._at:
                self._at = ()
                rows[0][0] = -rows[0][0]
            return rows

    engine = Engine(Once(12), [ScriptedDrafter(oracle(LANGUAGE, 4))], EAGER)
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


def bitwise(rounding: Rounding, sizes: Sequence[int], num_sequences: int = 1) -> BitwiseModel:
    return BitwiseModel(
        lambda length: RoundedModel(VOCABULARY, LANGUAGE, rounding, context_length=length, max_sequences=1),
        EqualSizes(tuple(sizes)),
        context_length=256,
        max_sequences=num_sequences,
    )


def bit_subject(model: BitwiseModel | FakeModel) -> Engine:
    drafters = (SuffixDrafter(min_match=1), ScriptedDrafter(oracle(LANGUAGE, 3)))
    return Engine(model, drafters, EAGER)


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("kernels", [PADDED, SHORT])
def test_equal_calls_hold_bit_for_bit(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = certify(bit_subject(bitwise(*kernels, num_sequences)), PROMPTS, BIT_EQUAL)
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


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("kernels", [PADDED, SHORT])
def test_unequal_calls_are_found(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bitwise(*kernels, num_sequences)
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
        return Shaky(*range(0, 256, 3), context_length=length, max_sequences=1)

    parts = certify(bit_subject(make(256)), PROMPTS, ONE_RULE).texts[GREEDY]
    assert all(part.holds for part in parts) and any(part.differences for part in parts)
    kept = BitwiseModel(make, EqualSizes((1, 2, 3, 4, 5)), context_length=256)
    findings = certify(bit_subject(kept), PROMPTS, ONE_RULE)
    assert not findings.holds and "differ, first in prompt" in reasons(findings)[0]
    assert not any(tie.near_tie for part in findings.texts[GREEDY] for tie in part.differences)


def test_the_fault_is_refused_where_it_cannot_show() -> None:
    with pytest.raises(SettingError, match="Add --bitwise"):
        certify(bit_subject(FakeModel(VOCABULARY, LANGUAGE)), PROMPTS, NEEDED)
    whole = bitwise(Rounding(()), TRIED)
    assert unequal_sizes(whole) == ()
    with pytest.raises(SettingError, match="changes nothing"):
        certify(bit_subject(whole), PROMPTS, NEEDED)
    with pytest.raises(SettingError, match="nothing is drafted"):
        certify(Engine(bitwise(*PADDED)), PROMPTS, NEEDED)
    unable = Engine(bitwise(*PADDED), (SuffixDrafter(min_match=50),), EAGER)
    with pytest.raises(SettingError, match="no draft was checked"):
        certify(unable, PROMPTS, NEEDED)


# Cached models


def test_a_cached_model_is_the_model() -> None:
    real = FakeModel(VOCABULARY, LANGUAGE, max_batch_tokens=4, max_rows=2)
    request = Request(PROMPT, SamplingParams(seed=3), max_tokens=30, ignore_end=True)
    drafter, cached = ScriptedDrafter(oracle(LANGUAGE, 1)), CachedModel(real)
    expected = Engine(FakeModel(VOCABULARY, LANGUAGE), [drafter], EAGER).generate(request).tokens
    calls = []
    for _ in range(2):
        engine = Engine(cached, [drafter], EAGER)
        assert engine.generate(request).tokens == expected
        engine.reset()
        calls.append(cached.calls)
    assert calls[0] == calls[1] > 0
    cached.forget()
    assert real.length(0) == 0


def test_the_exact_distribution_is_the_chain_rule() -> None:
    rows = CachedModel(FakeModel(VOCABULARY, LANGUAGE))
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
    exact = exact_distribution(rows, PROMPT, sampling, 10**6, 0.01, np.random.default_rng(0))

    def softmax(tokens: Sequence[int]) -> np.ndarray:
        chances = np.exp(LANGUAGE(tokens).astype(np.float64))
        return np.asarray(chances / chances.sum())

    text = (0, 2, 1)
    chance = np.prod([softmax([*PROMPT, *text[:i]])[text[i]] for i in range(3)])
    cell = exact.cell(text)
    assert cell is not None and exact.null.probs[cell] == pytest.approx(float(chance))
    assert exact.cell((VOCABULARY.size - 1,)) is not None  # an ended text is a cell of its own
    assert exact.cell((0, 2)) is None  # plain decoding would have gone on


# The document


def test_the_json_is_written_whole(sound: Findings, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text("an older one")
    write_certificate(path, certificate_of(sound))
    document = json.loads(path.read_text())
    assert document == as_json(certificate_of(sound)) and document["schema"] == SCHEMA
    assert document["verdict"] == "holds" and document["stand_in"]
    assert all(0 < test["p_value"] <= 1 and not test["rejected"] for test in document["sampled"])
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written is left


def test_what_cannot_be_tested_is_refused() -> None:
    with pytest.raises(SettingError, match="no-residual, argmax-draft, reused-random"):
        check_fault("sloppy")
    with pytest.raises(PromptError, match="there are none"):
        certify(subject_of(), [], QUICK)
    with pytest.raises(PromptError, match="prompt 2"):
        certify(subject_of(), [PROMPT, (0,) * 240], QUICK)
