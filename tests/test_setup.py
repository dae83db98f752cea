"""scripts/setup.py and the Makefile around it, with a stand-in for every program that they run.

The stand-ins are shell scripts on PATH: a uv that writes down how it was called, the .venv that
it makes, and compilers that take or refuse the flags that switch the AMX kernels off.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from tiny_gguf import write_tiny

PROJECT = Path(__file__).parents[1]
# What would reach the stage from the compilers and the make that these tests run under.
OUTSIDE = {"CC", "CXX", "CFLAGS", "CXXFLAGS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
AMX_OFF = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"

UV = """#!/bin/sh
echo "uv $* CFLAGS=[$CFLAGS] CXXFLAGS=[$CXXFLAGS]" >> "$STAGE/calls"
case "$*" in *"${UV_FAILS_AT:-nowhere}"*) exit 2 ;; esac
[ "$1" = venv ] || exit 0
for folder; do :; done
mkdir -p "$folder/bin" && cp "$STAGE/venv-python" "$folder/bin/python"
"""

# What the n-th first decode does is the n-th word of $DECODES: works, refuses, or a signal.
VENV_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    [ -z "$2" ] && exit 0
    [ -n "$NO_MODEL" ] && exit 1
    echo model.gguf; exit 0
fi
echo "first decode of $2" >> "$STAGE/calls"
outcome=$(echo "$DECODES" | cut -d ' ' -f "$(grep -c '^first decode' "$STAGE/calls")")
case "$outcome" in
    works) exit 0 ;;
    refuses) echo "llama.cpp cannot load model.gguf" >&2; exit 1 ;;
    *) kill -"$outcome" $$ ;;
esac
"""

ACCEPTING = "#!/bin/sh\nexit 0\n"
REFUSING = '#!/bin/sh\ncase "$*" in *amx*) exit 1 ;; esac\n'


@dataclass
class Stage:
    """A copy of the project's set-up in a folder of its own, among stand-ins."""

    root: Path
    settings: dict[str, str] = field(default_factory=lambda: {"DECODES": "works"})

    def program(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in OUTSIDE}
        path = os.pathsep.join([str(self.root / "bin"), os.environ["PATH"]])
        return {**kept, "PATH": path, "STAGE": str(self.root), **self.settings}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command or (sys.executable, "scripts/setup.py"),
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        """The calls that count, in order; asking uv for its version does not."""
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if not line.startswith("uv --version")]

    @property
    def is_ready(self) -> bool:
        return (self.root / ".venv" / ".ready").exists()

    @property
    def has_llama_cpp(self) -> bool:
        return (self.root / ".venv" / ".llama-cpp").exists()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    shutil.copytree(PROJECT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock"):
        shutil.copy(PROJECT / name, tmp_path)
    stage.program("bin/uv", UV)
    stage.program("venv-python", VENV_PYTHON)
    for compiler in ("cc", "c++"):
        stage.program(f"bin/{compiler}", ACCEPTING)
    return stage


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", PROJECT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_llama_cpp(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Add llama-cpp-python to a tree that is set up; the calls that are kept are those of this alone."""
    stage.run()
    (stage.root / "calls").unlink()
    return stage.run(*(arguments or (sys.executable, "scripts/setup.py", "--llama-cpp")))


def test_a_fresh_tree_gets_the_locked_packages_and_then_outrider(stage: Stage) -> None:
    result = stage.run()
    assert result.returncode == 0, result.stderr
    made, synced, installed = stage.calls
    assert made.startswith("uv venv") and sys.executable in made
    assert re.search(r"pip sync .*--require-hashes \S*/requirements\.lock", synced)
    assert re.search(r"pip install .*--no-deps .*--editable", installed)
    assert stage.is_ready


def test_setting_up_compiles_nothing_and_asks_for_no_compiler(stage: Stage) -> None:
    for compiler in ("cc", "c++"):
        stage.program(f"bin/{compiler}", '#!/bin/sh\necho "$0" >> "$STAGE/calls"\nexit 1\n')
    assert stage.run().returncode == 0
    assert not any(call.endswith(("/cc", "/c++")) for call in stage.calls)
    assert "--only-binary xllamacpp --only-binary ik-llama-cpp-python" in stage.calls[1]
    assert "CFLAGS=[] CXXFLAGS=[]" in stage.calls[1]


def test_a_working_venv_is_kept_and_a_broken_one_replaced(stage: Stage) -> None:
    stage.run()
    (stage.root / "calls").unlink()
    stage.run()
    assert [call.split()[1] for call in stage.calls] == ["pip", "pip"]
    (stage.root / ".venv" / "bin" / "python").write_text("#!/nowhere/python\n")
    (stage.root / "calls").unlink()
    assert stage.run().returncode == 0
    assert stage.calls[0].startswith("uv venv")


def test_what_the_tests_need_is_added_to_what_is_there(stage: Stage) -> None:
    result = stage.run("make", ".venv/.dev", f"PYTHON={sys.executable}")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"pip install .*--require-hashes --requirement \S*/requirements-dev\.lock", stage.calls[-1]
    )
    assert (stage.root / ".venv" / ".dev").exists()


