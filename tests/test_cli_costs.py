"""`outrider costs` as its users run it, on tiny models."""

import json
from functools import partial
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from outrider.costs import CallCosts, CallPoint
from outrider.costs.store import import_costs


@pytest.fixture
def costs(outrider: Call, monkeypatch: pytest.MonkeyPatch, models: Path, tmp_path: Path) -> Call:
    """The command with the tiny target, in a folder of its own, where nothing was measured yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return partial(outrider, "costs", "-m", str(models / "target.gguf"), "-t", "1", "--seconds", "0.3")


def test_the_table_its_picture_and_its_meaning(costs: Call, models: Path) -> None:
    outcome = costs("-md", str(models / "draft.gguf"))
    lines = outcome.out.splitlines()
    assert outcome.status == 0 and outcome.notes == "" and max(map(len, lines)) <= 80
    assert lines[0] == "target target" and lines[2].split()[0].startswith("1") and "█" in lines[2]
    assert "draft draft" in lines and "\x1b" not in outcome.out
    assert "pays by lookup from" in outcome.out and "a draft token costs" in outcome.out


def test_what_a_change_of_size_takes_on_a_gpu_is_said(costs: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CallCosts([CallPoint(1, 0.1)], switch_s=0.02)
    monkeypatch.setattr("outrider.cli.costs.costs_of", lambda *_, **__: found)
    said = "a call of another size than the last one takes 0.20 of a target call longer"
    assert said in " ".join(costs().out.split())


def test_json_is_all_there_is_on_standard_output(costs: Call) -> None:
    outcome = costs("--json")
    shown = json.loads(outcome.out)
    assert shown["target"]["schema"] == "outrider.costs/1" and shown["draft"] is None
    assert [row["drafted_tokens"] for row in shown["break_even_acceptance"]] == [1, 2, 4, 8]
    assert shown["about"]["target"]["settings"]["threads"] == 1
    assert json.loads(costs("--json").out)["target"] != shown["target"], "measured again"


def test_a_file_is_written_too(costs: Call, models: Path, tmp_path: Path) -> None:
    shown = json.loads(costs("--costs", "curve.json", "-md", str(models / "draft.gguf"), "--json").out)
    written = import_costs(tmp_path / "curve.json")
    assert written.target.as_json()["calls"] == shown["target"]["calls"] and written.draft is not None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--seconds", "0"), "--seconds: 0 cannot be used: "),
        (("--seconds", "nan"), "--seconds: nan cannot be used: "),
        (("--costs", "no/such/place.json"), "no/such/place.json: its folder does not exist"),
        (("-m", "nowhere.gguf"), "nowhere.gguf: "),
        (("-c", "-1"), "--ctx-size: -1 cannot be used: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(costs: Call, arguments: tuple[str, ...], complaint: str) -> None:
    assert refused(costs(*arguments)).startswith(complaint)
