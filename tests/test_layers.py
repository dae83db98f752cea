"""Imports inside src/outrider run one way: downward through this table, never sideways."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# From the bottom to the top. A part is a module or a package right under src/outrider; it may
# import the parts of the rows above its own in this list, and its own modules. A new part needs
# a place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("sampling", "models"),
    ("verify", "costs"),
    ("policy", "drafters", "constraints", "backends"),
    ("engine", "formats"),
    ("session",),
    ("lab",),
    ("server",),
    ("fleet",),
    ("__init__",),  # the Python API: what `import outrider` shows
    ("cli",),
    ("__main__",),
)
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}
SOURCE = Path(__file__).parents[1] / "src" / "outrider"
MAX_FUNCTION_LINES = 60


def imported_modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of every import, also those in functions and for type checking.

    `package` is the package that the module lies in. `from a import b` counts as a.b: b may be
    a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def part_of(name: tuple[str, ...], source: Path) -> str | None:
    """The part that a dotted name belongs to; None for names outside Outrider."""
    if name[0] != "outrider":
        return None
    part = name[1] if len(name) > 1 else "__init__"
    is_module = part in LEVELS or (source / part).is_dir() or (source / f"{part}.py").is_file()
    return part if is_module else "__init__"


def complaints(source: Path) -> list[str]:
    """What is wrong with the imports under `source`, one line each."""
    found = []
    for file in sorted(source.rglob("*.py")):
        inside = file.relative_to(source)
        part = inside.parts[0].removesuffix(".py")
        if part not in LEVELS:
            found.append(f"{inside}: {part} has no place in LAYERS")
            continue
        package = ("outrider", *inside.parent.parts)
        for line, name in imported_modules(ast.parse(file.read_text(encoding="utf-8")), package):
            other = part_of(name, source)
            if other is not None and other != part and LEVELS.get(other, len(LAYERS)) >= LEVELS[part]:
                found.append(f"{inside}:{line}: {part} may not import {other}")
    return found


def test_imports_run_downward() -> None:
    assert SOURCE.is_dir()
    assert complaints(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        ("core/data.py", "import outrider.engine", "core may not import engine"),
        ("core/data.py", "import outrider", "core may not import __init__"),
        ("verify.py", "from outrider import engine", "verify may not import engine"),
        ("verify.py", "from outrider import load", "verify may not import __init__"),
        ("policy.py", "from outrider.drafters.suffix import SuffixDrafter", "policy may not import drafters"),
        ("engine/loop.py", "from ..cli.main import main", "engine may not import cli"),
        ("engine/loop.py", "def late():\n    from .. import session", "engine may not import session"),
        ("drafters/suffix.py", "from ..backends import fake", "drafters may not import backends"),
        ("__init__.py", "from outrider.cli.main import main", "__init__ may not import cli"),
        ("extras/new.py", "import os", "extras has no place in LAYERS"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, statement: str, complaint: str) -> None:
    plant(tmp_path, file, statement)
    assert [line.split(": ", 1)[1] for line in complaints(tmp_path)] == [complaint]


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("engine/loop.py", "from outrider.engine.sequence import Sequence\nfrom . import sequence"),
        ("engine/loop.py", "from outrider import policy\nfrom ..verify import verify\nimport numpy.random"),
        ("cli/main.py", "import outrider.core.errors, outrider.session"),
        ("cli/main.py", "from outrider import __version__"),
        ("__init__.py", "from outrider.session import Session"),
    ],
)
def test_what_lies_below_may_be_imported(tmp_path: Path, file: str, statement: str) -> None:
    plant(tmp_path, file, statement)
    assert complaints(tmp_path) == []


def plant(source: Path, file: str, statement: str) -> None:
    """An empty module for every part, and one that holds the statement."""
    for part in LEVELS:
        (source / f"{part}.py").touch()
    (source / file).parent.mkdir(exist_ok=True)
    (source / file).write_text(statement, encoding="utf-8")


NOT_OF_RUN = (
    *("fleet", "server", "backends.native.build"),
    *(
        f"lab.{part}"
        for part in ("bench", "certify", "check", "distill", "plan", "replay", "trim", "workloads")
    ),
)


def test_run_reaches_nothing_that_it_does_not_do() -> None:
    """Its imports and theirs, those in functions too."""
    found: set[str] = set()
    waiting = ["cli.main", "cli.run", "cli.settings"]
    while waiting:
        name = waiting.pop()
        folder = SOURCE.joinpath(*name.split("."))
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if name in found or not file.is_file():
            continue
        found.add(name)
        package = ("outrider", *file.relative_to(SOURCE).parent.parts)
        for _, other in imported_modules(ast.parse(file.read_text(encoding="utf-8")), package):
            if other[0] == "outrider":  # of a.b.c all of them, and c may be no module
                waiting += [".".join(other[1:end]) for end in range(2, len(other) + 1)]
    assert "engine.loop" in found
    assert [name for name in sorted(found) if f"{name}.".startswith(tuple(f"{n}." for n in NOT_OF_RUN))] == []


def test_functions_fit_a_screen() -> None:
    too_long = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{file.relative_to(SOURCE)}: {node.name}, {lines} lines")
    assert too_long == []


EXPERIMENTS = ("bench", "certify", "check", "distill", "plan", "trim")


def test_no_experiment_imports_another() -> None:
    """What they share lies in lab/ itself, which imports none of them."""
    crossing = []
    for file in sorted((SOURCE / "lab").rglob("*.py")):
        inside = file.relative_to(SOURCE)
        own = inside.parts[1]
        for line, name in imported_modules(
            ast.parse(file.read_text(encoding="utf-8")), ("outrider", *inside.parent.parts)
        ):
            if (
                name[:2] == ("outrider", "lab")
                and len(name) > 2
                and name[2] in EXPERIMENTS
                and name[2] != own
            ):
                crossing.append(f"{inside}:{line}: {name[2]}")
    assert crossing == []


def test_the_document_of_the_architecture_names_what_there_is() -> None:
    document = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)/` \| (.*) \|$", document, re.MULTILINE)
    assert {part for part, _ in rows} == {part for part in LEVELS if not part.startswith("__")}
    for part, text in rows:
        for name in re.findall(r"`([a-z_]+)/?`", text):
            assert list((SOURCE / part).rglob(f"{name}.py")) or list((SOURCE / part).rglob(name)), (
                part,
                name,
            )
