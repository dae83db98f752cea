"""Heads as drafters, on tiny models of random weights: a model's own (MTP), those of files (EAGLE-3, MTP),
block drafters (DFlash, DFlash2, DSpark: no file of real ones was at hand) and Gemma 4 assistants."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from backends import FILES, IK, MAINLINE, assert_near, next_rows, store
from cli_helpers import Call, refused
from engines import GREEDY, asked, run
from head_files import EVEN, OPTIONS, Files, write_eagle, write_files
from llama_cpp_models import SMALL as SMALL_MODEL
from llama_cpp_models import TEXT
from outrider.backends.gguf.head_model import BlockModel, HeadModel, HeadWeights, open_own
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.memory import HOST
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import subject_of
from outrider.core.contracts import SavingModel
from outrider.core.data import Block, Logits, Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.costs.calibrate import calibrate
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers.store import KvTiers
from outrider.lab.certify.drafts import compare_drafts
from outrider.lab.certify.faults import SHIFTED, STALE
from outrider.models.gguf import ModelCard, read_card
from outrider.models.heads import read_head
from outrider.models.hub import HubOptions
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions
from outrider.session.loading import Room
from recordings import FLAT, SMALL, curve
from tiny import Sizes
from tiny_gguf import MERGES, write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

SEVEN = FixedPolicy(draft_max=7, p_min=0.0)
THREE = FixedPolicy(draft_max=3, p_min=0.0)
BLOCKS = ("dflash llama", "dflash2 llama", "dspark llama", "dspark-v4 llama", "dflash qwen35")
Numbers = npt.NDArray[np.float64]
LIBRARY = replace(OPTIONS, library=str(FILES[MAINLINE[0]].path)) if MAINLINE else OPTIONS


class Loaded:
    """Both files of a kind with random weights, so that nothing can go wrong unnoticed, in one library; the
    head may be the target's own."""

    def __init__(self, files: Files, options: LoadOptions) -> None:
        self.target = Weights(files.target, replace(options, heads=files.head is None))
        assert self.target.num_heads == (files.head is None)
        self.head: HeadWeights | None = None
        if files.head is not None:
            self.head = HeadWeights(read_head(read_card(files.head), read_card(files.target)), options)

    @contextmanager
    def open(self, max_sequences: int = 1) -> Iterator[tuple[GgufModel, Any]]:
        """A context for each."""
        tokens = 256 * max_sequences
        with closing(self.target.open(256, max_sequences=max_sequences)) as target:
            head = self.head.open_beside(target, tokens) if self.head else HeadModel(target, tokens)
            with closing(head):
                yield target, head

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        self.target.close()


# Heads that draft token by token

STEPPING = (
    *("own qwen35", "own glm4moe", "own qwen3next"),
    *("eagle3 llama", "eagle3 qwen35", "mtp qwen35", "mtp glm4moe"),
)


@pytest.fixture(scope="module", params=STEPPING)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("heads"), request.param, agrees=False)


@pytest.fixture(params=MAINLINE)
def stepping(request: pytest.FixtureRequest, files: Files) -> Iterator[Loaded]:
    """They, in each library that has the calls."""
    with closing(Loaded(files, replace(SMALL_MODEL, library=str(FILES[request.param].path)))) as found:
        yield found


def rows_of(loaded: Loaded, text: tuple[int, ...], drafted: tuple[int, ...] = ()) -> Logits:
    """The head's rows after each token but the first of a text that the target has evaluated but for its
    last, and of tokens drafted after it: read one at a time by a head that never did anything else."""
    with loaded.open() as (target, head):
        store(target, text[:-1])
        head.decode([Span(0, text[:1], 0, 0)])
        rest = enumerate((*text[1:], *drafted), 1)
        return np.array([head.decode([Span(0, (token,), i, 1)])[0][0] for i, token in rest])


