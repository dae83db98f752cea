"""What `outrider check` concludes from known costs, known acceptance and known vocabularies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engines import LANGUAGE
from engines import VOCABULARY as LETTERS
from outrider.backends.fake import FakeModel, FakeVocabulary
from outrider.core.contracts import FREE, UNABLE
from outrider.core.notices import collect_notices
from outrider.core.numbers import Interval
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.lab import predict
from outrider.lab.check import (
    DraftNumbers,
    DraftReport,
    DraftVerdict,
    acceptance_of,
    cannot_work,
    judge,
    judge_draft,
    judge_lookup,
    judge_lookup_alone,
    overall,
    tokenizers_of,
)
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFacts
from outrider.lab.predict import expect
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS, Answer, Case, questions_of, record_answers
from outrider.lab.rows import AnswerRow
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import share_of, speedup_of
from outrider.lab.subject import TOO_LONG, DraftOffers, Subject, offered, why_unusable
from outrider.models.gguf import read_card
from outrider.models.vocab import compare
from recordings import FLAT, SMALL, STEEP, DraftKind, TextKind, curve, recording
from timed_models import CallTime, TimedModel
from tiny_gguf import WIDTH, vocabulary, write_tiny

FACTS = ModelFacts("m", "m.gguf", "llama", "Q8_0", 1000, 1000, 0, 0, 1000, 900, 4096)
GREEDY = SamplingParams(temperature=0)


def answer(number: int, text: TextKind, draft: DraftKind | None, length: int = 48) -> Answer:
    """A made-up answer, with the offers of a draft of this quality."""
    made = recording(text, draft, seed=number, length=length)
    case = Case(Workload("made", (), GREEDY, 4 * length, "here"), Prompt(made.id, "x"), 0)
    calls = tuple((1, len(made.prompt) + i, 0.1, 0.0002) for i in range(length))
    row = AnswerRow(
        target="m", workload="made", case=made.id, prompt=made.prompt, tokens=made.tokens, text="",
        finish_reason="length", prefill_s=1.0, decode_s=0.1 * length, own_s=0.0, calls=calls, seed=0,
    )  # fmt: skip
    return Answer(case, row, replace(made, finish_reason="cancelled"), 0.25)


def subject(
    text: TextKind, draft: DraftKind | None, ratios: dict[int, float] = FLAT, count: int = 6
) -> tuple[Subject, list[Answer]]:
    answers = [answer(i, text, draft) for i in range(count)]
    target = LoadedTarget("m", FakeModel(LETTERS, LANGUAGE))
    return Subject(target, FACTS, curve(ratios), tuple(answers)), answers


@pytest.fixture(autouse=True)
def _few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are replayed a few are enough."""
    monkeypatch.setattr(predict, "_LENGTHS", (1, 3, 8))
    monkeypatch.setattr(predict, "_P_MINS", (0.0,))


def judged(known: Subject, costs: CallCosts, answers: list[Answer]) -> DraftReport:
    same = compare(LETTERS, LETTERS)
    offers = DraftOffers(FACTS, "free", same, None, costs, tuple(answers))
    return judge(known, offers)


# Judged on replays


def test_a_cheap_draft_that_is_right_pays() -> None:
    known, answers = subject("random", "target")
    report = judged(known, curve(SMALL, 0.005), answers)
    assert report.verdict.outcome == "pays" and report.verdict.pays
    assert report.acceptance is not None and report.acceptance.rate.value == 1.0
    assert report.step_ratio == pytest.approx(0.05) and report.bytes_ratio == 1.0
    assert report.speedups is not None and report.speedups.llama_cpp_default is not None
    assert report.speedups.auto.value > 1.5
    assert report.speedups.best.value >= report.speedups.auto.value - 1e-9


def test_a_draft_that_is_never_right_does_not_pay() -> None:
    known, answers = subject("random", "wrong")
    report = judged(known, curve(SMALL, 0.03), answers)
    assert report.verdict.outcome == "does not pay" and not report.verdict.pays
    assert "0.30 of a target step" in report.verdict.sentence and "0% are" in report.verdict.sentence


def test_a_draft_as_slow_as_the_target_does_not_pay_however_right_it_is() -> None:
    known, answers = subject("random", "target", STEEP)
    report = judged(known, curve(SMALL, 0.1), answers)
    assert report.verdict.outcome == "does not pay"
    assert "even drafts that are always right are slower" in report.verdict.sentence
    assert any("smaller draft" in advice for advice in report.verdict.advice)


