"""The options of `check`: models and prompts of its own, and how they are loaded as `run` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli import options
from outrider.cli.options import MACHINE, OUTPUT, option
from outrider.cli.settings import RunSettings

__all__ = ["command"]

_INTERRUPTED = 130
_HELP = "Say within a minute whether a draft model, or lookup alone, pays for a target on this machine."
_CHECKING = "Checking"

_Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A GGUF file, hf:OWNER/REPO[:QUANT], hf:OWNER/REPO/FILE, or default: the embedded default.",
    ),
]
_Drafts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[DRAFT]...", help="Draft models to judge, one after the other. None: lookup alone."
    ),
]
_Prompts = Annotated[
    list[str] | None,
    option(
        _CHECKING,
        "--prompts",
        metavar="FILE",
        help="Your prompts: a JSON-lines file or a built-in workload (repeatable). Default: all of these.",
    ),
]
_Seconds = Annotated[
    float,
    option(
        _CHECKING,
        "--seconds",
        metavar="S",
        help="Time for the target's answers, and again for each draft.",
    ),
]
_Backend = Annotated[
    str,
    option(
        MACHINE,
        "--backend",
        "--backends",
        metavar="NAMES",
        help="Native library: llama.cpp, ik, or auto and llama.cpp,ik: the faster one here, and by how much.",
    ),
]
_Json = Annotated[
    bool, option(OUTPUT, "--json", help="One JSON object on standard output, and nothing else.")
]


def command(cls: type[TyperCommand], as_run: Callable[[dict[str, Any]], RunSettings]) -> Any:
    """The command, of class `cls`; `as_run` makes settings of `run` of those that it has too."""

    def check_command(
        target: _Target,
        drafts: _Drafts = None,
        prompts: _Prompts = None,
        seconds: _Seconds = 45.0,
        hf_token: options.HubToken = None,
        offline: options.Offline = False,
        print_json: _Json = False,
        verbose: options.Verbose = False,
        ctx_size: options.Context = None,
        gpu_layers: options.GpuLayers = "all",
        gpu_layers_draft: options.DraftGpuLayers = None,
        split_mode: options.SplitMode = "layer",
        main_gpu: options.MainGpu = 0,
        threads: options.Threads = -1,
        threads_batch: options.ThreadsBatch = -1,
        batch_size: options.BatchTokens = 2048,
        ubatch_size: options.MicroBatchTokens = 512,
        flash_attn: options.FlashAttention = "auto",
        cache_type_k: options.CacheTypeK = "f16",
        cache_type_v: options.CacheTypeV = "f16",
        mmap: options.Mmap = True,
        mlock: options.Mlock = False,
        swa_full: options.FullWindow = True,
        repack: options.Repack = True,
        backend: _Backend = "auto",
        llama_library: options.LlamaLibrary = None,
    ) -> None:
        given = dict(locals())
        from outrider.backends.gguf import show_log
        from outrider.cli.check import CheckSettings, check

        show_log(verbose)
        own = {name: given[name] for name in CheckSettings.__dataclass_fields__ if name in given}
        own |= {"drafts": drafts or [], "prompts": prompts or []}
        try:
            status = check(CheckSettings(run=as_run(given), **own))
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            status = _INTERRUPTED
        raise typer.Exit(status)

    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command("check", cls=cls, help=_HELP)(check_command)
    return get_command(program)