def test_a_head_reads_in_one_call_what_it_reads_one_by_one(stepping: Loaded) -> None:
    text, drafted = TEXT[:40], TEXT[60:64]
    rows = rows_of(stepping, text, drafted)
    with stepping.open(2) as (target, head):
        store(target, TEXT[100:130], sequence=1)
        store(target, text[:-1])
        assert_rows(head.decode([Span(0, text, 0, 1), Span(1, TEXT[100:120], 0, 0)])[0], rows[38:39])
        assert head.reach(0, 40) == 40
        [found] = head.decode([Span(0, drafted, 40, 1)])
        assert_rows(found, rows[-1:])
        assert head.length(0) == 44 and head.reach(0, 44) == 40


def test_after_a_rejection_it_reads_with_the_targets_states(stepping: Loaded) -> None:
    """Two of four drafted tokens are accepted, and the target adds one: what the head drafts then is what
    one drafts that was never wrong."""
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])
    with stepping.open() as (target, head):
        store(target, text[:-1])
        head.decode([Span(0, text, 0, 1)])
        head.decode([Span(0, drafted, 20, 1)])
        target.decode([Span(0, (text[-1], *drafted), 19, 5, checkpoint=True)])
        target.truncate(0, target.reach(0, 22))
        store(target, after[target.length(0) : 22])
        head.truncate(0, head.reach(0, 22))
        assert head.length(0) == 20
        assert_rows(next_rows(head, after[20:])[-1:], rows_of(stepping, after)[-1:])
        target.decode([Span(0, (after[22],), 22, 1)])
        head.truncate(0, 10)
        longer = (*after, TEXT[91])
        assert_rows(next_rows(head, longer[10:])[-1:], rows_of(stepping, longer)[-1:])


def test_a_copied_sequence_has_the_states_too(stepping: Loaded) -> None:
    with stepping.open(2) as (target, head):
        store(target, TEXT[:20])
        head.decode([Span(0, TEXT[:15], 0, 0)])
        target.copy(0, 1, 20)
        head.copy(0, 1, 15)
        target.decode([Span(1, TEXT[20:22], 20, 1)])
        assert_rows(head.decode([Span(1, TEXT[15:23], 15, 1)])[0], rows_of(stepping, TEXT[:23])[-1:])


def test_a_sequence_starts_again(stepping: Loaded) -> None:
    with stepping.open() as (target, head):
        for start in (0, 50):
            target.truncate(0, 0)
            head.truncate(0, 0)
            text = TEXT[start : start + 20]
            store(target, text[:-1])
            assert_rows(head.decode([Span(0, text, 0, 1)])[0], rows_of(stepping, text)[-1:])


def assert_rows(found: Logits, expected: Logits) -> None:
    """They are near, and of the same tokens: a head may leave some out."""
    known = np.isfinite(expected).all(axis=0)
    assert (np.isneginf(found) == np.isneginf(expected)).all() and known.sum() > 100
    assert_near(found[:, known], expected[:, known])


# Blocks


@pytest.fixture(scope="module", params=BLOCKS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    files = write_files(tmp_path_factory.mktemp("blocks"), request.param, agrees=False)
    with closing(Loaded(files, LIBRARY)) as found:
        yield found


def block_of(loaded: Loaded, text: tuple[int, ...]) -> Numbers:
    """The block after a text that was read at once, by a drafter that never did anything else."""
    with loaded.open() as (target, head):
        store(target, text[:-1])
        return block_after(head, text)


def block_after(head: BlockModel, text: tuple[int, ...], sequence: int = 0) -> Numbers:
    """All that the drafter says of the places after a text, of which it reads what it has not read."""
    kept = head.reach(sequence, min(head.length(sequence), len(text) - 1))
    head.truncate(sequence, kept)
    [block] = head.decode([Span(sequence, text[kept:], kept, 1)])
    return numbers(block)


def numbers(block: object) -> Numbers:
    assert isinstance(block, Block) and len(block) == (8 if block.confidence is not None else 7)
    parts: list[npt.NDArray[Any]] = [block.rows.reshape(len(block), -1)]
    parts += [] if block.candidates is None else [block.candidates]
    parts += [] if block.confidence is None else [block.confidence[:, None]]
    return np.hstack(parts)


def test_a_block_does_not_depend_on_how_the_text_was_read(loaded: Loaded) -> None:
    """Two of four drafted tokens are accepted, the text is read in parts, and another sequence drafts
    along."""
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])
    with loaded.open(2) as (target, head):
        store(target, text[:-1])
        store(target, TEXT[100:140], sequence=1)
        head.decode([Span(0, text[:7], 0, 0), Span(1, TEXT[100:120], 0, 0)])
        assert_alike(block_after(head, text), block_of(loaded, text))
        target.decode([Span(0, (text[-1], *drafted), 19, 5, checkpoint=True)])
        target.truncate(0, target.reach(0, 22))
        store(target, after[target.length(0) : 22])
        kept = head.reach(0, 22)
        assert kept <= 19
        head.truncate(0, kept)
        spans = [Span(0, after[kept:], kept, 1), Span(1, TEXT[120:141], 20, 1)]
        for found, whole in zip(head.decode(spans), (after, TEXT[100:141]), strict=True):
            assert_alike(numbers(found), block_of(loaded, whole))


