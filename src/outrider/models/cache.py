"""Where Outrider keeps what it fetches and measures."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Outrider's own cache folder, which may not exist yet: $OUTRIDER_CACHE, else
    $XDG_CACHE_HOME/outrider, else ~/.cache/outrider."""
    own = os.environ.get("OUTRIDER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "outrider"
