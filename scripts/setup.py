"""Make .venv ready to use: the locked packages and the embedded model; and on request what more there is.

`make` runs this before everything else. It needs a Python of 3.11 or newer, no compiler, and nothing
that is not in the standard library. What it does, in order:

1. find uv on PATH, or install a pinned one into .tools;
2. create .venv and install exactly what requirements.lock names, then Outrider itself;
3. fetch the embedded model into the user's cache.

`--dev` adds the tools and the libraries of the tests, `--torch` PyTorch. `--llama-cpp` adds
llama-cpp-python, the one package that is compiled, and `--rebuild` compiles it again. Then it decodes
once with it in a child process, and builds it again when that kills the child: gcc 12 miscompiles the
tile configuration of llama.cpp's AMX kernels, and such a build dies of SIGSEGV at its first decode on a
CPU that has AMX. All builds are therefore made without those kernels, but uv's cache may hold a wheel
that was built otherwise, or elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PYTHON_NEEDED = (3, 11)
AMX_OFF = ("-mno-amx-int8", "-mno-amx-tile", "-mno-amx-bf16")
ENGINE = "llama-cpp-python"
READY_MADE = ("xllamacpp", "ik-llama-cpp-python")
FIRST_DECODE_LIMIT_S = 300

FETCH_MODEL = """
import sys
from outrider.core.errors import OutriderError
from outrider.models.embedded import embedded_default
try:
    print(embedded_default())
except OutriderError as error:
    sys.exit(f"setup: {error}")
"""


class SetupError(Exception):
    """Setup cannot go on; the message names the reason and the way out."""


def say(line: str) -> None:
    """Tell the user what happens now, in one line."""
    print(f"setup: {line}", file=sys.stderr, flush=True)


def require_python(version: tuple[int, int, int]) -> None:
    """Raise SetupError for a Python that is too old."""
    if version < PYTHON_NEEDED:
        found = ".".join(map(str, version))
        raise SetupError(
            f"Python 3.11 or newer is needed, and this is {found}. Name a newer one: make PYTHON=python3.12 …"
        )


def works(command: Sequence[str]) -> bool:
    """Whether a program is there and succeeds, whatever it prints."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def accepts(compiler: Sequence[str], language: str, flags: Sequence[str]) -> bool:
    """Whether a compiler is there and takes the flags, found out by compiling an empty file."""
    with tempfile.TemporaryDirectory() as folder:
        # -Werror: clang takes flags of other processors with no more than a warning.
        command = [*compiler, *flags, "-Werror", "-x", language, "-c", os.devnull]
        command += ["-o", os.path.join(folder, "empty.o")]
        return works(command)


