"""The options of `serve`: those of `run` about models and drafts, and one for every other setting.

Names and defaults are those of `outrider.server.settings`; what the command line leaves out may come
from the environment or from a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli import draft_options, options
from outrider.cli.options import option
from outrider.cli.output import write
from outrider.cli.settings import RunSettings
from outrider.core.extras import require_extra
from outrider.server.configuration import as_toml, read_configuration
from outrider.server.settings import TABLES, ServeSettings, table_of

__all__ = ["OPTIONS", "command"]

_PANELS = {"server": "Server", "access": "Access", "limits": "Limits", "logs": options.OUTPUT}

_ALIASES = {"max_running": ("-np", "--parallel"), "alias": ("-a",)}
"""Further names, as llama-server has them."""

_METAVARS = {int: "N", float: "S", str: "TEXT", Path: "FILE"}

_SHARED: dict[str, Any] = {
    "model": options.Model,
    "model_draft": options.DraftModel,
    "hf_repo": options.HubModel,
    "hf_repo_draft": options.HubDraft,
    "hf_token": options.HubToken,
    "offline": options.Offline,
    "policy": draft_options.Policy,
    "draft_max": draft_options.DraftMax,
    "draft_min": draft_options.DraftMin,
    "draft_p_min": draft_options.DraftPMin,
    "draft_sampling": draft_options.DraftSampling,
    "rule": draft_options.Rule,
    "bitwise": draft_options.Bitwise,
    "lookup": draft_options.Lookup,
    "corpus": draft_options.Corpus,
    "costs": draft_options.CostsFile,
    "temp": options.Temperature,
    "top_k": options.TopK,
    "top_p": options.TopP,
    "min_p": options.MinP,
    "ctx_size": Annotated[
        int | None,
        option(
            options.MACHINE,
            "-c",
            "--ctx-size",
            metavar="N",
            help="Context of a request in tokens; 0: as trained. Default: 4096, or as trained.",
        ),
    ],
    "ctx_size_draft": options.DraftContext,
    "gpu_layers": options.GpuLayers,
    "gpu_layers_draft": options.DraftGpuLayers,
    "split_mode": options.SplitMode,
    "main_gpu": options.MainGpu,
    "threads": options.Threads,
    "threads_batch": options.ThreadsBatch,
    "batch_size": options.BatchTokens,
    "ubatch_size": options.MicroBatchTokens,
    "flash_attn": options.FlashAttention,
    "cache_type_k": options.CacheTypeK,
    "cache_type_v": options.CacheTypeV,
    "mmap": options.Mmap,
    "mlock": options.Mlock,
    "swa_full": options.FullWindow,
    "repack": options.Repack,
    "backend": options.Backend,
    "llama_library": options.LlamaLibrary,
    "verbose": options.Verbose,
}

_Config = Annotated[
    Path | None,
    option(
        "Server",
        "--config",
        metavar="FILE",
        help="Settings as TOML, below the command line and the environment. Default: $OUTRIDER_CONFIG.",
    ),
]
_PrintConfig = Annotated[
    bool, option("Server", "--print-config", help="Print the settings in force as TOML, without secrets.")
]


def _own(name: str) -> Any:
    """The option of a setting that only the server has."""
    field = ServeSettings.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    panel = _PANELS[table_of(name) or ""]
    kind: Any = field.annotation
    if kind is bool:
        names = [f"{flag}/--no-{flag[2:]}"] if field.default else [flag]
        return Annotated[bool, option(panel, *names, help=field.description or "")]
    if isinstance(field.default, list):
        return Annotated[list[str] | None, option(panel, flag, metavar="TEXT", help=field.description or "")]
    plain = next(known for known in _METAVARS if known in _atoms(kind))
    metavar = "BYTES" if name in ("max_body", "max_schema") else _METAVARS[plain]
    made = option(panel, flag, *_ALIASES.get(name, ()), metavar=metavar, help=field.description or "")
    return Annotated[plain | None if field.default is None else plain, made]


def _atoms(kind: Any) -> set[Any]:
    """The types that a type is made of."""
    return {kind}.union(*map(_atoms, getattr(kind, "__args__", ())))


OPTIONS: dict[str, Any] = {
    name: _SHARED.get(name) or _own(name) for table in TABLES.values() for name in table.model_fields
}
"""For every setting its option, by name."""


def command(cls: type[TyperCommand], as_run: Callable[[dict[str, Any]], RunSettings]) -> Any:
    """The command, of class `cls`; `as_run` makes settings of `run` of those that it has too."""

    def serve_command(ctx: typer.Context, **given: Any) -> None:
        flags = {name: given[name] for name in OPTIONS if _is_given(ctx, name)}
        configuration = read_configuration(flags, os.environ, given["config"])
        if given["print_config"]:
            write(as_toml(configuration))
            raise typer.Exit
        require_extra("outrider serve", "serve")
        from outrider.cli.serve import serve

        raise typer.Exit(serve(configuration, as_run(configuration.settings.plain())))

    parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, kind in {"config": _Config, "print_config": _PrintConfig, **OPTIONS}.items():
        default = ServeSettings.model_fields[name].default if name in OPTIONS else None
        default = False if name == "print_config" else None if default == [] else default
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    vars(serve_command)["__signature__"] = Signature(parameters)
    serve_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    help_text = "Serve the models to many: an OpenAI-compatible API, and a web page."
    program.command("serve", cls=cls, help=help_text)(serve_command)
    return get_command(program)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