def test_llama_cpp_python_is_installed_by_its_own_lock_and_tried(stage: Stage) -> None:
    result = stage.run("make", ".venv/.llama-cpp", f"PYTHON={sys.executable}")
    assert result.returncode == 0, result.stderr
    installed, decoded = stage.calls[3:]
    assert "--no-deps --require-hashes" in installed and "llama-cpp-requirements.txt" in installed
    assert "reinstall" not in installed
    assert decoded == "first decode of model.gguf"
    assert stage.has_llama_cpp


def test_the_build_goes_without_the_amx_kernels(stage: Stage) -> None:
    add_llama_cpp(stage)
    assert f"CFLAGS=[{AMX_OFF}] CXXFLAGS=[{AMX_OFF}]" in stage.calls[0]


def test_the_users_own_flags_stay_in_front(stage: Stage) -> None:
    stage.settings |= {"CFLAGS": "-O1 -g", "CXXFLAGS": "-O2"}
    add_llama_cpp(stage)
    assert f"CFLAGS=[-O1 -g {AMX_OFF}] CXXFLAGS=[-O2 {AMX_OFF}]" in stage.calls[0]


def test_a_compiler_that_refuses_the_flags_gets_none(stage: Stage) -> None:
    stage.program("bin/cc", REFUSING)
    stage.program("bin/c++", REFUSING)
    stage.settings["CFLAGS"] = "-O1"
    assert add_llama_cpp(stage).returncode == 0
    assert "CFLAGS=[-O1] CXXFLAGS=[]" in stage.calls[0]


def test_each_language_is_asked_for_itself_and_the_users_compiler_first(stage: Stage) -> None:
    stage.program("bin/launcher", '#!/bin/sh\nexec "$@"\n')
    other = stage.program("bin/other c++", REFUSING)
    stage.settings |= {"CC": "launcher cc", "CXX": f"launcher '{other}'"}
    add_llama_cpp(stage)
    assert f"CFLAGS=[{AMX_OFF}] CXXFLAGS=[]" in stage.calls[0]


def test_a_build_that_dies_at_its_first_decode_is_made_anew(stage: Stage) -> None:
    stage.settings["DECODES"] = "SEGV works"
    result = add_llama_cpp(stage)
    assert result.returncode == 0, result.stderr
    cleaned, rebuilt, decoded = stage.calls[2:]
    assert cleaned.startswith("uv cache clean") and "llama-cpp-python" in cleaned
    assert "--reinstall-package llama-cpp-python --no-binary llama-cpp-python --require-hashes" in rebuilt
    assert f"CFLAGS=[{AMX_OFF}]" in rebuilt
    assert decoded.startswith("first decode")
    assert "dies of SIGSEGV" in result.stderr and "the new build" in result.stderr
    assert stage.has_llama_cpp


def test_a_build_that_dies_again_ends_the_setup_with_a_way_out(stage: Stage) -> None:
    stage.settings["DECODES"] = "ILL ILL works"
    result = add_llama_cpp(stage)
    assert result.returncode == 1
    assert "dies of SIGILL" in result.stderr and "CC=clang CXX=clang++" in result.stderr
    assert len([call for call in stage.calls if call.startswith("first decode")]) == 2
    assert not stage.has_llama_cpp


