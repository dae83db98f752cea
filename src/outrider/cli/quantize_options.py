"""The options of `quantize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli.options import MODELS, OUTPUT, HubToken, Offline, Threads, option

__all__ = ["command"]

_INTERRUPTED = 130

_HELP = "Make quantizations of a model with llama.cpp's own quantizer, from one download."

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. None: the embedded default.",
    ),
]
_To = Annotated[
    list[str],
    option(MODELS, "--to", metavar="TYPES", help="What to make: Q8_0,Q4_K_M,… (repeatable)."),
]
_Pure = Annotated[
    bool, option(MODELS, "--pure", help="All matrices of the one type, instead of llama.cpp's mixture.")
]
_KeepOutput = Annotated[
    bool, option(MODELS, "--leave-output-tensor", help="Leave the output matrix as it is in the source.")
]
_Out = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--out",
        metavar="FOLDER",
        help="Where the files go. Default: beside a local file; else the working folder.",
    ),
]
_Force = Annotated[bool, option(OUTPUT, "--force", help="Replace files that exist.")]
_Json = Annotated[
    bool, option(OUTPUT, "--json", help="One JSON object on standard output, and nothing else.")
]


def command(cls: type[TyperCommand], _as_run: Callable[[dict[str, Any]], Any]) -> Any:
    """The command, of class `cls`."""
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command("quantize", cls=cls, help=_HELP)(_quantize)
    return get_command(program)


def _quantize(
    to: _To,
    model: _Model = None,
    pure: _Pure = False,
    leave_output_tensor: _KeepOutput = False,
    hf_token: HubToken = None,
    offline: Offline = False,
    out: _Out = None,
    force: _Force = False,
    print_json: _Json = False,
    threads: Threads = -1,
) -> None:
    from outrider.cli.quantize import QuantizeSettings, make

    settings = QuantizeSettings(
        model=model,
        to=to,
        pure=pure,
        keep_output=leave_output_tensor,
        hf_token=hf_token,
        offline=offline,
        out=out,
        force=force,
        print_json=print_json,
        threads=max(threads, 0),
    )
    try:
        make(settings)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted: the file that was being written is removed", err=True)
        raise typer.Exit(_INTERRUPTED) from None
