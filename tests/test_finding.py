"""A draft that is found for a target: what a search comes to, and what a session takes of it."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from backends import FILES, MAINLINE, NATIVE
from head_files import write_heads
from hub_standin import Repository, serve
from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import UNABLE
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory
from outrider.lab.models import find_model
from outrider.models.finding import AUTO_DRAFT, find_drafts
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import HubOptions
from outrider.models.reference import choose_file
from outrider.policy.fixed import FixedPolicy
from outrider.session import loading
from outrider.session.loading import load_draft, resolve_models
from tiny_gguf import MERGES, write_tiny

pytestmark = pytest.mark.usefixtures("trusted")

Make = Callable[..., Path]
OPTIONS = LoadOptions(threads=1, library=str(FILES[NATIVE[0]].path))
"""of one library: several would be compared"""


@pytest.fixture
def hub(tmp_path: Path) -> HubOptions:
    """A hub's cache of the test's own."""
    return HubOptions(offline=True, cache_dir=tmp_path / "hub")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a tiny model: beside the target, or into a snapshot of the hub's cache."""

    def made(name: str, *, repository: str = "", **options: object) -> Path:
        folder = tmp_path / "models"
        if repository:
            folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / "abc"
        path = folder / f"{name}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_tiny(path, **options)  # type: ignore[arg-type]

    return made


def names(target: Path, hub: HubOptions) -> list[str]:
    return [card.path.stem for card in find_drafts(read_card(target), hub).drafts]


def loaded(target: Path, hub: HubOptions) -> tuple[str | None, tuple[str, ...]]:
    """Which draft a session takes, and its notices."""
    with closing(Pair.load(target, AUTO_DRAFT, options=OPTIONS, hub=hub)) as pair:
        return (None if pair.draft is None else pair.draft.card.path.stem), pair.notices


# The search


def test_smaller_files_with_the_same_tokenizer_are_found_and_no_others(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=60)
    make("half", layers=30)
    make("tenth", layers=4)
    make("least", layers=1)
    make("as-large", layers=60, seed=1)
    make("target.draft", layers=20)
    make("other-words", layers=4, merges=MERGES[5:], padding=5)
    make("mmproj-target", layers=2)
    make("cached", layers=6, repository="a/b")
    make("folder/deeper", layers=5, repository="a/b")
    make("split", layers=4, shards=3)
    found = names(target, hub)
    assert found[0] == "target.draft"  # made for it, as its name says
    assert set(found[1:]) == {"tenth", "cached", "deeper", "least", "half", "split-00001-of-00003"}
    assert found.index("cached") < found.index("half")  # nearer to a tenth
    places = {Path(file.reference).stem: file.place for file in find_drafts(read_card(target), hub).files}
    assert (places["cached"], places["half"]) == ("in the hub's cache", "beside the target")


def test_what_is_alike_in_name_comes_first(make: Make, hub: HubOptions) -> None:
    target = make("Some-Coder-32B-Instruct", layers=60)
    make("Other-1B", layers=4, repository="a/b")
    make("Some-Coder-1B-Instruct-Q4_K_M", layers=4, repository="c/d")
    assert names(target, hub) == ["Some-Coder-1B-Instruct-Q4_K_M", "Other-1B"]


def test_links_are_followed_once_and_never_round_in_circles(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=40)
    small = make("small", layers=4)
    folder = target.parent
    (folder / "again.gguf").symlink_to(small)
    (folder / "target-again.gguf").symlink_to(target)
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nowhere.gguf")
    (folder / "round").symlink_to(folder)
    (folder / "folder.gguf").mkdir()
    os.mkfifo(folder / "pipe.gguf")
    assert len(names(target, hub)) == 1


