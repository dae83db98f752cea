"""What a plain install does without: commands name the extra that they need, and `run` imports none."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cli_helpers import PATIENCE_S, ROOT, Call, environment, refused
from outrider.core.errors import SettingError
from outrider.core.extras import MODULES, require_extra
from tiny_gguf import write_tiny

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NOT_IN_RUN = {module for modules in MODULES.values() for module in modules} | {
    "starlette",
    "llama_cpp",
    "ik_llama_cpp",
    "xllamacpp",
}
PROGRAM = f"""
import atexit, json, sys
from importlib import import_module
atexit.register(lambda: print(json.dumps(sorted({NOT_IN_RUN} & sys.modules.keys())), file=sys.stderr))
for command in ("run", "chat", "costs", "verify", "check", "quantize"):
    import_module("outrider.cli." + command)
from outrider.cli.main import main
main()
"""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower().replace("_", "-") for text in requirements}


def test_every_module_is_brought_by_its_extra() -> None:
    owners = packages_distributions()
    for extra, modules in MODULES.items():
        for module in modules:
            owner = owners.get(module, [module])[0]
            assert owner.lower().replace("_", "-") in names(EXTRAS[extra]), (extra, module)
        assert len(modules) == len(EXTRAS[extra]), extra


def test_what_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SettingError) as caught:
        require_extra("outrider serve", "serve", "run it elsewhere")
    assert str(caught.value) == (
        "outrider serve: FastAPI and Uvicorn are not installed. "
        "They come with the extra serve: in Outrider's checkout, pip install '.[serve]'; "
        "or run it elsewhere."
    )


@pytest.mark.parametrize(
    ("module", "command", "said"),
    [
        ("fastapi", ["serve", "-m", "none.gguf"], "outrider serve: FastAPI is not installed. "),
        ("torch", ["distill", "-m", "none.gguf"], "outrider distill: PyTorch is not installed. "),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    outrider: Call, monkeypatch: pytest.MonkeyPatch, module: str, command: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    found = refused(outrider(*command))
    assert found.startswith(said) and f"pip install '.[{command[0]}]'" in found


@pytest.mark.parametrize("command", ["serve", "distill"])
def test_help_needs_no_extra(outrider: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    for module in MODULES[command]:
        monkeypatch.setitem(sys.modules, module, None)
    outcome = outrider(command, "--help")
    assert outcome.status == 0 and outcome.err == "" and f"outrider {command}" in outcome.out


PLAINLY = ["-n", "4", "--raw", "-t", "1", "--policy", "fixed"]
"""What calls cost is not measured, which imports nothing more."""


@pytest.mark.parametrize("arguments", [[*PLAINLY, "hello"], ["--help"]])
def test_a_plain_run_imports_nothing_of_the_extras(tmp_path: Path, arguments: list[str]) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", PROGRAM, "run", "-m", str(model), *arguments]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_ray_is_imported_by_its_flag_alone() -> None:
    program = "import sys, outrider.cli.bench, outrider.lab.bench.sweep; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(), timeout=2 * PATIENCE_S)


def test_a_cluster_without_ray_names_the_extra(outrider: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(outrider("bench", "-m", "none.gguf", "--ray", "local"))
    assert "--ray: Ray is not installed. It comes with the extra ray" in said
