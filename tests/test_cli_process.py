"""`outrider run` as a process: signals, closed streams, and what is loaded when."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli_helpers import COMMAND, PATIENCE_S, environment
from outrider.core.extras import MODULES

Program = subprocess.Popen[bytes]
Start = Callable[..., Program]

PLAINLY = ("-t", "1", "--policy", "fixed")
"""What calls cost need not be measured."""


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


@pytest.mark.parametrize("module", ["pydantic", "numpy"])
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
    line = [
        sys.executable,
        "-c",
        program,
        "run",
        "-m",
        str(models / "target.gguf"),
        *PLAINLY,
        "-n",
        "2",
        "hi",
    ]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == -signal.SIGINT and "Traceback" not in done.stderr and done.stdout


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
    line = f"{' '.join(COMMAND)} {run}"
    done = subprocess.run(line, shell=True, capture_output=True, env=environment(), check=False)
    assert done.returncode == 0 and done.stdout and not done.stderr


LOADING = """
import json, sys
heavy, extras = map(set, json.loads(sys.argv[1]))
model, before = sys.argv[2], {*sys.modules}
import outrider
found = [sorted({*sys.modules} - before - {"__future__"})]  # before Ctrl-C is seen to
from outrider.cli.main import main
def run(*words):
    sys.argv = ["outrider", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, ended.code
run("run", "--help")
run("check", "--help")
found.append(sorted((heavy | extras) & sys.modules.keys()))
import outrider.cli.run, outrider.cli.chat
found.append(sorted((extras | {"llguidance"}) & sys.modules.keys()))
import outrider.cli.costs, outrider.cli.verify, outrider.cli.check, outrider.cli.quantize
import outrider.lab.bench.sweep, outrider.cli.bench
run("run", "-m", model, "-n", "4", "--raw", "-t", "1", "--policy", "fixed", "hello")
found.append(sorted(extras & sys.modules.keys()))
print(json.dumps(found))
"""


def test_nothing_is_loaded_before_it_is_needed(models: Path) -> None:
    heavy = ["rich", "numpy", "gguf", "llguidance", "jinja2", "huggingface_hub", "outrider.session"]
    extras = ["starlette", "llama_cpp", "ik_llama_cpp", "xllamacpp"]
    extras += [module for modules in MODULES.values() for module in modules]
    line = [sys.executable, "-c", LOADING, json.dumps([heavy, extras]), str(models / "target.gguf")]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["outrider"], [], [], []]
