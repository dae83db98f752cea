"""What `outrider check` concludes from known costs, known acceptance and known vocabularies."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, card
from bench_models import row as model_row
from cli_helpers import TEMPLATE, Call, Outcome, refused
from engines import LANGUAGE
from engines import VOCABULARY as LETTERS
from head_files import write_heads
from outrider.backends.fake import FakeModel, FakeVocabulary
from outrider.backends.gguf import libraries
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.data import Draft, DraftWork, StepRecord
from outrider.core.errors import OutOfMemory
from outrider.core.notices import collect_notices
from outrider.core.numbers import Interval
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts, CallPoint
from outrider.lab import loaded
from outrider.lab.check import (
    DraftReport,
    LookupReport,
    Verdict,
    agreement_of,
    cannot_work,
    judge,
    judge_draft,
    judge_lookup,
    judge_lookup_alone,
    overall,
)
from outrider.lab.loaded import LoadedDraft, LoadedTarget, pair_row
from outrider.lab.models import ModelFacts, ModelFile
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS, questions_of, record_answers, recording_of
from outrider.lab.rows import AnswerRow, CostsRow, ModelRow, OffersRow, PairRow, Role, Row
from outrider.lab.statistics import speedup_of
from outrider.lab.subject import Subject, corrected, corrected_by_drafts
from outrider.models.gguf import ModelCard, read_card
from outrider.models.vocab import compare, tokenizer_id
from outrider.session.loading import load_draft
from recordings import FLAT, SMALL, STEEP, DraftKind, TextKind, curve, recording
from timed_models import CallTime, TimedModel
from tiny_gguf import MERGES, WIDTH, Reduced, vocabulary, write_tiny

pytestmark = pytest.mark.usefixtures("trusted")

FACTS = ModelFacts("m", "m.gguf", "llama", "Q8_0", 1000, 1000, 0, 0, 1000, 900, 4096)
GREEDY = SamplingParams(temperature=0)
TARGET, DRAFT = (ModelFile(name, Path(f"{name}.gguf"), card(name), name) for name in ("m", "d"))


def costs_row(model: str, role: Role, costs: CallCosts) -> CostsRow:
    beside = "m" if role == "draft" else None
    return CostsRow(model=model, role=role, curve=costs.as_json(), own_s={"plain": 0.0002}, beside=beside)


def subject(
    text: TextKind,
    draft: DraftKind | None = None,
    costs: CallCosts | None = None,
    ratios: dict[int, float] = FLAT,
    *,
    count: int = 6,
    length: int = 48,
    limit: int = 192,
) -> Subject:
    """A target that gave made-up answers, each cut off at this length, and a draft of this quality."""
    made = [recording(text, draft, seed=number, length=length) for number in range(count)]
    workload = Workload("made", tuple(Prompt(one.id, "x") for one in made), GREEDY, limit, "here")
    rows: list[Row] = [costs_row("m", "target", curve(ratios))]
    for one in made:
        where: dict[str, Any] = {"target": "m", "workload": "made", "case": one.id}
        answer = AnswerRow(
            prompt=one.prompt, tokens=one.tokens, text="", finish_reason="cancelled", prefill_s=1.0,
            decode_s=0.1 * length, seed=0, **where,
        )  # fmt: skip
        rows.append(answer)
        for offers in one.offers.values():
            said = {name: getattr(offers, name) for name in ("tokens", "confidence", "departures")}
            rows.append(OffersRow(draft="d", seconds=0.1, **said, **where))
    if costs is not None:
        report = compare(LETTERS, LETTERS).report
        rows += [costs_row("d", "draft", costs), pair_row("m", "d", report, identical=True)]
    target = LoadedTarget("m", FakeModel(LETTERS, LANGUAGE))
    return Subject(TARGET, target, [workload], FakeLoader(), rows, rows.append)


# Judged on replays


def test_a_cheap_draft_that_is_right_pays() -> None:
    report = judge(subject("random", "target", curve(SMALL, 0.005)), DRAFT)
    assert report.verdict.outcome == "pays" and report.verdict.pays
    assert (report.agreement, report.positions) == (1.0, 6 * 48)
    assert report.step_ratio == pytest.approx(0.05) and report.bytes_ratio == 1.0 and report.answers == 6
    assert report.over_plain is not None and report.over_plain.value > 1.5 and report.alone is not None


def test_a_draft_as_slow_as_the_target_does_not_pay_however_right_it_is() -> None:
    report = judge(subject("random", "target", curve(SMALL, 0.1), STEEP), DRAFT)
    assert report.verdict.outcome == "does not pay"
    assert "even drafts that are always right are slower" in report.verdict.sentence
    assert any("smaller draft" in advice for advice in report.verdict.advice)


def test_a_draft_that_adds_nothing_to_lookup_does_not_pay() -> None:
    # Of a few answers it cannot be told: the first ones are spent on finding out.
    known = subject("copying", "wrong", curve(SMALL, 0.05), count=12)
    lookup = judge_lookup_alone(known)
    assert lookup.verdict.outcome == "pays" and 0 < lookup.accepted <= lookup.drafted
    report = judge(known, DRAFT)
    assert report.verdict.outcome == "does not pay" and "lookup alone gives" in report.verdict.sentence
    assert any(advice.startswith("lookup alone") for advice in report.verdict.advice)


def test_what_is_read_once_counts_for_a_cut_answer_in_its_part() -> None:
    """Of an answer that would have become four times as long the draft's reading of the prompt counts a
    quarter, and against lookup and plain decoding nothing changes."""
    costs = curve(SMALL, 0.02)
    cut, whole = (judge(subject("random", "target", costs, limit=limit), DRAFT) for limit in (192, 48))
    assert cut.over_plain is not None and whole.over_plain is not None
    assert cut.over_plain.value > 1.03 * whole.over_plain.value and cut.lookup == whole.lookup


# Pairs that cannot work


def test_tokenizers_that_do_not_line_up_are_a_verdict() -> None:
    known = subject("random")
    known.append(pair_row("m", "d", compare(LETTERS, FakeVocabulary("wxyz ")).report))
    report = judge(known, DRAFT)
    assert report.verdict.outcome == "cannot work" and report.over_plain is None
    assert "do not line up" in report.verdict.sentence and report.pair is not None
    assert any("model family" in advice for advice in report.verdict.advice)


class OneDraft(FakeLoader):
    """Loads this model as the draft."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__()
        self._model = model

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        del target
        same = compare(self._model.vocabulary, self._model.vocabulary)
        return LoadedDraft(file.name, self._model, same), model_row(file, "draft")


