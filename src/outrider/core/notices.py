"""Lines that the user should see: what was switched off, and why.

Whoever finds something out calls `notify`; whoever can show it to the user encloses the work in
`collect_notices`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_log = logging.getLogger(__name__)

_collected: ContextVar[list[str] | None] = ContextVar("notices", default=None)


def notify(*lines: str | None) -> None:
    """Add lines (None: none) to the notices, each once. Where nobody collects them they go to the log."""
    collected = _collected.get()
    for line in filter(None, lines):
        if collected is None:
            _log.warning("%s", line)
        elif line not in collected:
            collected.append(line)


@contextmanager
def collect_notices() -> Iterator[list[str]]:
    """Collect what this thread notifies in the block. Of nested blocks the inner one gets it."""
    notices: list[str] = []
    token = _collected.set(notices)
    try:
        yield notices
    finally:
        _collected.reset(token)
