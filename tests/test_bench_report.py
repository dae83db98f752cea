"""The report of a sweep: one self-contained HTML file, and the tables in the terminal."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter

from bench_models import DRAFTS, TARGETS, bench_rows, head_row, model_row
from outrider.cli.bench import print_report
from outrider.cli.screen import Screen
from outrider.core.numbers import Interval
from outrider.lab.bench import figures
from outrider.lab.bench.figures import outcome, verdicts
from outrider.lab.bench.report import write_report
from outrider.lab.bench.results import Cell, Results
from outrider.lab.rows import BlockRow, CaseOutcome, HeadRow, PredictionRow, Row, RunRow, SkippedRow
from outrider.lab.statistics import estimate, self_ratio, t_tail

BIG = TARGETS[0]
SMALL = DRAFTS[0]
ROW: TypeAdapter[Row] = TypeAdapter(Row)


def html_of(rows: Sequence[Row], folder: Path) -> str:
    """The report of these rows."""
    path = folder / "report.html"
    write_report(Results.of(rows), path)
    return path.read_text("utf-8")


def printed(rows: Sequence[Row], width: int) -> str:
    console = Screen(file=StringIO(), width=width)
    print_report(Results.of(rows), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def renamed(rows: Sequence[Row], old: str, new: str) -> list[Row]:
    """The same rows with a model or a workload called otherwise."""
    inside = json.dumps(new)[1:-1]
    return [ROW.validate_json(row.model_dump_json().replace(old, inside)) for row in rows]


def few_rows(repetitions: int = 3, workloads: Sequence[str] = ("chat", "edits")) -> list[Row]:
    return bench_rows([BIG], [SMALL, None], workloads, repetitions=repetitions)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return bench_rows(TARGETS, [SMALL, None], ("chat", "edits"))


@pytest.fixture(scope="module")
def html(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    return html_of(rows, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def tree(html: str) -> Element:
    return ElementTree.fromstring(html)


def words(node: Element) -> str:
    return " ".join(" ".join(node.itertext()).split())


def section(tree: Element, name: str) -> Element:
    [found] = tree.findall(f".//details[@id='{name}']")
    return found


def chart(tree: Element) -> list[dict[str, str]]:
    """The rows of every target's chart, with its name."""
    return [
        row | {"target": part.attrib["aria-label"]}
        for part in tree.iter("section")
        for table in part.iter("table")
        for row in table_rows(table)
    ]


def table_rows(node: Element) -> list[dict[str, str]]:
    """The rows of a table by the heads of its columns."""
    heads = [words(cell) for cell in node.iter("th")]
    return [
        dict(zip(heads, map(words, row), strict=True))
        for row in node.iter("tr")
        if row.find("td") is not None
    ]


def bars(node: Element) -> list[dict[str, float]]:
    """The places of each bar in it, in percent."""
    styles = [bar.attrib["style"] for bar in node.findall(".//span[@class='bar']")]
    return [{n: float(v) for n, v in re.findall(r"--(\w+):([\d.]+)%", style)} for style in styles]


# The file


def test_it_needs_nothing_else(html: str, tree: Element) -> None:
    assert not re.search(r"https?:|<script|javascript:|@import|url\(|\bsrc=|\bon[a-z]+=", html)
    assert {link.attrib["href"] for link in tree.iter("link")} == {"data:,"}
    assert not {node.tag for node in tree.iter()} & {"script", "iframe", "object", "img"}


def test_the_bars_of_a_picture_are_its_numbers(tree: Element) -> None:
    found = section(tree, "costs")
    values = [float(list(row.values())[-1]) for row in table_rows(found)]
    lengths = [places["value"] for places in bars(found)]
    assert len(lengths) > 2 and max(lengths) == 100
    assert lengths == pytest.approx([100 * value / max(values) for value in values], abs=1.0)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = '<script>alert("1")</script>&$x$ 模型--><b>\'c\'</b><!-- style="d:e" up\x1b[31m\x00\x07'
    odd = renamed(few_rows(2, ("chat",)), SMALL, name)
    html = html_of(odd, tmp_path)
    root = ElementTree.fromstring(html)
    shown = re.sub(r"[\x00-\x1f]", "", name)
    assert shown in {row["draft"] for row in chart(root)}
    assert not {node.tag for node in root.iter()} & {"script", "b"}
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", html)