def test_a_draft_that_adds_nothing_to_lookup_does_not_pay() -> None:
    # Of a few answers it cannot be told: the first ones are spent on finding out.
    known, answers = subject("copying", "wrong", count=12)
    assert judge_lookup_alone(known).verdict.outcome == "pays"
    report = judged(known, curve(SMALL, 0.05), answers)
    assert report.verdict.outcome == "does not pay" and "lookup alone gives" in report.verdict.sentence
    assert any(advice.startswith("lookup alone") for advice in report.verdict.advice)


def test_what_is_read_once_counts_for_a_cut_answer_in_its_part() -> None:
    known, answers = subject("random", "target", count=1)
    slow = replace(known, answers=tuple(replace(a, whole_ratio=1.0) for a in answers))
    costs = curve(SMALL, 0.02)
    cut, whole = (expect(s.answers, s.prices(costs)).seconds["model 3"] for s in (known, slow))
    read_s = costs.prefill_s(len(answers[0].row.prompt))
    assert whole[0] - cut[0] == pytest.approx(0.75 * read_s)
    assert expect(known.answers, known.prices(costs)).seconds[PLAIN.name][0] == pytest.approx(
        expect(slow.answers, slow.prices(costs)).seconds[PLAIN.name][0]
    )


# Pairs that cannot work


def test_tokenizers_that_do_not_line_up_are_a_verdict() -> None:
    known, _ = subject("random", None)
    other = FakeVocabulary("wxyz ")
    alignment = compare(LETTERS, other)
    refusal = why_unusable(known, FREE, alignment)
    assert refusal is not None
    report = judge(known, DraftOffers(FACTS, "free", alignment, refusal))
    assert report.verdict.outcome == "cannot work" and report.speedups is None
    assert "do not line up" in report.verdict.sentence and report.tokenizers.report.differences
    assert any("model family" in advice for advice in report.verdict.advice)
    assert report.tokenizers.why_not is not None and report.tokenizers.lost_tokens == 4


def test_models_that_cannot_rewind_are_a_verdict() -> None:
    known, _ = subject("random", None)
    same = compare(LETTERS, LETTERS)
    assert why_unusable(known, FREE, same) is None
    draft = why_unusable(known, UNABLE, same)
    assert draft is not None and "the draft cannot forget" in draft[0]
    recurrent = LoadedTarget("m", FakeModel(LETTERS, LANGUAGE, rewind="none"))
    target = why_unusable(replace(known, target=recurrent), FREE, same)
    assert target is not None and "the target cannot take rejected" in target[0]


def test_a_draft_that_holds_no_prompt_is_a_verdict() -> None:
    known, _ = subject("random", None)
    same = compare(LETTERS, LETTERS)
    draft = LoadedDraft("d", FakeModel(LETTERS, LANGUAGE, context_length=2), same)
    assert offered(known, draft, seconds=1) == ([], len(known.answers))
    report = judge(known, DraftOffers(FACTS, "free", same, TOO_LONG))
    assert report.verdict.outcome == "cannot work" and "the draft's context" in report.verdict.sentence


def test_lost_tokens_are_counted_in_the_answers() -> None:
    first = answer(0, "random", None)
    answers = [replace(first, row=replace_tokens(first.row, (0, 0, 4, 0)))]
    lacking = tokenizers_of(compare(LETTERS, FakeVocabulary("abcd")), LETTERS, answers)
    assert lacking.lost_tokens == 1 and lacking.lost_ratio == 0.25 and not lacking.identical


def replace_tokens(row: AnswerRow, tokens: tuple[int, ...]) -> AnswerRow:
    return row.model_copy(update={"tokens": tokens})


# From numbers to verdicts

CALLS = [1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.1]
STEEP_CALLS = [1.0, 1.8, 2.4, 3.0, 3.6, 4.2, 4.6, 5.0, 5.5]


def numbers(
    over_plain: tuple[float, float, float],
    over_lookup: tuple[float, float, float],
    *,
    lookup: tuple[float, float, float] = (1.0, 0.99, 1.01),
    step: float = 0.1,
    right: float = 0.8,
    needed: float | None = 0.3,
    calls: list[float] = CALLS,
) -> DraftNumbers:
    acceptance = Interval(right, right - 0.05, right + 0.05)
    gains = Interval(*over_plain), Interval(*over_lookup)
    return DraftNumbers(calls, step, acceptance, needed, Interval(*lookup), *gains)


