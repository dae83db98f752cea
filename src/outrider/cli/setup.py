"""`outrider setup`: which libraries are there, and one compiled for this CPU on request."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli.options import option
from outrider.cli.output import readable, write
from outrider.core.errors import SettingError

__all__ = ["command"]

_LIBRARIES = "Libraries"
_INTERRUPTED = 130
_EVERY_S = 10.0
_HELP = "Show which libraries run GGUF files here; compile one for this CPU."
_STAGES = {
    "model": "fetching the default model, which the build is tried with",
    "fetching": "fetching ik_llama.cpp",
    "tools": "fetching cmake and ninja",
    "compiling": "compiling ik_llama.cpp for this CPU",
    "trying": "trying its first decode",
}

_Native = Annotated[
    bool,
    option(
        _LIBRARIES,
        "--native",
        help="Compile ik_llama.cpp for this CPU into the cache. Takes a C++ compiler and some minutes.",
    ),
]
_Force = Annotated[bool, option(_LIBRARIES, "--force", help="With --native: compile anew what is there.")]


def command(cls: type[TyperCommand], _as_run: Callable[[dict[str, Any]], Any]) -> Any:
    """The command, of class `cls`."""
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command("setup", cls=cls, help=_HELP)(_setup)
    return get_command(program)


def _setup(native: _Native = False, force: _Force = False) -> None:
    if force and not native:
        raise SettingError("--force", "there is nothing to compile anew", "Add --native.")
    try:
        if native:
            _build(force)
        else:
            write("\n".join(_libraries()) + "\n")
    except KeyboardInterrupt:
        typer.echo("\ninterrupted: nothing of the build is left", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _libraries() -> list[str]:
    """The libraries that are there, a line each."""
    from outrider.backends.gguf import installed, why_not
    from outrider.native import native_library

    lines = [
        f"{file} cannot be used: {why}" if (why := why_not(file)) else f"{file}: {readable(str(file.path))}"
        for file in installed()
    ]
    if not lines:
        lines = ["no package that brings a library is installed: pip install xllamacpp ik-llama-cpp-python"]
    if native_library() is None:
        lines.append("ik_llama.cpp for this CPU: not built; `outrider setup --native` does it")
    return lines


def _build(force: bool) -> None:
    from outrider.models import embedded_default
    from outrider.native import build_native

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with _ended_in_order(), _shown(errors) as progress:
        model = embedded_default(lambda done, total: progress("model", done / total))
        made = build_native(model, force=force, progress=progress)
    path = readable(str(made.path))
    if made.built:
        size = f"{made.path.stat().st_size / 1e6:.0f} MB, compiled in {_duration(made.seconds)}"
        write(f"ik_llama.cpp for this CPU is built and decodes ({size}): {path}\n")
    else:
        write(f"ik_llama.cpp for this CPU is there already (--force compiles it anew): {path}\n")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A signal that asks for the end, or a terminal that is closed, does what Ctrl-C does: the compilers run
    in a session of their own, and would go on."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    usual = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def _shown(errors: Console, clock: Callable[[], float] = monotonic) -> Iterator[Callable[[str, float], None]]:
    """What is to be told how far the build is: a bar on a terminal, else a line every 10 s at most."""
    if errors.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as bar:
            task, shown = bar.add_task("", total=1.0), ""

            def draw(stage: str, done: float) -> None:
                nonlocal shown
                if stage != shown:
                    shown = stage
                    bar.reset(task, description=_STAGES[stage])
                bar.update(task, completed=done)

            yield draw
        return
    last, said_s = "", 0.0

    def tell(stage: str, done: float) -> None:
        nonlocal last, said_s
        if stage != last or clock() - said_s >= _EVERY_S:
            last, said_s = stage, clock()
            errors.print(Text(f"{_STAGES[stage]}: {done:.0%}" if done else _STAGES[stage]))

    yield tell