def test_a_folder_that_may_not_be_listed_has_nothing(
    make: Make, hub: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make("target", layers=40)
    make("cached", layers=4, repository="a/b")

    def refuse(_path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert names(target, hub) == ["cached"]


def test_a_sidecar_that_is_broken_is_named_and_other_broken_files_are_not(
    make: Make, hub: HubOptions
) -> None:
    target = make("target", layers=40)
    for name in ("target-draft.gguf", "other.gguf"):
        (target.parent / name).write_bytes(b"GGUF and nothing more")
    [found] = find_drafts(read_card(target), hub).files
    assert Path(found.reference).name == "target-draft.gguf"
    draft, notices = loaded(target, hub)
    assert draft is None
    assert any("target-draft.gguf (beside the target): " in line for line in notices)


def test_heads_beside_the_target_are_named_with_why_they_are_not_used(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=40)
    write_heads(target.parent / "mtp-target.gguf", "qwen35", layers=5, mtp_layers=1, held=[4])
    write_heads(target.parent / "target-eagle3.gguf", "eagle3")
    write_heads(target.parent / "dflash-target.gguf", "dflash")
    make("x", repository="a/b")
    write_heads(target.parents[1] / "hub/models--a--b/snapshots/abc/mtp-x.gguf", "eagle3")
    found = find_drafts(read_card(target), hub)
    assert [card.path.stem for card in found.drafts] == ["x"]
    assert len(found.files) == 4 and all(file.note for file in found.files[1:])
    _, notices = loaded(target, hub)
    for why in (
        "made for a model of kind qwen35",
        "reads 0 layers of its target",
        "does not say which layers of its target it reads",
    ):
        assert sum(why in line for line in notices) == 1


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-DFlash-Q4_K_M.gguf"], "Qwen3-8B-Q4_K_M.gguf"),
        (["gemma-4-E2B-it-assistant-Q8_0.gguf", "gemma-4-E2B-it-Q8_0.gguf"], "gemma-4-E2B-it-Q8_0.gguf"),
        (["Qwen3-8B-DFlash-Q4_K_M.gguf", "mmproj-F16.gguf"], "Qwen3-8B-DFlash-Q4_K_M.gguf"),
        (["OpenAssistant-Q4_K_M.gguf", "x-dspark.gguf"], "OpenAssistant-Q4_K_M.gguf"),
    ],
)
def test_a_drafter_is_no_model_of_its_repository_unless_it_is_alone(names: list[str], chosen: str) -> None:
    assert choose_file(names) == chosen


@pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")
def test_a_target_with_a_head_of_its_own_takes_that(make: Make, hub: HubOptions) -> None:
    target = make("target", arch="qwen35", mtp_layers=1)
    make("small", layers=1)
    options = LoadOptions(threads=1, library=str(FILES[MAINLINE[0]].path), heads=True)
    with closing(Pair.load(target, AUTO_DRAFT, options=options, hub=hub)) as pair:
        assert pair.draft is None and pair.draft_name == "its own MTP head"


@pytest.mark.parametrize("is_target", [True, False])
def test_heads_that_are_named_are_refused_by_what_they_are(
    make: Make, hub: HubOptions, tmp_path: Path, is_target: bool
) -> None:
    heads, whole = str(write_heads(tmp_path / "x-eagle3.gguf", "eagle3")), str(make("whole"))
    why = "holds an EAGLE-3 head alone" if is_target else "it reads 0 layers of its target"
    with pytest.raises(ModelFileError, match=why) as caught:
        resolve_models(*((heads, AUTO_DRAFT) if is_target else (whole, heads)), hub)
    assert caught.value.what == heads
    with pytest.raises(ModelFileError, match="EAGLE-3"):
        find_model(heads, hub=hub)


# The hub


def test_sidecars_of_the_targets_repository_are_named_and_not_downloaded(tmp_path: Path, make: Make) -> None:
    files = {"m-Q4_K_M.gguf": make("m", layers=20).read_bytes()}
    files |= {name: b"x" * 3_000_000 for name in ("m-draft-Q8_0.gguf", "mtp/mtp-m.gguf", "m-Q8_0.gguf")}
    files |= {f"m-eagle3-0000{part}-of-00002.gguf": b"x" * 1_000_000 for part in (1, 2)}
    with serve({"owner/repo": Repository(files)}) as server:
        options = HubOptions(cache_dir=tmp_path / "hub", endpoint=server.endpoint)
        named = resolve_models("hf:owner/repo", AUTO_DRAFT, options)
        assert named.found is not None
        assert {file.reference.removeprefix("hf:owner/repo/") for file in named.found.files} == {
            "m-draft-Q8_0.gguf",
            "mtp/mtp-m.gguf",
            "m-eagle3-00001-of-00002.gguf",
        }
        assert {asked.path.rsplit("/", 1)[-1] for asked in server.downloads()} == {"m-Q4_K_M.gguf"}
        lines = list(map(str, named.found.files))
        assert "hf:owner/repo/m-draft-Q8_0.gguf (in its hub repository, not downloaded)" in lines
        assert sum("by its name it holds" in line for line in lines) == 2
        server.status = 503  # what is here is enough
        again = resolve_models("hf:owner/repo", AUTO_DRAFT, options)
        assert again.found is not None and again.found.files == ()