def test_a_draft_that_holds_no_prompt_is_a_verdict() -> None:
    known = subject("random")
    known.loader = OneDraft(FakeModel(LETTERS, LANGUAGE, context_length=2))
    known.score(DRAFT)
    report = judge(known, DRAFT)
    assert report.verdict.outcome == "cannot work" and "the draft's context" in report.verdict.sentence


def test_a_draft_is_scored_on_a_few_answers_when_the_time_is_up() -> None:
    target = LoadedTarget("m", TimedModel())
    rows: list[Row] = [costs_row("m", "target", curve(FLAT))]
    known = Subject(TARGET, target, [workload("one", 9)], OneDraft(TimedModel()), rows, rows.append)
    for row in record_answers(target, questions_of(known.workloads, target), curve({1: 1.0}), seconds=99):
        known.append(row)
    known.score(DRAFT, seconds=0)
    assert len(known.of(OffersRow)) == 4 and len(known.of(AnswerRow)) == 9


# From numbers to verdicts

CALLS = [1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.1]
STEEP_CALLS = [1.0, 1.8, 2.4, 3.0, 3.6, 4.2, 4.6, 5.0, 5.5]


def judged(
    over_plain: tuple[float, float, float],
    over_lookup: tuple[float, float, float],
    *,
    lookup: tuple[float, float, float] = (1.0, 0.99, 1.01),
    step: float = 0.1,
    right: float = 0.8,
    needed: float | None = 0.3,
    calls: list[float] = CALLS,
) -> Verdict:
    found = DraftReport(
        FACTS, "model", None, 0.5, 0.0, cannot_work(""), step_ratio=step, needed=needed,
        agreement=right, over_plain=Interval(*over_plain),
        over_lookup=Interval(*over_lookup), lookup=Interval(*lookup),
    )  # fmt: skip
    return judge_draft(found, calls)


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
    verdict = judged(over_plain, over_lookup)
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
    assert reason in judged(**given).sentence  # type: ignore[arg-type]


