"""The repository itself: its documents' commands, its locks, the script that sets it up, its mutants."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import outrider
from mutants import read_mutants
from outrider.cli import commands
from outrider.cli.help import CommandSpec
from outrider.core.extras import MODULES
from outrider.core.schema import Group
from tiny_gguf import write_tiny

# Every command line of the README and of docs/: the program takes it

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_INLINE = re.compile(r"`outrider ([a-z][^`]* [^`]*)`")
_PATTERN = re.compile(r"\[-|\|[A-Z]|…(?!\")|^bench [a-z]+$|^run --json$")
"""How a command is called, not a line to be typed."""
_LINE = re.compile(r"^(?:    |\$ |)(?:\.venv/bin/)?outrider (.+)$")


def documented() -> Iterator[tuple[str, str]]:
    """Page and command line of each; lines that a backslash continues are one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        in_block = False
        for line in text.splitlines():
            if line.startswith("```"):
                in_block = not in_block
            elif (in_block or line.startswith("    ")) and (found := _LINE.match(line)):
                yield page.name, found[1]
            else:
                yield from ((page.name, code) for code in _INLINE.findall(line))


COMMANDS = sorted({(page, line) for page, line in documented() if not _PATTERN.search(line)})


def words_of(line: str) -> list[str]:
    """The arguments of a line, up to a comment, a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))


def test_an_example_that_generates_ends_and_gives_the_same_text_again() -> None:
    for page, line in COMMANDS:
        words = words_of(line)
        if words[0] == "run":
            assert "-n" in words, (page, line)
            assert "--temp" in words or "--seed" in words, (page, line)


def test_the_program_takes_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[Group] = []

    def run(_: CommandSpec, settings: Group) -> int:
        carried_out.append(settings)
        return 0

    monkeypatch.setattr(commands, "_run", run)
    for page, line in COMMANDS:
        words = words_of(line)
        carried_out.clear()
        assert commands.carry_out(words) == 0, (page, line)
        assert carried_out or set(words) & {"--help", "-h", "--version"}
    named = {line.split()[0] for _, line in COMMANDS}
    assert len(COMMANDS) > 35 and named >= {"run", "serve", "check", "bench", "verify"}


# The locks hold all that pyproject.toml asks for, with hashes, for any index

DEV, ENGINE = "requirements-dev.lock", "scripts/llama-cpp-requirements.txt"
LOCKS = ["requirements.lock", DEV, ENGINE]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = METADATA["optional-dependencies"]


def versions(name: str) -> dict[str, set[str]]:
    """The versions of every package that a lock names; all of its entries have hashes."""
    lock = (ROOT / name).read_text()
    entries = re.findall(r"^([a-z0-9-]+)==([^\s;]+).*\\\n(?:    --hash=sha256:[0-9a-f]{64}.*\n)+", lock, re.M)
    assert len(entries) == len(re.findall(r"^[^\s#]", lock, re.M))
    return {package: {version for other, version in entries if other == package} for package, _ in entries}


def packages(requirements: list[str]) -> list[Requirement]:
    """The packages that are asked for, those of Outrider's own extras among them."""
    found = []
    for requirement in map(Requirement, requirements):
        own = requirement.extras if requirement.name == METADATA["name"] else set()
        found += [part for extra in own for part in packages(EXTRAS[extra])] or [requirement]
    return found


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("requirements.lock", METADATA["dependencies"] + EXTRAS["all"] + ["hatchling"]),
        (DEV, METADATA["dependencies"] + EXTRAS["dev"]),
        (ENGINE, EXTRAS["llama-cpp"]),
    ],
)
def test_a_lock_holds_every_dependency_with_its_hashes(name: str, requirements: list[str]) -> None:
    locked = versions(name)
    for requirement in packages(requirements):
        for version in locked[requirement.name.replace("_", "-")]:
            assert requirement.specifier.contains(version), requirement


def test_every_module_that_a_command_needs_is_brought_by_its_extra() -> None:
    owners = packages_distributions()
    for extra, modules in MODULES.items():
        wanted = {
            requirement.name.lower().replace("_", "-") for requirement in map(Requirement, EXTRAS[extra])
        }
        found = {owners.get(module, [module])[0].lower().replace("_", "-") for module in modules}
        assert found == wanted, extra


def test_the_changelog_begins_with_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == outrider.__version__


def test_what_has_to_be_compiled_is_in_a_lock_of_its_own() -> None:
    assert "llama-cpp-python" in versions(ENGINE)
    assert "llama-cpp-python" not in versions("requirements.lock") | versions(DEV)


@pytest.mark.parametrize("name", [*LOCKS, "scripts/uv-requirements.txt"])
def test_a_lock_names_no_host_that_a_user_may_not_reach(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert "--hash=" in lock
    assert not re.search(r"://|--index-url|--find-links", lock)


# scripts/setup.py, and its try of a build's first decode


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
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
    script = (ROOT / "scripts" / "setup.py").read_text(encoding="utf-8")
    assert ast.parse(script, feature_version=(3, 7)).body


@pytest.mark.slow
def test_a_first_decode_works_with_a_model_alone(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="`make test-all` builds it")
    (tmp_path / "text.gguf").write_text("no model")
    for model, status in ((write_tiny(tmp_path / "tiny.gguf"), 0), (tmp_path / "text.gguf", 1)):
        command = [sys.executable, str(ROOT / "scripts" / "first_decode.py"), str(model)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1] == f"llama.cpp cannot load {tmp_path / 'text.gguf'}"


# The kept list of mutants (scripts/mutants.py) fits the sources; running it takes minutes, this does not


def test_every_mutant_applies_to_one_place_and_names_tests_that_there_are() -> None:
    mutants = read_mutants()
    said = {mutant.id: mutant.place(ROOT / "src" / "outrider")[1] for mutant in mutants}
    assert {name: why for name, why in said.items() if why} == {}
    assert len(said) == len(mutants) >= 70
    assert {t for m in mutants for t in m.tests if not (ROOT / "tests" / f"{t}.py").exists()} == set()
