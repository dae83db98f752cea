"""Lines that the user should see, such as what was switched off and why: `notify` wherever it is found out,
`collect_notices` around the work where it can be shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_log = logging.getLogger(__name__)

_collected: ContextVar[list[str] | None] = ContextVar("notices", default=None)


def notify(*lines: str | None) -> None:
    """Add lines to the notices, each once; None adds none. Without a collector they go to the log."""
    collected = _collected.get()
    for line in filter(None, lines):
        if collected is None:
            _log.warning("%s", line)
        elif line not in collected:
            collected.append(line)


@contextmanager
def collect_notices() -> Iterator[list[str]]:
    """Collect this thread's notices in the block; of nested blocks the inner one gets them."""
    notices: list[str] = []
    token = _collected.set(notices)
    try:
        yield notices
    finally:
        _collected.reset(token)
