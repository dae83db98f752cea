"""Heads as drafters, a model's own (MTP) and those of files (EAGLE-3, MTP layers), on tiny models."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from backends import FILES, MAINLINE, assert_near, next_rows, store
from engines import GREEDY, asked, run
from head_files import OPTIONS, Files, write_files
from llama_cpp_models import SMALL, TEXT
from outrider.backends.gguf.head_model import HeadModel, HeadWeights
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions
from tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

THREE = FixedPolicy(draft_max=3, p_min=0.0)

KINDS = (
    *("own qwen35", "own glm4moe", "own qwen3next"),
    *("eagle3 llama", "eagle3 qwen35", "mtp qwen35", "mtp glm4moe"),
)


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose every weight is random, so that nothing can go wrong unnoticed."""
    return write_files(tmp_path_factory.mktemp("heads"), request.param, agrees=False)


@dataclass(frozen=True)
class Loaded:
    """Both, in one library."""

    target: Weights
    head: HeadWeights | None

    def open(self, max_sequences: int = 1) -> tuple[GgufModel, HeadModel]:
        """A context for each."""
        target, tokens = self.target.open(256, max_sequences=max_sequences), 256 * max_sequences
        return target, self.head.open_beside(target, tokens) if self.head else HeadModel(target, tokens)

    def expected(self, text: tuple[int, ...], drafted: tuple[int, ...] = ()) -> Logits:
        """The head's rows after each token but the first of a text that the target has evaluated but for its
        last, and of tokens drafted after it: read one at a time by a head that never did anything else."""
        target, head = self.open()
        store(target, text[:-1])
        head.decode([Span(0, text[:1], 0, 0)])
        rest = enumerate((*text[1:], *drafted), 1)
        rows = [head.decode([Span(0, (token,), i, 1)])[0][0] for i, token in rest]
        head.close()
        target.close()
        return np.array(rows)


@pytest.fixture(params=MAINLINE)
def loaded(request: pytest.FixtureRequest, files: Files) -> Iterator[Loaded]:
    """They, in each library that has the calls."""
    options = replace(SMALL, library=str(FILES[request.param].path))
    target = Weights(files.target, replace(options, heads=files.head is None))
    assert target.num_heads == (files.head is None)
    head = None
    if files.head is not None:
        head = HeadWeights(read_head(read_card(files.head), read_card(files.target)), options)
    yield Loaded(target, head)
    if head is not None:
        head.close()
    target.close()


def test_a_head_reads_in_one_call_what_it_reads_one_by_one(loaded: Loaded) -> None:
    text, drafted = TEXT[:40], TEXT[60:64]
    rows = loaded.expected(text, drafted)
    target, head = loaded.open(2)
    store(target, TEXT[100:130], sequence=1)
    store(target, text[:-1])
    assert_rows(head.decode([Span(0, text, 0, 1), Span(1, TEXT[100:120], 0, 0)])[0], rows[38:39])
    assert head.reach(0, 40) == 40
    [found] = head.decode([Span(0, drafted, 40, 1)])
    assert_rows(found, rows[-1:])
    assert head.length(0) == 44 and head.reach(0, 44) == 40
    head.close()
    target.close()


def test_after_a_rejection_it_reads_with_the_targets_states(loaded: Loaded) -> None:
    """Two of four drafted tokens are accepted, and the target adds one: what the head drafts then is what
    one drafts that was never wrong."""
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])
    target, head = loaded.open()
    store(target, text[:-1])
    head.decode([Span(0, text, 0, 1)])
    head.decode([Span(0, drafted, 20, 1)])
    target.decode([Span(0, (text[-1], *drafted), 19, 5, checkpoint=True)])
    target.truncate(0, target.reach(0, 22))
    store(target, after[target.length(0) : 22])
    head.truncate(0, head.reach(0, 22))
    assert head.length(0) == 20
    assert_rows(next_rows(head, after[20:])[-1:], loaded.expected(after)[-1:])
    target.decode([Span(0, (after[22],), 22, 1)])
    head.truncate(0, 10)
    longer = (*after, TEXT[91])
    assert_rows(next_rows(head, longer[10:])[-1:], loaded.expected(longer)[-1:])
    head.close()
    target.close()


