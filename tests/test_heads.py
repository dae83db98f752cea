"""Heads as drafters: a model's own MTP layers, and files of EAGLE-3 heads, MTP layers, block drafters
(DFlash, DFlash2, DSpark) and Gemma 4 assistants, on tiny models: no file of real ones was at hand."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from backends import FILES, IK, MAINLINE, store
from cli_helpers import Call, Outcome, refused
from engines import GREEDY, asked, run
from head_files import EVEN, OPTIONS, Files, write_eagle, write_files
from llama_cpp_models import SMALL, TEXT
from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.head_model import BlockModel, HeadModel, HeadWeights, open_own
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.memory import HOST
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import subject_of
from outrider.core.contracts import SavingModel
from outrider.core.data import Block, Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.costs.calibrate import calibrate
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers import KvTiers
from outrider.lab.certify.drafts import compare_drafts
from outrider.lab.certify.faults import SHIFTED, STALE
from outrider.models.gguf import ModelCard, read_card
from outrider.models.heads import read_head
from outrider.models.hub import HubOptions
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.session.loading import Room
from recordings import FLAT, curve
from recordings import SMALL as CHEAP
from tiny import Sizes
from tiny_gguf import MERGES, write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

SEVEN = FixedPolicy(draft_max=7, p_min=0.0)
TOKENS = (
    *("own qwen35", "own glm4moe", "own qwen3next"),
    *("eagle3 llama", "eagle3 qwen35", "mtp qwen35", "mtp glm4moe"),
)
"""what drafts token by token"""
BLOCKS = ("dflash llama", "dflash2 llama", "dspark llama", "dspark-v4 llama", "dflash qwen35")
Numbers = npt.NDArray[np.float64]


# What a head reads


class Loaded:
    """Both files of a kind with random weights, so that nothing can go wrong unnoticed."""

    def __init__(self, files: Files, library: str = MAINLINE[0] if MAINLINE else "") -> None:
        options = replace(SMALL, library=str(FILES[library].path))
        self.target = Weights(files.target, replace(options, heads=files.head is None))
        self.head = None
        if files.head is not None:
            self.head = HeadWeights(read_head(read_card(files.head), read_card(files.target)), options)

    def open(self, max_sequences: int = 1) -> tuple[GgufModel, HeadModel]:
        target, tokens = self.target.open(256, max_sequences=max_sequences), 256 * max_sequences
        return target, self.head.open_beside(target, tokens) if self.head else HeadModel(target, tokens)

    def expected(self, text: tuple[int, ...], drafted: tuple[int, ...] = ()) -> Numbers:
        """What is said after a text that the target has evaluated but for its last token, and after tokens
        drafted after it, by a head that never did anything else; one of tokens reads them one at a time."""
        target, head = self.open()
        store(target, text[:-1])
        if isinstance(head, BlockModel):
            found = said(head, text)
        else:
            head.decode([Span(0, text[:1], 0, 0)])
            rest = enumerate((*text[1:], *drafted), 1)
            *_, found = (numbers(head.decode([Span(0, (token,), i, 1)])[0]) for i, token in rest)
        head.close()
        target.close()
        return found

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        self.target.close()


@pytest.fixture(
    scope="module",
    params=[
        *((kind, MAINLINE[0]) for kind in (*TOKENS, *BLOCKS) if MAINLINE),
        *(pytest.param((kind, name), marks=pytest.mark.slow) for kind in TOKENS for name in MAINLINE[1:]),
    ],
    ids=" ".join,
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    kind, library = request.param
    with closing(
        Loaded(write_files(tmp_path_factory.mktemp("random"), kind, agrees=False), library)
    ) as found:
        yield found


def said(head: HeadModel, text: tuple[int, ...], sequence: int = 0) -> Numbers:
    """All that a head says after a text, of which it reads what it has not read."""
    kept = head.reach(sequence, min(head.length(sequence), len(text) - 1))
    head.truncate(sequence, kept)
    [found] = head.decode([Span(sequence, text[kept:], kept, 1)])
    return numbers(found)


def numbers(found: Any) -> Numbers:
    if not isinstance(found, Block):
        return np.array(found)
    assert len(found) == (8 if found.confidence is not None else 7)
    parts: list[npt.NDArray[Any]] = [found.rows.reshape(len(found), -1)]
    parts += [] if found.candidates is None else [found.candidates]
    parts += [] if found.confidence is None else [found.confidence[:, None]]
    return np.hstack(parts)


def assert_near(found: Numbers, expected: Numbers) -> None:
    """A head may leave tokens out."""
    known = np.isfinite(expected)
    assert found.shape == expected.shape and (np.isfinite(found) == known).all() and known.sum() > 50
    np.testing.assert_allclose(found[known], expected[known], atol=2e-3 * np.abs(expected[known]).max())


def test_what_it_says_does_not_depend_on_how_the_text_was_read(loaded: Loaded) -> None:
    """In parts and at once; of four drafted tokens two are accepted, and the target adds one; another
    sequence drafts along."""
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])
    target, head = loaded.open(2)
    store(target, text[:-1])
    store(target, TEXT[100:140], sequence=1)
    head.decode([Span(0, text[:7], 0, 0), Span(1, TEXT[100:120], 0, 0)])
    assert_near(said(head, text), loaded.expected(text))
    if not isinstance(head, BlockModel):
        assert head.reach(0, 20) == 20
        [rows] = head.decode([Span(0, drafted, 20, 1)])
        assert_near(numbers(rows), loaded.expected(text, drafted))
        assert head.length(0) == 24 and head.reach(0, 24) == 20
    target.decode([Span(0, (text[-1], *drafted), 19, 5, checkpoint=True)])
    target.truncate(0, target.reach(0, 22))
    store(target, after[target.length(0) : 22])
    kept = head.reach(0, 22)
    assert kept <= 20
    head.truncate(0, kept)
    spans = [Span(0, after[kept:], kept, 1), Span(1, TEXT[120:141], 20, 1)]
    for found, whole in zip(head.decode(spans), (after, TEXT[100:141]), strict=True):
        assert_near(numbers(found), loaded.expected(whole))
    target.decode([Span(0, (after[22],), 22, 1)])
    head.truncate(0, head.reach(0, 10))
    assert_near(said(head, (*after, TEXT[91])), loaded.expected((*after, TEXT[91])))
    target.close()
    head.close()


def test_a_copied_sequence_and_one_that_starts_again(loaded: Loaded) -> None:
    target, head = loaded.open(2)
    store(target, TEXT[:20])
    head.decode([Span(0, TEXT[:15], 0, 0)])
    target.copy(0, 1, 20)
    head.copy(0, 1, 15)
    assert head.reach(1, 15) == 15
    target.decode([Span(1, TEXT[20:22], 20, 1)])
    assert_near(said(head, TEXT[:23], 1), loaded.expected(TEXT[:23]))
    target.truncate(1, 0)
    head.truncate(1, 0)
    store(target, TEXT[50:69], sequence=1)
    assert_near(said(head, TEXT[50:70], 1), loaded.expected(TEXT[50:70]))
    target.close()
    head.close()


def test_it_follows_from_the_last_state_that_the_target_has(loaded: Loaded) -> None:
    """Texts that differ in the last token but one alone."""
    found, other = (loaded.expected((*TEXT[:18], token, TEXT[19])) for token in (TEXT[18], TEXT[50]))
    known = np.isfinite(found)
    assert np.abs(found[known] - other[known]).max() > 0.02 * np.abs(found[known]).max()


def test_a_candidate_has_the_scores_after_the_token_before_it() -> None:
    scores = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    block = Block(scores, np.array([[3, 1], [0, 2]]))
    assert block.row(1, 1, 4).tolist() == [6.0, -np.inf, 7.0, -np.inf]
    assert block.row(1, 3, 4).tolist() == [4.0, -np.inf, 5.0, -np.inf] == block.row(1, 2, 4).tolist()
    assert block.row(0, 1, 4).tolist() == [-np.inf, 1.0, -np.inf, 0.0], "the first place has one row"


def test_states_of_another_time_are_left_out(tmp_path: Path) -> None:
    """Of a restored text the drafter reads what the target evaluates from then on."""
    with closing(Loaded(write_files(tmp_path, "dflash qwen35", agrees=False))) as loaded:
        target, head = loaded.open()
        store(target, TEXT[:20])
        state = target.save(0)
        target.truncate(0, 0)
        target.restore(0, state)
        target.decode([Span(0, TEXT[20:30], 20, 1)])
        found = said(head, TEXT[:31])
        assert np.isfinite(found).all() and not np.allclose(found, loaded.expected(TEXT[:31]), atol=0.01)
        assert head.reach(0, 31) == 30
        target.close()
        head.close()


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
        assert_near(rows(head, after), rows(other, after))
        assert head.reach(0, 23) == 22


def test_a_part_of_the_tokens_is_drafted_alone(tmp_path: Path) -> None:
    made: dict[str, Any] = {"drafted": EVEN, "left_out": ("token_embd.weight",)}
    with closing(Loaded(write_files(tmp_path, "dflash llama", agrees=False, **made))) as loaded:
        target, head = loaded.open()
        store(target, TEXT[:10])
        block: Any = head.decode([Span(0, TEXT[:11], 0, 1)])[0]
        assert tuple(np.flatnonzero(np.isfinite(block.rows).all(axis=0))) == EVEN
        head.close()
        target.close()


# In the engine


@dataclass(frozen=True)
class Opened:
    """Files whose drafts are right now and then, a session on them, and the target by itself."""

    files: Files
    pair: Pair
    session: Session
    alone: Engine

    @property
    def is_block(self) -> bool:
        return self.drafter.block > 1

    @property
    def drafter(self) -> ModelDrafter:
        [drafter] = [d for d in self.session.engine.drafters if isinstance(d, ModelDrafter)]
        return drafter


@pytest.fixture(
    scope="module",
    params=(
        *("dflash llama", "dflash2 llama", "dspark llama", "dspark-v4 llama", "dspark qwen35"),
        *("assistant gemma4", "chain hy_v3", "mtp hy_v3"),
        *("own qwen35", "own glm4moe", "eagle3 llama", "mtp qwen35"),
    ),
)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    files, options = write_files(tmp_path_factory.mktemp("heads"), request.param), SessionOptions
    with (
        closing(Weights(files.target, replace(OPTIONS, heads=False))) as weights,
        closing(Pair.load(files.target, files.head, options=OPTIONS)) as pair,
        Session.open(pair, options(256, policy=SEVEN, lookup=False, max_running=4)) as session,
    ):
        yield Opened(files, pair, session, Engine(weights.open(256)))


@pytest.fixture
def opened(heads: Opened) -> Opened:
    """They, with nothing stored."""
    heads.session.engine.reset()
    return heads


def request(i: int = 0, size: int = 20, max_tokens: int = 50) -> Any:
    prompt = TEXT[7 * i : 7 * i + size]
    return asked(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_end=True)


def test_greedy_texts_equal_plain_ones(opened: Opened) -> None:
    """Of several sequences in a batch, of one on KV that is there, after one that was cancelled, and where
    the context ends."""
    name = "its own MTP head" if opened.files.head is None else "head"
    assert opened.pair.draft_name == name
    assert any(f"target drafts with {name}" in notice for notice in opened.session.notices)
    engine, requests = opened.session.engine, [request(i) for i in range(4)]
    found = run(engine, *requests)
    cancelled = engine.submit(requests[1])
    for _ in range(3):
        engine.step()
    engine.cancel(cancelled)
    again = engine.generate(requests[0])
    longest = engine.generate(replace(requests[0], max_tokens=500))
    for made, completion in zip(requests, found, strict=True):
        assert completion.tokens == opened.alone.generate(made).tokens
    assert again.tokens == found[0].tokens and longest.tokens[:50] == again.tokens
    assert longest.finish_reason == "context" and len(longest.tokens) > 200
    records = [record for completion in found for record in completion.records if record.draft]
    assert sum(record.num_accepted > 0 for record in records) > 2
    assert sum(record.num_accepted < len(record.draft) for record in records) > 2
    calls = {record.work.calls for record in records if len(record.draft) == 7}
    assert calls <= ({1} if opened.is_block else {7})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_automatic_choice_asks_for_a_block_once_a_step(opened: Opened, temperature: float) -> None:
    policy, engine = AutoPolicy(curve(FLAT), curve(CHEAP, 0.005)), opened.session.engine
    made = replace(request(1, max_tokens=60), sampling=SamplingParams(temperature=temperature, seed=1))
    engine.equip(engine.drafters, policy)
    found = engine.generate(made)
    engine.equip(engine.drafters, SEVEN)
    if not temperature:
        assert found.tokens == opened.alone.generate(made).tokens
    calls = {record.work.calls for record in found.records} - {0}
    assert calls and (not opened.is_block or (calls == {1} and policy.state.block in (7, 8)))


def test_a_schema_masks_each_place_and_forced_text_joins(opened: Opened) -> None:
    schema = {"enum": ["the river and the road", "the river and the sea"]}
    answer = opened.session.generate("the river", max_tokens=60, sampling=GREEDY, schema=schema)
    assert answer.text in ('"the river and the road"', '"the river and the sea"')


def test_for_kv_that_left_and_came_back_drafts_go_on(opened: Opened) -> None:
    first, target = request(size=80, max_tokens=20), cast(SavingModel, opened.session.target)
    with closing(KvTiers(target, memory_bytes=2**30)) as tiers:
        engine = Engine(target, opened.session.engine.drafters, SEVEN, kv_store=tiers)
        answer = engine.generate(first).tokens
        engine.reset(texts=False)
        turn = replace(first, prompt=(*first.prompt, *answer, *TEXT[80:84]), max_tokens=40)
        again = engine.generate(turn)
        engine.reset()
    assert tiers.counts.hits["memory"] == 1 and again.reused_tokens == 99
    assert again.tokens == opened.alone.generate(turn).tokens
    assert any(record.num_accepted for record in again.records)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_call_costs_nothing_but_itself(opened: Opened, failing: int) -> None:
    """Of those that read the target's states, and of those that read tokens."""
    engine, made = opened.session.engine, request(size=30, max_tokens=30)
    engine.submit(made)
    for _ in range(3):
        engine.step()
    native, calls, has_failed = opened.pair.target.library.functions, set[int](), False
    real = native.llama_process

    def process(context: int, kind: int, batch: int) -> int:
        calls.add(kind)
        return real(context, kind, batch) or (-3 if kind == failing else 0)

    with patch.object(native, "llama_process", process):
        try:
            engine.step()
        except BackendError:
            has_failed = True
    [completion] = run(engine)
    assert has_failed == (failing in calls)
    assert completion.tokens == opened.alone.generate(made).tokens


