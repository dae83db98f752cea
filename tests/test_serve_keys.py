"""API keys and what each may use."""

import hmac
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.server.errors import Problem
from outrider.server.keys import (
    ApiKey,
    Bucket,
    Caller,
    KeyRing,
    RateLimiter,
    digest_of,
    key_ring,
    read_keys,
)
from outrider.server.settings import ServeSettings

ANNA, BEN, EVE = "anna-anna-anna-anna", "ben-ben-ben-ben-ben-ben", "eve-eve-eve-eve-eve-eve"


def owned(name: str, key: str, **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(key), **limits)


def file(folder: Path, text: str, name: str = "keys.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limiter(clock: Hands, **limits: int) -> RateLimiter:
    return RateLimiter(owned("anna", ANNA, **limits), clock)


# Recognising keys


def test_a_key_is_found_by_itself_alone() -> None:
    ring = KeyRing([owned("anna", ANNA), owned("ben", BEN)])
    assert [key and key.name for key in map(ring.find, (ANNA, BEN, EVE, "", ANNA[:-1], f"{ANNA} "))] == [
        "anna", "ben", None, None, None, None,
    ]  # fmt: skip
    assert ring and not KeyRing()
    assert KeyRing().find(ANNA) is None


@pytest.mark.parametrize("presented", [ANNA, BEN, EVE])
def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, presented: str) -> None:
    compared: list[tuple[str, str]] = []
    genuine = hmac.compare_digest

    def counting(ours: str, theirs: str) -> bool:
        compared.append((ours, theirs))
        return genuine(ours, theirs)

    ring = KeyRing([owned("anna", ANNA), owned("ben", BEN), owned("c", "c" * 20)])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    ring.find(presented)
    assert compared == [(key.sha256, digest_of(presented)) for key in ring.keys]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([("anna", ANNA), ("anna", BEN)], "API key anna: two keys have this name"),
        ([("anna", ANNA), ("ben", ANNA)], "API key ben: it is the same key as anna"),
    ],
)
def test_two_users_are_two_keys(keys: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        KeyRing([owned(name, key) for name, key in keys])


# Where keys come from


def test_keys_of_the_settings_are_their_owners() -> None:
    ring = key_ring(ServeSettings(api_key=[SecretStr(ANNA)]))
    assert list(ring.keys) == [owned("default", ANNA, admin=True)]
    ring = key_ring(ServeSettings(api_key=[SecretStr(ANNA), SecretStr(BEN)]))
    assert [key.name for key in ring.keys] == ["default-1", "default-2"]


def test_a_toml_file_of_keys(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        f'''
        [[key]]
        name = "anna"
        key = "{ANNA}"
        requests_per_minute = 10
        tokens_per_minute = 1000
        concurrency = 2
        admin = true
        [[key]]
        name = "ben"
        sha256 = "{digest_of(BEN).upper()}"
        ''',
    )
    with collect_notices() as notices:
        ring = key_ring(ServeSettings(api_keys=path))
    assert ring.keys == (
        owned("anna", ANNA, requests_per_minute=10, tokens_per_minute=1000, concurrency=2, admin=True),
        owned("ben", BEN),
    )
    assert notices == []


def test_a_file_that_others_can_read_is_mentioned(tmp_path: Path) -> None:
    path = file(tmp_path, f'[[key]]\nname = "anna"\nkey = "{ANNA}"\n')
    path.chmod(0o644)
    with collect_notices() as notices:
        key_ring(ServeSettings(api_keys=path))
    assert "others on this machine can read the keys" in notices[0] and ANNA not in notices[0]
    path.write_text(f'[[key]]\nname = "anna"\nsha256 = "{"0" * 64}"\n')
    with collect_notices() as notices:
        key_ring(ServeSettings(api_keys=path))
    assert notices == []


def record(fields: str) -> str:
    return f'[[key]]\nname = "anna"\n{fields}\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "key: it is missing"),
        ("key = []", "key: it has to be an array with at least 1 item"),
        ("[[key]", "it is not valid TOML"),
        ("[key]\nname = 'a'", "key: it has to be an array"),
        ("keys = 3\n" + record(f'key = "{ANNA}"'), "keys: it is not known"),
        (record(""), "key[1].sha256: it is missing"),
        (record(f'key = "{ANNA}"\nsha256 = "{"0" * 64}"'), "key[1]: it has both"),
        (record('key = "short"'), "key[1]: a key has 16 to 512 characters"),
        (record(f'key = "{ANNA} {ANNA}"'), "key[1]: a key is printable ASCII"),
        (record(f'key = "{ANNA}ä"'), "key[1]: a key is printable ASCII"),
        (record('sha256 = "12"'), "key[1].sha256: it has to be text with pattern"),
        (record(f'key = "{ANNA}"\nconcurrency = 0'), "key[1].concurrency: it has to be 1 or more"),
        (record(f'key = "{ANNA}"\nconcurrency = "2"'), "key[1].concurrency: it has to be a whole number"),
        (record(f'key = "{ANNA}"\ntokens = 2'), "key[1].tokens: it is not known"),
        (f'[[key]]\nkey = "{ANNA}"\n', "key[1].name: it is missing"),
        (
            record(f'key = "{ANNA}"').replace("anna", "an na", 1),
            "key[1].name: it has to be text with pattern",
        ),
        (record("key = 3"), "key[1]: a key is printable ASCII"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_named_without_the_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = file(tmp_path, text)
    with pytest.raises(SettingError) as error:
        read_keys(path)
    assert str(error.value).removeprefix(str(path)).lstrip(":, ").startswith(complaint)
    assert ANNA not in str(error.value)


# Limits


@given(
    per_minute=st.integers(1, 1000),
    tries=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 1000)), max_size=60),
)
def test_no_minute_has_more_than_a_full_bucket_and_what_flows_in(
    per_minute: int, tries: list[tuple[float, int]]
) -> None:
    clock = Hands()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for pause_s, amount in tries:
        clock.now_s += pause_s
        wait_s = bucket.wait_s(amount)
        assert math.isinf(wait_s) == (amount > per_minute)
        if wait_s == 0:
            bucket.take(amount)
            taken.append((clock.now_s, amount))
    for i, (start_s, _) in enumerate(taken):
        for j in range(i, len(taken)):
            used = sum(amount for _, amount in taken[i : j + 1])
            assert used <= per_minute * (1 + (taken[j][0] - start_s) / 60) + 1e-6


