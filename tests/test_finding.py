"""A draft that is found for a target: `-md auto`, and `outrider check TARGET` alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from outrider.backends.gguf import LoadOptions
from outrider.models.finding import AUTO_DRAFT, find_drafts, resolve_models
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions
from outrider.session.pair import Pair
from tiny_gguf import MERGES, write_tiny

Make = Callable[..., Path]


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
        folder.mkdir(parents=True, exist_ok=True)
        return write_tiny(folder / f"{name}.gguf", **options)  # type: ignore[arg-type]

    return made


def names(target: Path, hub: HubOptions) -> list[str]:
    return [found.card.path.stem for found in find_drafts(read_card(target), hub)]


def test_smaller_files_with_the_same_tokenizer_are_found_and_no_others(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=60)
    make("half", layers=30)
    make("tenth", layers=4)
    make("least", layers=1)
    make("as-large", layers=60, seed=1)
    make("target.draft", layers=20)
    make("other-words", layers=4, merges=MERGES[:5], padding=600)
    make("mmproj-target", layers=2)
    make("cached", layers=6, repository="a/b")
    make("mamba", arch="mamba", layers=1)
    (target.parent / "broken.gguf").write_bytes(b"GGUF and nothing more")
    found = names(target, hub)
    assert found[0] == "target.draft"  # made for it, as its name says
    assert set(found[1:]) - {"mamba"} == {"tenth", "cached", "least", "half"}
    assert found.index("cached") < found.index("half")  # nearer to a tenth
    places = {found.card.path.stem: found.place for found in find_drafts(read_card(target), hub)}
    assert (places["cached"], places["half"]) == ("in the hub's cache", "beside the target")


def test_a_session_takes_what_lines_up_and_says_so(make: Make, hub: HubOptions) -> None:
    target = make("target", layers=40)
    make("near", layers=2, merges=(*MERGES[:-1], "o f"))  # as many tokens, of which one is another
    make("right", layers=8)
    options = LoadOptions(threads=1)
    with closing(Pair.load(target, AUTO_DRAFT, options=options, hub=hub)) as pair:
        assert pair.draft is not None and pair.draft_card is not None
        assert any(line.startswith("-md auto: ") and "beside the target" in line for line in pair.notices)
        session = pair.open(128)
        assert session.generate("the ", max_tokens=4).tokens
        session.close()


def test_where_there_is_none_a_line_says_what_could_be_taken(make: Make, hub: HubOptions) -> None:
    target = make("alone")
    with closing(Pair.load(target, AUTO_DRAFT, options=LoadOptions(threads=1), hub=hub)) as pair:
        assert pair.draft is None
        assert any("no smaller file beside alone.gguf" in line for line in pair.notices)


def test_the_embedded_default_has_its_own(hub: HubOptions) -> None:
    assert resolve_models(None, AUTO_DRAFT, hub) == resolve_models(None, None, hub)


def test_a_draft_that_is_named_is_not_looked_for(make: Make, hub: HubOptions) -> None:
    target, other = make("target", layers=20), make("other", layers=2)
    assert resolve_models(str(target), str(other), hub) == (target, [other], None)
    assert resolve_models(str(target), None, hub) == (target, [], None)
