"""Two runs compared, and a run exported."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench_rows import bench_rows
from outrider.core.errors import InputError, SettingError
from outrider.lab.bench.changes import changes, differences, print_changes
from outrider.lab.bench.export import COLUMNS, export
from outrider.lab.bench.results import Results
from outrider.lab.rows import AnswerRow, BlockRow, HeadRow, Row
from test_bench_statistics import run_row
from test_bench_summary import model

HEAD = HeadRow(started="2026-01-01T00:00:00Z", machine={"cpu": "x", "commit": "1"}, plan={"seed": 0})


def sweep(
    seed: int,
    ratios: Sequence[float] = (1.5, 1.0, 0.7),
    pace: float = 1.0,
    head: HeadRow = HEAD,
    fingerprint: str = "t",
    repetitions: int = 4,
) -> Results:
    """Eight cases whose speed-ups lie around these, one for each setting; all times are times `pace`."""
    rng, cases = np.random.default_rng(seed), np.random.default_rng(0).standard_normal(8)
    rows: list[Row] = [head, model("t", "target", 1).model_copy(update={"fingerprint": fingerprint})]
    for repetition in range(repetitions):
        block = f"w/{repetition}"
        for case, own in enumerate(cases):
            for i, ratio in enumerate((1.0, *ratios)):
                setting = f"model {i}" if i else "plain"
                speedup = ratio * math.exp(0.2 * own) if i else 1.0
                seconds = 5 * pace / speedup * math.exp(0.01 * rng.standard_normal())
                rows.append(run_row(block, setting, "w", str(case), repetition, seconds))
        rows.append(
            BlockRow(block=block, target="t", workload="w", repetition=repetition, hiccups=0, calls=1)
        )
    return Results.of(rows)


def said(before: Results, after: Results) -> dict[str, str]:
    return {change.cell.setting: change.outcome for change in changes(before, after)}


def printed(before: Results, after: Results) -> str:
    console = Console(file=StringIO(), width=120)
    print_changes(before, after, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_two_runs_of_the_same_have_not_changed() -> None:
    wrong = sum(
        "faster" in t or "slower" in t for t in (said(sweep(s), sweep(s + 50)).values() for s in range(20))
    )
    assert wrong <= 2
    text = printed(sweep(1), sweep(2))
    assert text.strip() == "No change beyond the noise: 4 figures."


def test_what_changed_is_said() -> None:
    before, after = sweep(1), sweep(2, (1.2, 1.0, 0.8))
    assert said(before, after) == {"plain": "tie", "model 1": "slower", "model 2": "tie", "model 3": "faster"}
    [slower] = [change for change in changes(before, after) if change.cell.setting == "model 1"]
    assert slower.figure == "speed-up" and slower.ratio.value == pytest.approx(0.8, rel=0.02)
    assert slower.ratio.low < 0.8 < slower.ratio.high and slower.before.value > slower.after.value
    text = printed(before, after)
    assert "model 1" in text and "-2" in text and "model 2" not in text and "In the rest no change" in text


def test_of_a_rest_that_is_not_there_nothing_is_said() -> None:
    text = printed(sweep(1, ()), sweep(2, (), pace=0.5))
    assert "tokens/s" in text and "change beyond the noise" not in text
    assert printed(sweep(1, ()), sweep(2, ())).strip() == "No change beyond the noise: 1 figure."


def test_plain_speed_changes_only_beyond_what_processes_differ_by() -> None:
    assert said(sweep(1), sweep(2, pace=1.06))["plain"] == "tie"
    found = [change for change in changes(sweep(1), sweep(2, pace=0.7)) if change.cell.setting == "plain"]
    assert [(change.figure, change.outcome) for change in found] == [("tokens/s", "faster")]
    assert found[0].ratio.value == pytest.approx(1 / 0.7, rel=0.02)


def test_runs_may_have_been_repeated_differently_often() -> None:
    assert set(said(sweep(1, repetitions=3), sweep(2, repetitions=6)).values()) == {"tie"}


def test_what_makes_runs_hard_to_compare_is_said() -> None:
    head = HeadRow(started="2026", machine={"cpu": "y", "commit": "1"}, plan={"seed": 0, "prompts": 4})
    other = sweep(2, (1.5,), head=head, fingerprint="u")
    found = differences(sweep(1), other)
    assert found == [
        "machine, cpu: x / y",
        "plan, prompts: none / 4",
        "model t: another file (t / u)",
        "only in the first: t × d × model 2 × w, t × d × model 3 × w",
    ]
    assert "note: machine, cpu: x / y" in printed(sweep(1), other)
    assert differences(sweep(1), sweep(2)) == []


def test_cases_of_one_name_that_ask_something_else_are_counted() -> None:
    rows = bench_rows(targets=("big-Q8_0",), drafts=(None,), workloads=("chat", "edits"), cases=2)
    answers = [row for row in rows if isinstance(row, AnswerRow)]
    other = [row.model_copy(update={"prompt": (1,)}) if row.case == "chat-1" else row for row in answers]
    before, after = Results.of([HEAD, *answers]), Results.of([HEAD, *other])
    assert differences(before, after) == ["workload chat: 1 of 2 cases have another prompt"]


def test_nothing_in_common() -> None:
    assert "Nothing ran in both." in printed(sweep(1), Results.of([HEAD]))


# Export

SMALL = Results.of(bench_rows(targets=("big-Q8_0",), workloads=("chat",), cases=2, repetitions=2))


def test_a_csv_has_every_request_and_prediction(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    export(SMALL, path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    runs = [row for row in rows if row["kind"] == "run"]
    assert len(runs) == len(SMALL.runs)
    assert len(rows) - len(runs) == sum(len(row.cases) for row in SMALL.predictions)
    first, row = runs[0], SMALL.runs[0]
    assert (first["setting"], first["case"], float(first["decode_s"])) == (
        row.setting,
        row.case,
        row.decode_s,
    )
    assert float(first["tokens_per_s"]) == pytest.approx(row.timed_tokens / row.decode_s)
    assert {row["draft"] for row in rows} >= {"", "small-Q8_0"}


def test_a_parquet_file_holds_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(SMALL, tmp_path / "run.parquet")
    export(SMALL, tmp_path / "run.csv")
    rows = parquet.read_table(tmp_path / "run.parquet").to_pylist()
    assert len(rows) == len((tmp_path / "run.csv").read_text(encoding="utf-8").splitlines()) - 1
    assert rows[0]["decode_s"] == SMALL.runs[0].decode_s and rows[-1]["block"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.parquet"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="neither CSV nor Parquet"):
        export(SMALL, tmp_path / "run.xlsx")
    with pytest.raises(SettingError, match="its folder does not exist"):
        export(SMALL, tmp_path / "nowhere" / "run.csv")
    with pytest.raises(InputError, match="nothing ran and nothing was predicted"):
        export(Results.of([HEAD]), tmp_path / "run.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingError, match=r"\.\[parquet\]"):
        export(SMALL, tmp_path / "run.parquet")
    assert list(tmp_path.iterdir()) == []
