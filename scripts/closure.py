"""How much code importing a module reaches: what someone who changes it may have to read.

    python scripts/closure.py                       # engine.loop, cli.run and server.assembly
    python scripts/closure.py outrider.policy ...   # any others

Prints for each module the files and lines that its imports reach, and the lines of each part. "At once"
counts what is loaded with the module, "in all" also imports inside functions; imports under TYPE_CHECKING
count in neither. A module brings the `__init__` of its packages along; that of outrider itself is left out.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "outrider"
MODULES = ("outrider.engine.loop", "outrider.cli.run", "outrider.server.assembly")
Name = tuple[str, ...]


def file_of(module: Name, source: Path = SOURCE) -> Path | None:
    """The file of a dotted name, if it is a module under `source`, which is the folder of module[:1]."""
    path = source.joinpath(*module[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file if module[0] == source.name and file.is_file() else None


def imports(
    file: Path, source: Path = SOURCE, *, in_functions: bool = True, for_types: bool = False
) -> Iterator[tuple[int, Name]]:
    """Line and dotted name of every import in a file. `from a import b` counts as a.b: b may be a module.

    Args:
        file: A module under `source`.
        source: The package's folder.
        in_functions: Also those that run when a function is called.
        for_types: Also those under `if TYPE_CHECKING`.
    """
    package = (source.name, *file.relative_to(source).parent.parts)
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((node.lineno, (*base, alias.name)) for alias in node.names)
        else:
            waiting += reversed(list(ast.iter_child_nodes(node)))


def closure(module: str, source: Path = SOURCE, *, in_functions: bool = True) -> dict[Name, int]:
    """The modules that importing one reaches, itself among them, each with its number of lines."""
    reached: dict[Name, int] = {}
    waiting = [tuple(module.split("."))]
    while waiting:
        name = waiting.pop()
        file = file_of(name, source)
        if len(name) == 1 or name in reached or file is None:
            continue
        reached[name] = len(file.read_text(encoding="utf-8").splitlines())
        for _, other in [(0, name), *imports(file, source, in_functions=in_functions)]:
            waiting += [other[:end] for end in range(2, len(other) + 1)]
    return reached


def describe(module: str, source: Path = SOURCE) -> Iterator[str]:
    """The table that is printed for a module."""
    counted = (closure(module, source, in_functions=False), closure(module, source))
    parts = [Counter[str]() for _ in counted]
    for lines_of, lines in zip(counted, parts, strict=True):
        for name, number in lines_of.items():
            lines[name[1]] += number
    at_once, in_all = parts
    yield f"{module:28}{'at once':>10}{'in all':>10}"
    yield f"  {'files':26}{len(counted[0]):10,}{len(counted[1]):10,}"
    yield f"  {'lines':26}{at_once.total():10,}{in_all.total():10,}"
    yield from (f"    {part:24}{at_once[part]:10,}{lines:10,}" for part, lines in in_all.most_common())


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module", nargs="*", default=MODULES, help="dotted name, as outrider.engine.loop")
    arguments = parser.parse_args()
    for module in arguments.module:
        if file_of(tuple(module.split("."))) is None:
            parser.error(f"{module}: no module under {SOURCE}")
        print("\n".join(describe(module)))


if __name__ == "__main__":
    main()
