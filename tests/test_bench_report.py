"""The report of a sweep: one self-contained HTML file, and the tables in the terminal."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from bench_rows import DRAFTS, TARGETS, bench_rows, head_row, skipped
from outrider.cli.bench import print_report
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.lab.bench import figures
from outrider.lab.bench.report.page import write_report
from outrider.lab.bench.report.words import verdict
from outrider.lab.bench.results import Cell, Results, read_rows
from outrider.lab.rows import Row, RunRow

BIG = TARGETS[0]
SMALL = DRAFTS[0]
STORED = Path(__file__).parents[1] / "benchmarks" / "sweep" / "results" / "sweep"
PICTURES = ("acceptance", "costs")
VOID = {"meta", "link", "br", "hr", "img", "input"}
ROW: TypeAdapter[Row] = TypeAdapter(Row)


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str) -> list[Node]:
        return [found for child in self.children for found in ([child] * (child.tag == tag) + child.all(tag))]

    def words(self) -> str:
        return " ".join([self.text, *(child.words() for child in self.children)]).replace("\xa0", " ").strip()


class Tree(HTMLParser):
    """Reads a document whose elements are all closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Node("document", {})]
        self.feed(text)
        self.close()
        assert [node.tag for node in self.open] == ["document"]

    @property
    def root(self) -> Node:
        return self.open[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


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
def tree(html: str) -> Node:
    return Tree(html).root


def section(tree: Node, name: str) -> Node:
    [found] = [part for part in tree.all("details") if part.attributes.get("id") == name]
    return found


def chart(tree: Node) -> list[dict[str, str]]:
    """The rows of every target's chart, with its name."""
    return [
        row | {"target": part.attributes["aria-label"] or ""}
        for part in (tree.all("section") or [tree])
        for table in part.all("table")
        for row in table_rows(table)
    ]


def table_rows(node: Node) -> list[dict[str, str]]:
    """The rows of a table by the heads of its columns."""
    heads = [cell.words() for cell in node.all("thead")[0].all("th")]
    rows = [[cell.words() for cell in row.all("td")] for row in node.all("tbody")[0].all("tr")]
    return [dict(zip(heads, row, strict=True)) for row in rows]


# The file


def test_it_needs_nothing_else(html: str, tree: Node) -> None:
    assert not re.search(r"https?:|<script|javascript:|@import|\bsrc=|\bon[a-z]+=", html)
    assert not tree.all("script")
    assert {link.attributes["href"] for link in tree.all("link")} == {"data:,"}
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert not tree.all("iframe") + tree.all("object") + tree.all("img")


def test_names_within_it_are_unique_and_lead_somewhere(html: str) -> None:
    counts = Counter(re.findall(r'\bid="([^"]+)"', html))
    assert [name for name, count in counts.items() if count > 1] == []
    used = set(re.findall(r'(?:url\(|href="|labelledby=")#?([A-Za-z][\w.-]*)[")]', html)) - {"data"}
    assert used - set(counts) == set()


def test_the_bars_of_a_picture_are_its_numbers(tree: Node) -> None:
    for name in PICTURES:
        found = section(tree, name)
        [table] = found.all("table")
        rows = table_rows(table)
        bars = [node.attributes["style"] for node in table.all("span") if node.attributes["class"] == "bar"]
        values = [float(list(row.values())[-1].removesuffix(" %")) for row in rows]
        lengths = [float(re.findall(r"--value:([\d.]+)%", style or "")[0]) for style in bars]
        assert len(rows) == len(bars) > 2 and max(lengths) == 100
        assert lengths == pytest.approx([100 * value / max(values) for value in values], abs=1.0)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = '<script>alert("1")</script>&$x$ 模型--><b>\'c\'</b><!-- style="d:e" up\x1b[31m\x00\x07'
    odd = renamed(few_rows(2, ("chat",)), SMALL, name)
    html = html_of(odd, tmp_path)
    root = Tree(html).root
    shown = re.sub(r"[\x00-\x1f]", "", name)
    assert shown in {row["draft"] for row in chart(root)}
    assert not root.all("script") + root.all("b") and "{d:e}" not in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", html)


def test_it_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    results = Results.of([head_row([BIG], [], ["chat"], 3)])
    with pytest.raises(SettingError, match="folder does not exist"):
        write_report(results, tmp_path / "gone" / "report.html")
    with pytest.raises(SettingError, match="is a folder"):
        write_report(results, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Its figures


def test_its_tables_hold_the_summarys_figures(rows: list[Row], tree: Node) -> None:
    results = Results.of(rows)
    found = {(r["target"], r["draft"], r["workload"]): r for r in chart(tree)}
    assert len(found) == 2 * 2 * 3
    for (target, draft, workload), row in found.items():
        asked = (target, None if draft == "none" else draft)
        where = None if workload == "all" else workload
        assert row["setting"] == figures.fastest(results, *asked, where)[0]
        speedup = figures.measured_speedup(results, Cell(*asked, row["setting"], where))
        plain = figures.measured_speed(results, Cell(target, None, "plain", where))
        assert speedup
        assert plain
        assert row["speed-up"] == f"{speedup.value:.2f}x"
        assert row["95 %"] == f"{speedup.low:.2f}–{speedup.high:.2f}"
        assert float(row["plain tokens/s"]) == pytest.approx(plain.value, abs=0.05)


def test_it_begins_with_what_to_do_the_command_and_the_bars(html: str, tree: Node) -> None:
    first = tree.all("section")[0]
    said = [node for node in first.all("p") if node.attributes.get("class") == "do"]
    assert said[0].words().startswith(f"On this machine, {BIG} is fastest with ")
    assert first.all("code")[0].words().startswith("outrider run -m ")
    bars = [node.attributes for node in first.all("span") if node.attributes.get("class") == "bar"]
    for row, bar in zip(chart(first), bars, strict=True):
        places = {n: float(v) for n, v in re.findall(r"--(\w+):([\d.]+)%", bar["style"] or "")}
        assert places["low"] <= places["value"] <= places["high"] <= 100
        speedup = float(row["speed-up"].removesuffix("x"))
        assert places["value"] / places["one"] == pytest.approx(speedup, rel=0.01)
    assert html.index('class="do"') < html.index('class="bars"') < html.index("<details")


# Runs that are not complete


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    tree = Tree(html_of([head_row([BIG], [], ["chat"], 3)], tmp_path)).root
    assert "Nothing was measured yet." in tree.words()
    assert not {"acceptance", "costs"} & {node.attributes.get("id") for node in tree.all("details")}


def test_what_was_only_predicted_says_so(tmp_path: Path) -> None:
    rows = few_rows(0)
    tree = Tree(html_of(rows, tmp_path)).root
    assert "By prediction, not yet measured" in tree.words()
    assert {row["95 %"] for row in chart(tree)} == {"predicted"}
    assert "No setting was both predicted and run" in tree.words()
    assert "≈" in printed(rows, 80)


def test_a_pair_that_does_not_line_up_is_named_with_the_reason(tmp_path: Path) -> None:
    rows = [*few_rows(2, ("chat",)), *skipped(BIG, "other-Q8_0")]
    tree = Tree(html_of(rows, tmp_path)).root
    assert "the tokenizers share 12 % of their tokens" in section(tree, "setup").words()
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
    drafted, alone = (figures.fastest(results, BIG, draft, "chat")[1] for draft in (SMALL, None))
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


@pytest.mark.parametrize("repetitions", [1, 2])
def test_a_measured_gain_never_ends_in_plain_decoding(repetitions: int) -> None:
    """The stored sweep, as if it had been repeated less."""
    rows = [row for row in read_rows(STORED) if getattr(row, "repetition", 0) < repetitions]
    results = Results.of(rows)
    said = {target: verdict(results, target) for target in results.targets}
    for target, text in said.items():
        found = [figures.best(results, target, draft, None).speedup for draft in results.columns]
        gains = [gain for gain in found if gain]
        assert any(gain.low > 1.1 for gain in gains) and "plainly" not in " ".join(text), text
        assert ("not settled" in " ".join(text)) == (repetitions == 1), text


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
    where = [(draft, workload) for workload in (None, "chat", "edits") for draft in (None, SMALL)]
    best = [Cell(BIG, d, figures.fastest(results, BIG, d, w)[0], w) for d, w in where]
    said = [row.outcome for row in figures.verdicts(results, best)]
    alone = [figures.outcome(row.speedup, None) for row in figures.verdicts(results, best)]
    assert said != alone
    shown = re.findall(r"[\d.]+–[\d.]+ +(\w+)", printed(rows, 120))
    assert Counter(shown) == Counter(said)
