"""Many requests run beside each other, each taken up as soon as there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from outrider.core.data import Completion, Request
from outrider.core.errors import OutriderError
from outrider.engine import Engine

_Key = TypeVar("_Key")


def answered(
    engine: Engine,
    following: Callable[[], tuple[_Key, Request] | None],
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[tuple[_Key, Completion | OutriderError]]:
    """The requests' completions as they end, or why a request cannot be answered.

    `following` gives the next request under a name of the caller's, None where there is none at the moment.
    Once `is_over`, which is asked before each call, all ends as far as it has come. The engine has no other
    requests, and stores nothing once this is closed. Raises BackendError when a call fails.
    """
    running: dict[int, _Key] = {}
    held: tuple[_Key, Request] | None = None
    try:
        while not is_over():
            while (held := held or following()) is not None and engine.has_room(held[1]):
                (key, request), held = held, None
                try:
                    running[engine.submit(request)] = key
                except OutriderError as error:
                    yield key, error
            if not running:
                return
            for update in engine.step():
                if (ended := update.error or update.completion) is not None:
                    yield running.pop(update.record.request), ended
        for request_id, key in running.items():
            if (completion := engine.cancel(request_id)) is not None:
                yield key, completion
    finally:
        for request_id in running:
            engine.cancel(request_id)
        engine.reset()