@pytest.mark.parametrize(
    ("over_plain", "over_lookup", "outcome", "pays"),
    [
        ((1.5, 1.3, 1.7), (1.5, 1.3, 1.7), "pays", True),
        ((1.03, 1.02, 1.04), (1.03, 1.02, 1.04), "pays", True),
        ((1.5, 1.3, 1.7), (1.03, 1.01, 1.05), "undecided", True),
        ((1.5, 1.3, 1.7), (1.01, 0.9, 1.1), "undecided", False),
        ((1.01, 0.9, 1.1), (1.5, 1.3, 1.7), "undecided", False),
        ((1.5, 1.3, 1.7), (1.0, 0.99, 1.01), "does not pay", False),
        ((0.8, 0.7, 1.01), (1.5, 1.3, 1.7), "does not pay", False),
        ((0.5, 0.4, 0.6), (0.5, 0.4, 0.6), "does not pay", False),
        ((1.3, 0.0, math.inf), (1.3, 0.0, math.inf), "undecided", True),
    ],
)
def test_a_draft_pays_over_plain_decoding_and_over_lookup(
    over_plain: tuple[float, float, float], over_lookup: tuple[float, float, float], outcome: str, pays: bool
) -> None:
    verdict = judge_draft(numbers(over_plain, over_lookup))
    assert (verdict.outcome, verdict.pays) == (outcome, pays)
    assert "inf" not in verdict.sentence and ("one answer" in verdict.sentence) == math.isinf(over_plain[2])
    assert ("where 1.02x pays" in verdict.sentence) == (outcome == "undecided")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"needed": None, "step": 0.9}, "0.90 of a target step, so that even drafts that are always right"),
        ({"needed": 0.63, "right": 0.41}, "so 63% of its tokens must be right, and 41% are"),
        ({"needed": 0.412, "right": 0.408}, "41% of its tokens are right, which saves too little"),
        ({"over_plain": (1.4, 1.2, 1.6)}, "it adds nothing to lookup"),
        ({"right": 0.5, "needed": 0.45}, "50% of its tokens are right, which saves too little"),
    ],
)
def test_the_reason_why_it_does_not_pay(changes: dict[str, object], reason: str) -> None:
    given: dict[str, object] = {"over_plain": (0.9, 0.8, 1.0), "over_lookup": (0.9, 0.8, 1.0)} | changes
    assert reason in judge_draft(numbers(**given)).sentence  # type: ignore[arg-type]


def test_what_to_try_instead_follows_from_the_numbers() -> None:
    slow = (0.9, 0.8, 1.0)

    def advice(**changes: object) -> str:
        return " | ".join(judge_draft(numbers(slow, slow, **changes)).advice)  # type: ignore[arg-type]

    assert "smaller draft" in advice(step=0.6) and "smaller draft" not in advice(step=0.1)
    assert "another quantization" in advice(calls=STEEP_CALLS) and "another quantization" not in advice()
    assert "closer to the target" in advice(right=0.3) and "closer to the target" not in advice(right=0.9)
    assert "leave the draft out" in advice(lookup=(1.3, 1.1, 1.5))
    assert "--corpus" in advice() and "distill" not in advice()
    undecided = judge_draft(numbers((1.1, 0.9, 1.3), (1.1, 0.9, 1.3)))
    assert any("outrider bench" in line for line in undecided.advice)


@pytest.mark.parametrize(
    ("speedup", "outcome", "pays"),
    [
        ((1.2, 1.05, 1.4), "pays", True),
        ((1.1, 0.9, 1.4), "undecided", True),
        ((1.0, 0.9, 1.4), "undecided", False),
        ((1.0, 0.99, 1.01), "does not pay", False),
    ],
)
def test_lookup_is_judged_against_plain_decoding(
    speedup: tuple[float, float, float], outcome: str, pays: bool
) -> None:
    verdict = judge_lookup(Interval(*speedup), CALLS)
    assert (verdict.outcome, verdict.pays) == (outcome, pays) and "lookup alone" in verdict.sentence


