"""Help, completion, and what is kept on the machine."""

import json
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from outrider.cli.help import COMMANDS


def test_every_help_names_its_command_and_fits_80_columns(outrider: Call) -> None:
    for name in COMMANDS:
        shown = outrider(*name.split(), "-h")
        assert shown.status == 0 and f"Usage: outrider {name} " in shown.out
        assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["run", "chat", "serve", "verify"])
def test_help_begins_with_what_most_need_and_leads_to_the_rest(outrider: Call, command: str) -> None:
    first, whole = outrider(command, "--help"), outrider(command, "--help-all")
    assert first.status == whole.status == 0
    assert len(first.out.splitlines()) < 100 < len(whole.out.splitlines())
    assert "--model MODEL" in first.out and "--help-all" in first.out
    assert "--override-tensor" in whole.out and "--override-tensor" not in first.out
    assert "--help-all" not in outrider("setup", "--help").out, "it is short"
    assert outrider(command, "-t", "1", "--no-mtp", "--help").out == first.out
    assert "Usage" not in outrider("run", "-m", "--help").out, "the name of a file"
    assert max(map(len, whole.out.splitlines())) <= 80
    for name in ("-m", "-md", "-c", "-ngl", "-ngld", "-t", "-hf", "-hfd"):
        assert f"  {name}, --" in whole.out


@pytest.mark.parametrize(
    ("line", "offered"), [("outrider ch", "chat"), ("outrider run --draft-m", "--draft-max")]
)
def test_a_shell_can_complete_commands_and_options(
    outrider: Call, monkeypatch: pytest.MonkeyPatch, line: str, offered: str
) -> None:
    monkeypatch.setenv("_OUTRIDER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert offered in outrider().out.split()


def test_the_cache_is_listed_and_emptied(
    outrider: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    assert outrider("cache").status == 0, "there is nothing yet"
    for name in ("costs", "models"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a").write_bytes(b"12345")
    (folder / "chat_history").write_text("hello")
    listed = outrider("cache")
    assert listed.status == 0 and str(folder) in "".join(listed.out.split())
    for name in ("costs", "models", "chat_history"):
        assert name in listed.out
    assert refused(outrider("cache", "--remove", "cost")).startswith("--remove cost: ")
    gone = json.loads(outrider("cache", "--remove", "costs", "--json").out)
    assert gone["removed"] == ["costs"] and set(gone["kept"]) == {"models", "chat_history"}
    assert gone["kept"]["models"] == {"files": 1, "bytes": 5} and not (folder / "costs").exists()
    outrider("cache", "--remove", "all")
    assert list(folder.iterdir()) == []