def test_a_block_follows_from_the_last_state_that_the_target_has(loaded: Loaded) -> None:
    """Texts that differ in the last token but one alone."""
    found, other = (block_of(loaded, (*TEXT[:18], token, TEXT[19])) for token in (TEXT[18], TEXT[50]))
    assert TEXT[18] != TEXT[50] and np.abs(found - other).max() > 0.02 * np.abs(found).max()


def test_a_candidate_has_the_scores_after_the_token_before_it() -> None:
    scores = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    block = Block(scores, np.array([[3, 1], [0, 2]]))
    assert block.row(1, 1, 4).tolist() == [6.0, -np.inf, 7.0, -np.inf]
    assert block.row(1, 3, 4).tolist() == [4.0, -np.inf, 5.0, -np.inf] == block.row(1, 2, 4).tolist()
    assert block.row(0, 1, 4).tolist() == [-np.inf, 1.0, -np.inf, 0.0], "the first place has one row"


def test_a_copied_sequence_and_one_that_starts_again(loaded: Loaded) -> None:
    with loaded.open(2) as (target, head):
        store(target, TEXT[:20])
        head.decode([Span(0, TEXT[:15], 0, 0)])
        target.copy(0, 1, 20)
        head.copy(0, 1, 15)
        assert head.reach(1, 15) == 15
        target.decode([Span(1, TEXT[20:22], 20, 1)])
        assert_alike(block_after(head, TEXT[:23], 1), block_of(loaded, TEXT[:23]))
        target.truncate(1, 0)
        head.truncate(1, 0)
        store(target, TEXT[50:69], sequence=1)
        assert_alike(block_after(head, TEXT[50:70], 1), block_of(loaded, TEXT[50:70]))


def test_states_of_another_time_are_left_out(loaded: Loaded) -> None:
    """Of a restored text the drafter reads what the target evaluates from then on."""
    with loaded.open() as (target, head):
        store(target, TEXT[:20])
        if not target.rewinding.is_free:
            pytest.skip("attention alone is restored as it is")
        state = target.save(0)
        target.truncate(0, 0)
        target.restore(0, state)
        target.decode([Span(0, TEXT[20:30], 20, 1)])
        found = block_after(head, TEXT[:31])
        assert np.isfinite(found).all() and not np.allclose(found, block_of(loaded, TEXT[:31]), atol=0.01)
        assert head.reach(0, 31) == 30


def assert_alike(found: Numbers, expected: Numbers) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_chained_layers_draft_the_same_however_a_text_was_read(tmp_path: Path) -> None:
    files = write_files(tmp_path, "chain hy_v3", agrees=False)
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])

    def rows(head: GgufModel, text: tuple[int, ...]) -> Numbers:
        kept = head.reach(0, min(head.length(0), len(text) - 1))
        head.truncate(0, kept)
        spans = [Span(0, text[kept:], kept, 1), Span(0, drafted[2:3], len(text), 1)]
        return np.array([head.decode([span])[0][0] for span in (*spans, Span(0, (7,), len(text) + 1, 1))])

    with closing(Weights(files.target, replace(OPTIONS, heads=True))) as weights:
        assert weights.num_heads == 2
        target, fresh = weights.open(128), weights.open(128)
        head, other = open_own(target, 256), open_own(fresh, 256)
        store(target, text[:-1])
        head.decode([Span(0, text[:9], 0, 0)])
        assert np.ptp(rows(head, text), axis=0).max() > 1
        target.decode([Span(0, (text[-1], *drafted), 19, 5)])
        target.truncate(0, 22)
        store(fresh, after[:-1])
        assert_alike(rows(head, after), rows(other, after))
        assert head.reach(0, 23) == 22