def test_what_a_block_costs_is_measured(opened: Opened) -> None:
    both = [cast(GgufModel, model) for model in (opened.session.target, opened.drafter.model)]
    assert len({subject_of(model, "last").key() for model in both}) == 2
    found = calibrate(opened.drafter.model, seconds=0.02, rows="last")
    assert found.is_measured and found.call_s(1, context=0) > 0


@pytest.mark.parametrize("signatures", ["_SIGNATURES", "_LAYER_SIGNATURES"])
def test_a_library_without_the_calls_is_named(opened: Opened, signatures: str) -> None:
    files = opened.files
    if signatures == "_LAYER_SIGNATURES" and not opened.is_block:
        pytest.skip("it needs none of these")
    with patch(f"outrider.backends.gguf.heads.{signatures}", {"llama_no_such_call": (None,)}):
        if files.head is not None:
            assert (
                "llama.cpp cannot run it here: it has no function llama_no_such_call" in files.why_refused()
            )
            return
        with (
            closing(Pair.load(files.target, options=OPTIONS)) as pair,
            Session.open(pair, SessionOptions(128, policy=SEVEN)) as session,
        ):
            [line] = [line for line in session.notices if "MTP" in line]
            assert pair.draft_name is None and line.endswith("llama.cpp as it is here lacks the calls for it")


