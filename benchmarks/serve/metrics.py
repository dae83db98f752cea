"""What a server's /metrics says about the requests it has."""

from __future__ import annotations

import re

RUNNING = ("outrider_num_requests_running", "llamacpp:requests_processing", "vllm:num_requests_running")
WAITING = ("outrider_num_requests_waiting", "llamacpp:requests_deferred", "vllm:num_requests_waiting")


def running_and_waiting(text: str) -> tuple[float | None, float | None]:
    """Requests that run, and that wait; None where the text does not say."""
    return _first(text, RUNNING), _first(text, WAITING)


def _first(text: str, names: tuple[str, ...]) -> float | None:
    """The sum over the samples of the first of the metrics that is there: one for each model."""
    for name in names:
        if found := re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE):
            return sum(map(float, found))
    return None
