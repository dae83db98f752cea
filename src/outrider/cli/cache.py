"""`outrider cache`: what is stored on this machine, and how to remove it."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.text import Text

from outrider.cli.screen import Screen
from outrider.cli.settings import CacheSettings
from outrider.core.errors import SettingError
from outrider.core.numbers import counted, gigabytes, readable
from outrider.models.hub import HubOptions, cache_dir

_KINDS = {
    "models": "the embedded model",
    "native": "ik_llama.cpp compiled for this CPU (`outrider setup --native` makes it again)",
    "costs": "what calls cost, and which library is the faster one; measured again",
    "acceptance": "how often drafts were accepted; learned again",
    "corpus": "indexes of --corpus; made again",
    "builds.json": "which libraries run which models; tried again",
    "said.json": "what was said today",
    "chat_history": "what you typed in `outrider chat`",
}


def cache(settings: CacheSettings) -> int:
    """Show what is stored, or remove it; returns the exit status."""
    folder = cache_dir()
    found = {path.name: path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    names = list(found) if "all" in settings.remove else settings.remove
    for name in names:
        if name not in found:
            there = ", ".join(found) or "nothing"
            raise SettingError(f"--remove {name}", f"{folder} has no such kind", f"There is {there}.")
    sizes = {name: _size(path) for name, path in found.items()}
    for name in names:
        _remove(found.pop(name))
    console = Screen()
    if names:
        console.say(f"removed: {', '.join(names)}")
    console.print(Text(readable(str(folder)), style="bold", overflow="fold"))
    rows = [(name, counted(sizes[name][0], "file"), gigabytes(sizes[name][1])) for name in found]
    console.table(("kind", "files", "size"), rows, left=("kind",))
    console.print()
    console.rows([(name, _KINDS[name]) for name in found if name in _KINDS], style="")
    console.say(f"Models of the hub are in {HubOptions().cache}: `hf cache` lists and removes them.")
    return 0


def _size(path: Path) -> tuple[int, int]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