# What a head misread is found

FAULTS = {
    **dict.fromkeys(BLOCKS[:-1], (STALE, SHIFTED)),
    **dict.fromkeys(("assistant gemma4", "chain hy_v3", "own glm4moe"), (STALE,)),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_a_head_drafts_of_a_text_that_it_misread_is_found(kind: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, kind, agrees=False)
    with (
        closing(Pair.load(files.target, files.head, options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(128, policy=SEVEN)) as session,
    ):
        [drafter] = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
        made = asked(TEXT[:20], max_tokens=40, sampling=GREEDY)
        compared = partial(compare_drafts, session.target, drafter.model, drafter.alignment, [made])
        sound, *broken = (compared(fault) for fault in (None, *FAULTS[kind]))
    assert sound.compared == sound.same > 5
    assert all(one.compared > 5 and not one.holds for one in broken)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BLOCKS[:-1], "assistant gemma4", "chain hy_v3"])
def test_the_command_that_verifies_finds_what_a_head_misread(
    kind: str, tmp_path: Path, outrider: Call
) -> None:
    files = write_files(tmp_path, kind, agrees=False)
    pair = ["-m", str(files.target), *(["-md", str(files.head)] if files.head else [])]
    settings = ("--backend", "llama.cpp", "-t", "1", "-c", "256", "--quick", "-n", "32", "--json", "--raw")
    prompts = ("-p", "the river and the road " * 3, "-p", "a b c d a b c d")

    def verify(*fault: str) -> Outcome:
        return outrider("verify", *pair, *settings, *prompts, *fault)

    sound, stale, shifted = verify(), verify("--inject", STALE), verify("--inject", SHIFTED)
    assert sound.status == 0 and json.loads(sound.out)["verdict"] == "holds", sound.out + sound.err
    assert stale.status == 1 and json.loads(stale.out)["verdict"] == "does not hold"
    if kind in BLOCKS:
        assert shifted.status == 1 and json.loads(shifted.out)["verdict"] == "does not hold"
    else:
        assert (
            shifted.status == 2 and "no block drafter is in use" in shifted.err and "texts" not in shifted.err
        )