# Its figures


def test_its_tables_hold_the_summarys_figures(rows: list[Row], tree: Element) -> None:
    results = Results.of(rows)
    found = {(r["target"], r["draft"], r["workload"]): r for r in chart(tree)}
    assert len(found) == 2 * 2 * 3
    for (target, draft, workload), row in found.items():
        where = None if workload == "all" else workload
        best = figures.best(results, target, None if draft == "none" else draft, where)
        speedup, plain = best.speedup, figures.measured_speed(results, best.cell.plain)
        assert row["setting"] == best.cell.setting and speedup is not None and plain is not None
        assert row["speed-up"] == f"{speedup.value:.2f}x"
        assert row["95 %"] == f"{speedup.low:.2f}–{speedup.high:.2f}"
        assert float(row["plain tokens/s"]) == pytest.approx(plain.value, abs=0.05)


def test_it_begins_with_what_to_do_the_command_and_the_bars(html: str, tree: Element) -> None:
    first = next(tree.iter("section"))
    assert words(first.findall("p")[0]).startswith(f"On this machine, {BIG} is fastest with ")
    assert words(next(first.iter("code"))).startswith("outrider run -m ")
    for row, places in zip(chart(first), bars(first), strict=True):
        assert places["low"] <= places["value"] <= places["high"] <= 100
        speedup = float(row["speed-up"].removesuffix("x"))
        assert places["value"] / places["one"] == pytest.approx(speedup, rel=0.01)
    assert html.index('class="do"') < html.index('class="bars"') < html.index("<details")


# Runs that are not complete


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    tree = ElementTree.fromstring(html_of([head_row([BIG], [], ["chat"], 3)], tmp_path))
    assert "Nothing was measured yet." in words(tree) and not tree.findall(".//details[@id='costs']")


def test_what_was_only_predicted_says_so(tmp_path: Path) -> None:
    rows = few_rows(0)
    tree = ElementTree.fromstring(html_of(rows, tmp_path))
    assert "By prediction, not yet measured" in words(tree)
    assert {row["95 %"] for row in chart(tree)} == {"predicted"}
    assert "No setting was both predicted and run" in words(tree)
    assert "≈" in printed(rows, 80)


def test_a_pair_that_does_not_line_up_is_named_with_the_reason(tmp_path: Path) -> None:
    why = "the tokenizers share 12 % of their tokens"
    rows = [*few_rows(2, ("chat",)), SkippedRow(what="other-Q8_0", why=why)]
    tree = ElementTree.fromstring(html_of(rows, tmp_path))
    assert why in words(section(tree, "setup"))
    assert "other-Q8_0" in printed(rows, 80)
    assert "other-Q8_0" not in {row["draft"] for row in chart(tree)}


# What it advises


def slower(rows: Sequence[Row], factor: float, workload: str = "") -> list[Row]:
    """The same rows, with speculation slower, under one workload or all."""
    return [
        row.model_copy(update={"decode_s": row.decode_s * factor})
        if isinstance(row, RunRow) and row.setting != "plain" and workload in ("", row.workload)
        else row
        for row in rows
    ]


WINNER = "with the draft small-Q8_0 and the setting “auto”, "


@pytest.mark.parametrize(
    ("rows", "said", "unsaid"),
    [
        (few_rows(), f"On this machine, big-Q8_0 is fastest {WINNER}", "plainly"),
        (slower(few_rows(), 8), "decode big-Q8_0 plainly: the best that was tried", "is fastest"),
        (
            slower(few_rows(), 8, "chat"),
            r"gains nothing over all workloads .* but it does on edits \(.*, [\d.]+x\)",
            "plainly",
        ),
        (
            [row for row in few_rows() if not (isinstance(row, RunRow) and row.draft)],
            f"By prediction, not yet measured, big-Q8_0 is fastest {WINNER}.*It has not run for real: run "
            "the same command again, with more --minutes.*outrider run -m .*/big-Q8_0.gguf --policy lookup",
            "plainly",
        ),
    ],
    ids=["a winner", "none", "on one workload", "the best was only predicted"],
)
def test_the_verdict_says_what_to_run(rows: list[Row], said: str, unsaid: str) -> None:
    text = " ".join(printed(rows, 200).split())
    assert re.search(said, text) and unsaid not in text


