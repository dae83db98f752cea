"""What people see: rows, and how far something is."""

import io

import pytest

from outrider.cli.screen import Screen


def test_a_row_is_a_line_for_each_text_and_none_where_nothing_is_said() -> None:
    shown = io.StringIO()
    rows = [("one", "a"), ("two", ["b", "", "c [red]\x1b"]), ("three", None), ("four", ""), ("five", ())]
    Screen(file=shown, width=80).rows(rows, width=4)
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["one", "a"], ["two", "b"], ["c", "[red]"],
    ]  # fmt: skip


def test_progress_on_a_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with Screen(file=shown, force_terminal=True, width=80).progress() as report:
        report("running", 0.5, "a [red]name")
    text = shown.getvalue()
    assert "running" in text and "50%" in text and "[red]name" in text
    assert capsys.readouterr().out == ""


def test_progress_elsewhere_is_a_line_for_each_stage_and_every_ten_seconds() -> None:
    shown, now_s = io.StringIO(), 0.0
    with Screen(file=shown, width=80).progress(lambda: now_s) as report:
        report("loading")
        for second in range(25):
            now_s = float(second)
            report("running", second / 25, f"at {second}")
        report("writing", 0.0)
    assert shown.getvalue().splitlines() == [
        "running: 0%, at 0",
        "running: 40%, 15 s left, at 10",
        "running: 80%, 5.0 s left, at 20",
        "writing: 0%",
    ]


def test_the_time_left_follows_the_last_minutes() -> None:
    shown, now_s = io.StringIO(), 0.0
    with Screen(file=shown, width=80).progress(lambda: now_s) as report:
        for part in (0.0, 0.5, 0.5):  # half of it was there already
            now_s += 1.0
            report("training", part)
        for i in range(1, 301):
            now_s += 1.0
            report("training", 0.5 + i / 1000)
    assert shown.getvalue().splitlines()[-1].startswith("training: 80%, 3 min 2"), "200 s, nearly"