# What does not fit

WITHOUT = ("token_embd.weight", "output.weight")
OF_EACH: dict[str, dict[str, Any]] = {
    "states of 128 values, and those of target.gguf have 64": {"sizes": Sizes(width=128)},
    "its mask token is 289, and it knows 289 tokens": {"mask": 289},
    "it drafts blocks of 1 tokens": {"metadata": {"block_size": 1}},
}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
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
    (
        "eagle3 llama",
        "states of 32 values, and those of target.gguf have 64",
        {"metadata": {"target_hidden_size": 32}},
    ),
    ("eagle3 llama", "reads layer 9, and target.gguf has 2", {"layers": (0, 1, 9)}),
    ("eagle3 llama", "it reads 2 layers of its target", {"layers": (0, 1)}),
    ("eagle3 llama", "with 2 of its own", {"metadata": {"block_count": 2}}),
    ("eagle3 llama", "it knows 288 tokens, and target.gguf 289", {"merges": MERGES[:-1], "drafted": ()}),
    ("eagle3 llama", "these have other numbers", {"merges": MERGES[::-1], "drafted": ()}),
    ("eagle3 llama", "names some twice", {"drafted": (1, 2, 2)}),
    ("eagle3 llama", "none of its 289", {"drafted": (1, 289)}),
    (
        "eagle3 llama",
        "it takes embeddings or output from its target",
        {"sizes": Sizes(width=128, kv_heads=2), "drafted": ()},
    ),
    ("eagle3 llama", "fc.weight", {"left_out": ("token_embd.weight", "fc.weight")}),
    ("eagle3 llama", "dies at its first call (SIGABRT)", {"metadata": {"rope.dimension_count": 64}}),
    # llama.cpp gives no such state of Llama models, and none at all of others.
    ("eagle3 llama", "computes it wrongly", {"layers": (0, 1, 2)}),
    ("eagle3 qwen2moe", "dies at its first call", {}),
    ("mtp qwen35", "made for a model of kind glm4moe of 2 layers, 64 wide", {"arch": "glm4moe"}),
    ("mtp qwen35", "of kind qwen35 of 8 layers, 64 wide, and the target is qwen35 of 4", {"layers": 8}),
    ("mtp qwen35", "of 4 layers, 128 wide", {"sizes": Sizes(width=128)}),
    (
        "mtp qwen35",
        "a reduced vocabulary (d2t: 145 tokens of 289), which is not supported",
        {"drafted": EVEN},
    ),
    ("mtp qwen35", "it holds 2 MTP layers, and llama.cpp runs one of kind qwen35", {"mtp_layers": 2}),
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


