"""API keys, and what each may use. Only SHA-256 digests are kept. A presented key is compared with all of
them in constant time, so that timing says nothing about the keys. A file of keys is TOML with a `[[key]]`
table for each: `name`, then `key` or its `sha256` (hexadecimal), and optionally `requests_per_minute`,
`tokens_per_minute`, `concurrency` and `admin`."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from outrider.core.errors import SettingError
from outrider.core.files import read_toml
from outrider.core.invalid import invalid
from outrider.core.notices import notify
from outrider.server.errors import Problem
from outrider.server.settings import ServeSettings

_MIN_CHARACTERS = 16
_MAX_CHARACTERS = 512
_MAKE_ONE = "`openssl rand -hex 24` makes one."

_Limit = Annotated[int, Field(ge=1)] | None


class ApiKey(BaseModel):
    """One key: the name that logs and metrics show, its SHA-256 digest in hexadecimal (or the `key` itself),
    and its limits; None: no limit. Tokens are those of prompts and answers."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)] = Field(repr=False)
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    concurrency: _Limit = None
    admin: bool = False

    @model_validator(mode="before")
    @classmethod
    def _digested(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "key" not in given:
            return given
        key, others = given["key"], {name: value for name, value in given.items() if name != "key"}
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or " " in key:
            raise PydanticCustomError("key", "a key is printable ASCII without spaces")
        if not _MIN_CHARACTERS <= len(key) <= _MAX_CHARACTERS:
            raise PydanticCustomError("key", f"a key has {_MIN_CHARACTERS} to {_MAX_CHARACTERS} characters")
        if "sha256" in given:
            raise PydanticCustomError("key", "it has both key and sha256")
        return others | {"sha256": digest_of(key)}


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: list[ApiKey] = Field(min_length=1)


class KeyRing:
    """The keys that are accepted. Raises SettingError where two have one name, or are one key."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        for i, key in enumerate(self.keys):
            for other in self.keys[:i]:
                what = f"API key {key.name}"
                if key.name == other.name:
                    raise SettingError(what, "two keys have this name", "Rename one of them.")
                if key.sha256 == other.sha256:
                    why = f"it is the same key as {other.name}"
                    raise SettingError(what, why, "Give each user a key of their own.")

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented; None for one that is not accepted. All are compared, always."""
        digest = digest_of(presented)
        found = [key for key in self.keys if hmac.compare_digest(key.sha256, digest)]
        return found[0] if found else None


def key_ring(settings: ServeSettings) -> KeyRing:
    """The keys of the settings. Raises SettingError. Keys given as settings are called `default` (or
    `default-1`, `default-2`, …) and may do everything without limits."""
    given = [secret.get_secret_value() for secret in settings.api_key]
    names = [f"default-{number}" for number in range(1, len(given) + 1)] if len(given) > 1 else ["default"]
    tables = [{"name": name, "key": key, "admin": True} for name, key in zip(names, given, strict=False)]
    keys = _validated({"key": tables}, "api_key", _MAKE_ONE) if tables else []
    return KeyRing(keys + (read_keys(settings.api_keys) if settings.api_keys else []))


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises SettingError, which names the record and never the key."""
    content = read_toml(path, "Name a TOML file of keys (--api-keys).")
    keys = _validated(content, str(path), f"Write [[key]] tables, each with name and key. {_MAKE_ONE}")
    if any("key" in table for table in content["key"]) and path.stat().st_mode & 0o044:
        notify(f"{path}: others on this machine can read the keys (chmod 600 {path}, or give sha256)")
    return keys


def _validated(content: dict[str, Any], where: str, way_out: str) -> list[ApiKey]:
    try:
        return _File.model_validate(content).key
    except ValidationError as error:
        raise SettingError(where, str(invalid(error)), way_out) from None


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal."""
    return sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


# What a key may use: requests and tokens a minute, and requests at once
#
# Rates are token buckets: a key that was quiet may use a minute's worth at once, then as much as flows back.
# Tokens are reserved before a request runs and corrected when it has: an answer of unknown length may
# overdraw, and later requests wait until that has flowed back. One thread (the event loop's) calls all of
# this.

_MINUTE_S = 60.0
_BUSY_RETRY_S = 1.0
"""When a key that runs as many requests as it may should ask again."""


class Bucket:
    """A token bucket: `per_minute` units flow in each minute, and at most as many are kept."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen_s = clock()

    @property
    def level(self) -> float:
        """What the bucket holds now; negative where more was used."""
        now_s = self._clock()
        flowed = (now_s - self._seen_s) * self.per_minute / _MINUTE_S
        self._level = min(self._level + flowed, self.per_minute)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until the bucket holds an amount; infinity if it never will."""
        if amount > self.per_minute:
            return math.inf
        return max(0.0, amount - self.level) * _MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Use an amount, whether it is there or not; a negative one gives back."""
        self._level = min(self.level - amount, self.per_minute)


class RateLimiter:
    """How much of its limits a key uses; without a key there are none."""

    def __init__(self, key: ApiKey | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.name = key.name if key else ""
        self.namespace = key.sha256 if key else ""
        self._concurrency = key.concurrency if key else None
        self._running = 0
        rates = (key.requests_per_minute, key.tokens_per_minute) if key else (None, None)
        self.requests, self.tokens = (Bucket(rate, clock) if rate else None for rate in rates)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it runs. Raises Problem (429)."""
        if self._concurrency is not None and self._running >= self._concurrency:
            why = f"this key may run {self._concurrency} requests at once."
            raise _limit_reached("requests", why, _BUSY_RETRY_S, "Wait until one of them has ended.")
        if self.requests is not None:
            if wait_s := self.requests.wait_s(1):
                why = f"this key may make {self.requests.per_minute} requests a minute."
                raise _limit_reached("requests", why, wait_s)
            self.requests.take(1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def _limit_reached(kind: str, why: str, wait_s: float, way_out: str = "") -> Problem:
    message = f"{why} {way_out or f'Try again in {max(1, math.ceil(wait_s))} s.'}"
    return Problem(429, message, type=kind, code="rate_limit_exceeded", retry_after_s=wait_s)


@dataclass(slots=True)
class TokenUsage:
    """The tokens that a generation, or all of a request's, used so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Caller:
    """Who makes a request, and what it used; the guard sets `request.state.caller`. `name` is the key's (""
    without keys). `namespace` keeps KV and remembered texts apart. It is the key's digest, since they may
    outlive the server and a name may be given to another."""

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        limiter = limiter or RateLimiter()
        self.name, self.namespace, self._tokens = limiter.name, limiter.namespace, limiter.tokens
        self._usages: list[TokenUsage] = []

    @property
    def used(self) -> TokenUsage:
        prompt = sum(used.prompt_tokens for used in self._usages)
        return TokenUsage(prompt, sum(used.completion_tokens for used in self._usages))

    @contextmanager
    def reserved(self, prompt_tokens: int, max_tokens: int) -> Iterator[TokenUsage]:
        """Hold the tokens of a prompt and its longest answer, at most a minute's; at the end they cost what
        was counted into the usage. Raises Problem (429)."""
        taken = self._take(prompt_tokens, max_tokens)
        self._usages.append(used := TokenUsage())
        try:
            yield used
        finally:
            if self._tokens is not None:
                self._tokens.take(used.prompt_tokens + used.completion_tokens - taken)

    def _take(self, prompt_tokens: int, max_tokens: int) -> int:
        if self._tokens is None:
            return 0
        most = self._tokens.per_minute
        if prompt_tokens > most:
            why = f"the prompt has {prompt_tokens} tokens, and this key may use {most} a minute."
            raise _limit_reached("tokens", why, math.inf, "Shorten it.")
        amount = min(prompt_tokens + max_tokens, most)
        if wait_s := self._tokens.wait_s(amount):
            why = f"this key may use {most} tokens a minute; this request may need {amount}."
            raise _limit_reached("tokens", why, wait_s)
        self._tokens.take(amount)
        return amount
