"""A server with the embedded model that is ended and started again: KV and texts outlive it."""

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from real_server import ARGUMENTS, KEY, KEYS, MODEL, ONE_AT_ONCE, REASON, RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

BEGINNING = "Once there was a small engine that drafted ahead of a large one, step by step. " * 12
NEXT = "Once there was a"
"""What follows is all but certain: a text that was read in other calls differs by no rounding."""


def started(folder: Path, *arguments: str, **how: Any) -> AbstractContextManager[RealServer]:
    """A server; `folder` is for its files and its cache."""
    return real_server(folder, *ARGUMENTS, "-c", "1024", "--cache-dir", str(folder / "kv"), *arguments, **how)


def asked(server: RealServer, question: str, key: str = KEY, **fields: Any) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    body = {"prompt": BEGINNING + question, "max_tokens": 16, "temperature": 0, **fields}
    found = server.post("/v1/completions", key, **body)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_after_sigterm_kv_is_found_by_its_key_alone(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        expected, cached = asked(server, NEXT)
        assert cached == 0
    with started(tmp_path) as server:
        assert asked(server, NEXT, ONE_AT_ONCE)[1] == 0
        text, cached = asked(server, NEXT)
        assert text == expected and cached > 200
        assert asked(server, "And then?")[1] > 190
        assert server.metric("outrider_kv_tier_hits_total", tier="disk") == 1
        assert server.metric("outrider_kv_tier_restored_tokens_total", tier="disk") == cached
        assert server.metric("outrider_prompt_tokens_cached_total") >= cached
    files = list((tmp_path / "kv").iterdir())
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_after_sigkill_it_starts_and_answers_as_before(tmp_path: Path) -> None:
    with started(tmp_path, "--kept-sequences", "0", "-np", "1", end=signal.SIGKILL) as server:
        expected = asked(server, NEXT)[0]
        for number in range(3):  # what has to leave is written
            body = {"prompt": f"{number} is a number that has nothing to do with engines. " * 9}
            asked(server, "", **body)
        assert server.becomes(3, "outrider_kv_tier_kept_total")
    for file in (tmp_path / "kv").glob("*.kv"):
        os.truncate(file, file.stat().st_size // 2)
        break
    with started(tmp_path) as server:
        assert asked(server, NEXT)[0] == expected
    assert "is not used: it was cut short" in (tmp_path / "log").read_text()


def test_a_beginning_comes_back_from_memory(tmp_path: Path) -> None:
    with started(tmp_path, "--cache-ram", "64", "--kept-sequences", "0", "-np", "1") as server:
        expected = asked(server, NEXT)[0]
        asked(server, "", prompt="Something else that is long enough to be kept, too. " * 9)
        text, cached = asked(server, NEXT)
        assert text == expected and cached > 200
        assert server.metric("outrider_kv_tier_hits_total", tier="memory") == 1


def counted(server: RealServer, prompt: str, key: str) -> tuple[int, int]:
    """Tokens of a prompt that were cached, and drafted tokens from earlier texts, of a request by a key."""
    found = server.post("/v1/completions", key, prompt=prompt, max_tokens=32, temperature=0)
    drafts = found["outrider"]["drafters"].get("earlier", {"drafted_tokens": 0})
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], drafts["drafted_tokens"]


def test_of_what_one_key_left_another_gets_nothing(tmp_path: Path) -> None:
    """Neither KV in the cache, in memory and on disk, nor texts to draft from, before and after a restart."""
    places = ("--cache-ram", "64", "--policy", "fixed", "-np", "1", "--kept-sequences", "0")
    other = "Something else that is long enough to leave the cache no room for more. " * 9
    asked_by_both = BEGINNING + "What did it do?"
    with started(tmp_path, *places) as server:
        assert counted(server, asked_by_both, KEY) == (0, 0)
        assert counted(server, asked_by_both, ONE_AT_ONCE) == (0, 0)  # the other's is in the cache
        assert counted(server, other, KEY)[0] == 0
        cached, drafted = counted(server, asked_by_both, KEY)
        assert cached > 200 and drafted > 0
        assert server.metric("outrider_kv_tier_hits_total", tier="memory") == 1
    for file in (tmp_path / "kv").iterdir():
        text = file.read_bytes()
        assert KEY.encode() not in text and ONE_AT_ONCE.encode() not in text
    keys = KEYS.replace(ONE_AT_ONCE, "a-third-key-that-was-never-here")  # under a name that was
    with started(tmp_path, *places, keys=keys) as server:
        assert counted(server, asked_by_both, "a-third-key-that-was-never-here") == (0, 0)
        cached, drafted = counted(server, asked_by_both, KEY)
        assert cached > 200 and drafted > 0
        assert server.metric("outrider_kv_tier_hits_total", tier="disk") == 1