def without_amx(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the AMX kernels switched off in CFLAGS and CXXFLAGS.

    The flags are appended to the user's own, for each compiler that knows them: those for other
    processors and old ones do not, and have no such kernels to switch off.
    """
    guarded = dict(environment)
    for variable, default, language, flags in (
        ("CC", "cc", "c", "CFLAGS"),
        ("CXX", "c++", "c++", "CXXFLAGS"),
    ):
        compiler = shlex.split(environment.get(variable) or default)
        if accepts(compiler, language, AMX_OFF):
            guarded[flags] = " ".join([environment.get(flags, ""), *AMX_OFF]).strip()
    return guarded


def run(command: Sequence[str], environment: Mapping[str, str], failure: str) -> None:
    """Run a command with its output on the terminal; raise SetupError(failure) when it fails."""
    if subprocess.run(command, env=dict(environment), check=False).returncode != 0:
        raise SetupError(failure)


def find_uv(root: Path, environment: Mapping[str, str]) -> str:
    """The uv on PATH, else a pinned one that is installed into .tools first."""
    found = shutil.which("uv", path=environment["PATH"])
    if found and works([found, "--version"]):
        return found
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: its ensurepip module is missing. "
            "Install it (Debian and Ubuntu: apt install python3-venv) or install uv."
        )
    say("uv is not installed; bringing a copy into .tools")
    tools = root / ".tools"
    venv = [sys.executable, "-m", "venv", str(tools)]
    run(venv, environment, f"no virtual environment could be made in {tools}; the reason is above.")
    pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--require-hashes", "--requirement", str(root / "scripts" / "uv-requirements.txt")]
    run(pip, environment, "pip could not install uv; the reason is above. Or install uv yourself.")
    return str(tools / "bin" / "uv")


def venv_python(root: Path) -> Path:
    """The interpreter of .venv."""
    return root / ".venv" / "bin" / "python"


def make_venv(root: Path, uv: str, environment: Mapping[str, str]) -> None:
    """Create .venv for this interpreter unless a working one is there."""
    if works([str(venv_python(root)), "-c", ""]):
        return
    shutil.rmtree(root / ".venv", ignore_errors=True)
    command = [uv, "venv", "--quiet", "--python", sys.executable, str(root / ".venv")]
    run(command, environment, "uv could not create .venv; its reason is above.")


def uv_pip(root: Path, uv: str, action: str) -> list[str]:
    """The start of a uv command that works on .venv."""
    return [uv, "pip", action, "--python", str(venv_python(root))]


def install(root: Path, uv: str, environment: Mapping[str, str]) -> None:
    """Install what requirements.lock names, nothing else, and then Outrider from its sources.

    The libraries that run the models come ready-made or not at all: uv would try to compile them where
    there is no wheel.
    """
    failure = "the packages could not be installed; uv's reason is above."
    say("installing the locked packages")
    locked = ["--require-hashes", str(root / "requirements.lock")]
    for library in READY_MADE:
        locked += ["--only-binary", library]
    run([*uv_pip(root, uv, "sync"), *locked], environment, failure)
    itself = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", str(root)]
    run([*uv_pip(root, uv, "install"), *itself], environment, failure)


def install_dev(root: Path, environment: Mapping[str, str]) -> None:
    """Add what checking and testing need to the .venv that is there."""
    say("installing the packages of the checks and the tests")
    locked = ["--require-hashes", "--requirement", str(root / "requirements-dev.lock")]
    failure = "the packages could not be installed; uv's reason is above."
    run([*uv_pip(root, find_uv(root, environment), "install"), *locked], environment, failure)
    (root / ".venv" / ".dev").touch()


def install_engine(root: Path, uv: str, environment: Mapping[str, str], *, rebuild: bool = False) -> None:
    """Add llama-cpp-python to .venv; `rebuild` compiles it even where uv has a wheel of an earlier build.

    That wheel leaves uv's cache first: it would be taken again, here and by the next setup.
    """
    failure = f"{ENGINE} could not be built; uv's reason is above."
    compiler = shlex.split(environment.get("CXX") or "c++")
    if not accepts(compiler, "c++", ()):
        failure += (
            f" Building it needs a C++ compiler, and '{shlex.join(compiler)}' is none that works: "
            "install one (Debian and Ubuntu: apt install g++) or set CC and CXX."
        )
    locked = ["--require-hashes", "--requirement", str(root / "scripts" / "llama-cpp-requirements.txt")]
    command = [*uv_pip(root, uv, "install"), "--no-deps"]
    if rebuild:
        run([uv, "cache", "clean", "--quiet", ENGINE], environment, failure)
        command += ["--reinstall-package", ENGINE, "--no-binary", ENGINE]
    run([*command, *locked], environment, failure)


def install_torch(root: Path, environment: Mapping[str, str]) -> None:
    """Install PyTorch into .venv, which training and its tests need and nothing else does.

    By pip, which looks where its own configuration says: a build without CUDA may lie there.
    """
    wanted = ["--requirement", str(root / "scripts" / "torch-requirements.txt")]
    command = [sys.executable, "-m", "pip", "--python", str(venv_python(root)), "--disable-pip-version-check"]
    if not works([*command, "--version"]):
        command = [find_uv(root, environment), "pip"]
        wanted = ["--python", str(venv_python(root)), *wanted]
    say("installing PyTorch, which the tests of training need")
    failure = "PyTorch could not be installed; the reason is above."
    run([*command, "install", "--quiet", *wanted], environment, failure)
    (root / ".venv" / ".torch").touch()


def fetch_model(root: Path, environment: Mapping[str, str]) -> Path | None:
    """The embedded model's file in the user's cache, fetched if need be; None if that fails."""
    result = subprocess.run(
        [str(venv_python(root)), "-c", FETCH_MODEL],
        env=dict(environment),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return Path(result.stdout.strip()) if result.returncode == 0 else None


def deadly_signal(root: Path, model: Path, environment: Mapping[str, str]) -> str | None:
    """The name of the signal that a first decode dies of in a child process; None if it works.

    Raises SetupError when the child fails in any other way.
    """
    command = [str(venv_python(root)), str(root / "scripts" / "first_decode.py"), str(model)]
    try:
        result = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FIRST_DECODE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        limit = f"{FIRST_DECODE_LIMIT_S} s"
        raise SetupError(f"a first decode with {model} did not end within {limit}. Try again.") from None
    if result.returncode > 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(f"a first decode failed: {reason}. If {model} is damaged, delete it and try again.")
    if result.returncode == 0:
        return None
    try:
        return signal.Signals(-result.returncode).name
    except ValueError:
        return f"signal {-result.returncode}"


def ensure_first_decode(root: Path, uv: str, model: Path, environment: Mapping[str, str]) -> None:
    """Decode once in a child; if that kills it, build llama.cpp again and try a second time."""
    died_of = deadly_signal(root, model, environment)
    if died_of is None:
        return
    say(f"{ENGINE} dies of {died_of} at its first decode here; building it again, which takes minutes")
    install_engine(root, uv, environment, rebuild=True)
    died_of = deadly_signal(root, model, environment)
    if died_of is not None:
        raise SetupError(
            f"{ENGINE} dies of {died_of} at its first decode, also when built on this machine. "
            "Another compiler may help: CC=clang CXX=clang++ make setup"
        )
    say(f"the new build of {ENGINE} works")


def add_llama_cpp(root: Path, inherited: Mapping[str, str], *, rebuild: bool = False) -> None:
    """Add a llama-cpp-python that works to the .venv that is there. Raises SetupError.

    `rebuild` compiles it even where a build is at hand: for other CMAKE_ARGS or compilers. Without the
    embedded model it is not tried, and not marked as ready: the next `make` makes up for that.
    """
    environment = without_amx(inherited)
    uv = find_uv(root, environment)
    say(f"installing {ENGINE}; {'' if rebuild else 'where it is not cached, '}compiling it takes minutes")
    install_engine(root, uv, environment, rebuild=rebuild)
    model = fetch_model(root, environment)
    if model is None:
        say(f"{ENGINE} is not tried without the embedded model; the next make tries again to fetch it")
        return
    ensure_first_decode(root, uv, model, environment)
    (root / ".venv" / ".llama-cpp").touch()


def setup(root: Path, environment: Mapping[str, str]) -> None:
    """Do what every command needs for the working tree at `root`. Raises SetupError.

    Without the embedded model the rest is done all the same, but .venv is not marked as ready:
    the next `make` tries again to fetch it.
    """
    uv = find_uv(root, environment)
    make_venv(root, uv, environment)
    install(root, uv, environment)
    if fetch_model(root, environment) is None:
        say("going on without the embedded model; the next make tries again to fetch it")
        return
    (root / ".venv" / ".ready").touch()
    say("ready")


def with_own_tools(root: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment with .tools at the end of PATH."""
    path = [inherited.get("PATH") or os.defpath, str(root / ".tools" / "bin")]
    return {**inherited, "PATH": os.pathsep.join(path)}


def main() -> int:
    """Set up the working tree that this file is in; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    more = parser.add_mutually_exclusive_group()
    more.add_argument("--dev", action="store_true", help="add the tools and the libraries of the tests")
    more.add_argument("--llama-cpp", action="store_true", help=f"add {ENGINE}, compiled if need be")
    more.add_argument(
        "--rebuild", action="store_true", help=f"compile {ENGINE} even where a build is at hand"
    )
    more.add_argument("--torch", action="store_true", help="add PyTorch")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    environment = with_own_tools(root, os.environ)
    try:
        require_python(sys.version_info[:3])
        if arguments.dev:
            install_dev(root, environment)
        elif arguments.torch:
            install_torch(root, environment)
        elif arguments.llama_cpp or arguments.rebuild:
            add_llama_cpp(root, environment, rebuild=arguments.rebuild)
        else:
            setup(root, environment)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; run make again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