# In the engine

KINDS = (
    *("dflash llama", "dflash2 llama", "dspark llama", "dspark-v4 llama", "dspark qwen35"),
    *("assistant gemma4", "chain hy_v3", "mtp hy_v3"),
)


HEADS = ("own qwen35", "own glm4moe", "eagle3 llama", "mtp qwen35")


@pytest.fixture(scope="module", params=(*KINDS, *HEADS))
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose drafts are right now and then."""
    return write_files(tmp_path_factory.mktemp("heads"), request.param)


def test_greedy_texts_equal_plain_ones(heads: Files) -> None:
    """Of several sequences in a batch, of one on KV that is there, after one that was cancelled, and where
    the context ends."""
    with heads.opened(policy=SEVEN, lookup=False, max_running=4) as (pair, session):
        name = "its own MTP head" if heads.head is None else "head"
        assert pair.draft_name == name
        assert any(f"target drafts with {name}" in notice for notice in session.notices)
        requests = [
            asked(TEXT[7 * i : 7 * i + 20], max_tokens=50, sampling=GREEDY, ignore_end=True) for i in range(4)
        ]
        found = run(session.engine, *requests)
        cancelled = session.engine.submit(requests[1])
        for _ in range(3):
            session.engine.step()
        session.engine.cancel(cancelled)
        again = session.engine.generate(requests[0])
        longest = session.engine.generate(replace(requests[0], max_tokens=500))
    for request, completion in zip(requests, found, strict=True):
        assert completion.tokens == heads.plain_text(request)
    assert again.tokens == found[0].tokens and longest.tokens[:50] == again.tokens
    assert longest.finish_reason == "context" and len(longest.tokens) > 100
    records = [record for completion in found for record in completion.records if record.draft]
    assert sum(record.num_accepted > 0 for record in records) > 2
    assert sum(record.num_accepted < len(record.draft) for record in records) > 2
    is_block = heads.head is not None and read_card(heads.head).kind == "dflash"
    assert {record.work.calls for record in records if len(record.draft) == 7} <= ({1} if is_block else {7})


@pytest.mark.parametrize("heads", KINDS, indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_automatic_choice_asks_for_a_block_once_a_step(heads: Files, temperature: float) -> None:
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.005))
    sampling = SamplingParams(temperature=temperature, seed=1)
    request = asked(TEXT[7:27], max_tokens=60, sampling=sampling, ignore_end=True)
    with heads.opened(policy=policy, lookup=False) as (_, session):
        found = session.engine.generate(request)
    if not temperature:
        assert found.tokens == heads.plain_text(request)
    calls = {record.work.calls for record in found.records} - {0}
    is_block = heads.head is not None and read_card(heads.head).kind == "dflash"
    assert calls and (not is_block or (calls == {1} and policy.state.block in (7, 8)))


def test_a_schema_masks_each_place_and_forced_text_joins(heads: Files) -> None:
    schema = {"enum": ["the river and the road", "the river and the sea"]}
    with heads.opened(policy=SEVEN) as (_, session):
        answer = session.generate("the river", max_tokens=60, sampling=GREEDY, schema=schema)
        assert answer.text in ('"the river and the road"', '"the river and the sea"')


@pytest.mark.parametrize("heads", KINDS, indirect=True)
def test_for_kv_that_left_and_came_back_drafts_go_on(heads: Files) -> None:
    first = asked(TEXT[:80], max_tokens=20, sampling=GREEDY, ignore_end=True)
    with (
        heads.opened(256, policy=SEVEN, lookup=False) as (_, session),
        closing(KvTiers(cast(SavingModel, session.target), memory_bytes=2**30, clock=lambda: 0.0)) as tiers,
    ):
        engine = Engine(session.target, session.engine.drafters, SEVEN, kv_store=tiers)
        answer = engine.generate(first).tokens
        engine.generate(replace(first, prompt=TEXT[200:290]))
        turn = replace(first, prompt=(*first.prompt, *answer, *TEXT[80:84]), max_tokens=40)
        again = engine.generate(turn)
    assert tiers.counts.hits["memory"] == 1 and again.reused_tokens == 99
    assert again.tokens == heads.plain_text(turn)
    assert any(record.num_accepted for record in again.records)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_call_costs_nothing_but_itself(heads: Files, failing: int) -> None:
    """Of those that read the target's states, and of those that read tokens."""
    request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
    with heads.opened(256, policy=THREE, lookup=False) as (pair, session):
        session.engine.submit(request)
        for _ in range(3):
            session.engine.step()
        native, failed = pair.target.library.functions, list[int]()
        real = native.llama_process

        def process(context: int, kind: int, batch: int) -> int:
            failed.extend([kind] * (kind == failing))
            return real(context, kind, batch) or (-3 if kind == failing else 0)

        with patch.object(native, "llama_process", process), suppress(BackendError):
            session.engine.step()
            assert not failed, "a call that failed is an error"
        [completion] = run(session.engine)
    assert failed or failing == 0, "MTP layers read them as they are"
    assert completion.tokens == heads.plain_text(request)


