"""What a key may use: requests and tokens a minute, and requests at once.

Rates are token buckets: a key that was quiet may use a minute's worth at once, then as much as flows
back. Tokens are reserved before a request runs and corrected when it has: an answer of unknown length
may overdraw, and later requests wait until that has flowed back. One thread (the event loop's) calls all
of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from outrider.server.keys import ApiKey, KeyLimits
from outrider.server.problems import Problem

__all__ = ["Bill", "Bucket", "Caller", "Meter", "RateLimited"]

_MINUTE_S = 60.0
_BUSY_RETRY_S = 1.0
"""When a key that runs as many requests as it may should ask again."""

Clock = Callable[[], float]
"""Seconds of a clock that never goes back."""


class RateLimited(Problem):
    """A key's limit is reached (429). `retry_after_s` says when to ask again; infinity: never, so large."""

    def __init__(self, kind: str, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        if math.isinf(retry_after_s):
            headers = {"X-Should-Retry": "false"}
        else:
            headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(429, message, type=kind, code="rate_limit_exceeded", headers=headers)


class Bucket:
    """`per_minute` units flow in each minute, and no more than these are kept."""

    def __init__(self, per_minute: int, clock: Clock = monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen_s = clock()

    @property
    def level(self) -> float:
        """What is there now; negative where more was used than there was."""
        now_s = self._clock()
        flowed = (now_s - self._seen_s) * self.per_minute / _MINUTE_S
        self._level = min(self._level + flowed, self.per_minute)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; infinity if it never is."""
        if amount > self.per_minute:
            return math.inf
        return max(0.0, amount - self.level) * _MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Use so much, whether it is there or not; a negative amount gives back."""
        self._level = min(self.level - amount, self.per_minute)


class Meter:
    """What one key uses of its limits."""

    def __init__(self, limits: KeyLimits, clock: Clock = monotonic) -> None:
        self.limits = limits
        self.running = 0
        self.requests = _bucket(limits.requests_per_minute, clock)
        self.tokens = _bucket(limits.tokens_per_minute, clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its beginning to its end. Raises RateLimited."""
        most = self.limits.concurrency
        if most is not None and self.running >= most:
            message = f"this key may run {most} requests at once. Wait until one of them has ended."
            raise RateLimited("requests", message, _BUSY_RETRY_S)
        if self.requests is not None:
            if wait_s := self.requests.wait_s(1):
                message = f"this key may make {self.requests.per_minute} requests a minute. {_wait(wait_s)}"
                raise RateLimited("requests", message, wait_s)
            self.requests.take(1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def reserve(self, prompt_tokens: int, max_tokens: int) -> float:
        """Take the tokens of a prompt and of its longest answer; returns how many were taken.

        An answer that could be longer than a minute's tokens is reserved as what is left of these. Raises
        RateLimited.
        """
        if self.tokens is None:
            return 0.0
        most = self.tokens.per_minute
        if prompt_tokens > most:
            message = (
                f"the prompt has {prompt_tokens} tokens, and this key may use {most} a minute. Shorten it."
            )
            raise RateLimited("tokens", message, math.inf)
        amount = min(prompt_tokens + max_tokens, most)
        if wait_s := self.tokens.wait_s(amount):
            message = (
                f"this key may use {most} tokens a minute; this request may need {amount}. {_wait(wait_s)}"
            )
            raise RateLimited("tokens", message, wait_s)
        self.tokens.take(amount)
        return amount


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


def _wait(wait_s: float) -> str:
    return f"Try again in {max(1, math.ceil(wait_s))} s."


@dataclass(slots=True)
class Bill:
    """The tokens that a generation has used so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Caller:
    """Who makes one request, and what it used: in `request.state.caller` behind the guard.

    `name` is the key's ("" where no key is demanded); KV and remembered texts are kept apart by it.
    """

    def __init__(self, key: ApiKey | None = None, meter: Meter | None = None) -> None:
        self.name = key.name if key else ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._meter = meter or Meter(KeyLimits())

    @contextmanager
    def reserved(self, prompt_tokens: int, max_tokens: int) -> Iterator[Bill]:
        """Hold the tokens that a generation may need; what its bill says at the end is what it costs.

        Count into the bill as tokens come: then a request that is broken off pays for what it got. Raises
        RateLimited.
        """
        taken = self._meter.reserve(prompt_tokens, max_tokens)
        bill = Bill()
        try:
            yield bill
        finally:
            self.prompt_tokens += bill.prompt_tokens
            self.completion_tokens += bill.completion_tokens
            if self._meter.tokens is not None:
                self._meter.tokens.take(bill.prompt_tokens + bill.completion_tokens - taken)
