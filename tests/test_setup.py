"""scripts/setup.py: what it says to an old Python, and its try of a build's first decode."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tiny_gguf import write_tiny

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", PROJECT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.slow
def test_a_first_decode_of_a_real_model_works(tmp_path: Path) -> None:
    result = first_decode(write_tiny(tmp_path / "tiny.gguf"))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_first_decode_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    result = first_decode(tmp_path / "text.gguf")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"llama.cpp cannot load {tmp_path / 'text.gguf'}"


def first_decode(model: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("llama_cpp", reason="`make test-all` builds it")
    command = [sys.executable, str(PROJECT / "scripts" / "first_decode.py"), str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