def test_what_a_block_costs_is_measured(heads: Files) -> None:
    with heads.opened(policy=SEVEN) as (_, session):
        [drafter] = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
        both = [cast(GgufModel, model) for model in (session.target, drafter.model)]
        assert len({subject_of(model, "last").key() for model in both}) == 2
        curve = calibrate(drafter.model, seconds=0.1, rows="last")
        assert curve.is_measured and curve.call_s(1, context=0) > 0


FAULTS = [
    *((kind, fault) for kind in BLOCKS[:-1] for fault in (STALE, SHIFTED)),
    *((kind, STALE) for kind in ("assistant gemma4", "chain hy_v3", "own glm4moe")),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_what_a_head_drafts_of_a_text_that_it_misread_is_found(kind: str, fault: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, kind, agrees=False)
    request = asked(TEXT[:20], max_tokens=40, sampling=GREEDY)
    with files.opened(policy=SEVEN) as (_, session):
        [drafter] = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
        compared = partial(compare_drafts, session.target, drafter.model, drafter.alignment, [request])
        sound, broken = compared(None), compared(fault)
    assert sound.compared == sound.same > 5
    assert broken.compared > 5 and not broken.holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BLOCKS[:-1], "assistant gemma4", "chain hy_v3"])
def test_the_command_that_verifies_finds_what_a_head_misread(
    kind: str, tmp_path: Path, outrider: Call
) -> None:
    files = write_files(tmp_path, kind, agrees=False)
    pair = ["-m", str(files.target), *(["-md", str(files.head)] if files.head else [])]
    settings = ("--backend", "llama.cpp", "-t", "1", "-c", "256", "--quick", "-n", "32", "--json", "--raw")
    prompts = ("-p", "the river and the road " * 3, "-p", "a b c d a b c d")
    verify = partial(outrider, "verify", *pair, *settings, *prompts)
    sound, stale, shifted = verify(), verify("--inject", STALE), verify("--inject", SHIFTED)
    assert sound.status == 0 and json.loads(sound.out)["verdict"] == "holds", sound.out + sound.err
    assert stale.status == 1 and json.loads(stale.out)["verdict"] == "does not hold"
    if kind in BLOCKS:
        assert shifted.status == 1 and json.loads(shifted.out)["verdict"] == "does not hold"
    else:
        assert (
            shifted.status == 2 and "no block drafter is in use" in shifted.err and "texts" not in shifted.err
        )


# A model's own head


