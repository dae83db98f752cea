"""What can go wrong with any command is one message, without a traceback. No model is needed."""

import os
import sys
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from outrider.cli.help import COMMANDS, load
from outrider.cli.main import main
from outrider.cli.output import PIPE_CLOSED, USAGE_ERROR
from outrider.core.schema import settings_of
from tiny_gguf import write_tiny


def status_with(output: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status where standard output is this file."""
    with os.fdopen(output, "w") as stream:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


WRITE = [("run", "--help"), ("--version",), ("setup",), ("plan", "--list")]


@pytest.mark.parametrize("arguments", WRITE, ids=" ".join)
def test_a_full_disk_is_named(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_with(os.open("/dev/full", os.O_WRONLY), arguments, monkeypatch)
    assert status == USAGE_ERROR
    assert capsys.readouterr().err == (
        "error: standard output: no space left on device. Free some space, or send it elsewhere.\n"
    )


@pytest.mark.parametrize("arguments", WRITE, ids=" ".join)
def test_a_reader_that_left_is_no_error(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert status_with(writing, arguments, monkeypatch) == PIPE_CLOSED
    assert capsys.readouterr().err == ""


def test_a_file_that_nobody_was_prepared_for_is_named(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.setup._libraries", lambda: os.mkdir("/proc/none"))
    assert refused(run("setup")) == "/proc/none: no such file or directory. Check it, or name another."


# What is given


@pytest.fixture
def run(outrider: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    return outrider


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_named(run: Call, name: str) -> None:
    said = refused(run(*name.split(), "--no-such-option"))
    assert said.startswith(f"--no-such-option: outrider {name} has no such option. ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("chat --json", "--json: outrider chat has no such option. Did you mean --json-mode?"),
        ("setup -z", "-z: outrider setup has no such option. outrider setup --help lists what there is."),
        ("--nope", "--nope: outrider has no such option. outrider --help lists what there is."),
        ("rnu", "outrider: no such command 'rnu'. Did you mean 'run'?"),
        (
            "quantize",
            "outrider quantize: missing option '--to'. outrider quantize --help lists what there is.",
        ),
        ("check", "outrider check: missing argument 'TARGET'. outrider check --help lists what there is."),
        ("cache x", "outrider cache: got unexpected extra argument(s) (x). outrider cache --help lists"),
        ("run -m", "-m: it requires an argument. --help says how it is given."),
        ("run --raw=3", "--raw: it does not take a value. --help says how it is given."),
    ],
)
def test_what_the_parser_refuses_is_one_line(run: Call, line: str, said: str) -> None:
    assert refused(run(*line.split())).startswith(said)


def test_a_line_without_a_command_gets_the_help(run: Call) -> None:
    outcome = run()
    assert outcome.status == USAGE_ERROR and outcome.err.startswith("Usage: outrider ")


NEEDED = {
    "check": ["default"],
    "trim": ["default", "--for", "default"],
    "quantize": ["--to", "Q8_0"],
}
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --top-p 2 hello", "--top-p: 2 cannot be used: it has to be 1 or less."),
        ("serve --cache-disk inf", "--cache-disk: inf cannot be used: it has to be 100000 or less."),
        (
            "serve --cache-disk 1e308",
            "--cache-disk: 1e308 cannot be used: it has to be 100000 or less.",
        ),
        # A pattern for each layer would fill the memory.
        ("run --n-cpu-moe 99999999999 hi", "--n-cpu-moe: 99999999999 cannot be used: it has to be 10000 or "),
    ],
)
def test_a_number_that_is_out_of_range_is_named(run: Call, line: str, said: str) -> None:
    assert refused(run(*line.split())).startswith(said)


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
