"""The scripts of benchmarks/policy: what their figures are worked out from."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from harness import Prompt, append, geometric_mean, interval, read_rows, resume
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Draft, DraftWork, Row, StepRecord
from outrider.costs import CallCosts, CallPoint
from outrider.costs.store import PairCosts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import hindsight_bound
from outrider.models.chat import ChatTemplate
from outrider.models.vocab import align
from outrider.policy.state import PolicyState
from outrider.session import Session
from policy import live, prompts, replay, report
from policy.ahead import MAX_MODEL, Found, offers_of
from policy.ahead import Offers as Known
from policy.bench import Bench, Plan, Run
from policy.choices import AUTO, PLAIN, Choice, fixed
from policy.choices import settings as fixed_choices
from policy.curves import WRONG, CallTimes, as_row, read_costs, time_calls
from policy.limit import Informed, informed_limit
from policy.summary import best_single, by_category, measured, server_times

CURVE = CallCosts([CallPoint(n, 0.05 + 0.01 * n) for n in (1, 2, 3, 4, 8, 16, 64)], prefill_token_s=0.002)
DRAFT_CURVE = CallCosts(
    [CallPoint(n, 0.01 + 0.002 * n) for n in (1, 2, 3, 4, 8, 16, 64)], prefill_token_s=0.0005
)
PAIR = PairCosts(CURVE, DRAFT_CURVE)
VOCABULARY = FakeVocabulary("abcd ")
HEAD = {
    "kind": "machine",
    "cpu": "a processor",
    "threads": 2,
    "tokens": 128,
    "told": None,
    "busy": 0,
    "measured": "today",
    "models": {"target.gguf": "abc", "draft.gguf": "def"},
}


def step(
    num_tokens: int = 1,
    verify_s: float = 0.06,
    call_tokens: tuple[int, ...] = (),
    model_s: float = 0.0,
    prefill_s: float = 0.0,
) -> StepRecord:
    read = 50 if prefill_s else 0
    work = DraftWork(len(call_tokens), model_s, int(prefill_s > 0), prefill_s, call_tokens, read)
    return StepRecord(
        request=0,
        step=0,
        kind="decode",
        position=100,
        num_evaluated=num_tokens,
        draft=Draft(),
        num_accepted=0,
        tokens=(1,),
        work=work,
        draft_s=model_s,
        verify_s=verify_s,
        sampling_s=0.0,
        other_s=0.0,
        end_s=0.0,
        batch_tokens=num_tokens,
    )


def row(
    number: int = 1, category: str = "qa", *, plain: Sequence[float] = (8.0, 8.2, 8.1), auto: float = 6.0
) -> dict[str, Any]:
    """A row of live.py: 100 tokens in so many seconds."""

    def runs(seconds: Sequence[float], speedup: float | None) -> list[dict[str, Any]]:
        estimate = speedup and {"speedup": speedup, "low": speedup - 0.1, "high": speedup + 0.1}
        return [{"tokens": 100, "decode_s": s, "estimate": estimate} for s in seconds]

    return {
        "kind": "prompt",
        "id": number,
        "category": category,
        "runs": {
            "plain": runs(plain, None),
            "auto": runs([auto + 1, auto, auto - 1], 1.3),
            "both 4/0": runs([auto - 0.5] * 3, None),
        },
        "equal": True,
        "text_tokens": 100,
        "bound_s": 5.0,
        "replayed_s": {"auto": 6.0, "plain": 8.0, "both 4/0": 5.5, "lookup 2/0": 7.0},
        "calls": {
            "target": [
                {"tokens": 1, "calls": 300, "seconds": 0.08, "ratio": 1.0},
                {"tokens": 4, "calls": 9, "seconds": 0.12, "ratio": 1.0},
            ],
            "draft": [{"tokens": 1, "calls": 9, "seconds": 0.04, "ratio": 1.0}],
        },
    }


# Rows in files


def test_a_run_goes_on_behind_the_rows_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert resume(out, HEAD, ("cpu", "models")) == []
    append(out, {"kind": "prompt", "id": 1, "seconds": 1 / 3})
    with out.open("a") as file:
        file.write('{"kind": "prom')  # killed while it wrote
    assert resume(out, HEAD, ("cpu", "models")) == [{"kind": "prompt", "id": 1, "seconds": 0.3333333}]
    append(out, {"id": 2})
    assert [r.get("id") for r in read_rows(out)] == [None, 1, 2]


def test_a_head_that_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"kind": "mach')
    assert resume(out, HEAD, ("cpu",)) == []
    assert read_rows(out) == [HEAD]


def test_rows_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    resume(out, HEAD, ("cpu",))
    with pytest.raises(SystemExit, match="measured with other cpu: choose another"):
        resume(out, HEAD | {"cpu": "another"}, ("cpu", "threads"))


@pytest.mark.parametrize(("text", "complaint"), [("", "empty"), ("{}\n[1]\n", "line 2"), ("{", "line 1")])
def test_what_is_no_file_of_rows_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit, match=f"some.jsonl.*{complaint}"):
        read_rows(path)


# Prompts


def test_the_first_of_each_category_are_taken_and_no_id_twice() -> None:
    given_ = [{"id": i, "category": "even" if i % 2 == 0 else "odd"} for i in (1, 2, 2, 3, 4, 5, 6)]
    assert [p["id"] for p in prompts.select(given_, 2)] == [1, 2, 3, 4]


def test_the_measuring_set_has_the_edits_and_the_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps({"id": i, "category": "qa", "turns": ["?"]}) + "\n" for i in range(9))
    )
    monkeypatch.setattr(sys, "argv", ["prompts.py", str(source), "--out", str(out), "--first", "3"])
    prompts.main()
    categories = [prompt["category"] for prompt in read_rows(out)]
    assert {name: categories.count(name) for name in categories} == {"qa": 3, "edit": 3, "json": 3}


# Curves


@given(
    scale=st.floats(0.2, 5.0),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    earlier=st.floats(0.2, 5.0),
)
@settings(max_examples=examples(40))
def test_a_machine_that_is_slower_as_a_whole_scales_the_curve(
    scale: float, sizes: list[int], earlier: float
) -> None:
    run, before, now = CallTimes(CURVE), CallTimes(CURVE), CallTimes(CURVE)
    for n in sizes:
        before.note(n, earlier * CURVE.call_s(n, context=50), 50)
        now.note(n, scale * CURVE.call_s(n, context=50), 50)
    run.join(before)
    run.join(now)
    fitted = now.fitted(run)
    for n in (1, 2, 5, 8, 30, 64):
        assert fitted.call_s(n, context=0) == pytest.approx(scale * CURVE.call_s(n, context=0))
    assert fitted.prefill_s(10) == pytest.approx(scale * CURVE.prefill_s(10))


def test_sizes_with_enough_calls_go_by_their_own_times() -> None:
    run, now = CallTimes(CURVE), CallTimes(CURVE)
    for n, factor, calls in ((1, 2.0, 100), (4, 3.0, 5), (6, 1.0, 5), (8, 9.0, 4)):
        for _ in range(calls):
            now.note(n, factor * CURVE.call_s(n, context=0), 0)
    run.join(now)
    fitted = now.fitted(run)
    ratios = {n: fitted.call_s(n, context=0) / CURVE.call_s(n, context=0) for n in (1, 4, 6, 8)}
    assert ratios == pytest.approx({1: 2.0, 4: 3.0, 6: 1.0, 8: 2.0})  # four calls over 8 prove nothing


def test_another_prompts_calls_tell_the_shape_but_not_the_scale() -> None:
    run, before, now = CallTimes(CURVE), CallTimes(CURVE), CallTimes(CURVE)
    for _ in range(20):
        before.note(1, 5.0 * CURVE.call_s(1, context=0), 0)
        now.note(1, CURVE.call_s(1, context=0), 0)
    for _ in range(6):
        before.note(4, 10.0 * CURVE.call_s(4, context=0), 0)
    run.join(before)
    fitted = now.fitted(run)
    assert fitted.call_s(4, context=0) == pytest.approx(2 * CURVE.call_s(4, context=0))
    assert fitted.call_s(1, context=0) == pytest.approx(CURVE.call_s(1, context=0))


def test_prompts_that_met_the_machine_in_different_moods_agree_on_the_shape() -> None:
    run, now = CallTimes(CURVE), CallTimes(CURVE)
    for mood, sizes in ((1.0, [1] * 20), (5.0, [1] * 2 + [4] * 6)):
        prompt = CallTimes(CURVE)
        for n in sizes:
            prompt.note(n, mood * CURVE.call_s(n, context=0), 0)
        run.join(prompt)
    assert now.fitted(run).call_s(4, context=0) == pytest.approx(CURVE.call_s(4, context=0))


def test_the_draft_models_first_call_is_told_from_its_steps() -> None:
    target, draft = CallTimes(CURVE), CallTimes(DRAFT_CURVE)
    one_s, three_s = 2 * DRAFT_CURVE.call_s(1, context=100), 4 * DRAFT_CURVE.call_s(3, context=100)
    records = [
        step(call_tokens=(1, 1), model_s=2 * one_s, prefill_s=0.2),
        step(4, 0.1, call_tokens=(3, 1, 1), model_s=three_s + 2 * one_s),
        step(),
        replace(step(), batch_tokens=5, read_tokens=4),
    ]
    time_calls(records, target, draft)
    assert draft.ratios == {1: [pytest.approx(2.0)], 3: [pytest.approx(4.0)]}
    assert draft.prefill_token_s == [0.004]
    assert {n: len(found) for n, found in target.ratios.items()} == {1: 2, 4: 1}
    assert draft.as_json()[1] == {"tokens": 3, "calls": 1, "seconds": three_s, "ratio": pytest.approx(4.0)}


def test_costs_are_wrong_in_the_way_that_is_said() -> None:
    def told(name: str) -> tuple[CallCosts, CallCosts]:
        pair = WRONG[name](PAIR)
        assert pair.draft is not None
        return pair.target, pair.draft

    longer, _ = told("long calls 2x")
    assert longer.call_s(1, context=0) == pytest.approx(CURVE.call_s(1, context=0))
    assert longer.call_s(8, context=0) == pytest.approx(2 * CURVE.call_s(8, context=0))
    shorter, _ = told("long calls 0.5x")
    assert shorter.call_s(2, context=0) == pytest.approx(CURVE.call_s(1, context=0))  # not below one token
    target, draft = told("draft 0.5x")
    assert target.call_s(8, context=0) == pytest.approx(CURVE.call_s(8, context=0))
    assert draft.call_s(8, context=0) == pytest.approx(DRAFT_CURVE.call_s(8, context=0) / 2)


def test_the_last_costs_of_a_file_of_results_are_read(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    for factor in (1.0, 2.0):
        points = [CallPoint(p.num_tokens, factor * p.seconds) for p in CURVE.points]
        append(path, as_row(PairCosts(CallCosts(points), None)))
    pair = read_costs(path)
    assert pair.draft is None
    assert pair.target.call_s(4, context=0) == pytest.approx(2 * CURVE.call_s(4, context=0))


def test_files_without_costs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    append(path, HEAD)
    with pytest.raises(SystemExit, match="holds no costs"):
        read_costs(path)
    with pytest.raises(SystemExit, match="cannot be read"):
        read_costs(tmp_path / "gone.json")


# Summaries


def test_the_mean_of_a_doubling_and_a_halving_is_no_gain() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    low, high = interval([1.2, 1.3, 1.4, 1.5])
    assert 1.2 <= low < geometric_mean([1.2, 1.3, 1.4, 1.5]) < high <= 1.5
    assert interval([1.3]) == pytest.approx((1.3, 1.3))


def test_a_row_becomes_ratios_of_times_per_token() -> None:
    found = measured(row())
    assert found.speedup == pytest.approx(8.1 / 6)
    assert found.share == pytest.approx(5 / 6)
    assert found.bound_speedup == pytest.approx(8 / 5)
    assert found.speedup_share == pytest.approx(8.1 / 6 / 1.6)
    assert found.regret == pytest.approx(6 / 5.5 - 1)
    assert found.real_regret == pytest.approx(6 / 5.5 - 1)
    assert found.estimate_error == pytest.approx(1.3 / 1.35 - 1)
    assert found.estimate_holds
    assert not found.lost


def test_texts_of_different_lengths_are_compared_by_token() -> None:
    data = row()
    for run in data["runs"]["auto"]:
        run["tokens"] = 50
    assert measured(data).speedup == pytest.approx(8.1 / 12)


@pytest.mark.parametrize(("plain", "lost"), [((8.0, 8.1, 8.2), True), ((8.0, 8.1, 9.5), False)])
def test_a_prompt_is_lost_when_it_is_slow_beyond_the_noise(plain: Sequence[float], lost: bool) -> None:
    assert measured(row(plain=plain, auto=9.0)).lost == lost


def test_categories_come_with_all_of_them_last() -> None:
    found = by_category([measured(row(1, "qa")), measured(row(2, "edit")), measured(row(3, "qa"))])
    assert {name: [p.id for p in group] for name, group in found.items()} == {
        "edit": ["2"],
        "qa": ["1", "3"],
        "all": ["1", "2", "3"],
    }
    assert list(found)[-1] == "all"


def test_the_best_single_setting_is_best_on_the_whole() -> None:
    name, seconds = best_single({"a": [1.0, 9.0], "b": [2.0, 2.0]})
    assert name == "b"
    assert seconds == pytest.approx(2.0)


def test_the_servers_clock_starts_behind_the_first_token() -> None:
    rows = [
        {"setting": "plain", "id": 7, "tokens": 11, "decode_s": seconds} for seconds in (1.0, 3.0, 2.0)
    ] + [{"setting": "plain", "id": 8, "tokens": 1, "decode_s": 0.0}]
    assert server_times(rows) == {"plain": {"7": 0.2}}


# The report


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *files: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, files)])
    report.main()
    return capsys.readouterr().out


def test_the_report_tells_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, server = tmp_path / "live.jsonl", tmp_path / "server.jsonl"
    for entry in (HEAD, as_row(PAIR), row(1, "qa"), row(2, "edit", auto=8.6)):
        append(out, entry)
    append(server, HEAD | {"server": "llama-server 1", "settings": {}})
    for number, times in ((1, (8.0, 7.0)), (2, (8.0, 9.0))):
        for setting, seconds in zip(("plain", "draft"), times, strict=True):
            append(
                server,
                {"kind": "answer", "id": number, "setting": setting, "decode_s": seconds, "tokens": 101},
            )
    text = printed(capsys, monkeypatch, out, server)
    assert "| edit | 1 | 0.942x **below 0.98** |" in text
    assert "| qa | 1 | 1.350x | 1.35–1.35 | 1.35x | 1.60x | 83.3% | 84.4% | 83.3% | +9.1% |" in text
    assert "1: 2 edit 0.94x!" in text
    assert "Best single setting in replay: both 4/0; automatic 0.917x of its speed." in text
    assert "| qa | 1.167x | draft | 1.167x |" in text  # over its best single setting, and over the best here
    assert "| in the run | 80.0 ms | – | – | 1.50 |" in text


def test_a_server_with_another_target_is_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, server = tmp_path / "live.jsonl", tmp_path / "server.jsonl"
    for entry in (HEAD, as_row(PAIR), row()):
        append(out, entry)
    append(server, HEAD | {"models": {"other.gguf": "123"}})
    append(server, {"kind": "answer", "id": 1, "setting": "plain", "decode_s": 1.0, "tokens": 2})
    assert "Against llama" not in printed(capsys, monkeypatch, out, server)
    with pytest.raises(SystemExit, match="no file holds prompts"):
        printed(capsys, monkeypatch, server)


# The informed decoder


def recording_of(answer: Sequence[int], offered: Sequence[int], sure: Sequence[float]) -> Recording:
    offers = Offers(tuple(offered), tuple(sure), {})
    return Recording("1", "qa", (1, 2, 3, 1, 2), tuple(answer), "length", {"draft": offers})


# A plan holds up to 16 tokens of the draft model's, the bound any number: longer ones would differ by design.
answers = st.lists(st.integers(1, 3), min_size=1, max_size=MAX_MODEL)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    answer = draw(answers)
    offered = [token if draw(st.integers(0, 3)) else token + 5 for token in answer]
    sure = [draw(st.floats(0.05, 0.99)) for _ in answer]
    return recording_of(answer, offered, sure)


def told(found: Found) -> list[float]:
    """The chances of somebody who knows what will come."""
    return [float(i < found.right) for i in range(len(found.chances))]


@given(recordings())
@settings(max_examples=examples(40))
def test_to_know_the_outcome_is_the_hindsight_bound(recording: Recording) -> None:
    offers = offers_of(recording, PolicyState(CURVE, {}), "draft", least=0.0)
    certain = Known(
        [{n: replace(f, chances=told(f)) for n, f in found.items()} for found in offers.free],
        [float(right > 0) for right in offers.model_right],
        offers.model_right,
    )
    expected_s, seconds = Informed(recording, certain, CURVE, DRAFT_CURVE).seconds()
    free_s, _ = Informed(recording, certain, CURVE, None).seconds()
    assert seconds == pytest.approx(expected_s)
    read_s = DRAFT_CURVE.prefill_s(len(recording.prompt))
    bound_s = hindsight_bound(recording, CURVE, {"draft": DRAFT_CURVE})
    assert min(free_s, read_s + expected_s) == pytest.approx(bound_s)


@given(recordings())
@settings(max_examples=examples(40))
def test_no_informed_decoder_beats_hindsight(recording: Recording) -> None:
    _, seconds = informed_limit(recording, PolicyState(CURVE, {}), CURVE, ("draft", DRAFT_CURVE))
    assert seconds >= hindsight_bound(recording, CURVE, {"draft": DRAFT_CURVE}) * (1 - 1e-9)


# Replays


def test_a_draft_that_is_always_wrong_is_never_accepted_and_the_target_itself_always() -> None:
    original = recording_of([4, 5, 6, 7, 8, 9, 10, 11] * 3, [1] * 24, [0.5] * 24)
    choice = fixed(4, 0.0, lookup=False)
    for wrong in (True, False):
        changed = replay.with_draft(original, wrong=wrong)
        policy = choice.policy(CURVE, {})
        found = choice.replay(changed, policy, CURVE, {"draft": DRAFT_CURVE})
        drafted = sum(len(record.draft) for record in found.records)
        assert drafted > 0
        assert sum(record.num_accepted for record in found.records) == (0 if wrong else drafted)


def test_settings_differ_in_the_drafters_that_they_ask() -> None:
    names = [choice.name for choice in fixed_choices(True)]
    assert len(set(names)) == len(names) == 37
    original = recording_of([1, 2, 3] * 8, [1, 2, 3] * 8, [0.9] * 24)
    sources = {}
    for choice in (fixed(2, 0, lookup=False), fixed(2, 0, model=False), fixed(2, 0), PLAIN):
        found = choice.replay(original, choice.policy(CURVE, {}), CURVE, {"draft": DRAFT_CURVE})
        sources[choice.name] = {source for record in found.records for source in record.draft.sources}
    assert sources["model 2/0"] == {"draft"}
    assert sources["lookup 2/0"] == {"lookup"}
    assert "lookup" in sources["both 2/0"]
    assert sources["plain"] == set()


def test_the_replays_report_has_every_part() -> None:
    originals = [recording_of([1, 2, 3, 4] * 6, [1, 2, 3, 4] * 6, [0.9] * 24) for _ in range(2)]
    text = "\n".join(replay.report(replay.Scene.of(originals, PAIR)))
    for part in (
        "| auto |",
        "| plain | 1.000x | 1.000x | 1.00x |",
        "| auto, warm |",
        "| bound |",
        "| qa | 2 |",
        "Brier",
        "given draft 2x",
    ):
        assert part in text
    alone = "\n".join(replay.report(replay.Scene.of(originals, PairCosts(CURVE, None))))
    assert "no draft model" in alone
    assert "given draft 2x" not in alone


def test_a_replay_starts_as_a_process_does_unless_it_is_to_learn_on() -> None:
    """The draft model of the first texts is never right; the last one has nothing of that, or all of it."""
    right = recording_of(list(range(40)), list(range(40)), [0.95] * 40)
    texts = [*[replay.with_draft(right, wrong=True)] * 4, right]

    def calls(recordings: Sequence[Recording], *, warm: bool) -> list[int]:
        found, _ = replay.Scene.of(recordings, PAIR, warm=warm).run(AUTO)
        return [sum(record.work.calls for record in each.records) for each in found]

    alone = calls([right], warm=False)
    assert alone[0] > 0
    cold = calls(texts, warm=False)
    assert cold[:4] == cold[:1] * 4
    assert cold[4:] == alone
    assert calls(texts, warm=True)[4:] != alone


def test_what_is_waited_for_includes_that_the_target_reads_the_prompt() -> None:
    original = recording_of([1, 2, 3] * 8, [1, 2, 3] * 8, [0.9] * 24)
    scene = replay.Scene.of([original], PAIR)
    [found], _ = scene.run(fixed(4, 0.0))
    read_s = 0.002 * len(original.prompt)
    assert found.speedup > 1
    assert scene.waited([found]) == [pytest.approx((found.plain_s + read_s) / (found.seconds + read_s))]


# The live measurement, on models of no weight


def endless(tokens: Sequence[int]) -> Row:
    """A language without an end."""
    row = random_logits(VOCABULARY.size, seed=11, order=3)(tokens)
    row[-1] = -100.0
    return row


def bench(plan: Plan, *, with_draft: bool = True) -> Bench:
    target, draft = FakeModel(VOCABULARY, endless), FakeModel(VOCABULARY, endless)
    alignment = align(VOCABULARY, VOCABULARY)
    drafters: list[Drafter] = [SuffixDrafter(), *([ModelDrafter(draft, alignment)] if with_draft else [])]
    template = ChatTemplate("{{ messages[0].content }}", bos="", eos="")
    session = Session(target, drafters, template=template)
    costs = PAIR if with_draft else PairCosts(CURVE, None)
    return Bench(session, alignment if with_draft else None, costs, plan)


@pytest.mark.parametrize("with_draft", [True, False])
def test_a_prompt_is_answered_in_every_way_and_replayed(with_draft: bool) -> None:
    plan = Plan(num_tokens=24, repetitions=2, fixed=[fixed(4, 0.0)])
    found, recording = bench(plan, with_draft=with_draft).measure(Prompt(5, "qa", "abcd"))
    assert json.loads(json.dumps(found)) == found
    assert {mode: len(runs) for mode, runs in found["runs"].items()} == {
        "plain": 2,
        "auto": 2,
        "both 4/0": 2,
    }
    assert found["equal"]
    assert found["divergence"] is None
    assert len(recording.tokens) == found["text_tokens"] == found["runs"]["auto"][0]["tokens"]
    assert all(run["estimate"] is None for run in found["runs"]["plain"])
    if with_draft:
        assert recording.offers["draft"].tokens == recording.tokens  # the draft is the target
        assert found["runs"]["both 4/0"][0]["accepted"]["draft"] > 0
        assert found["calls"]["draft"]
    assert all(seconds >= found["bound_s"] * (1 - 1e-9) for seconds in found["replayed_s"].values())
    assert [run["target_calls"] for run in found["runs"]["plain"]] == [24, 24]
    # Of each answer all calls but the first, which reads the prompt as well, say what a call takes.
    assert sum(call["calls"] for call in found["calls"]["target"] if call["tokens"] == 1) >= 2 * 23
    timed = sum(run["target_calls"] - 1 for runs in found["runs"].values() for run in runs)
    assert sum(call["calls"] for call in found["calls"]["target"]) == timed
    assert measured(found).speedup > 0


def test_each_repetition_is_a_session_that_meets_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = bench(Plan(num_tokens=12, repetitions=2))
    answer = Bench.answer
    met: list[int] = []

    def answering(self: Bench, tokens: tuple[int, ...], mode: Choice, number: int) -> Run:
        done = answer(self, tokens, mode, number)
        if mode is AUTO:
            met.append(id(self.session.engine.policy))
        return done

    monkeypatch.setattr(Bench, "answer", answering)
    measuring.measure(Prompt(1, "qa", "abc abc"))
    measuring.measure(Prompt(2, "qa", "dcb dcb"))
    assert met[:2] == met[2:]
    assert met[0] != met[1]


def test_where_texts_part_it_is_the_policys_own_that_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = bench(Plan(num_tokens=12, repetitions=1))
    answer = Bench.answer

    def answering(self: Bench, tokens: tuple[int, ...], mode: Choice, number: int) -> Run:
        run = answer(self, tokens, mode, number)
        if mode is not PLAIN:
            return run
        other = (*run.completion.tokens[:3], 1 - run.completion.tokens[3] % 2, 0)
        return Run(replace(run.completion, tokens=other), None)

    monkeypatch.setattr(Bench, "answer", answering)
    found, recording = measuring.measure(Prompt(1, "qa", "abc abc"))
    assert not found["equal"]
    assert found["divergence"]["position"] == 3
    assert len(recording.tokens) == found["text_tokens"] == found["runs"]["auto"][0]["tokens"] == 12


@pytest.mark.parametrize(
    ("text", "names"), [("2,4:0,8:0.75", ["both 2/0.65", "both 4/0", "both 8/0.75"]), ("", [])]
)
def test_fixed_settings_are_read(text: str, names: list[str]) -> None:
    assert [choice.name for choice in live.fixed_settings(text)] == names


def test_settings_that_cannot_be_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no probability"):
        live.fixed_settings("4:3")
    with pytest.raises(argparse.ArgumentTypeError, match="too few"):
        live.positive("0")


def test_the_load_beside_a_run_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def starting(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(start(command))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starting)
    with pytest.raises(KeyboardInterrupt), live.load(2):
        assert [process.poll() for process in started] == [None, None]
        raise KeyboardInterrupt
    assert all(process.poll() is not None for process in started)
