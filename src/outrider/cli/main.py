"""The `outrider` program: errors become messages and exit statuses."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.commands import Commands
from outrider.cli.output import USAGE_ERROR, leave, open_streams, readable
from outrider.core.errors import OutriderError
from outrider.core.files import reason_of

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding that measures, decides and proves: the same text in fewer target calls.",
)


def _libraries() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version  # loads slowly

    found = []
    for name in ("ik-llama-cpp-python", "xllamacpp", "llama-cpp-python"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__} ({', '.join(_libraries()) or 'no library to run models'})")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options of the program itself."""


def main() -> None:
    """Run the program. Errors become one message and exit status 2."""
    open_streams()
    try:
        app(prog_name="outrider")
        return
    except OutriderError as error:
        what = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: {reason_of(error)}. Check it, or name another."
    except MemoryError:
        what = "memory: this machine has none left. Choose a smaller model or context (-c)."
    from rich.text import Text  # loads slowly

    from outrider.cli.screen import Screen

    Screen(stderr=True, soft_wrap=True).say(Text.assemble(("error: ", "bold red"), readable(what)))
    leave(USAGE_ERROR)
