"""`--corpus` and `--prediction` as users give them."""

from pathlib import Path

import pytest

from cli_helpers import Call, Outcome, refused, result
from outrider import Session
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.params import SamplingParams
from outrider.policy.fixed import FixedPolicy

PROMPT = "def mean(values):"
GREEDY = SamplingParams(temperature=0)
OPTIONS = LoadOptions(threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(outrider: Call, models: Path) -> Call:
    """`outrider run` with short, greedy answers."""

    def run(*arguments: str | Path, model: str = "target.gguf", command: str = "run") -> Outcome:
        fixed = f"-m {models / model} -t 1 --temp 0 -n 24 --ignore-eos".split()
        return outrider(command, *fixed, "-p", PROMPT, *map(str, arguments))

    return run


def test_files_are_drafted_from_and_change_nothing(run: Call, tmp_path: Path) -> None:
    plain = result(run("--json", "--draft-max", "0"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_text(f"{PROMPT}{plain['text']}")
    (tmp_path / "files" / "two").write_bytes(b"\0")
    (tmp_path / "answer").write_text(plain["text"])
    corpus = ("--no-lookup", "--corpus", tmp_path / "files", "--corpus", tmp_path / "answer")
    for name, given in (("prediction", ("--prediction", tmp_path / "answer")), ("corpus", corpus)):
        fast = result(run("--json", "--policy", "fixed", *given))
        assert fast["text"] == plain["text"] and fast["target_calls"] < plain["target_calls"]
        assert fast["drafters"][name]["accepted_tokens"] > 0
    assert "corpus: indexed 2 files" in " ".join(fast["notices"]), fast["notices"]
    assert "skipped 1 binary" in " ".join(fast["notices"])


def test_a_prediction_that_cannot_be_read_is_refused(run: Call, tmp_path: Path) -> None:
    assert refused(run("--prediction", tmp_path / "none")).startswith(f"{tmp_path / 'none'}: no such file")
    (tmp_path / "answer").write_bytes(b"caf\xe9 au lait")
    assert "answer: it is not UTF-8" in refused(run("--prediction", tmp_path / "answer"))


def test_a_corpus_that_cannot_be_used_is_refused(run: Call, tmp_path: Path) -> None:
    nowhere = refused(run("--corpus", tmp_path / "nowhere", model="nowhere.gguf"))
    assert "nowhere: there is no such file or folder" in nowhere, "before anything is loaded"
    (tmp_path / "files").mkdir()
    said = run("--corpus", tmp_path / "files")
    assert said.status == 2 and "files: there is no text in it. Name files or folders" in said.err


def test_a_model_that_cannot_rewind_says_what_is_not_used(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    (tmp_path / "text").write_text("some text")
    outcome = run("--corpus", tmp_path / "text", "--prediction", tmp_path / "text", model="mamba.gguf")
    assert outcome.status == 0
    assert "note: the corpus is not used" in outcome.err
    assert "note: the prediction is not used" in outcome.err


def test_a_conversation_has_a_corpus(run: Call, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text")
    outcome = run("--corpus", tmp_path / "text", command="chat", model="chat.gguf")
    assert "note: corpus: indexed 1 file" in outcome.err


# The Python API


def test_earlier_answers_of_a_session_are_drafted_from(models: Path) -> None:
    policy = FixedPolicy(draft_max=8, p_min=0.2, hand_over=0.2)
    with Session.load(models / "target.gguf", context_length=256, options=OPTIONS, policy=policy) as session:
        settings = {"max_tokens": 24, "sampling": GREEDY, "ignore_end": True}
        first = session.generate("10 10 10 def", **settings)
        other = session.generate("return and the", **settings)
        again = session.generate("10 10 10 def", **settings)
        assert again.tokens == first.tokens and other.tokens != first.tokens
        accepted = [source for r in again.records for source in r.draft.sources[: r.num_accepted]]
        assert accepted.count("earlier") > 8


def test_a_session_without_a_follower_says_so_once(models: Path) -> None:
    with Session.load(models / "target.gguf", context_length=64, options=OPTIONS) as loaded:
        session = Session(loaded.target)
        for _ in range(2):
            session.generate(PROMPT, max_tokens=2, sampling=GREEDY, prediction="some text")
        assert session.notices == ["the prediction is not used: no drafter of this session follows one"]