def test_a_copied_sequence_has_the_states_too(loaded: Loaded) -> None:
    target, head = loaded.open(2)
    store(target, TEXT[:20])
    head.decode([Span(0, TEXT[:15], 0, 0)])
    target.copy(0, 1, 20)
    head.copy(0, 1, 15)
    target.decode([Span(1, TEXT[20:22], 20, 1)])
    assert_rows(head.decode([Span(1, TEXT[15:23], 15, 1)])[0], loaded.expected(TEXT[:23])[-1:])
    head.close()
    target.close()


def test_a_sequence_starts_again(loaded: Loaded) -> None:
    target, head = loaded.open()
    for start in (0, 50):
        target.truncate(0, 0)
        head.truncate(0, 0)
        text = TEXT[start : start + 20]
        store(target, text[:-1])
        assert_rows(head.decode([Span(0, text, 0, 1)])[0], loaded.expected(text)[-1:])
    head.close()
    target.close()


def assert_rows(found: Logits, expected: Logits) -> None:
    """They are near, and of the same tokens: a head may leave some out."""
    known = np.isfinite(expected).all(axis=0)
    assert (np.isneginf(found) == np.isneginf(expected)).all() and known.sum() > 100
    assert_near(found[:, known], expected[:, known])


# In the engine


OTHERS = ("own glm4moe", "eagle3 llama", "mtp qwen35")


@pytest.fixture(scope="module", params=["own qwen35", *OTHERS])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose head is right now and then."""
    return write_files(tmp_path_factory.mktemp("good"), request.param)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model whose own head is right now and then."""
    return write_files(tmp_path_factory.mktemp("own"), "own qwen35")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_call_of_the_head_costs_nothing_but_itself(good: Files, failing: int) -> None:
    """Of those that read the target's states, and of those that read tokens."""
    request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
    pair = Pair.load(good.target, good.head, options=OPTIONS)
    if failing == 0 and (pair.draft is None or pair.draft.card.kind == "mtp"):
        pair.close()
        pytest.skip("MTP layers read them as they are")
    with closing(pair), Session.open(pair, SessionOptions(256, policy=THREE, lookup=False)) as session:
        session.engine.submit(request)
        for _ in range(3):
            session.engine.step()
        native = pair.target.library.functions
        real = native.llama_process

        def process(context: int, kind: int, batch: int) -> int:
            return real(context, kind, batch) or (-3 if kind == failing else 0)

        with patch.object(native, "llama_process", process), pytest.raises(BackendError):
            session.engine.step()
        [completion] = run(session.engine)
    assert completion.tokens == good.plain_text(request)


# A model's own head


def test_heads_are_left_alone_where_they_are_not_wanted(own: Files, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path / "draft.gguf")
    for options, named in ((replace(OPTIONS, heads=False), None), (OPTIONS, draft), (OPTIONS, "none")):
        with closing(Pair.load(own.target, named, options=options)) as pair:
            assert pair.draft_name == ("draft" if named is draft else None)
            with Session.open(pair, SessionOptions(128, policy=THREE)) as session:
                assert not any("MTP" in notice for notice in session.notices)
                target = session.target
                assert isinstance(target, GgufModel) and target.hidden is None


def test_layers_that_llama_cpp_would_die_of_are_left_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "two.gguf", arch="qwen35", mtp_layers=2)
    with (
        closing(Pair.load(path, options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(64, policy=THREE)) as session,
    ):
        assert pair.draft_name is None
        [notice] = [notice for notice in session.notices if "MTP" in notice]
        why = "it is one of 2, and llama.cpp runs no more than one in a model of kind qwen35"
        assert notice == f"two has an MTP head, which is not used: {why}"
        assert session.generate("the river", max_tokens=4, sampling=GREEDY).text
