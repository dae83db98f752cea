"""`outrider bench` and its subcommands as commands; what they do is imported when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli.bench_flags import FLAGS, SWITCHES, Json
from outrider.cli.options import OUTPUT, option
from outrider.core.extras import require_extra

__all__ = ["SUBCOMMANDS", "command", "subcommand"]

_HELP = """Find the pairing and the settings that win here: sweep targets, drafts, settings and workloads.

[bold]outrider bench init[/bold] writes a commented plan; [bold]bench report[/bold], [bold]compare[/bold] and
[bold]export[/bold] read runs (-h tells more). Interrupted, it goes on where it was when it is started again.
"""

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run.", show_default=False)]
_Before = Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.", show_default=False)]
_After = Annotated[Path, typer.Argument(metavar="B", help="That of a later one.", show_default=False)]
_NewPlan = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")]
_Force = Annotated[bool, option(OUTPUT, "--force", help="Replace the file if there is one.")]
_Html = Annotated[
    Path | None, option(OUTPUT, "--html", metavar="FILE", help="Write the HTML report there too.")
]
_To = Annotated[
    Path,
    option(OUTPUT, "--to", metavar="FILE", help="A file that ends in .csv or .parquet."),
]


def _bench(ctx: typer.Context, **arguments: Any) -> None:
    given = {name: value for name, value in arguments.items() if _is_given(ctx, name)}
    require_extra("outrider bench", "bench")
    from outrider.cli.bench import bench

    raise typer.Exit(bench(given))


def _sign() -> None:
    """Give `_bench` a parameter for each of its options: they are handed on as they are."""
    parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, kind in FLAGS.items():
        default = SWITCHES.get(name)
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    vars(_bench)["__signature__"] = Signature(parameters)
    _bench.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_sign()


def _init(file: _NewPlan = Path("bench.toml"), force: _Force = False) -> None:
    from outrider.cli.bench_runs import init

    raise typer.Exit(init(file, force=force))


def _report(folder: _Folder, html: _Html = None, json: Json = False) -> None:
    from outrider.cli.bench_runs import report

    raise typer.Exit(report(folder, html, as_json=json))


def _compare(before: _Before, after: _After) -> None:
    from outrider.cli.bench_runs import compare

    raise typer.Exit(compare(before, after))


def _export(folder: _Folder, to: _To) -> None:
    from outrider.cli.bench_runs import export

    raise typer.Exit(export(folder, to))


_FUNCTIONS: Mapping[str, tuple[Callable[..., None], str]] = {
    "bench": (_bench, _HELP),
    "init": (_init, "Write a plan with every setting explained, ready to be run."),
    "report": (_report, "Show the report of a run, as far as it has come."),
    "compare": (_compare, "What changed between two runs, beyond the noise."),
    "export": (_export, "Write the rows of a run as a table: CSV or Parquet."),
}

SUBCOMMANDS = frozenset(_FUNCTIONS) - {"bench"}
"""What may stand behind `bench` instead of a plan."""


def subcommand(cls: type[TyperCommand], name: str) -> Any:
    """`bench` itself or one of SUBCOMMANDS, of class `cls`."""
    function, text = _FUNCTIONS[name]
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command(name, cls=cls, help=text)(function)
    return get_command(program)


def command(cls: type[TyperCommand], _as_run: Callable[[dict[str, Any]], Any]) -> Any:
    """`bench` itself, of class `cls`."""
    return subcommand(cls, "bench")


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
