"""The commands of the program. Their settings and functions are imported when they are called."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from outrider.cli import llama_options
from outrider.cli.output import INTERRUPTED
from outrider.core.errors import SettingError
from outrider.core.schema import Group, Setting, setting_error, settings_of

_RUN = """Generate text with a target model and its drafts, and show what it took.

Exit status: 0; 2 for an error; 3 for an output cut off before its schema or grammar ends; 130 after Ctrl-C;
141 when the reader of its output left (| head).
"""
_BENCH = """Find the pairing and the settings that win here: sweep targets, drafts, settings and workloads.

outrider bench init writes a commented plan; bench report and export read runs (-h says more).
A sweep that was interrupted continues when it is started again.
"""


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command: its settings' class and its function, which returns the exit status, as MODULE:NAME in
    `outrider.cli`; `hidden` are settings that the help omits."""

    settings: str
    function: str
    help: str
    hidden: str = ""


COMMANDS = {
    "run": CommandSpec("settings:RunSettings", "run:run", _RUN),
    "chat": CommandSpec(
        "settings:ChatSettings",
        "chat:chat",
        "Hold a conversation; its KV is kept between turns.",
        hidden="settings:NOT_IN_CHAT",
    ),
    "verify": CommandSpec(
        "settings:VerifySettings",
        "verify:verify",
        "Test that speculation does not change the output, and write a certificate.",
    ),
    "costs": CommandSpec(
        "settings:CostsSettings",
        "costs:costs",
        "Measure what model calls cost here, and what acceptance drafts must reach.",
    ),
    "bench": CommandSpec("bench_settings:BenchSettings", "bench:bench", _BENCH),
    "bench init": CommandSpec(
        "bench_settings:InitSettings",
        "bench:init",
        "Write a plan, ready to run, that explains every setting.",
    ),
    "bench report": CommandSpec(
        "bench_settings:ReportSettings", "bench:report", "Show the report of a run, finished or not."
    ),
    "bench export": CommandSpec(
        "bench_settings:ExportSettings",
        "bench:export",
        "Write the rows of a run as a table: CSV or JSON lines.",
    ),
    "check": CommandSpec(
        "settings:CheckSettings",
        "check:check",
        "Find out within a minute whether a draft model, or lookup alone, pays on this machine.",
    ),
    "plan": CommandSpec(
        "plan_settings:PlanSettings",
        "plan:plan",
        "Predict what a pair would do on other hardware, and write the command for another engine.",
    ),
    "distill": CommandSpec(
        "distill_settings:DistillSettings",
        "distill:distill",
        "Train a small draft on the target's own answers, and measure it on held-out prompts.",
    ),
    "trim": CommandSpec(
        "settings:TrimSettings",
        "trim:trim_draft",
        "Make a draft cheaper without training: a smaller vocabulary, and weight types that are fast here.",
    ),
    "quantize": CommandSpec(
        "settings:QuantizeSettings",
        "quantize:quantize_model",
        "Quantize a model with llama.cpp's own quantizer, from one download.",
    ),
    "serve": CommandSpec(
        "serve_settings:ServeOptions",
        "serve_settings:serve_or_print",
        "Serve models: an OpenAI-compatible API, and a web page.",
    ),
    "cache": CommandSpec(
        "settings:CacheSettings",
        "cache:cache",
        "Show what Outrider keeps on this machine, where, and remove it.",
    ),
    "setup": CommandSpec(
        "settings:SetupSettings",
        "setup:setup",
        "Show which libraries and devices run GGUF files here; compile a library for this CPU.",
    ),
}


_NOTICES = "outrider.notices"
"""in a context's `meta`: notes about the command line"""
_ALL = "--help-all"
_LONG = 40
"""The help of a command with more settings shows only the usual ones."""
_USUAL = frozenset(
    """
    prompt_argument prompt file system interactive predict stop model hf_repo model_draft hf_repo_draft
    ctx_size threads gpu_layers backend temp top_p seed json_schema grammar policy draft_max corpus prediction
    show_source compare explain quiet print_json trace offline verbose host port api_key alias models_dir
    max_running config print_config log_prompts plan workload prompts minutes out quick tokens output base
    """.split()  # noqa: SIM905 (names are read, not quotation marks)
)
"""Settings that most people need"""
_COLUMN = 26
"""where the explanations start in the help"""


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"outrider.cli.{module}"), name)