def test_a_quantization_of_a_target_that_is_named_after_its_heads_is_no_sidecar(
    tmp_path: Path, make: Make
) -> None:
    files = {"m-MTP-Q4_K_M.gguf": make("m", layers=20).read_bytes(), "m-MTP-Q8_0.gguf": b"x"}
    with serve({"owner/repo": Repository(files)}) as server:
        options = HubOptions(cache_dir=tmp_path / "hub", endpoint=server.endpoint)
        found = resolve_models("hf:owner/repo", AUTO_DRAFT, options).found
    assert found is not None and found.files == ()


# What a session takes


def test_a_session_takes_what_lines_up_and_says_so(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=40)
    make("near", layers=4, merges=(*MERGES[:-1], "o f"))  # as many tokens, of which one is another
    make("right", layers=8)
    make("also", layers=12)
    assert names(target, hub)[0] == "near"
    with closing(Pair.load(target, AUTO_DRAFT, options=OPTIONS, hub=hub)) as pair:
        assert pair.draft is not None
        taken = pair.draft.card.path.name
        [line] = [line for line in pair.notices if "-md auto takes" in line]
        assert line.startswith(f"-md auto takes {taken} (") and "beside the target" in line
        assert "also.gguf" in line and "`outrider check`" in line
        session = Session.open(pair, SessionOptions(128, policy=FixedPolicy()))
        assert session.generate("the ", max_tokens=4).tokens
        session.close()


@pytest.mark.parametrize("error", [OutOfMemory, BackendCrash])
def test_a_draft_that_cannot_be_loaded_is_passed_over_for_the_next(
    make: Make, hub: HubOptions, monkeypatch: pytest.MonkeyPatch, error: type[OutOfMemory]
) -> None:
    target = make("target", layers=40)
    make("first", layers=4)
    make("second", layers=8)
    load = load_draft

    def fail(target: Weights, card: ModelCard, *rest: Any, **named: Any) -> Weights:
        if card.path.stem == "first":
            raise error(str(card.path), "it cannot be had")
        return load(target, card, *rest, **named)

    monkeypatch.setattr(loading, "load_draft", fail)
    draft, notices = loaded(target, hub)
    assert draft == "second"
    assert "-md auto skips first.gguf: it cannot be had" in notices
    assert any(line.startswith("-md auto takes second.gguf") for line in notices)


@pytest.mark.parametrize(
    ("cannot_rewind", "said"),
    [
        (True, "-md auto: target cannot take rejected drafts back, so no draft is loaded"),
        (False, "no smaller file beside target.gguf"),
    ],
)
def test_where_there_is_none_a_line_says_why(
    make: Make, hub: HubOptions, monkeypatch: pytest.MonkeyPatch, cannot_rewind: bool, said: str
) -> None:
    target = make("target", layers=40)
    if cannot_rewind:
        make("small", layers=4)
        monkeypatch.setattr(Weights, "rewinding", UNABLE)
    draft, notices = loaded(target, hub)
    assert draft is None and any(said in line for line in notices)


def test_a_draft_that_is_named_is_not_looked_for(make: Make, hub: HubOptions) -> None:
    assert resolve_models(None, AUTO_DRAFT, hub) == resolve_models(None, None, hub)
    target, other = make("target", layers=20), make("other", layers=2)
    named = resolve_models(str(target), str(other), hub)
    assert named.draft is not None and (named.draft.path, named.found) == (other, None)
    named = resolve_models(str(target), None, hub)
    assert (named.target.path, named.draft, named.found) == (target, None, None)