def test_a_file_of_heads_is_left_alone_where_bits_must_be_equal(tmp_path: Path) -> None:
    files = write_files(tmp_path, "eagle3 llama")
    with (
        closing(Pair.load(files.target, files.head, options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(128, policy=SEVEN, bitwise=True)) as session,
    ):
        assert any(n.startswith("head (") and n.endswith("bit-equal") for n in session.notices)
        assert not any(isinstance(drafter, ModelDrafter) for drafter in session.engine.drafters)


def test_the_library_that_runs_heads_is_taken_for_both(tmp_path: Path) -> None:
    files = write_files(tmp_path, "eagle3 llama")
    if IK:
        assert "ik_llama.cpp cannot run it" in files.why_refused(LoadOptions(backend="ik"))
    with closing(Pair.load(files.target, files.head, options=LoadOptions(threads=1))) as pair:
        assert pair.target.library.backend == "llama.cpp"
        line = "head holds an EAGLE-3 head, which llama.cpp alone runs: it is used for both"
        assert line in pair.notices


@pytest.mark.parametrize("arch", ["llama", "qwen2moe"])
def test_a_head_that_is_found_beside_the_target_is_taken_if_it_runs(tmp_path: Path, arch: str) -> None:
    target = write_tiny(tmp_path / "target.gguf", arch=arch, layers=6)
    write_eagle(tmp_path / "head.gguf")
    write_eagle(tmp_path / "a-wrong-eagle3.gguf", layers=(0, 1, 9))
    write_tiny(tmp_path / "small.gguf", layers=1)
    with closing(Pair.load(target, "auto", options=OPTIONS, hub=HubOptions(offline=True))) as pair:
        assert (pair.draft_name == "head") == (arch == "llama")
        does = "takes head.gguf (" if arch == "llama" else "skips head.gguf: "
        assert any(line.startswith(f"-md auto {does}") for line in pair.notices)
        assert any("a-wrong-eagle3.gguf" in line and "reads layer 9" in line for line in pair.notices)


def test_heads_are_left_alone_where_they_are_not_wanted(tmp_path: Path) -> None:
    own, draft = write_files(tmp_path, "own qwen35"), write_tiny(tmp_path / "draft.gguf")
    for options, named in ((replace(OPTIONS, heads=False), None), (OPTIONS, draft), (OPTIONS, "none")):
        with closing(Pair.load(own.target, named, options=options)) as pair:
            assert pair.draft_name == ("draft" if named is draft else None)
            with Session.open(pair, SessionOptions(128, policy=SEVEN)) as session:
                assert not any("MTP" in notice for notice in session.notices)
                target = session.target
                assert isinstance(target, GgufModel) and target.hidden is None


def test_layers_that_llama_cpp_would_die_of_are_left_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "two.gguf", arch="qwen35", mtp_layers=2)
    with (
        closing(Pair.load(path, options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(64, policy=SEVEN)) as session,
    ):
        assert pair.draft_name is None
        [notice] = [notice for notice in session.notices if "MTP" in notice]
        why = "it is one of 2, and llama.cpp runs no more than one in a model of kind qwen35"
        assert notice == f"two has an MTP head, which is not used: {why}"
        assert session.generate("the river", max_tokens=4, sampling=GREEDY).text