def test_a_first_decode_that_is_refused_is_no_reason_to_rebuild(stage: Stage) -> None:
    stage.settings["DECODES"] = "refuses"
    result = add_llama_cpp(stage)
    assert result.returncode == 1
    assert "cannot load model.gguf" in result.stderr and "Traceback" not in result.stderr
    assert not any("reinstall" in call for call in stage.calls)
    assert not stage.has_llama_cpp


def test_without_the_embedded_model_setup_goes_on_and_is_made_up_for(stage: Stage) -> None:
    make = ("make", ".venv/.llama-cpp", f"PYTHON={sys.executable}")
    stage.settings["NO_MODEL"] = "1"
    result = stage.run(*make)
    assert result.returncode == 0
    assert "going on without the embedded model" in result.stderr and "is not tried" in result.stderr
    assert not any(call.startswith("first decode") for call in stage.calls)
    assert not stage.is_ready and not stage.has_llama_cpp
    del stage.settings["NO_MODEL"]
    stage.run(*make)
    assert stage.calls[-1].startswith("first decode")
    assert stage.is_ready and stage.has_llama_cpp


def test_a_rebuild_can_be_asked_for(stage: Stage) -> None:
    result = add_llama_cpp(stage, "make", "rebuild", f"PYTHON={sys.executable}")
    assert result.returncode == 0, result.stderr
    cleaned, rebuilt, decoded = stage.calls
    assert cleaned.startswith("uv cache clean") and "--reinstall-package llama-cpp-python" in rebuilt
    assert f"CFLAGS=[{AMX_OFF}]" in rebuilt and decoded.startswith("first decode")


def test_packages_that_cannot_be_installed_end_the_setup(stage: Stage) -> None:
    stage.settings["UV_FAILS_AT"] = "pip sync"
    result = stage.run()
    assert result.returncode == 1
    assert "could not be installed" in result.stderr
    assert not stage.is_ready


def test_a_missing_compiler_is_named_when_the_build_fails(stage: Stage) -> None:
    stage.settings |= {"UV_FAILS_AT": "llama-cpp-requirements", "CXX": "no-such-compiler"}
    result = add_llama_cpp(stage)
    assert result.returncode == 1
    assert "needs a C++ compiler" in result.stderr and "no-such-compiler" in result.stderr
    del stage.settings["CXX"]
    assert "C++ compiler" not in stage.run(sys.executable, "scripts/setup.py", "--llama-cpp").stderr


def test_make_sets_up_once_and_again_when_the_lock_changes(stage: Stage) -> None:
    make = ("make", "setup", f"PYTHON={sys.executable}")
    assert stage.run(*make).returncode == 0
    first = len(stage.calls)
    assert stage.run(*make).returncode == 0
    assert len(stage.calls) == first
    later = (stage.root / ".venv" / ".ready").stat().st_mtime + 5
    os.utime(stage.root / "requirements.lock", (later, later))
    assert stage.run(*make).returncode == 0
    assert len(stage.calls) > first


def test_a_uv_that_setup_brought_earlier_is_used_again(stage: Stage, setup: ModuleType) -> None:
    own = stage.program(".tools/bin/uv", ACCEPTING)
    stage.settings["PATH"] = str(own.parent)
    assert setup.find_uv(stage.root, stage.environment()) == str(own)


def test_a_python_without_ensurepip_is_told_what_to_install(
    tmp_path: Path, setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(setup.SetupError, match=r"ensurepip.*python3-venv"):
        setup.find_uv(tmp_path, {"PATH": str(tmp_path)})


def test_an_old_python_is_told_what_is_needed(setup: ModuleType) -> None:
    setup.require_python((3, 11, 0))
    with pytest.raises(setup.SetupError, match=r"3\.11 or newer is needed, and this is 3\.10\.4"):
        setup.require_python((3, 10, 4))


def test_an_old_python_can_read_the_script_so_far() -> None:
    script = (PROJECT / "scripts" / "setup.py").read_text(encoding="utf-8")
    assert ast.parse(script, feature_version=(3, 7)).body


def test_a_first_decode_of_a_real_model_works(tmp_path: Path) -> None:
    result = first_decode(write_tiny(tmp_path / "tiny.gguf"))
    assert result.returncode == 0, result.stderr


def test_a_first_decode_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    result = first_decode(tmp_path / "text.gguf")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"llama.cpp cannot load {tmp_path / 'text.gguf'}"


def first_decode(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "scripts" / "first_decode.py"), str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
