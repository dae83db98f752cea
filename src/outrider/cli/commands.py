"""The program's command line. Settings and functions of a command are imported when it is called."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from outrider import __version__
from outrider.cli import llama_options
from outrider.cli.help import COMMANDS, CommandSpec, load
from outrider.cli.output import INTERRUPTED, USAGE_ERROR
from outrider.core.errors import SettingError
from outrider.core.schema import Group, Setting, setting_error, settings_of

_NOTICES = "outrider.notices"
"""in a context's `meta`: notes about the command line"""
_ParserError: Any = typer.BadParameter.__base__
"""all that the parser raises; typer exports no name of it"""


class Commands(TyperGroup):
    """The program: COMMANDS, each made when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, spec in COMMANDS.items():
            if " " not in name:
                self.add_command(TyperCommand(name, help=spec.help, rich_markup_mode=None))

    def main(self, *arguments: Any, **options: Any) -> Any:
        """The exit status. Raises SettingError for what the parser refuses."""
        try:
            return super().main(*arguments, **options | {"standalone_mode": False})
        except _ParserError as error:
            raise _refusal(error) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `bench report` and its like are commands of their own.
        name = " ".join(args[:2])
        if name in COMMANDS and len(args) > 1:
            return name, _made(name), args[2:]
        resolved = super().resolve_command(ctx, args)
        rest = resolved[2]
        if args[0] in llama_options.COMMANDS:
            settings = settings_of(load(COMMANDS[args[0]].settings))
            rest, ctx.meta[_NOTICES] = llama_options.translate(args[0], rest, settings)
        return resolved[0], _made(args[0]), rest

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help.splitlines()[0]) for name in self.commands])


def _refusal(error: Any) -> SettingError:
    program = error.ctx.command_path if error.ctx else "outrider"
    way_out = f"{program} --help lists what there is."
    why, _, near = error.format_message().rstrip(".").partition(". ")
    if hasattr(error, "possibilities"):
        near = f"Did you mean {error.possibilities[0]}?" if error.possibilities else way_out
        return SettingError(error.option_name, f"{program} has no such option", near)
    if hasattr(error, "option_name"):  # given with a value that it does not take, or without one
        return SettingError(error.option_name, "it " + why.split("' ")[-1], "--help says how it is given.")
    return SettingError(program, why[0].lower() + why[1:], near or way_out)


@cache
def _made(name: str) -> Any:
    spec = COMMANDS[name]
    group: type[Group] = load(spec.settings)
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
    program.command(name, help=spec.help)(command)
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
        function: Callable[[Group], int] = load(spec.function)
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


app = typer.Typer(
    cls=Commands,
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


@app.callback(invoke_without_command=True)
def _program(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options of the program itself. A line without a command gets the help."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(USAGE_ERROR)
