"""The real program with the real embedded model: ended and started again, with several models, and among
clients that break off at any moment."""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from openai import InternalServerError, OpenAI

from cli_helpers import PATIENCE_S
from real_server import (
    ARGUMENTS,
    KEY,
    KEYS,
    MODEL,
    NAME,
    ONE_AT_ONCE,
    REASON,
    RealServer,
    real_server,
)
from serving import CHAT, TEXT, user
from tiny_gguf import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

# KV and texts outlive it

BEGINNING = "Once there was a small engine that drafted ahead of a large one, step by step. " * 12
NEXT = "Once there was a"
"""What follows is all but certain: a text that was read in other calls differs by no rounding."""
IN_MEMORY = ("--cache-ram", "64", "-np", "1", "--kept-sequences", "0")


def started(folder: Path, *arguments: str, **how: Any) -> AbstractContextManager[RealServer]:
    """A server; `folder` is for its files and its cache."""
    return real_server(folder, *ARGUMENTS, "-c", "1024", "--cache-dir", str(folder / "kv"), *arguments, **how)


def asked(server: RealServer, question: str, key: str = KEY, **fields: Any) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    body = {"prompt": BEGINNING + question, "max_tokens": 16, "temperature": 0, **fields}
    found = server.post(TEXT, key, **body)
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


def counted(server: RealServer, prompt: str, key: str) -> tuple[int, int]:
    """Tokens of a prompt that were cached, and drafted tokens from earlier texts."""
    found = server.post(TEXT, key, prompt=prompt, max_tokens=32, temperature=0)
    drafts = found["outrider"]["drafters"].get("earlier", {"drafted_tokens": 0})
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], drafts["drafted_tokens"]


def test_of_what_one_key_left_another_gets_nothing(tmp_path: Path) -> None:
    """Neither KV in the cache, in memory and on disk, nor texts to draft from, before and after a restart."""

    other = "Something else that is long enough to leave the cache no room for more. " * 9
    asked_by_both = BEGINNING + "What did it do?"
    with started(tmp_path, *IN_MEMORY, "--policy", "fixed") as server:
        assert counted(server, asked_by_both, KEY) == (0, 0)
        assert counted(server, asked_by_both, ONE_AT_ONCE) == (0, 0)  # the other's is in the cache
        expected = asked(server, NEXT)[0]
        assert counted(server, other, KEY)[0] == 0
        text, cached = asked(server, NEXT)
        assert text == expected and cached > 200
        cached, drafted = counted(server, asked_by_both, KEY)
        assert cached > 200 and drafted > 0
        assert server.metric("outrider_kv_tier_hits_total", tier="memory") >= 1
    for file in (tmp_path / "kv").iterdir():
        content = file.read_bytes()
        assert KEY.encode() not in content and ONE_AT_ONCE.encode() not in content
    keys = KEYS.replace(ONE_AT_ONCE, "a-third-key-that-was-never-here")  # under a name that was
    with started(tmp_path, *IN_MEMORY, "--policy", "fixed", keys=keys) as server:
        assert counted(server, asked_by_both, "a-third-key-that-was-never-here") == (0, 0)
        cached, drafted = counted(server, asked_by_both, KEY)
        assert cached > 200 and drafted > 0
        assert server.metric("outrider_kv_tier_hits_total", tier="disk") == 1


# Several models