def test_what_to_try_instead_follows_from_the_numbers() -> None:
    slow = (0.9, 0.8, 1.0)

    def advice(**changes: object) -> str:
        return " | ".join(judged(slow, slow, **changes).advice)  # type: ignore[arg-type]

    assert "smaller draft" in advice(step=0.6) and "smaller draft" not in advice(step=0.1)
    assert "another quantization" in advice(calls=STEEP_CALLS) and "another quantization" not in advice()
    assert "closer to the target" in advice(right=0.3) and "closer to the target" not in advice(right=0.9)
    assert "leave the draft out" in advice(lookup=(1.3, 1.1, 1.5))
    assert "--corpus" in advice() and "distill" not in advice()
    undecided = judged((1.1, 0.9, 1.3), (1.1, 0.9, 1.3))
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


def report(name: str, verdict: Verdict, gain: float = 1.2) -> DraftReport:
    return DraftReport(
        replace(FACTS, name=name), "model", None, 0.5, 0.0, verdict, over_plain=Interval(gain, 1.1, 2.0)
    )


def test_the_verdict_over_all_drafts() -> None:
    lookup_pays, lookup_not = (
        LookupReport(9, 5, Interval(1.2, 1.1, 1.3), verdict)
        for verdict in (Verdict("pays", True, "L pays"), Verdict("does not pay", False, "L does not"))
    )
    good, better = (
        report("a", Verdict("pays", True, "good")),
        report("b", Verdict("pays", True, "better"), 1.6),
    )
    bad, broken = report("c", Verdict("does not pay", False, "bad")), report("d", cannot_work("no"))
    unsure = report("e", Verdict("undecided", False, "open"))
    assert overall(lookup_pays, []) == ("L pays", True)
    assert overall(lookup_not, []) == ("L does not", False)
    assert overall(None, [])[1] is False
    assert overall(lookup_not, [good]) == ("good", True)
    assert overall(lookup_not, [good, better]) == ("best with b: better", True)
    assert overall(lookup_pays, [bad]) == ("bad; L pays", True), "lookup is there, whatever the draft"
    assert overall(lookup_not, [bad]) == ("bad; L does not", False)
    assert overall(lookup_pays, [broken])[1] is False, "the pair that was asked about cannot work"
    assert overall(lookup_pays, [broken, bad])[1] is True
    assert overall(lookup_not, [bad, bad])[0].startswith("none of the drafts pays")
    assert overall(lookup_pays, [unsure]) == ("open; L pays", True)
    assert overall(lookup_not, [unsure, bad])[0].startswith("none of the drafts is likely to pay")
    assert overall(lookup_not, [broken, broken])[0].startswith("none of the drafts can work")


# Figures


def test_intervals_hold_their_value_and_widen_with_spread_and_error() -> None:
    plain = [1.0] * 6
    narrow, wide = (
        speedup_of(plain, [1 / (1.2 + s * d) for d in (-2, -1, -1, 1, 1, 2)]) for s in (0.01, 0.1)
    )
    assert narrow.low < narrow.value < narrow.high and wide.high - wide.low > narrow.high - narrow.low
    shaken = speedup_of(plain, plain, error=0.05)
    assert shaken.low == pytest.approx(math.exp(-0.098), rel=0.01) and shaken.value == 1.0


def test_the_agreement_is_over_all_positions() -> None:
    made = recording("random", "target", length=4)
    offers = made.offers["draft"]
    wrong = (offers.tokens[0], offers.tokens[1] + 1, *offers.tokens[2:])
    assert agreement_of([replace(made, offers={"draft": replace(offers, tokens=wrong)})]) == (0.75, 4)


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
    assert {row.workload for row in answers} == {"one", "two"}
    assert all(16 <= len(row.tokens) <= ANSWER_TOKENS for row in answers)
    assert answers[0].finish_reason == "cancelled"
    made = recording_of(target, questions[0], answers[0])
    assert made.whole_ratio == len(answers[0].tokens) / 128


def test_answers_that_end_at_once_are_left_out_and_counted() -> None:
    target = LoadedTarget("timed", TimedModel())
    brief = replace(workload("one", 3), max_tokens=4)
    questions = questions_of([brief, workload("two", 2)], target)
    with collect_notices() as notices:
        answers = record_answers(target, questions, curve({1: 1.0}), seconds=60)
    assert "left out for ending within a few tokens" in notices[0] and ": 3 of the answers" in notices[0]
    assert [row.workload for row in answers] == ["two", "two"]


# Measured curves corrected by the calls and the steps of real answers


