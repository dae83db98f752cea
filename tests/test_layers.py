"""Imports inside src/outrider run one way: downward through this table, never sideways."""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from closure import closure, file_of, imports

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
        for line, name in imports(file, source, for_types=True):
            other = part_of(name, source)
            if other is not None and other != part and LEVELS.get(other, len(LAYERS)) >= LEVELS[part]:
                found.append(f"{inside}:{line}: {part} may not import {other}")
    return found


def test_imports_run_downward() -> None:
    assert SOURCE.is_dir()
    assert complaints(SOURCE) == []


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Empty modules, one for each part."""
    (source := tmp_path / "outrider").mkdir()
    for part in LEVELS:
        (source / f"{part}.py").touch()
    return source


def test_a_planted_import_is_found(planted: Path) -> None:
    (planted / "extras.py").touch()
    (planted / "policy.py").write_text("import numpy\nfrom outrider.drafters.lookup import SuffixDrafter\n")
    (planted / "core.py").write_text("def late():\n    import outrider\n")
    assert complaints(planted) == [
        "core.py:2: core may not import __init__",
        "extras.py: extras has no place in LAYERS",
        "policy.py:2: policy may not import drafters",
    ]


def cycle(source: Path) -> list[str]:
    """Files that import one another in a circle when they are loaded; empty where none do.

    Imports in functions and under TYPE_CHECKING do not count: they run later or never, and are written so
    where two files need each other's names.
    """
    graph: dict[str, set[str]] = {}
    for file in sorted(source.rglob("*.py")):
        graph[str(file.relative_to(source))] = needed = set()
        for _, name in imports(file, source, in_functions=False):
            module = file_of(name, source) or file_of(name[:-1] or name, source)
            if module is not None:
                needed.add(str(module.relative_to(source)))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_one_another_in_a_circle() -> None:
    assert cycle(SOURCE) == []


def test_a_planted_circle_is_found(planted: Path) -> None:
    (planted / "engine.py").write_text("from outrider.policy import Slots")
    (planted / "policy.py").write_text("class A:\n    from .engine import Loop")
    assert {*cycle(planted)} == {"engine.py", "policy.py"}
    (planted / "policy.py").write_text("def late():\n    from . import engine")
    assert cycle(planted) == []


NOT_OF_RUN = (
    *("fleet", "server", "backends.native.build"),
    *(
        f"lab.{part}"
        for part in ("bench", "certify", "check", "distill", "plan", "replay", "trim", "workloads")
    ),
)


def test_run_reaches_nothing_that_it_does_not_do() -> None:
    """Its imports and theirs, those in functions too."""
    starts = ("outrider.cli.main", "outrider.cli.run", "outrider.cli.settings")
    found = {".".join(name[1:]) for start in starts for name in closure(start)}
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


EXPERIMENTS = ("bench", "certify", "distill", "plan", "trim")


def test_no_experiment_imports_another() -> None:
    """What they share lies in lab/ itself, which imports none of them."""
    crossing = [
        f"{file.relative_to(SOURCE)}:{line}: {name[2]}"
        for file in sorted((SOURCE / "lab").rglob("*.py"))
        for line, name in imports(file, for_types=True)
        if name[:2] == ("outrider", "lab")
        and {*name[2:3]} & {*EXPERIMENTS} - {file.relative_to(SOURCE).parts[1]}
    ]
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
