"""API keys: who they belong to, how one is recognised, and what each may use.

Only SHA-256 digests are kept. A presented key is compared with every one of them in constant time, so
that how long an answer takes says nothing about the keys.

A file of keys is TOML with a `[[key]]` table for each, or JSON lines (`.jsonl`) with an object for each:
`name`, then `key` or the `sha256` of it (hexadecimal), and if wanted `requests_per_minute`,
`tokens_per_minute`, `concurrency` and `admin` (may read /metrics).
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.core.errors import SettingError
from outrider.core.files import parse_json, read_text, read_toml
from outrider.core.invalid import invalid
from outrider.server.errors import Problem
from outrider.server.settings import ServeSettings

_MIN_CHARACTERS = 16
_MAX_CHARACTERS = 512
_MAKE_ONE = "`openssl rand -hex 24` makes one."

_Limit = Annotated[int, Field(ge=1)] | None


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use; None: as much as the server has. Tokens are those of prompts and answers."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: the name that logs and metrics show, and the SHA-256 digest of the key itself."""

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits = KeyLimits()
    admin: bool = False


class KeyRing:
    """The keys that are accepted. Raises SettingError where two have one name, or are one key."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        names, digests = set[str](), dict[bytes, str]()
        for key in self.keys:
            if key.name in names:
                raise SettingError(f"API key {key.name}", "two keys have this name", "Rename one of them.")
            if key.digest in digests:
                why = f"it is the same key as {digests[key.digest]}"
                raise SettingError(f"API key {key.name}", why, "Give each user a key of their own.")
            names.add(key.name)
            digests[key.digest] = key.name

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented; None for one that is not accepted. All are compared, always."""
        digest = _digest(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def key_ring(settings: ServeSettings) -> tuple[KeyRing, tuple[str, ...]]:
    """The keys that the settings name, and lines that the operator should see. Raises SettingError.

    Keys in the settings themselves are their owner's: called `default` (or `default-1`,
    `default-2`, …), without limits, and allowed everything.
    """
    given = [secret.get_secret_value() for secret in settings.api_key]
    names = ["default"] if len(given) == 1 else [f"default-{number}" for number in range(1, len(given) + 1)]
    keys = [
        ApiKey(name, _digest(_checked(key, f"api_key ({name})")), admin=True)
        for name, key in zip(names, given, strict=True)
    ]
    notices: list[str] = []
    if settings.api_keys is not None:
        keys += read_keys(settings.api_keys, notices)
    return KeyRing(keys), tuple(notices)


class _Record(BaseModel):
    """A key as a file states it."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key: str | None = None
    sha256: str | None = Field(None, pattern=r"^[0-9a-fA-F]{64}$")
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    concurrency: _Limit = None
    admin: bool = False


def read_keys(path: Path, notices: list[str] | None = None) -> list[ApiKey]:
    """The keys of a file. Raises SettingError, which names the record and never repeats a key."""
    records = _records(path)
    if not records:
        raise SettingError(str(path), "there is no key in it", "Write a [[key]] table with name and key.")
    keys = [_read_record(record, f"{path}, {where}") for where, record in records]
    readable = path.is_file() and path.stat().st_mode & 0o044
    if readable and notices is not None and any("key" in record for _, record in records):
        notices.append(f"{path}: others on this machine can read the keys (chmod 600 {path}, or give sha256)")
    return keys


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each record of the file, and its place."""
    way_out = "Name a file of keys (--api-keys)."
    if path.suffix == ".jsonl":
        numbered = enumerate(read_text(path, way_out).splitlines(), 1)
        lines = [(number, line) for number, line in numbered if line.strip()]
        return [(f"line {number}", _object(line, f"{path}, line {number}")) for number, line in lines]
    content = read_toml(path, way_out)
    tables = content.pop("key", [])
    if content:
        raise SettingError(f"{path}: {next(iter(content))}", "it is not known", "A key is a [[key]] table.")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"{path}: key", "it is no array of tables", "Write [[key]] above each key.")
    return [(f"key {number}", table) for number, table in enumerate(tables, 1)]


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingError(where, "it is no JSON object", 'Write {"name": …, "key": …}.')
    return found


def _read_record(record: dict[str, Any], where: str) -> ApiKey:
    try:
        read = _Record.model_validate(record)
    except ValidationError as error:
        first = invalid(error)
        reason = _WRITTEN if first.kind == "string_pattern_mismatch" else first.reason
        raise SettingError(f"{where}: {first.path}", reason, "Correct it there.") from None
    if (read.key is None) == (read.sha256 is None):
        why = "it has both key and sha256" if read.key else "it has neither key nor sha256"
        raise SettingError(f"{where} ({read.name})", why, "Give one of them.")
    if read.sha256 is not None:
        digest = bytes.fromhex(read.sha256)
    else:
        digest = _digest(_checked(read.key or "", f"{where} ({read.name})"))
    limits = KeyLimits(read.requests_per_minute, read.tokens_per_minute, read.concurrency)
    return ApiKey(read.name, digest, limits, read.admin)


_WRITTEN = (
    "it is written otherwise: a name has up to 64 letters, digits and . _ -, a sha256 64 hexadecimal digits"
)


def _checked(key: str, where: str) -> str:
    """The key, if it can travel in a header and cannot be guessed soon."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SettingError(where, "a key is printable ASCII without spaces", _MAKE_ONE)
    if not _MIN_CHARACTERS <= len(key) <= _MAX_CHARACTERS:
        raise SettingError(where, f"a key has {_MIN_CHARACTERS} to {_MAX_CHARACTERS} characters", _MAKE_ONE)
    return key


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", errors="surrogateescape")).digest()


# What a key may use: requests and tokens a minute, and requests at once
#
# Rates are token buckets: a key that was quiet may use a minute's worth at once, then as much as flows back.
# Tokens are reserved before a request runs and corrected when it has: an answer of unknown length may
# overdraw, and later requests wait until that has flowed back. One thread (the event loop's) calls all of
# this.

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


class RateLimiter:
    """What one key uses of its limits."""

    def __init__(self, limits: KeyLimits, clock: Clock = monotonic) -> None:
        self.limits = limits
        self.running = 0
        rates = limits.requests_per_minute, limits.tokens_per_minute
        self.requests, self.tokens = (None if rate is None else Bucket(rate, clock) for rate in rates)

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


def _wait(wait_s: float) -> str:
    return f"Try again in {max(1, math.ceil(wait_s))} s."


@dataclass(slots=True)
class TokenUsage:
    """The tokens that a generation has used so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Caller:
    """Who makes one request, and what it used: in `request.state.caller`, set by the guard.

    `name` is the key's ("" where no key is demanded); KV and remembered texts are kept apart by it.
    """

    def __init__(self, key: ApiKey | None = None, limiter: RateLimiter | None = None) -> None:
        self.name = key.name if key else ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._limiter = limiter or RateLimiter(KeyLimits())

    @contextmanager
    def reserved(self, prompt_tokens: int, max_tokens: int) -> Iterator[TokenUsage]:
        """Hold the tokens that a generation may need; the usage at the end is what it costs.

        Count into it as tokens come: then a request that is broken off pays for what it got. Raises
        RateLimited.
        """
        taken = self._limiter.reserve(prompt_tokens, max_tokens)
        used = TokenUsage()
        try:
            yield used
        finally:
            self.prompt_tokens += used.prompt_tokens
            self.completion_tokens += used.completion_tokens
            if self._limiter.tokens is not None:
                self._limiter.tokens.take(used.prompt_tokens + used.completion_tokens - taken)