def test_recorded_calls_correct_a_curve() -> None:
    measured = CallCosts([CallPoint(1, 0.1), CallPoint(4, 0.2)], prefill_token_s=0.01, window=50)
    calls = [(1, 0, 0.2)] * 3 + [(2, 0, 0.5 * measured.call_s(2, context=0))] * 3 + [(4, 0, 9.0)] * 2
    found = corrected(measured, calls)
    assert found.calls_s(4, context=0)[[0, 1, 3]] == pytest.approx([0.2, 0.0667, 0.1], rel=1e-3)
    assert found.window == 50
    assert found.prefill_s(10) == pytest.approx(0.1)
    assert corrected(measured, [(1, 0, 50.0)] * 3).call_s(1, context=0) == pytest.approx(0.4)
    assert corrected(measured, [(4, 0, 9.0)] * 2) is measured


def test_steps_correct_a_drafts_curve_by_what_the_target_did_not_take_longer() -> None:
    target, draft = CallCosts([CallPoint(1, 0.1)]), CallCosts([CallPoint(1, 0.01)])
    work = DraftWork(calls=2, call_tokens=(1, 1), model_s=0.08, prefill_tokens=4, prefill_s=0.4)
    verify_s = 2 * target.call_s(1, context=0)
    slow = StepRecord(0, 0, "decode", 0, 1, Draft(), 0, (5,), work, 0.12, verify_s, 0.0, 0.0, 0.4)
    reading = replace(slow, verify_s=verify_s / 100, read_tokens=99, read_s=verify_s)
    found = corrected_by_drafts(draft, [reading, slow, reading], target)
    assert found.call_s(1, context=0) == pytest.approx(0.02 + 0.01)
    assert found.prefill_s(10) == pytest.approx(0.5)
    assert corrected_by_drafts(draft, [reading], target) is draft
    assert corrected_by_drafts(draft, [], target) is draft


