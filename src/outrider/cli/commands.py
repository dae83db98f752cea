"""Commands whose help fits a terminal, and the group of them, which makes the rare ones when asked for."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Commands"]

_NOT_IN_CHAT = {"file", "raw", "interactive", "compare", "repetitions", "json", "logprobs", "prediction"}
"""Options that a conversation refuses, so its help leaves them out."""


def _tidy(params: list[Any]) -> list[Any]:
    """Options as the help shows them: one long name each, and one name for a switch's two sides."""
    for param in params:
        short = [name for name in param.opts if not name.startswith("--")]
        long = [name for name in param.opts if name.startswith("--")][:1]
        if param.secondary_opts:
            long = [f"--[no-]{long[0].removeprefix('--')}"]
            param.secondary_opts = []
        param.opts = [*short, *long]
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help fits a terminal of 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if self.name == "chat":
            self.params = [param for param in self.params if param.name not in _NOT_IN_CHAT]
            for param in self.params:
                if param.name in ("prompt_argument", "prompt"):
                    vars(param)["help"] = "The first message; else the conversation asks for it."
        self.params = _tidy(self.params)
        super().format_help(ctx, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        return _tidy([option])[0] if option else None


_LAZY = {
    "bench": "outrider.cli.bench_options",
    "check": "outrider.cli.check_options",
    "distill": "outrider.cli.distill_options",
    "quantize": "outrider.cli.quantize_options",
    "serve": "outrider.cli.serve_options",
    "setup": "outrider.cli.setup",
}
"""Commands that are made when they are asked for, since they load slowly or are rare: each by the module
whose `command(cls, as_run)` makes it."""


class Commands(TyperGroup):
    """The program itself, whose help is set like that of its commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LAZY]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `bench init` and its like are commands of their own; what else stands there is a plan.
        if args[:1] == ["bench"]:
            from outrider.cli.bench_options import SUBCOMMANDS, subcommand

            if args[1:] and args[1] in SUBCOMMANDS:
                return f"bench {args[1]}", subcommand(Command, args[1]), args[2:]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _LAZY:
            return super().get_command(ctx, cmd_name)
        return self.made(import_module(_LAZY[cmd_name]))

    def made(self, module: ModuleType) -> Any:
        """The command of a module that was loaded for it."""
        raise NotImplementedError(module.__name__)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.params = _tidy(self.params)
        super().format_help(ctx, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        return _tidy([option])[0] if option else None
