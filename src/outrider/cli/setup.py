"""`outrider setup`: which libraries are there, and one compiled for this machine on request."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from outrider.cli.output import write
from outrider.cli.screen import Screen
from outrider.cli.settings import SetupSettings
from outrider.core.errors import SettingError
from outrider.core.numbers import duration, gigabytes, readable

_STAGES = {
    "model": "fetching the default model, which the build is tried with",
    "fetching": "fetching {}",
    "CUDA": "fetching CUDA's compiler",
    "tools": "fetching cmake and ninja",
    "compiling": "compiling {}",
    "trying": "trying its first decode",
}


def setup(settings: SetupSettings) -> int:
    """Show the libraries, or build one; returns the exit status. Raises SettingError and BuildError."""
    if settings.force and not (settings.native or settings.cuda):
        raise SettingError("--force", "there is nothing to compile again", "Add --native or --cuda.")
    if settings.cuda_arch is not None and not settings.cuda:
        raise SettingError("--cuda-arch", "it says for which cards to compile", "Add --cuda.")
    if not (settings.native or settings.cuda):
        write("\n".join(_libraries()) + "\n")
        return 0
    if settings.native:
        _build(settings.force)
    if settings.cuda:
        _build(settings.force, cuda=True, kinds=settings.cuda_arch)
    return 0


def _libraries() -> list[str]:
    from outrider.backends.gguf.libraries import describe_gpus, installed, why_not
    from outrider.backends.native import cuda_library, native_library
    from outrider.backends.native.cuda import cards

    lines = []
    for file in installed():
        why = why_not(file)
        lines.append(f"{file} cannot be used: {why}" if why else f"{file}: {readable(str(file.path))}")
        lines += [] if why else [f"  {line}" for line in describe_gpus(file)]
    if not lines:
        lines = ["no package that brings a library is installed: pip install xllamacpp ik-llama-cpp-python"]
    if native_library() is None:
        lines.append("ik_llama.cpp for this CPU: not built; `outrider setup --native` does it")
    if cards() and cuda_library() is None:
        names = ", ".join(dict.fromkeys(card.name for card in cards()))
        lines.append(f"llama.cpp for {names}: not built; `outrider setup --cuda` does it")
    return lines


def _build(force: bool, *, cuda: bool = False, kinds: str | None = None) -> None:
    from outrider.backends.gguf.libraries import describe_gpus
    from outrider.backends.gguf.library import LibraryFile
    from outrider.backends.native import IK, MAINLINE
    from outrider.backends.native.build import build_native
    from outrider.backends.native.cuda import plan_cuda
    from outrider.models.embedded import embedded_default

    plan = plan_cuda(kinds) if cuda else None
    title, source = ("ik_llama.cpp for this CPU", IK)
    if plan:
        title, source = f"llama.cpp for NVIDIA cards of kind {', '.join(plan.kinds)}", MAINLINE
    with _ended_in_order(), Screen(stderr=True, soft_wrap=True).progress() as report:

        def show(stage: str, done: float) -> None:
            report(_STAGES[stage].format(title if stage == "compiling" else title.partition(" ")[0]), done)

        model = embedded_default(lambda done, total: show("model", done / total))
        made = build_native(model, force=force, progress=show, source=source, cuda=plan)
    path = readable(str(made.path))
    if made.built:
        made_of = f"{gigabytes(made.path.stat().st_size)}, compiled in {duration(made.seconds)}"
        write(f"{title} is built and decodes ({made_of}): {path}\n")
    else:
        write(f"{title} is there already (--force compiles it again): {path}\n")
    for line in describe_gpus(LibraryFile(made.path, title, source.version)) if plan else ():
        write(f"  {line}\n")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C: the compilers run in their own session, and would not
    stop."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    usual = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