def test_the_verdict_prefers_what_is_faster_for_certain() -> None:
    """Beside a draft that is faster on average by one case alone."""
    rows = few_rows(workloads=("chat",))
    plain = {(r.block, r.case): r.decode_s for r in rows if isinstance(r, RunRow) and r.setting == "plain"}
    for place, row in enumerate(rows):
        if isinstance(row, RunRow) and row.setting != "plain":
            number = int(row.case[-1])
            ratio = 1.5 + 0.01 * number if row.draft is None else 20 if number == 0 else 0.9
            rows[place] = row.model_copy(update={"decode_s": plain[row.block, row.case] / ratio})
    results = Results.of(rows)
    drafted, alone = (figures.best(results, BIG, draft, "chat").speedup for draft in (SMALL, None))
    assert drafted is not None and alone is not None and drafted.value > alone.value > 1
    text = " ".join(printed(rows, 200).split())
    assert "is fastest with no draft model" in text
    assert "plain decoding over chat (from" in text


def test_what_ran_once_is_the_likely_winner_and_not_plain_decoding() -> None:
    rows = few_rows(1)
    text = " ".join(printed(rows, 200).split())
    best = figures.measured_speedup(Results.of(rows), Cell(BIG, SMALL, "auto", None))
    assert best is not None and best.low > 1
    said = f"{best.value:.2f}x ({best.low:.2f} to {best.high:.2f}) plain decoding over all workloads"
    likely = "big-Q8_0 is most likely fastest with the draft small-Q8_0 and the setting “auto”"
    assert f"On this machine, {likely}, {said}" in text
    assert "each prompt ran once, so the machine's noise is unknown. Run the same command with " in text
    assert "--repetitions 4 to settle it" in text and "plainly" not in text
    assert "outrider run -m models/big-Q8_0.gguf -md models/small-Q8_0.gguf" in text


# The terminal