def test_the_verdict_over_all_drafts() -> None:
    lookup_pays, lookup_not = (
        DraftVerdict("pays", True, "L pays"),
        DraftVerdict("does not pay", False, "L does not"),
    )
    good, better = DraftVerdict("pays", True, "good"), DraftVerdict("pays", True, "better")
    bad, broken = DraftVerdict("does not pay", False, "bad"), cannot_work("no", ())
    fast, faster = Interval(1.2, 1.1, 1.3), Interval(1.6, 1.5, 1.7)
    assert overall(lookup_pays, []) == ("L pays", True)
    assert overall(lookup_not, []) == ("L does not", False)
    assert overall(None, [])[1] is False
    assert overall(lookup_not, [("a", good, fast)]) == ("good", True)
    assert overall(lookup_not, [("a", good, fast), ("b", better, faster)]) == ("best with b: better", True)
    assert overall(lookup_pays, [("a", bad, fast)]) == ("bad", True), "lookup is there, whatever the draft"
    assert overall(lookup_not, [("a", bad, fast)]) == ("bad", False)
    assert overall(lookup_pays, [("a", broken, None)])[1] is False, (
        "the pair that was asked about cannot work"
    )
    assert overall(lookup_pays, [("a", broken, None), ("b", bad, fast)])[1] is True
    assert overall(lookup_not, [("a", bad, fast), ("b", bad, fast)])[0].startswith("none of the drafts pays")
    assert overall(lookup_not, [("a", broken, None), ("b", bad, fast)])[0] == "b: bad"
    open_ = DraftVerdict("undecided", False, "open")
    assert overall(lookup_pays, [("a", open_, fast)]) == ("open; L pays", True)
    assert overall(lookup_not, [("a", open_, fast), ("b", bad, fast)])[0].startswith(
        "none of the drafts is likely to pay"
    )


# Figures


def test_intervals_hold_their_value_and_widen_with_spread_and_error() -> None:
    plain = [1.0] * 6
    narrow, wide = (
        speedup_of(plain, [1 / (1.2 + s * d) for d in (-2, -1, -1, 1, 1, 2)]) for s in (0.01, 0.1)
    )
    assert narrow.low < narrow.value < narrow.high and wide.high - wide.low > narrow.high - narrow.low
    shaken = speedup_of(plain, plain, error=0.05)
    assert shaken.low == pytest.approx(math.exp(-0.098), rel=0.01) and shaken.value == 1.0
    share = share_of([1, 3, 2, 4], [4, 4, 4, 4])
    assert 0 <= share.low < share.value == 0.625 < share.high <= 1


def test_acceptance_by_place_counts_only_what_was_met() -> None:
    made = answer(0, "random", "target", length=4).recording
    offers = made.offers["draft"]
    wrong = (offers.tokens[0], offers.tokens[1] + 1, *offers.tokens[2:])
    found = acceptance_of([replace(made, offers={"draft": replace(offers, tokens=wrong)})], "draft")
    # Drafts begin at each of 4 places: right at 3; of the three that reach a second place, right at ...
    assert found.positions == 4 and found.rate.value == 0.75
    assert found.by_position[:3] == (0.75, 0.5, None)


def test_a_token_reads_neither_idle_experts_nor_a_looked_up_embedding(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2moe"):
        card = read_card(write_tiny(tmp_path / f"{arch}.gguf", arch=arch))
        embedding = len(vocabulary()) * WIDTH
        assert card.bytes_per_token == 4 * (card.active_parameters - embedding)
    assert card.active_parameters < card.parameters


# Measured


def constant(seconds: float) -> CallTime:
    return lambda *_call: seconds


def workload(name: str, count: int, text: str = "abcd ") -> Workload:
    prompts = tuple(Prompt(f"{name}{i}", text * 4) for i in range(count))
    return Workload(name, prompts, GREEDY, 128, "here")


def test_answers_end_with_the_time_and_come_from_all_workloads() -> None:
    model = TimedModel(constant(0.1))
    target = LoadedTarget("timed", model)
    questions = questions_of([workload("one", 9), workload("two", 9)], target)
    assert [case.workload.name for case in questions[:4]] == ["one", "two"] * 2
    answers = record_answers(target, questions, curve({1: 1.0}), seconds=30, clock=model.clock)
    assert 4 <= len(answers) < 18 and model.now < 45
    assert {a.row.workload for a in answers} == {"one", "two"}
    assert all(16 <= len(a.row.tokens) <= ANSWER_TOKENS for a in answers)
    assert answers[0].recording.finish_reason == "cancelled"
    assert answers[0].whole_ratio == len(answers[0].row.tokens) / 128


def test_answers_that_end_at_once_are_left_out_and_counted() -> None:
    target = LoadedTarget("timed", TimedModel())
    brief = replace(workload("one", 3), max_tokens=4)
    questions = questions_of([brief, workload("two", 2)], target)
    with collect_notices() as notices:
        answers = record_answers(target, questions, curve({1: 1.0}), seconds=60)
    assert "left out for ending within a few tokens" in notices[0] and ": 3 of the answers" in notices[0]
    assert [a.row.workload for a in answers] == ["two", "two"]