def test_heads_are_left_alone_where_they_are_not_wanted(tmp_path: Path) -> None:
    own = write_files(tmp_path, "own qwen35")
    draft = write_tiny(tmp_path / "draft.gguf")
    for options, named in ((replace(OPTIONS, heads=False), None), (OPTIONS, draft), (OPTIONS, "none")):
        with closing(Pair.load(own.target, named, options=options)) as pair:
            assert pair.draft_name == ("draft" if named is draft else None)
            with Session.open(pair, SessionOptions(128, policy=THREE)) as session:
                assert not any("MTP" in notice for notice in session.notices)
                target = session.target
                assert isinstance(target, GgufModel) and target.hidden is None


def test_layers_that_llama_cpp_would_die_of_are_left_alone(tmp_path: Path) -> None:
    files = Files(write_tiny(tmp_path / "two.gguf", arch="qwen35", mtp_layers=2), None)
    with files.opened(64, policy=THREE) as (pair, session):
        assert pair.draft_name is None
        [notice] = [notice for notice in session.notices if "MTP" in notice]
        why = "it is one of 2, and llama.cpp runs no more than one in a model of kind qwen35"
        assert notice == f"two has an MTP head, which is not used: {why}"
        assert session.generate("the river", max_tokens=4, sampling=GREEDY).text


@pytest.mark.parametrize("heads", ["eagle3 llama"], indirect=True)
def test_a_file_of_heads_is_left_alone_where_bits_must_be_equal(heads: Files) -> None:
    with heads.opened(policy=SEVEN, bitwise=True) as (_, session):
        assert any(n.startswith("head (") and n.endswith("bit-equal") for n in session.notices)
        assert not any(isinstance(drafter, ModelDrafter) for drafter in session.engine.drafters)


# What does not fit

WITHOUT = ("token_embd.weight", "output.weight")
OF_EACH: dict[str, dict[str, Any]] = {
    "states of 128 values, and those of target.gguf have 64": {"sizes": Sizes(width=128)},
    "its mask token is 289, and it knows 289 tokens": {"mask": 289},
    "it drafts blocks of 1 tokens": {"metadata": {"block_size": 1}},
}
OF_EAGLE: dict[str, dict[str, Any]] = {
    "states of 32 values, and those of target.gguf have 64": {"metadata": {"target_hidden_size": 32}},
    "reads layer 9, and target.gguf has 2": {"layers": (0, 1, 9)},
    "it reads 2 layers of its target": {"layers": (0, 1)},
    "with 2 of its own": {"metadata": {"block_count": 2}},
    "it knows 288 tokens, and target.gguf 289": {"merges": MERGES[:-1], "drafted": ()},
    "these have other numbers": {"merges": MERGES[::-1]},
    "names some twice": {"drafted": (1, 2, 2)},
    "none of its 289": {"drafted": (1, 289)},
    "it takes embeddings or output from its target": {"sizes": Sizes(width=128, kv_heads=2)},
    "fc.weight": {"left_out": ("token_embd.weight", "fc.weight")},
    "dies at its first call (SIGABRT)": {"metadata": {"rope.dimension_count": 64}},
    "computes it wrongly": {"layers": (0, 1, 2)},  # llama.cpp gives no such state of Llama models
}
OF_LAYERS: dict[str, dict[str, Any]] = {
    "made for a model of kind glm4moe of 2 layers, 64 wide": {"arch": "glm4moe"},
    "of kind qwen35 of 8 layers, 64 wide, and the target is qwen35 of 4": {"layers": 8},
    "of 4 layers, 128 wide": {"sizes": Sizes(width=128)},
    "a reduced vocabulary (d2t: 145 tokens of 289), which is not supported": {"drafted": EVEN},
    "it holds 2 MTP layers, and llama.cpp runs one of kind qwen35": {"mtp_layers": 2},
}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    *(("eagle3 llama", why, made) for why, made in OF_EAGLE.items()),
    *(("mtp qwen35", why, made) for why, made in OF_LAYERS.items()),
    *((kind, why, made) for kind in BLOCKS[:-1] for why, made in OF_EACH.items()),
    ("dflash llama", "it reads layer 9, and target.gguf has 2", {"metadata": {"target_layers": [0, 1, 9]}}),
    ("dflash llama", "it does not say which layers", {"metadata": {"target_layers": [-1, 0, 1]}}),
    ("dflash llama", "it knows 288 tokens, and target.gguf 289", {"merges": MERGES[:-1]}),
    ("dflash llama", "it speaks of 4 candidates", {"metadata": {"selector_top_k": 4}}),
    ("dflash llama", "names some twice", {"drafted": (1, 2, 2), "left_out": WITHOUT[:1]}),
    ("dflash llama", "fc.weight", {"left_out": (*WITHOUT, "fc.weight")}),
    ("dflash2 llama", "it speaks of 0 candidates", {"metadata": {"selector_top_k": 0}}),
    ("dflash2 llama", "missing conv/selector metadata", {"metadata": {"selector_rank": 0}}),
    ("dflash2 llama", "too small for the selector", {"metadata": {"selector_top_k": 8}}),
    ("dspark llama", "markov_w2.weight", {"left_out": (*WITHOUT, "markov_w2.weight")}),
    ("dspark-v4 llama", "expects uncompressed", {"metadata": {"attention.compress_ratios": [0, 4]}}),
    ("assistant llama", "it was made for Gemma 4, and the target is of kind llama", {}),
    ("assistant gemma4", "it reads states of 128 values", {"sizes": Sizes()}),
    ("assistant gemma4", "it reads states of 32 values", {"metadata": {"embedding_length_out": 32}}),
    ("assistant gemma4", "it knows 288 tokens, and target.gguf 289", {"merges": MERGES[:-1]}),
    (
        "assistant gemma4",
        "nextn.pre_projection.weight",
        {"left_out": ("output.weight", "nextn.pre_projection.weight")},
    ),
    ("assistant gemma4", "dies at its first call", {"sizes": Sizes(width=32, head=64)}),
]


