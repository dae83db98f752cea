"""`outrider check` as its users run it, on tiny models."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import TEMPLATE, Call, Outcome, refused
from head_files import write_heads
from outrider.backends.gguf import libraries
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.errors import OutOfMemory
from outrider.lab import loaded
from outrider.models.gguf import ModelCard
from outrider.models.vocab import tokenizer_id
from outrider.session.loading import load_draft
from recordings import FLAT, SMALL, curve
from tiny_gguf import MERGES, Reduced, write_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "draft.gguf", noise=0.3)
    write_tiny(folder / "foreign.gguf", merges=[merge[::-1] for merge in MERGES])
    write_tiny(folder / "recurrent.gguf", arch="mamba")
    write_tiny(folder / "experts.gguf", arch="qwen2moe")
    questions = ["the rain in the street", "a stone at the shore", "there was a king", "on the other hand"]
    prompts = [{"id": str(i), "prompt": text, "max_tokens": 32} for i, text in enumerate(questions * 2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def check(outrider: Call, monkeypatch: pytest.MonkeyPatch, models: Path) -> Call:
    """The command among the tiny models, whose costs are given: however busy the machine is, every prompt is
    answered and every answer scored."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("OUTRIDER_CACHE", str(models / "cache"))
    costs = {"all": curve(FLAT, 0.001), "last": curve(SMALL, 0.0002)}
    monkeypatch.setattr(loaded, "costs_of", lambda _model, *, rows, **_: costs[rows])
    return partial(outrider, "check", "-t", "1", "--seconds", "3600", "--prompts", "prompts.jsonl")


def as_json(outcome: Outcome) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(outcome.out)
    assert shown["schema"] == "outrider.check/1"
    return shown


def test_a_draft_is_judged_and_the_status_says_what_json_says(check: Call) -> None:
    outcome = check("target.gguf", "draft.gguf", "--json")
    shown = as_json(outcome)
    assert outcome.status == (0 if shown["pays"] else 1) and outcome.notes == ""
    [draft] = shown["drafts"]
    assert draft["model"]["name"] == "draft"
    assert draft["pair"]["identical"] and draft["bytes_ratio"] == 1.0 and draft["step_ratio"] > 0
    assert 0 <= draft["agreement"] <= 1 and draft["positions"] > 0
    assert draft["answers"] == sum(shown["answers"].values()) > 0
    assert draft["over_plain"]["value"] > 0 and draft["over_lookup"]["value"] > 0
    assert draft["verdict"]["outcome"] in ("pays", "undecided", "does not pay")
    assert shown["lookup"]["over_plain"]["value"] > 0 and shown["rewind"] == "free"
    assert sorted(map(int, shown["calls_s"])) == [1, 2, 4, 8, 16] and list(shown["answers"]) == ["prompts"]


def test_what_people_read_fits_eighty_columns(check: Call) -> None:
    outcome = check("target.gguf", "draft.gguf")
    lines = outcome.out.splitlines()
    assert outcome.notes == "" and max(map(len, lines)) <= 80 and "\x1b" not in outcome.out
    assert lines[0] == "target target" and "lookup alone" in lines and "draft draft" in lines
    for name in ("tokenizer", "rewind", "calls", "answers", "step", "verdict"):
        assert any(line.strip().startswith(name) for line in lines), name
    table = next(place for place, line in enumerate(lines) if line.startswith("draft  "))
    assert [line.split("  ")[0] for line in lines[table : table + 3]] == ["draft", "lookup alone", "draft"]