@given(per_minute=st.integers(1, 1000), used=st.integers(0, 5000), amount=st.integers(1, 1000))
def test_who_waits_as_long_as_told_is_served(per_minute: int, used: int, amount: int) -> None:
    clock = Hands()
    bucket = Bucket(per_minute, clock)
    bucket.take(used)
    wait_s = bucket.wait_s(amount)
    if math.isfinite(wait_s):
        clock.now_s += wait_s + 1e-6
        assert bucket.wait_s(amount) == 0


def refused(act: Callable[[], object]) -> Problem:
    with pytest.raises(Problem) as error:
        act()
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


def test_requests_a_minute() -> None:
    clock = Hands()
    meter = limiter(clock, requests_per_minute=2)
    for _ in range(2):
        with meter.request():
            pass
    error = refused(meter.request().__enter__)
    assert error.type == "requests" and error.headers == {"Retry-After": "30"}
    clock.now_s += 29
    assert refused(meter.request().__enter__).headers == {"Retry-After": "1"}
    clock.now_s += 1.01
    with meter.request():
        pass


def test_tokens_are_reserved_ahead_and_corrected_after() -> None:
    clock = Hands()
    meter = limiter(clock, tokens_per_minute=100)
    caller = Caller(meter)
    with caller.reserved(30, 50) as bill:
        error = refused(caller.reserved(10, 11).__enter__)
        assert error.type == "tokens" and error.headers == {"Retry-After": "1"}
        bill.prompt_tokens = 30
        bill.completion_tokens += 5
    assert meter.tokens is not None and meter.tokens.level == 65
    assert (caller.used.prompt_tokens, caller.used.completion_tokens) == (30, 5)
    refused(caller.reserved(60, 6).__enter__)
    with caller.reserved(60, 5):
        pass  # it never ran: nothing is charged
    assert meter.tokens.level == 65


def test_an_answer_of_unknown_length_may_overdraw_and_later_ones_wait() -> None:
    clock = Hands()
    meter = limiter(clock, tokens_per_minute=100)
    caller = Caller(meter)
    with caller.reserved(50, 4000) as bill:
        bill.prompt_tokens, bill.completion_tokens = 50, 150
    assert refused(caller.reserved(1, 1).__enter__).headers == {"Retry-After": "62"}
    clock.now_s += 61.3
    with caller.reserved(1, 1):
        pass


def test_a_prompt_that_never_fits_is_refused_for_good() -> None:
    caller = Caller(limiter(Hands(), tokens_per_minute=100))
    error = refused(caller.reserved(101, 1).__enter__)
    assert error.headers == {"X-Should-Retry": "false"} and "101 tokens" in error.message


def test_without_limits_nothing_is_refused() -> None:
    caller = Caller()
    assert caller.name == ""
    with caller.reserved(10**9, 10**9) as bill:
        bill.completion_tokens = 7
    assert caller.used.completion_tokens == 7