@pytest.mark.parametrize(("kind", "why", "made"), WRONG)
def test_what_does_not_fit_is_refused_in_a_line(
    kind: str, why: str, made: dict[str, Any], tmp_path: Path
) -> None:
    assert why in write_files(tmp_path, kind, agrees=False, **made).why_refused()


def test_the_program_ends_with_a_line(tmp_path: Path, outrider: Call) -> None:
    """Where the file was named; of those that `auto` finds it leaves this one out, and decodes plainly."""
    files = write_files(tmp_path, "dflash llama", agrees=False, mask=289)
    assert files.head is not None
    head = files.head.rename(tmp_path / "target-dflash.gguf")
    line = ("run", "-m", str(files.target), "--backend", "llama.cpp", "-t", "1", "-n", "4", "-p", "the river")
    why = "its mask token is 289, and it knows 289 tokens"
    assert why in refused(outrider(*line, "-md", str(head)))
    found = outrider(*line, "-md", "auto")
    assert found.status == 0 and found.out and why in found.said and "lookup drafts alone" in found.said


@pytest.mark.parametrize("named", [True, False])
def test_a_drafter_for_which_there_is_no_room_is_left_out(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV and its target's states, which are kept for it, are counted before it is loaded."""
    files = write_files(tmp_path, "dflash llama")
    target, opening = read_card(files.target), SessionOptions(256)
    assert files.head is not None

    def needed(card: ModelCard | None) -> float:
        read = replace(OPTIONS, mmap=False)  # weights that are mapped do not count
        models = Room(target, card, read, read, opening).contexts(next(candidates(OPTIONS)))
        return sum(sum(model.needed(on_gpus=False)[HOST]) for model in models)

    states, kv = 256 * 3 * 64 * 4, (256 + 64) * 2 * 2 * 64 * 4
    card = read_card(files.head)
    assert needed(card) - needed(None) == sum(card.layout.tensors.values()) + states + kv
    free = {HOST: needed(None) - sum(target.layout.tensors.values()) + 1000.0}  # weights are mapped
    monkeypatch.setattr("outrider.session.loading.free_memory", lambda *_: free)
    reference = str(files.head) if named else "auto"
    hub = HubOptions(offline=True)
    with closing(Pair.load(files.target, reference, options=OPTIONS, hub=hub, opening=opening)) as pair:
        assert pair.draft is None
        [line] = [line for line in pair.notices if "head.gguf" in line]
    begins = "head.gguf is left out: " if named else "-md auto skips head.gguf: "
    assert line.startswith(f"{begins}weights and KV cache take at least ")


def test_a_part_of_the_tokens_is_drafted_alone(tmp_path: Path) -> None:
    made: dict[str, Any] = {"drafted": EVEN, "left_out": ("token_embd.weight",)}
    files = write_files(tmp_path, "dflash llama", agrees=False, **made)
    with closing(Loaded(files, LIBRARY)) as loaded, loaded.open() as (target, head):
        store(target, TEXT[:10])
        known = np.isfinite(head.decode([Span(0, TEXT[:11], 0, 1)])[0].rows).all(axis=0)
        assert tuple(np.flatnonzero(known)) == EVEN


@pytest.mark.parametrize("heads", KINDS, indirect=True)
@pytest.mark.parametrize("signatures", ["_SIGNATURES", "_LAYER_SIGNATURES"])
def test_a_library_without_the_calls_is_named(heads: Files, signatures: str) -> None:
    is_block = heads.head is not None and read_card(heads.head).kind == "dflash"
    if signatures == "_LAYER_SIGNATURES" and not is_block:
        pytest.skip("it needs none of these")
    with patch(f"outrider.backends.gguf.heads.{signatures}", {"llama_no_such_call": (None,)}):
        if heads.head is not None:
            why = heads.why_refused()
            assert why.endswith("llama.cpp cannot run it here: it has no function llama_no_such_call")
            return
        with heads.opened(policy=SEVEN) as (pair, session):
            [line] = [line for line in session.notices if "MTP" in line]
            assert pair.draft_name is None and line.endswith("llama.cpp as it is here lacks the calls for it")


def test_targets_and_libraries_that_give_no_states_are_named(tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head.gguf")
    other = write_tiny(tmp_path / "other.gguf", arch="qwen2moe")
    assert "dies at its first call" in Files(other, head).why_refused()
    target = write_tiny(tmp_path / "target.gguf")
    missing = patch("outrider.backends.gguf.heads._LAYER_SIGNATURES", {"llama_no_such_call": (None,)})
    with missing:
        why = Files(target, head).why_refused()
    assert (
        why
        == "it holds an EAGLE-3 head, and llama.cpp cannot run it here: it has no function llama_no_such_call"
    )
    if IK:
        assert "ik_llama.cpp cannot run it" in Files(target, head).why_refused(LoadOptions(backend="ik"))


def test_the_library_that_runs_heads_is_taken_for_both(tmp_path: Path) -> None:
    files = write_files(tmp_path, "eagle3 llama")
    with closing(Pair.load(files.target, files.head, options=LoadOptions(threads=1))) as pair:
        assert pair.target.library.backend == "llama.cpp"
        line = "head holds an EAGLE-3 head, which llama.cpp alone runs: it is used for both"
        assert line in pair.notices


def test_a_head_that_is_found_beside_the_target_is_taken(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", layers=6)
    write_eagle(tmp_path / "head.gguf")
    write_eagle(tmp_path / "a-wrong-eagle3.gguf", layers=(0, 1, 9))
    write_tiny(tmp_path / "small.gguf", layers=1)
    with closing(Pair.load(target, "auto", options=OPTIONS, hub=HubOptions(offline=True))) as pair:
        assert pair.draft_name == "head"
        assert any(line.startswith("-md auto takes head.gguf (") for line in pair.notices)
        assert any("a-wrong-eagle3.gguf" in line and "reads layer 9" in line for line in pair.notices)


def test_a_found_head_that_cannot_run_is_passed_over(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", arch="qwen2moe", layers=6)
    write_eagle(tmp_path / "head.gguf")
    with closing(Pair.load(target, "auto", options=OPTIONS, hub=HubOptions(offline=True))) as pair:
        assert pair.draft is None or pair.draft_name != "head"
        assert any(line.startswith("-md auto skips head.gguf: ") for line in pair.notices)