class Command(TyperCommand):
    """A command whose help lists its settings by panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ALL] = _ALL in args
        return super().parse_args(ctx, ["--help" if word == _ALL else word for word in args])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        spec = COMMANDS[self.name or ""]
        hidden = _load(spec.hidden) if spec.hidden else ()
        settings = [s for s in settings_of(_load(spec.settings)).values() if s.name not in hidden]
        is_short = len(settings) > _LONG and not ctx.meta.get(_ALL)
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for setting in settings:
            if setting.name in _USUAL or not is_short:
                panel = "Arguments" if setting.is_argument else setting.panel
                panels.setdefault(panel, []).append(_help_record(setting))
        if is_short:
            more = f"Show all {len(settings)} options."
            panels["More"] = [(_ALL.ljust(_COLUMN), more)]
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records, col_max=_COLUMN)


def _help_record(setting: Setting) -> tuple[str, str]:
    written = setting.metavar or ""
    if not setting.is_argument:
        short = [name for name in setting.names if not name.startswith("--")]
        long = f"--[no-]{setting.flag.removeprefix('--')}" if "/" in "".join(setting.flags) else setting.flag
        written = f"{', '.join([*short, long])} {written if setting.kind is not bool else ''}"
    default = "on" if setting.default is True else setting.default
    meaning = setting.help if default in (None, False, "") else f"{setting.help} [{default}]"
    return written.rstrip().ljust(_COLUMN), meaning


class Commands(TyperGroup):
    """The program: COMMANDS, each made when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, spec in COMMANDS.items():
            if " " not in name:
                self.add_command(TyperCommand(name, help=spec.help, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `bench init` and its like are commands of their own; anything else after `bench` is a plan.
        name = " ".join(args[:2])
        if name in COMMANDS and len(args) > 1:
            return name, _made(name), args[2:]
        if args[0] in llama_options.PROGRAMS:
            way_out = f"Use `outrider {llama_options.PROGRAMS[args[0]]}`, which takes its options."
            raise SettingError(f"outrider {args[0]}", "that is a program of llama.cpp", way_out)
        resolved = super().resolve_command(ctx, args)
        rest = resolved[2]
        if args[0] in llama_options.COMMANDS:
            rest, notices = llama_options.translate(
                args[0], rest, lambda name: settings_of(_load(COMMANDS[name].settings))
            )
            ctx.meta[_NOTICES] = notices
        return resolved[0], _made(args[0]), rest

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help.splitlines()[0]) for name in self.commands])


@cache
def _made(name: str) -> Any:
    spec = COMMANDS[name]
    group: type[Group] = _load(spec.settings)
    settings = settings_of(group)

    def command(ctx: typer.Context, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if _is_given(ctx, name)}
        try:
            parsed = group.model_validate(given)
        except ValidationError as error:
            flags = {name: settings[name].flag for name in given}
            raise setting_error(error, group, given, flags) from None
        for notice in ctx.meta.get(_NOTICES, ()):
            typer.echo(f"note: {notice}", err=True)
        is_chat = getattr(parsed, "interactive", False)
        raise typer.Exit(_carry_out(COMMANDS["chat"] if is_chat else spec, parsed))

    parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += map(_parameter, settings.values())
    vars(command)["__signature__"] = Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.command(name, cls=Command, help=spec.help)(command)
    return get_command(program)


def _parameter(setting: Setting) -> Parameter:
    is_argument = setting.is_argument
    shown: Any = typer.Argument(metavar=setting.metavar) if is_argument else typer.Option(*setting.flags)
    # Numbers are read by the settings themselves, whose errors name the value that was given.
    one = str if setting.kind in (int, float) else setting.kind
    kind: Any = list[one] if setting.is_list else one  # type: ignore[valid-type]
    if not setting.is_required and setting.default is None:
        kind = kind | None
    default = Parameter.empty if setting.is_required else setting.default
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, shown], default=default)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _carry_out(spec: CommandSpec, settings: Group) -> int:
    try:
        function: Callable[[Group], int] = _load(spec.function)
        if not gc.isenabled():  # since the program's start: what was imported stays
            gc.freeze()
            gc.enable()
        is_first = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        if is_first:  # from here on there is something to end well
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return function(settings)
        finally:
            if is_first:  # another one while the program ends leaves no traceback
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # typer would end without a word, in the middle of a line
        typer.echo("\ninterrupted", err=True)
        return INTERRUPTED
