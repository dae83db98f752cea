"""`--corpus` and `--prediction` as users give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import TEMPLATE, Outcome, call
from outrider.backends.gguf import LoadOptions, mainline
from outrider.core.params import SamplingParams
from outrider.policy import FixedPolicy
from outrider.session import Session
from tiny_gguf import write_tiny

Call = Callable[..., Outcome]
PROMPT = "def mean(values):"
GREEDY = SamplingParams(temperature=0)
OPTIONS = LoadOptions(threads=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf")
    write_tiny(folder / "chat.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "mamba.gguf", arch="mamba")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(models: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    """`outrider run` with short, greedy answers."""

    def run(*arguments: str | Path, model: str = "target.gguf", command: str = "run") -> Outcome:
        fixed = (
            "-m",
            str(models / model),
            "-t",
            "1",
            "--temp",
            "0",
            "-n",
            "24",
            "--ignore-eos",
            "-p",
            PROMPT,
        )
        return call(monkeypatch, capfdbinary, command, *fixed, *map(str, arguments))

    return run


def result(outcome: Outcome) -> dict[str, Any]:
    assert outcome.status == 0, outcome.err
    loaded = json.loads(outcome.out)
    assert isinstance(loaded, dict)
    return loaded


def test_a_predicted_answer_is_drafted_from_and_changes_nothing(run: Call, tmp_path: Path) -> None:
    plain = result(run("--json", "--draft-max", "0"))
    answer = tmp_path / "answer"
    answer.write_text(plain["text"])
    fast = result(run("--json", "--policy", "fixed", "--prediction", answer))
    assert fast["text"] == plain["text"]
    assert (
        fast["drafters"]["prediction"]["accepted_tokens"] > 0
    )  # it tokenizes in another way than it says it
    assert fast["target_calls"] < plain["target_calls"]


def test_a_corpus_is_drafted_from_and_changes_nothing(run: Call, tmp_path: Path) -> None:
    plain = result(run("--json", "--draft-max", "0"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_text(f"{PROMPT}{plain['text']}")
    (tmp_path / "files" / "two").write_bytes(b"\0")
    for _ in range(2):
        fast = result(run("--json", "--policy", "fixed", "--no-lookup", "--corpus", tmp_path / "files"))
        assert fast["text"] == plain["text"]
        assert set(fast["drafters"]) == {"corpus"}
        assert fast["drafters"]["corpus"]["accepted_tokens"] > 0
        assert any("indexed 1 file" in notice for notice in fast["notices"])
        assert any("skipped 1 binary" in notice for notice in fast["notices"])


def test_several_paths_make_one_corpus(run: Call, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"some text of {name}")
    outcome = run("--corpus", tmp_path / "one", "--corpus", tmp_path / "two")
    assert outcome.status == 0
    assert "note: corpus: indexed 2 files" in outcome.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        (b"", "it is empty"),
        (b" \n ", "it is empty"),
        (b"some\0text", "it is not text (it holds zero bytes)"),
        (b"caf\xe9 au lait", "it is not UTF-8"),
    ],
)
def test_a_prediction_that_is_no_text_is_refused(
    run: Call, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "answer").write_bytes(content)
    outcome = run("--prediction", tmp_path / "answer")
    assert outcome.status == 2 and outcome.out == ""
    assert str(tmp_path / "answer") in outcome.err and message in outcome.err


def test_a_corpus_that_is_not_there_is_refused_before_anything_is_loaded(run: Call, tmp_path: Path) -> None:
    outcome = run("--corpus", tmp_path / "nowhere", model="not there either")
    assert outcome.status == 2 and outcome.out == ""
    assert "nowhere: there is no such file or folder" in outcome.err


def test_a_corpus_without_text_is_refused(run: Call, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    outcome = run("--corpus", tmp_path / "files")
    assert outcome.status == 2 and outcome.out == ""
    assert "files: there is no text in it. Name files or folders" in outcome.err


def test_a_model_that_cannot_rewind_says_what_is_not_used(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mainline.Dialect, "keeps_states", False)
    (tmp_path / "text").write_text("some text")
    outcome = run("--corpus", tmp_path / "text", "--prediction", tmp_path / "text", model="mamba.gguf")
    assert outcome.status == 0
    assert "note: the corpus is not used" in outcome.err
    assert "note: the prediction is not used" in outcome.err


def test_a_conversation_has_a_corpus_but_no_prediction(run: Call, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text")
    chat = {"command": "chat", "model": "chat.gguf"}
    assert "note: corpus: indexed 1 file" in run("--corpus", tmp_path / "text", **chat).err
    refused = run("--prediction", tmp_path / "text", **chat)
    assert refused.status == 2 and "--prediction: not available in a conversation" in refused.err


# The Python API


def test_earlier_answers_of_a_session_are_drafted_from(models: Path) -> None:
    policy = FixedPolicy(draft_max=8, p_min=0.2, hand_over=0.2)
    with Session.load(models / "target.gguf", context_length=256, options=OPTIONS, policy=policy) as session:
        settings = {"max_tokens": 24, "sampling": GREEDY, "ignore_end": True}
        first = session.generate("10 10 10 def", **settings)
        other = session.generate("return and the", **settings)
        again = session.generate("10 10 10 def", **settings)
        assert again.tokens == first.tokens and other.tokens != first.tokens
        assert (
            sum(record.draft.sources[: record.num_accepted].count("earlier") for record in again.records) > 8
        )


def test_a_prediction_belongs_to_its_request(models: Path) -> None:
    policy = FixedPolicy()
    with Session.load(models / "target.gguf", context_length=256, options=OPTIONS, policy=policy) as session:
        settings = {"max_tokens": 24, "sampling": GREEDY, "ignore_end": True}
        plain = session.generate(PROMPT, speculate=False, **settings)

        def predicted(text: str | None) -> int:
            session.engine.reset()
            done = session.generate(PROMPT, prediction=text, **settings)
            assert done.tokens == plain.tokens
            return sum(record.draft.sources.count("prediction") for record in done.records)

        assert predicted(plain.text) > 8
        assert predicted(None) == 0
        assert predicted("") == 0
        assert session.notices == []


def test_a_session_without_a_follower_says_so_once(models: Path) -> None:
    with Session.load(models / "target.gguf", context_length=64, options=OPTIONS) as loaded:
        session = Session(loaded.target)
        for _ in range(2):
            session.generate(PROMPT, max_tokens=2, sampling=GREEDY, prediction="some text")
        assert session.notices == ["the prediction is not used: no drafter of this session follows one"]


def test_a_corpus_is_part_of_what_is_loaded(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text")
    target = models / "target.gguf"
    with Session.load(target, context_length=64, options=OPTIONS, corpus=[tmp_path / "text"]) as session:
        assert "corpus" in [drafter.name for drafter in session.engine.drafters]
        assert session.notices[0].startswith("corpus: indexed 1 file")