@pytest.mark.parametrize("width", [80, 200])
def test_the_terminals_tables_fit(rows: list[Row], width: int) -> None:
    text = printed(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    results = Results.of(rows)
    for target in TARGETS:
        assert target in text
        best = figures.measured_speedup(results, Cell(target, SMALL, "auto", None))
        assert best
        assert f"{best.value:.2f}x" in text
        assert f"{best.low:.2f}–{best.high:.2f}" in text


def test_long_names_do_not_push_the_figures_out() -> None:
    long = renamed(few_rows(), SMALL, "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M-imatrix-abliterated")
    text = printed(long, 80)
    assert max(len(line) for line in text.splitlines() if "outrider run" not in line) <= 80
    assert re.search(r"all +16\.\d +auto +[\d.]+x +[\d.]+–[\d.]+ +faster", text)


def test_verdicts_have_to_hold_among_all_that_the_table_shows() -> None:
    """What ran once cannot be told from noise, whatever its interval over other prompts."""
    rows = bench_rows([BIG], [SMALL, None], ("chat", "edits"), cases=2, repetitions=1)
    results = Results.of(rows)
    best = figures.bests_of(results, BIG)
    said = [one.outcome for one in best]
    assert said != [figures.outcome(one.speedup, None) for one in best if one.speedup]
    shown = re.findall(r"[\d.]+–[\d.]+ +(\w+)", printed(rows, 120))
    assert Counter(shown) == Counter(said)


# Figures

Floats = npt.NDArray[np.float64]
CERTAIN = ("faster", "slower")
HEAD = HeadRow(started="2026-01-01T00:00:00Z", machine={}, plan={"repetitions": 3})


def run(setting: str, decode_s: float, **fields: Any) -> RunRow:
    values: dict[str, Any] = {
        "block": "w/0",
        "target": "t",
        "draft": "d" if setting.startswith(("model", "auto")) else None,
        "setting": setting,
        "workload": "w",
        "case": "1",
        "repetition": 0,
        "order": 0,
        "tokens": 100,
        "prefill_s": 1.0,
        "decode_s": decode_s,
        "target_calls": 100,
        "draft_calls": 0,
        "drafted": (),
        "accepted": (),
    }
    return RunRow(**(values | fields))


def block(name: str = "w/0", workload: str = "w", repetition: int = 0) -> BlockRow:
    return BlockRow(block=name, workload=workload, target="t", repetition=repetition)


def prediction(setting: str, seconds: Mapping[str, float]) -> PredictionRow:
    """Of plain decoding's 10 s."""
    counts: dict[str, Any] = {
        "target_calls": 40,
        "draft_calls": 50,
        "drafted": (40, 20),
        "accepted": (30, 10),
    }
    cases = tuple(
        CaseOutcome(case=case, tokens=100, seconds=took, plain_s=10.0, **counts)
        for case, took in seconds.items()
    )
    return PredictionRow(setting=setting, cases=cases, target="t", draft="d", workload="w")


def results(*rows: Row) -> Results:
    return Results.of([HEAD, *rows])


Times = Mapping[str, Mapping[str, Sequence[float]]]
"""By case and setting the decoding seconds of each repetition."""


def timed(times: Times, workload: str = "w") -> list[Row]:
    """All of it in complete blocks."""
    rows: list[Row] = []
    for repetition in range(min(len(found) for case in times.values() for found in case.values())):
        where: dict[str, Any] = {
            "block": f"{workload}/{repetition}",
            "workload": workload,
            "repetition": repetition,
        }
        for case, found in times.items():
            rows += [run(setting, found[setting][repetition], case=case, **where) for setting in found]
        rows.append(block(f"{workload}/{repetition}", workload, repetition))
    return rows


def two_settings(ratios: Mapping[str, Sequence[float]], workload: str = "w") -> list[Row]:
    """Plain decoding at 0.1 s a token and `model 3`, so much faster in each repetition of each case."""
    times = {
        case: {"plain": [10.0] * len(found), "model 3": [10 / ratio for ratio in found]}
        for case, found in ratios.items()
    }
    return timed(times, workload)


# Which rows count


def test_only_complete_blocks_count() -> None:
    rows: list[Row] = [run("plain", 10.0), block(), run("plain", 99.0, block="w/1")]
    assert [row.decode_s for row in results(*rows).runs] == [10.0]
    assert results(run("plain", 10.0)).runs == ()


def test_what_ran_in_a_first_beginning_alone_does_not_count() -> None:
    """The block's clock tells where it began again."""
    first = [run("lookup 8", 9.0, started_s=0.1), run("plain", 99.0, started_s=5.0)]
    again = [run("plain", 10.0, started_s=0.1), run("model 3", 5.0, started_s=11.0)]
    found = results(*first, *again, block())
    assert [(row.setting, row.decode_s) for row in found.runs] == [("plain", 10.0), ("model 3", 5.0)]


def test_the_later_of_two_rows_about_the_same_counts() -> None:
    found = results(prediction("auto", {"1": 9.0}), prediction("auto", {"1": 4.0}))
    assert [row.cases[0].seconds for row in found.predictions] == [4.0]


# Speed


def test_a_speed_up_is_the_geometric_mean_of_the_cases_medians() -> None:
    found = results(*two_settings({"1": [2.0, 2.0, 9.0], "2": [8.0, 8.0, 8.0]}))
    interval = figures.measured_speedup(found, Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(4.0)
    assert (interval.cases, interval.repetitions) == (2, 3)
    speed = figures.measured_speed(found, Cell("t", "d", "model 3", "w"))
    plain = figures.measured_speed(found, Cell("t", None, "plain", "w"))
    assert speed is not None and plain is not None
    assert [speed.value, plain.value] == pytest.approx([40.0, 10.0])


def test_only_blocks_that_have_both_are_compared() -> None:
    rows = two_settings({"1": [2.0, 2.0]})
    rows += [run("plain", 1000.0, block="w/9"), block("w/9")]
    interval = figures.measured_speedup(results(*rows), Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(2.0) and interval.repetitions == 2


def test_over_all_workloads_is_over_each_of_them_or_nothing() -> None:
    both = results(*two_settings({"1": [1.0], "2": [1.0], "3": [1.0]}, "a"), *two_settings({"1": [4.0]}, "b"))
    pooled = figures.measured_speedup(both, Cell("t", "d", "model 3", None))
    assert pooled is not None and pooled.value == pytest.approx(2.0)
    half = results(
        *two_settings({"1": [4.0]}, "b"), run("plain", 10.0, block="a/0", workload="a"), block("a/0", "a")
    )
    assert figures.measured_speedup(half, Cell("t", "d", "model 3", None)) is None
    assert figures.measured_speedup(half, Cell("t", "d", "model 3", "b")) is not None


def test_the_best_setting_is_measured_before_predicted() -> None:
    measured = two_settings({"1": [2.0], "2": [2.0]})
    promising = prediction("auto", {"1": 1.0, "2": 1.0})
    models = [
        model_row(TARGETS[0], "target").model_copy(update={"model": "t"}),
        model_row(DRAFTS[0], "draft").model_copy(update={"model": "d"}),
    ]
    for rows, said in (([*measured, promising], ("model 3", True)), ([promising], ("auto", False))):
        best = figures.best(results(*rows, *models), "t", "d", "w")
        assert (best.cell.setting, best.is_measured) == said and best.speedup is not None
    assert figures.best(results(promising, *models), "t", None, "w").speedup is None


# Prediction


def test_the_error_of_predicted_speed_ups() -> None:
    """The machine is a quarter slower than its curve; one of two speed-ups is predicted right."""
    rows: list[Row] = [
        run("plain", 12.5),
        run("model 3", 6.25),
        run("model 4", 5.0),
        block(),
        prediction("model 3", {"1": 5.0}),
        prediction("model 4", {"1": 5.0}),
    ]
    count, median = figures.prediction_error(results(*rows)) or (0, 0.0)
    assert count == 2 and median == pytest.approx(0.1)


# Intervals


def measured(
    rng: np.random.Generator, cases: int, repetitions: int, ratio: float, between: float, within: float
) -> list[tuple[Floats, Floats]]:
    """Cases whose speed-ups spread by `between` around `ratio`, requests with noise `within` (both log)."""
    found = []
    for _ in range(cases):
        own = ratio * math.exp(between * rng.standard_normal())
        noise = np.exp(within * rng.standard_normal((2, repetitions)))
        found.append((0.05 * noise[0], 0.05 / own * noise[1]))
    return found


def test_repetitions_are_drawn_in_pairs() -> None:
    """A machine that changes its pace between blocks does so for both."""
    pace = np.array([1.0, 1.5, 0.7, 2.0, 0.9])
    together = [(0.05 * pace, 0.025 * pace)] * 6
    pairs = estimate([together])
    assert pairs.high - pairs.low < 1e-9


@pytest.mark.parametrize(("cases", "between", "within"), [(6, 0.2, 0.03), (8, 0.02, 0.05), (16, 0.2, 0.02)])
def test_intervals_hold_the_truth_as_often_as_they_say(cases: int, between: float, within: float) -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(200):
        interval = estimate([measured(rng, cases, 4, 1.3, between, within)])
        inside += interval.low <= 1.3 <= interval.high
    assert inside / 200 >= 0.925  # more where repetitions' noise is most of it: it is drawn on both levels


def test_students_t() -> None:
    known = {(12.706, 1): 0.05, (4.303, 2): 0.05, (2.365, 7): 0.05, (2.228, 10): 0.05, (1.0, 1): 0.5}
    for (statistic, degrees), tail in known.items():
        assert t_tail(statistic, degrees) == pytest.approx(tail, abs=2e-4)


def test_plain_against_itself() -> None:
    rng = np.random.default_rng(5)
    quiet = [[0.05 * np.exp(0.001 * rng.standard_normal(4)) for _ in range(8)]]
    loud = [[0.05 * np.exp(0.1 * rng.standard_normal(4)) for _ in range(8)]]
    narrow, wide = self_ratio(quiet), self_ratio(loud)
    assert narrow is not None and wide is not None
    assert narrow.value == 1 and narrow.low * narrow.high == pytest.approx(1)
    assert narrow.high < 1.002 and 1.01 < wide.high < 1.2
    assert self_ratio([[np.array([0.05])]]) is None and self_ratio([]) is None


@pytest.mark.parametrize(
    ("speedup", "noise", "said"),
    [
        ((1.5, 1.4, 1.6), None, "faster"),
        ((0.8, 0.7, 0.9), (1.0, 0.98, 1.02), "slower"),
        ((1.1, 0.99, 1.2), None, "unsettled"),
        ((1.04, 0.99, 1.1), None, "tie"),
        ((1.03, 1.02, 1.04), (1.0, 0.95, 1.05), "tie"),
        ((1.06, 1.02, 1.1), (1.0, 0.95, 1.05), "faster"),
    ],
)
def test_a_result_is_a_tie_within_the_noise_or_near_1(
    speedup: tuple[float, float, float], noise: tuple[float, float, float] | None, said: str
) -> None:
    assert outcome(Interval(*speedup), Interval(*noise) if noise else None) == said


SETTINGS = [f"model {n}" for n in range(1, 11)]


def noisy_table(
    seed: int,
    true_ratio: float = 1.0,
    between: float = 0.0,
    within: float = 0.03,
    cases: int = 6,
    repetitions: int = 3,
) -> Results:
    """Ten settings under two workloads, all as fast as plain decoding but the first, and noise:
    of each case `between`, of each request `within` (log)."""
    rng = np.random.default_rng(seed)

    def times(setting: str) -> Sequence[float]:
        own = 0.0 if setting == "plain" else between * rng.standard_normal()
        ratio = true_ratio if setting == SETTINGS[0] else 1.0
        found: list[float] = (5 / ratio * np.exp(own + within * rng.standard_normal(repetitions))).tolist()
        return found

    rows: list[Row] = []
    for workload in ("a", "b"):
        table = {str(i): {name: times(name) for name in ("plain", *SETTINGS)} for i in range(cases)}
        rows += timed(table, workload)
    return results(*rows)


@pytest.mark.parametrize(("tables", "within"), [pytest.param(100, 0.01, marks=pytest.mark.slow), (30, 0.05)])
def test_tables_of_nothing_but_noise_are_called_ties(tables: int, within: float) -> None:
    found = [verdicts(noisy_table(seed, within=within)) for seed in range(tables)]
    assert sum(any(v.outcome in CERTAIN for v in table) for table in found) / tables <= 0.07


def test_a_result_that_other_prompts_could_turn_round_is_not_certain() -> None:
    """Prompts differ, the machine hardly: every figure is firm on these prompts, few are on others."""
    tables = [noisy_table(seed, between=0.1, within=0.002) for seed in range(20)]
    cells = [(v, figures.noise(table, "t", v.cell.workload)) for table in tables for v in verdicts(table)]
    loud = [n and v.speedup and not n.low <= v.speedup.value <= n.high for v, n in cells]
    assert sum(map(bool, loud)) / len(cells) > 0.7
    assert sum(v.outcome in CERTAIN for v, _ in cells) / len(cells) < 0.08


@pytest.mark.parametrize("cases", [1, 2])
def test_few_prompts_and_repetitions_are_enough_for_a_large_difference(cases: int) -> None:
    """The noise is known from all cells of a table, not from two numbers."""
    table = verdicts(noisy_table(7, within=0.03, true_ratio=2.0, cases=cases, repetitions=2))
    assert {v.outcome for v in table if v.cell.setting == "model 1"} == {"faster"}
    assert not [v for v in table if v.cell.setting != "model 1" and v.outcome in CERTAIN]


def test_what_ran_once_is_not_certain() -> None:
    table = verdicts(noisy_table(7, within=0.03, true_ratio=2.0, repetitions=1))
    assert {v.outcome for v in table if v.cell.setting == "model 1"} == {"unsettled"}
    assert {v.outcome for v in table if v.cell.setting != "model 1"} == {"tie"}


def test_a_true_difference_is_found_among_nineteen_ties() -> None:
    shown = [(v.cell.setting, v.outcome) for v in verdicts(noisy_table(1000, true_ratio=1.5))]
    assert shown.count(("model 1", "faster")) == 2 and sum(said == "tie" for _, said in shown) == 18
    [slow] = {v.outcome for v in verdicts(noisy_table(1001, true_ratio=0.7)) if v.cell.setting == "model 1"}
    assert slow == "slower"
