"""`outrider run` as a process: signals, closed streams, encodings, and what its help loads."""

import ast
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import outrider
from cli_helpers import COMMAND, PATIENCE_S, environment, spawn
from tiny_gguf import write_tiny

Program = subprocess.Popen[bytes]
Start = Callable[..., Program]

PLAINLY = ("-t", "1", "--policy", "fixed")
"""What calls cost need not be measured."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf")
    write_tiny(folder / "long.gguf", context_length=8192, layers=8)
    return folder


@pytest.fixture
def start(models: Path) -> Iterator[Start]:
    """Start an answer that takes a while; it is ended after the test."""
    programs: list[Program] = []

    def run(*arguments: str) -> Program:
        line = [*COMMAND, "run", "-m", str(models / "long.gguf"), *PLAINLY, "--ignore-eos", "--raw"]
        line += [*arguments, "hello"]
        program = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        programs.append(program)
        return program

    yield run
    for program in programs:
        with program:  # closes its pipes
            program.kill()


def test_a_reader_that_leaves_early_is_no_error(start: Start) -> None:
    program = start("-q")
    assert program.stdout and program.stderr
    assert len(program.stdout.read(20)) == 20
    program.stdout.close()
    assert b"Traceback" not in program.stderr.read()
    assert program.wait(PATIENCE_S) == 141  # by 1 commands say what they found


INTERRUPTED_AT = """
import builtins, os, runpy, signal, sys
module = sys.argv.pop(1)
plain = builtins.__import__
def interrupted(name, *arguments, **options):
    if name == module:
        os.kill(os.getpid(), signal.SIGINT)
    return plain(name, *arguments, **options)
builtins.__import__ = interrupted
runpy.run_module("outrider", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["typer", "outrider.cli.settings", "numpy"])
def test_ctrl_c_while_the_program_starts_leaves_no_traceback(models: Path, module: str) -> None:
    line = [sys.executable, "-c", INTERRUPTED_AT, module, "run", "-m", str(models / "target.gguf"), "hello"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode in (-signal.SIGINT, 130) and "Traceback" not in done.stderr and not done.stdout


def test_ctrl_c_while_the_program_ends_leaves_no_traceback(models: Path) -> None:
    program = (
        "import atexit, os, runpy, signal\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "runpy.run_module('outrider', run_name='__main__', alter_sys=True)"
    )
    line = [sys.executable, "-c", program, "run", "-m", str(models / "target.gguf"), "-n", "2", "hi"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == -signal.SIGINT and "Traceback" not in done.stderr and done.stdout


def test_nothing_is_loaded_before_ctrl_c_is_seen_to() -> None:
    program = "import sys; before = {*sys.modules}; import outrider; print({*sys.modules} - before)"
    sources = str(Path(outrider.__file__).parents[1])
    line = [sys.executable, "-S", "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": sources}, check=True)
    assert ast.literal_eval(done.stdout) == {"outrider", "__future__"}


def test_text_streams_and_ctrl_c_ends_it_with_a_readout(start: Start) -> None:
    # All of this text would fit a buffer: without a flush it would come when the answer is complete.
    program = start("-n", "2000")
    assert program.stdout and program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    out, err = (data.decode(errors="replace") for data in program.communicate(timeout=PATIENCE_S))
    assert program.returncode == 130
    assert out.endswith("\n")
    assert "; interrupted" in err and "target calls" in err and "Traceback" not in err


def test_ctrl_c_is_heard_while_the_library_writes_its_log(start: Start) -> None:
    # Python prints and forgets an exception that is raised in a callback from native code.
    program = start("-v", "-n", "8000", "--json", "--compare", "--repetitions", "50")
    assert program.stderr
    while b"n_ctx " not in program.stderr.readline():  # written when a context is opened
        assert program.poll() is None
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 130
    assert b"Exception ignored" not in err and b"Traceback" not in err
    assert out == b"" or json.loads(out)["finish_reason"] == "cancelled"


def test_closed_standard_streams_are_survived(models: Path) -> None:
    run = f"run -q --raw {' '.join(PLAINLY)} -n 4 -m {models / 'target.gguf'} hello 2>&- <&-"
    for line, status in (("--version >&-", 2), (run, 0)):
        done = subprocess.run(
            f"{' '.join(COMMAND)} {line}", shell=True, capture_output=True, env=environment(), check=False
        )
        assert done.returncode == status, done.stderr
        assert b"Traceback" not in done.stderr


def test_a_narrow_encoding_gets_question_marks(models: Path) -> None:
    target = str(models / "target.gguf")
    arguments = ("-m", target, *PLAINLY, "--temp", "0", "-n", "64", "--ignore-eos", "hello")
    outcome = spawn("run", *arguments, env=environment(PYTHONIOENCODING="ascii"))
    assert outcome.status == 0 and "?" in outcome.out and "Traceback" not in outcome.err


def test_help_loads_nothing_that_runs_models() -> None:
    heavy = {
        "typer",
        "rich",
        "numpy",
        "gguf",
        "llguidance",
        "jinja2",
        "huggingface_hub",
        "fastapi",
        "outrider.session",
    }
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*({heavy!r} & sys.modules.keys()), file=sys.stderr))\n"
        "from outrider.cli.main import main; main()"
    )
    for arguments in (["run", "--help"], ["check", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment(), capture_output=True, check=False
        )
        assert (done.returncode, done.stderr.strip()) == (0, b""), arguments


def test_constraints_are_loaded_when_they_are_needed() -> None:
    program = "import sys, outrider.cli.run, outrider.cli.chat; sys.exit('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), check=False)
    assert done.returncode == 0