# The command as its users run it, on tiny models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "draft.gguf", noise=0.3)
    write_tiny(folder / "foreign.gguf", merges=[merge[::-1] for merge in MERGES])
    write_tiny(folder / "recurrent.gguf", arch="mamba")
    write_tiny(folder / "experts.gguf", arch="qwen2moe")
    questions = ["the rain in the street", "a stone at the shore", "there was a king", "on the other hand"]
    prompts = [{"id": str(i), "prompt": text, "max_tokens": 32} for i, text in enumerate(questions)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def check(outrider: Call, monkeypatch: pytest.MonkeyPatch, models: Path) -> Call:
    """The command among the tiny models, whose costs are given: however busy the machine is, every prompt is
    answered and every answer scored."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("OUTRIDER_CACHE", str(models / "cache"))
    costs = {"all": curve(FLAT, 0.001), "last": curve(SMALL, 0.0002)}
    monkeypatch.setattr(loaded, "costs_of", lambda _model, *, rows, **_: costs[rows])
    return partial(outrider, "check", "-t", "1", "--seconds", "3600", "--prompts", "prompts.jsonl")


def as_json(outcome: Outcome) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(outcome.out)
    assert shown["schema"] == "outrider.check/1"
    return shown


def test_a_draft_is_judged_and_the_status_says_what_json_says(check: Call) -> None:
    outcome = check("target.gguf", "draft.gguf", "--json")
    shown = as_json(outcome)
    assert outcome.status == (0 if shown["pays"] else 1) and outcome.notes == ""
    [draft] = shown["drafts"]
    assert draft["model"]["name"] == "draft"
    assert draft["pair"]["identical"] and draft["bytes_ratio"] == 1.0 and draft["step_ratio"] > 0
    assert 0 <= draft["agreement"] <= 1 and draft["positions"] > 0
    assert draft["answers"] == sum(shown["answers"].values()) > 0
    assert draft["over_plain"]["value"] > 0 and draft["over_lookup"]["value"] > 0
    assert draft["verdict"]["outcome"] in ("pays", "undecided", "does not pay")
    assert shown["lookup"]["over_plain"]["value"] > 0 and shown["rewind"] == "free"
    assert sorted(map(int, shown["calls_s"])) == [1, 2, 4, 8, 16] and list(shown["answers"]) == ["prompts"]


def test_what_people_read_fits_eighty_columns(check: Call) -> None:
    outcome = check("target.gguf", "draft.gguf")
    lines = outcome.out.splitlines()
    assert outcome.notes == "" and max(map(len, lines)) <= 80 and "\x1b" not in outcome.out
    assert lines[0] == "target target" and "lookup alone" in lines and "draft draft" in lines
    for name in ("tokenizer", "rewind", "calls", "answers", "step", "verdict"):
        assert any(line.strip().startswith(name) for line in lines), name
    table = next(place for place, line in enumerate(lines) if line.startswith("draft  "))
    assert [line.split("  ")[0] for line in lines[table : table + 3]] == ["draft", "lookup alone", "draft"]


@pytest.mark.slow
def test_without_a_draft_those_that_are_found_are_judged(
    check: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "target.gguf", layers=40, chat_template=TEMPLATE)
    for name in ("first", "second"):
        write_tiny(tmp_path / f"{name}.gguf", layers=4 if name == "first" else 6, noise=0.3)
    write_heads(tmp_path / "target-eagle3.gguf", "eagle3")
    load = load_draft

    def fail(target: Weights, card: ModelCard, options: LoadOptions, **given: Any) -> Weights:
        if card.path.stem == "first":
            raise OutOfMemory(str(card.path), "there is no room")
        return load(target, card, options, **given)

    monkeypatch.setattr(loaded, "load_draft", fail)
    shown = as_json(check(str(tmp_path / "target.gguf"), "--json"))
    assert [draft["model"]["name"] for draft in shown["drafts"]] == ["second"]
    assert "first is skipped: there is no room" in shown["notices"]
    assert [Path(file["reference"]).stem for file in shown["found"]] == ["first", "second", "target-eagle3"]
    text = check(str(tmp_path / "target.gguf")).out
    rows = [line.replace("drafts", "").split()[:2] for line in text.splitlines() if ".gguf (" in line]
    assert rows == [["-", "first.gguf"], ["measured", "second.gguf"], ["-", "target-eagle3.gguf"]]
    named = check(str(tmp_path / "target.gguf"), str(tmp_path / "first.gguf"))
    assert named.status == 2 and "there is no room" in named.err


def test_a_draft_with_another_tokenizer_is_refused_before_anything_is_measured(
    check: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "load_weights", lambda *_, **__: pytest.fail("loaded"))
    outcome = check("target.gguf", "draft.gguf", "foreign.gguf")
    assert outcome.status == 2 and outcome.out == ""
    assert (
        outcome.err.startswith("error: draft: the tokenizers do not line up")
        and "lookup needs no draft" in outcome.err
    )


def test_a_reduced_vocabulary_is_said_to_be_one(check: Call, models: Path, tmp_path: Path) -> None:
    weights = Weights(models / "target.gguf", LoadOptions(threads=1))
    name = tokenizer_id(weights.vocabulary)
    weights.close()
    reduced = write_tiny(tmp_path / "reduced.gguf", noise=0.1, reduced=Reduced(10, name))
    stray = write_tiny(tmp_path / "stray.gguf", noise=0.1, reduced=Reduced(10, "0" * 64))
    text = " ".join(check("target.gguf", str(reduced), str(stray)).out.split())
    assert "reduced: it knows 268 of the target's 289 tokens" in text
    assert "cannot work: its reduced vocabulary was made for another tokenizer" in text


def test_a_model_that_cannot_rewind_is_a_verdict(check: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    outcome = check("recurrent.gguf", "draft.gguf")
    text = " ".join(outcome.out.split())
    assert outcome.status == 1 and "rejected tokens cannot be taken back" in text
    assert "cannot work: the target cannot take" in text
    [draft] = as_json(check("target.gguf", "recurrent.gguf", "--json"))["drafts"]
    assert draft["verdict"]["outcome"] == "cannot work"
    assert "cannot forget tokens" in draft["verdict"]["sentence"]


def test_a_library_that_is_not_here_is_named_in_a_line(check: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    [first, *_] = [library.backend for library in candidates(LoadOptions())]
    missing = "ik" if first == "llama.cpp" else "llama.cpp"
    kept = [library.file for library in candidates(LoadOptions(backend=first))]
    monkeypatch.setattr(libraries, "installed", lambda: tuple(kept))
    alone = check("target.gguf", "--backend", missing)
    assert alone.status == 2 and f"backend {missing}: " in alone.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.gguf",), "nowhere.gguf: "),
        (("target.gguf", "nowhere.gguf"), "nowhere.gguf: "),
        (("*.gguf",), "*.gguf: 5 files match"),
        (("target.gguf", "--prompts", "no.jsonl"), "no.jsonl: "),
        (("target.gguf", "--seconds", "nan"), "--seconds: nan cannot be used: "),
        (("target.gguf", "--backend", "cuda"), "backend: 'cuda' is not known"),
        (("target.gguf", "-c", "32"), "prompts: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(check: Call, arguments: tuple[str, ...], complaint: str) -> None:
    assert refused(check(*arguments)).startswith(complaint)