@pytest.mark.slow
def test_without_a_draft_those_that_are_found_are_judged(
    check: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "target.gguf", layers=40, chat_template=TEMPLATE)
    for name in ("first", "second"):
        write_tiny(tmp_path / f"{name}.gguf", layers=4 if name == "first" else 6, noise=0.3)
    write_heads(tmp_path / "target-eagle3.gguf", "eagle3")
    load = load_draft

    def fail(target: Weights, card: ModelCard, options: LoadOptions, **given: Any) -> Weights:
        if card.path.stem == "first":
            raise OutOfMemory(str(card.path), "there is no room")
        return load(target, card, options, **given)

    monkeypatch.setattr(loaded, "load_draft", fail)
    shown = as_json(check(str(tmp_path / "target.gguf"), "--json"))
    assert [draft["model"]["name"] for draft in shown["drafts"]] == ["second"]
    assert "first is skipped: there is no room" in shown["notices"]
    assert [Path(file["reference"]).stem for file in shown["found"]] == ["first", "second", "target-eagle3"]
    text = check(str(tmp_path / "target.gguf")).out
    rows = [line.replace("drafts", "").split()[:2] for line in text.splitlines() if ".gguf (" in line]
    assert rows == [["-", "first.gguf"], ["measured", "second.gguf"], ["-", "target-eagle3.gguf"]]
    named = check(str(tmp_path / "target.gguf"), str(tmp_path / "first.gguf"))
    assert named.status == 2 and "there is no room" in named.err


def test_a_draft_with_another_tokenizer_is_refused_before_anything_is_measured(
    check: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "load_weights", lambda *_, **__: pytest.fail("loaded"))
    outcome = check("target.gguf", "draft.gguf", "foreign.gguf")
    assert outcome.status == 2 and outcome.out == ""
    assert (
        outcome.err.startswith("error: draft: the tokenizers do not line up")
        and "lookup needs no draft" in outcome.err
    )


def test_a_reduced_vocabulary_is_said_to_be_one(check: Call, models: Path, tmp_path: Path) -> None:
    weights = Weights(models / "target.gguf", LoadOptions(threads=1))
    name = tokenizer_id(weights.vocabulary)
    weights.close()
    reduced = write_tiny(tmp_path / "reduced.gguf", noise=0.1, reduced=Reduced(10, name))
    stray = write_tiny(tmp_path / "stray.gguf", noise=0.1, reduced=Reduced(10, "0" * 64))
    text = " ".join(check("target.gguf", str(reduced), str(stray)).out.split())
    assert "reduced: it knows 268 of the target's 289 tokens" in text
    assert "cannot work: its reduced vocabulary was made for another tokenizer" in text


def test_a_model_that_cannot_rewind_is_a_verdict(check: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    outcome = check("recurrent.gguf", "draft.gguf")
    text = " ".join(outcome.out.split())
    assert outcome.status == 1 and "rejected tokens cannot be taken back" in text
    assert "cannot work: the target cannot take" in text
    [draft] = as_json(check("target.gguf", "recurrent.gguf", "--json"))["drafts"]
    assert draft["verdict"]["outcome"] == "cannot work"
    assert "cannot forget tokens" in draft["verdict"]["sentence"]


def test_a_library_that_is_not_here_is_named_in_a_line(check: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    [first, *_] = [library.backend for library in candidates(LoadOptions())]
    missing = "ik" if first == "llama.cpp" else "llama.cpp"
    kept = [library.file for library in candidates(LoadOptions(backend=first))]
    monkeypatch.setattr(libraries, "installed", lambda: tuple(kept))
    alone = check("target.gguf", "--backend", missing)
    assert alone.status == 2 and f"backend {missing}: " in alone.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.gguf",), "nowhere.gguf: "),
        (("target.gguf", "nowhere.gguf"), "nowhere.gguf: "),
        (("*.gguf",), "*.gguf: 5 files match"),
        (("target.gguf", "--prompts", "no.jsonl"), "no.jsonl: "),
        (("target.gguf", "--seconds", "nan"), "--seconds: nan cannot be used: "),
        (("target.gguf", "--backend", "cuda"), "backend: 'cuda' is not known"),
        (("target.gguf", "-c", "32"), "prompts: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(check: Call, arguments: tuple[str, ...], complaint: str) -> None:
    assert refused(check(*arguments)).startswith(complaint)