COUNTING = "One, two, three, four, five, one, two, three,"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models, and a file that is cut off."""
    models: Path = tmp_path_factory.mktemp("models")
    for name in ("tiny", "other"):
        write_tiny(models / f"{name}.gguf")
    whole = (models / "tiny.gguf").read_bytes()
    (models / "torn.gguf").write_bytes(whole[: len(whole) // 2])
    return models


@pytest.fixture(scope="module")
def several(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    own: Path = tmp_path_factory.mktemp("server")
    options = ("--models-dir", str(folder), "--models-max", "2", "--idle", "1", "-c", "256")
    with real_server(own, *options, *ARGUMENTS) as server:
        yield server
    assert "torn.gguf is not served" in (own / "log").read_text()


@pytest.fixture
def client(several: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=several.base_url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def text_of(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=COUNTING, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def states(client: OpenAI) -> dict[str, str]:
    return {model.id: model.model_dump()["status"]["value"] for model in client.models.list()}


def test_each_model_answers_as_itself_whatever_was_loaded_between(client: OpenAI) -> None:
    assert set(states(client)) == {NAME, "tiny", "other"}
    first = {name: text_of(client, name) for name in (NAME, "tiny", "other")}
    assert first[NAME] != first["tiny"] == first["other"]  # the tiny ones have the same weights
    with ThreadPoolExecutor(4) as threads:
        names = [NAME, "tiny", "other", "other", NAME, "tiny"] * 2
        answers = list(threads.map(lambda name: text_of(client, name), names))
    assert answers == [first[name] for name in names]


def test_idle_models_are_unloaded_and_come_back(client: OpenAI, several: RealServer, folder: Path) -> None:
    before = text_of(client, "tiny")
    end_s = time.monotonic() + PATIENCE_S
    while "loaded" in states(client).values():
        assert time.monotonic() < end_s
        time.sleep(0.1)
    generated = several.metric("outrider_generation_tokens_total")
    assert text_of(client, "tiny") == before
    assert several.metric("outrider_generation_tokens_total") > generated > 0
    gone = folder / "other.gguf"  # a file that is not there is an error of its requests
    kept = gone.rename(folder / "kept")
    with pytest.raises(InternalServerError) as refused:
        text_of(client, "other")
    assert refused.value.code == "model_not_loaded" and str(folder) not in str(refused.value)
    kept.rename(gone)
    assert text_of(client, "other") == before


# Clients that break off: nothing may stay behind, and what is answered afterwards is what was answered before

DISCONNECTS = 1_000
WARM = 200
SEED = 7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    arguments = ("-t", "1", "-c", "1024", "--client-timeout", "5", "--cache-ram", "0")
    with real_server(tmp_path_factory.mktemp("hostile"), *arguments) as running:
        yield running


def greedy(server: RealServer) -> str:
    """What the model says to a question; always the same, before the near-tie that its 18th token is."""
    answer = server.post(CHAT, messages=user("Count to ten."), temperature=0, max_tokens=12)
    text: str = answer["choices"][0]["message"]["content"]
    return text


def break_off(server: RealServer, chance: random.Random) -> None:
    """One client that leaves at some moment between its first byte and the last of its answer."""
    body = {
        "messages": user("Tell me of the sea. " * chance.choice([1, 40])),
        "max_tokens": chance.choice([1, 300]),
        "stream": chance.random() < 0.6,
        "n": chance.choice([1, 1, 3]),
    }
    content = json.dumps(body).encode()
    host, _, port = server.address.removeprefix("http://").partition(":")
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()
    sent = head + content
    sock = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    match chance.choice(["nothing", "head", "body", "sent", "sent", "read", "read", "twice"]):
        case "head":
            sock.sendall(sent[: chance.randrange(1, len(head) - 4)])
        case "body":
            sock.sendall(sent[: chance.randrange(len(head), len(sent))])
        case "sent":
            sock.sendall(sent)
        case "read":
            sock.sendall(sent)
            with contextlib.suppress(TimeoutError):
                sock.settimeout(chance.choice([0.01, 0.05, 0.2]))
                sock.recv(chance.choice([1, 200, 4096]))
        case "twice":
            sock.sendall(sent + sent)
    if chance.random() < 0.7:  # reset rather than closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_thousand_clients_that_vanish_leave_nothing_behind(server: RealServer) -> None:
    before, chance = greedy(server), random.Random(SEED)
    taken_bytes = []
    for number in (WARM, DISCONNECTS - WARM):
        for _ in range(number):
            break_off(server, chance)
        assert server.is_idle() and server.becomes(0, "outrider_num_requests_waiting")
        taken_bytes.append(server.metric("process_resident_memory_bytes"))
    assert taken_bytes[1] < 1.1 * taken_bytes[0]
    assert greedy(server) == before


@pytest.mark.parametrize("what", ["a", " ", "1", "\n", "!", "<|im_end|>", "\U0001f600", "a\u0301", "\0"])
def test_texts_that_are_hard_to_tokenize_are_answered(server: RealServer, what: str) -> None:
    text = what * (3_000_000 // len(json.dumps(what, ensure_ascii=False).encode()))
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"content": text},
        TEXT: {"prompt": text},
        CHAT: {"messages": user(text)},
    }
    for path, body in bodies.items():
        try:
            server.post(path, **body)
        except HTTPError as error:
            assert error.code in (400, 413)
            error.close()
    assert greedy(server)
