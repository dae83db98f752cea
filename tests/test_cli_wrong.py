"""What all commands share: help, completion, and that what goes wrong is one message. No model is needed."""

import io
import os
import re
import sys
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from outrider import __version__ as outrider_version
from outrider.cli.help import COMMANDS, load
from outrider.cli.main import main
from outrider.cli.output import PIPE_CLOSED, USAGE_ERROR, open_streams, write
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.schema import settings_of
from tiny_gguf import write_tiny


@pytest.fixture
def run(outrider: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    return outrider


# Help


def test_every_help_names_its_command_and_fits_80_columns(run: Call) -> None:
    for name in COMMANDS:
        shown = run(*name.split(), "-h")
        assert shown.status == 0 and f"Usage: outrider {name} " in shown.out
        assert max(map(len, shown.out.splitlines())) <= 80
    program = run("--help")
    assert program.status == 0 and {*re.findall("^  ([a-z][a-z ]+?)  ", program.out, re.MULTILINE)} == {
        *COMMANDS
    }
    assert run("--version").out == f"outrider {outrider_version}\n"
    without = run()
    assert (without.status, without.out, without.err) == (USAGE_ERROR, "", program.out)


@pytest.mark.parametrize("command", ["run", "chat", "serve", "verify"])
def test_help_begins_with_what_most_need_and_leads_to_the_rest(run: Call, command: str) -> None:
    first, whole = run(command, "--help"), run(command, "--help-all")
    assert first.status == whole.status == 0
    assert len(first.out.splitlines()) < 100 < len(whole.out.splitlines())
    assert "--model MODEL" in first.out and "--help-all" in first.out
    assert "--override-tensor" in whole.out and "--override-tensor" not in first.out
    assert run(command, "-t", "1", "--no-mtp", "--help").out == first.out
    assert "Usage" not in run(command, "-m", "--help").out, "the name of a file"
    assert max(map(len, whole.out.splitlines())) <= 80
    for name in ("-m", "-md", "-c", "-ngl", "-ngld", "-t", "-hf", "-hfd"):
        assert f"  {name}, --" in whole.out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("outrider ch", ["chat", "check"]),
        ("outrider", [name for name in COMMANDS if " " not in name]),
        ("outrider run --draft-m", ["--draft-max"]),
        ("outrider bench export --t", ["--to"]),
    ],
)
def test_a_shell_can_complete_commands_and_options(
    run: Call, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert run("--complete").out.split() == offered


# Standard output that takes nothing


@pytest.mark.parametrize(
    "arguments", [("run", "--help"), ("--version",), ("setup",), ("plan", "--list")], ids=" ".join
)
@pytest.mark.parametrize(
    ("is_full", "status", "said"),
    [
        (
            True,
            USAGE_ERROR,
            "error: standard output: no space left on device. Free some space, or send it elsewhere.\n",
        ),
        (False, PIPE_CLOSED, ""),
    ],
    ids=["a full disk", "a reader that left"],
)
def test_what_takes_no_output_is_named(
    arguments: tuple[str, ...],
    is_full: bool,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    with os.fdopen(output, "w") as stream:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code, capsys.readouterr().err) == (status, said)


def test_streams_that_are_closed_or_narrow(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(narrow, encoding="ascii"))
        open_streams()
        write("caf\u00e9")
        assert narrow.getvalue() == b"caf?"
    monkeypatch.setattr(sys, "stdout", None)
    assert refused(run("--version")) == "standard output: it is closed. Send it to a file, or to /dev/null."


def test_a_file_that_nobody_was_prepared_for_is_named(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.setup._libraries", lambda: os.mkdir("/proc/none"))
    assert refused(run("setup")) == "/proc/none: no such file or directory. Check it, or name another."


# What is given


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_named(run: Call, name: str) -> None:
    said = refused(run(*name.split(), "--no-such-option"))
    assert said.startswith(f"--no-such-option: outrider {name} has no such option. ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("chat --json", "--json: outrider chat has no such option. Did you mean --json-mode?"),
        ("run --drft-max 3", "--drft-max: outrider run has no such option. Did you mean --draft-max?"),
        ("run --warmup --mirostat 2", "--mirostat: it is not supported. See --min-p."),
        ("setup -z", "-z: outrider setup has no such option. outrider setup --help lists what there is."),
        ("--nope", "--nope: outrider has no such option. outrider --help lists what there is."),
        ("rnu", "rnu: outrider has no such command. Did you mean run?"),
        ("quantize", "--to: it is missing. What to make: "),
        ("check", "TARGET: it is missing. A GGUF file, "),
        ("cache x", "outrider cache: unexpected argument 'x'. outrider cache --help lists what there is."),
        ("run -m", "-m: it requires an argument. --help says how it is given."),
        ("run --raw=3", "--raw: it does not take a value. --help says how it is given."),
        ("run --top-p 2 hello", "--top-p: 2 cannot be used: it has to be 1 or less."),
        ("serve --cache-disk inf", "--cache-disk: inf cannot be used: it has to be 100000 or less."),
        ("serve --cache-disk 1e308", "--cache-disk: 1e308 cannot be used: it has to be 100000 or less."),
        # A pattern for each layer would fill the memory.
        ("run --n-cpu-moe 99999999999 hi", "--n-cpu-moe: 99999999999 cannot be used: it has to be 10000 or "),
    ],
)
def test_what_cannot_be_read_is_one_line(run: Call, line: str, said: str) -> None:
    assert refused(run(*line.split())).startswith(said)


NEEDED = {"check": ["default"], "trim": ["default", "--for", "default"], "quantize": ["--to", "Q8_0"]}
"""Arguments without which a command is refused for that."""


def numbers() -> dict[str, list[str]]:
    """The flags of all settings that are numbers, each with the shortest command that has it."""
    found = {name: settings_of(load(spec.settings)).values() for name, spec in COMMANDS.items()}
    flags: dict[str, str] = {}
    for name, settings in sorted(found.items(), key=lambda entry: len(entry[1])):
        flags = {setting.flag: name for setting in settings if setting.kind in (int, float)} | flags
    return {
        name: [flag for flag, its in flags.items() if its == name] for name in dict.fromkeys(flags.values())
    }


@pytest.mark.parametrize(("name", "flags"), numbers().items())
def test_a_word_for_a_number_is_named(run: Call, name: str, flags: list[str]) -> None:
    for flag in flags:
        said = refused(run(*name.split(), *NEEDED.get(name, []), f"{flag}=many"))
        assert said.startswith(f"{flag}: many cannot be used: ")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are no models, each for another reason."""
    folder = tmp_path_factory.mktemp("files")
    whole = write_tiny(folder / "whole.gguf").read_bytes()
    contents = {"empty": b"", "text": b"Once upon a time", "cut": whole[:3000], "magic": b"GGUF"}
    for name, data in contents.items():
        (folder / f"{name}.gguf").write_bytes(data)
    (folder / "folder.gguf").mkdir()
    return folder


TAKE_MODELS = (
    "run -m {} hi",
    "chat -m {}",
    "verify -m {}",
    "costs -m {}",
    "check {}",
    "trim {} --for default",
    "quantize {} --to Q8_0",
    "bench --target {} -o run",
    "plan --target {} --on h100",
)


@pytest.mark.parametrize("line", TAKE_MODELS)
def test_a_file_that_is_no_model_is_named(run: Call, line: str, files: Path, tmp_path: Path) -> None:
    for name in ("empty", "text", "cut", "magic", "folder", "missing"):
        path = files / f"{name}.gguf"
        outcome = run(*line.format(path).split())
        assert outcome.status == USAGE_ERROR and outcome.out == "", name
        assert outcome.err.splitlines()[-1].startswith(f"error: {path}: "), outcome.err
    assert list(tmp_path.iterdir()) == []


# What is not installed


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        (
            "fastapi",
            "serve -m none.gguf",
            "outrider serve: FastAPI is not installed. It comes with the ",
        ),
        ("torch", "distill -m none.gguf", "outrider distill: PyTorch is not installed. It comes with the "),
        ("ray", "bench -m none.gguf --ray local", "--ray: Ray is not installed. It comes with the extra ray"),
    ],
)
def test_what_is_missing_is_named_and_help_needs_none_of_it(
    run: Call, monkeypatch: pytest.MonkeyPatch, module: str, line: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(run(*line.split())).startswith(said)
    assert run(line.split()[0], "--help").status == 0


def test_several_missing_modules_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SettingError) as caught:
        require_extra("outrider serve", "serve", "run it elsewhere")
    assert str(caught.value) == (
        "outrider serve: FastAPI and Uvicorn are not installed. They come with the extra serve: "
        "in Outrider's checkout, pip install '.[serve]'; or run it elsewhere."
    )


# What is kept on the machine


def test_the_cache_is_listed_and_emptied(run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    assert run("cache").status == 0, "there is nothing yet"
    for name in ("costs", "models"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a").write_bytes(b"12345")
    (folder / "chat_history").write_text("hello")
    listed = run("cache")
    assert listed.status == 0 and str(folder) in "".join(listed.out.split())
    for name in ("costs", "models", "chat_history"):
        assert name in listed.out
    assert refused(run("cache", "--remove", "cost")).startswith("--remove cost: ")
    gone = run("cache", "--remove", "costs").out
    assert "removed: costs" in gone and "1 file" in gone and not (folder / "costs").exists()
    run("cache", "--remove", "all")
    assert list(folder.iterdir()) == []
