"""Several real models in one server, and OpenAI's client that asks them."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import InternalServerError, OpenAI

from cli_helpers import PATIENCE_S
from real_server import ARGUMENTS, KEY, MODEL, NAME, REASON, RealServer, real_server
from tiny_gguf import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

TEXT = "One, two, three, four, five, one, two, three,"


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
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    own: Path = tmp_path_factory.mktemp("server")
    options = ("--models-dir", str(folder), "--models-max", "2", "--idle", "1", "-c", "256")
    with real_server(own, *options, *ARGUMENTS) as server:
        yield server
        log = (own / "log").read_text()
    assert "torn.gguf is not served" in log


@pytest.fixture
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def text_of(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=TEXT, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def states(client: OpenAI) -> dict[str, str]:
    return {model.id: model.model_dump()["status"]["value"] for model in client.models.list()}


def test_each_model_answers_as_itself_whatever_was_loaded_between(client: OpenAI) -> None:
    assert set(states(client)) == {NAME, "tiny", "other"}
    first = {name: text_of(client, name) for name in (NAME, "tiny", "other")}
    assert first[NAME] != first["tiny"] == first["other"]  # the tiny ones have the same weights
    with ThreadPoolExecutor(4) as threads:
        asked = [NAME, "tiny", "other", "other", NAME, "tiny"] * 2
        answers = list(threads.map(lambda name: text_of(client, name), asked))
    assert answers == [first[name] for name in asked]


def test_idle_models_are_unloaded_and_come_back(client: OpenAI, server: RealServer) -> None:
    before = text_of(client, "tiny")
    end_s = time.monotonic() + PATIENCE_S
    while "loaded" in states(client).values():
        assert time.monotonic() < end_s
        time.sleep(0.1)
    generated = server.metric("outrider_generation_tokens_total")
    assert text_of(client, "tiny") == before
    assert server.metric("outrider_generation_tokens_total") > generated > 0


def test_a_file_that_is_gone_is_an_error_of_its_requests(client: OpenAI, folder: Path) -> None:
    gone = folder / "other.gguf"
    while states(client)["other"] != "unloaded":
        time.sleep(0.1)
    kept = gone.rename(folder / "kept")
    with pytest.raises(InternalServerError) as refused:
        text_of(client, "other")
    assert refused.value.code == "model_not_loaded" and str(folder) not in str(refused.value)
    kept.rename(gone)
    assert text_of(client, "other") == text_of(client, "tiny")
