"""Heads in files of their own (EAGLE-3, MTP layers) as drafters, on tiny models of random weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from backends import FILES, IK, MAINLINE, assert_near, next_rows, store
from engines import GREEDY, asked, run
from head_files import EVEN, with_good_head, write_eagle, write_heads
from llama_cpp_models import SMALL, TEXT
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.head_model import HeadModel, HeadWeights
from outrider.backends.gguf.model import GgufModel
from outrider.backends.tuning.scoring import subject_of
from outrider.core.data import Logits, Request, Span
from outrider.core.errors import BackendError, OutriderError
from outrider.core.params import DraftSampling, SamplingParams, Verification
from outrider.costs.calibrate import calibrate
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from outrider.models.hub import HubOptions
from outrider.policy import FixedPolicy
from outrider.session.pair import Pair
from tiny.sizes import Sizes
from tiny_gguf import MERGES, write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

OPTIONS = LoadOptions(backend="llama.cpp", threads=1, cache_type_k="f32", cache_type_v="f32")
THREE = FixedPolicy(draft_max=3, p_min=0.0)


@dataclass(frozen=True)
class Files:
    """A target and a file of heads for it."""

    target: Path
    head: Path

    def why_refused(self, options: LoadOptions = OPTIONS) -> str:
        """Why they do not run together, in a line."""
        with pytest.raises(OutriderError) as caught:
            Pair.load(self.target, self.head, options=options).close()
        assert str(self.head) in caught.value.what and caught.value.way_out and "\n" not in str(caught.value)
        return caught.value.why


def write_files(folder: Path, kind: str, *, agrees: bool = True) -> Files:
    """Of a kind: "eagle3" or "mtp" and the target's architecture."""
    what, arch = kind.split(" ")
    made: dict[str, Any] = {"arch": arch, "context_length": 512, "repeating": agrees}
    if what == "mtp":
        target = write_tiny(folder / "target.gguf", **made)
        write = with_good_head if agrees else write_tiny
        own = {} if agrees else {"mtp_layers": 1}
        return Files(target, write(folder / "head.gguf", arch=arch, part="heads", **own))
    target = write_tiny(folder / "target.gguf", **made)
    layers = (0, 2, 4) if arch == "qwen35" else (0, 1, 1)
    return Files(target, write_eagle(folder / "head.gguf", layers=layers, agrees=agrees, drafted=EVEN))


@pytest.fixture(scope="module", params=["eagle3 llama", "eagle3 qwen35", "mtp qwen35", "mtp glm4moe"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose every weight is random, so that nothing can go wrong unnoticed."""
    return write_files(tmp_path_factory.mktemp("heads"), request.param, agrees=False)


@dataclass(frozen=True)
class Loaded:
    """Both, in one library."""

    target: Weights
    head: HeadWeights

    def open(self, max_sequences: int = 1) -> tuple[GgufModel, HeadModel]:
        """A context for each."""
        target = self.target.open(256, max_sequences=max_sequences)
        return target, self.head.open_beside(target, 256 * max_sequences)

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
    target = Weights(files.target, replace(options, heads=False))
    head = HeadWeights(read_head(read_card(files.head), read_card(files.target)), options)
    yield Loaded(target, head)
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


@pytest.fixture(scope="module", params=["eagle3 llama", "mtp qwen35"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose head is right now and then."""
    return write_files(tmp_path_factory.mktemp("good"), request.param)


def plain_text(files: Files, request: Request) -> tuple[int, ...]:
    weights = Weights(files.target, replace(OPTIONS, heads=False))
    found = Engine(weights.open(256)).generate(request)
    weights.close()
    return found.tokens


def test_greedy_texts_with_heads_equal_plain_ones(good: Files) -> None:
    outcomes: Counter[bool] = Counter()
    with closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair:
        assert pair.draft_name == "head"
        with pair.open(256, policy=THREE, lookup=False, max_running=4) as session:
            assert any("target drafts with head (" in notice for notice in session.notices)
            requests = [
                asked(TEXT[7 * i : 7 * i + 20], max_tokens=60, sampling=GREEDY, ignore_end=True)
                for i in range(4)
            ]
            found = run(session.engine, *requests)
            again = session.engine.generate(requests[0])  # on the KV that is there
    for request, completion in zip(requests, found, strict=True):
        assert completion.tokens == plain_text(good, request)
        outcomes.update(r.num_accepted > 0 for r in completion.records if r.draft)
        assert sum(record.work.calls for record in completion.records) > 20
    assert again.tokens == found[0].tokens
    assert outcomes[True] > 5 and outcomes[False] > 5


@pytest.mark.slow
def test_sampled_texts_with_heads_have_the_distribution_of_plain_ones(good: Files) -> None:
    def texts(engine: Engine, count: int, draft_sampling: DraftSampling) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(count):
            params = SamplingParams(temperature=1.0, top_k=3, seed=seed)
            verification = Verification(draft_sampling=draft_sampling)
            request = asked(TEXT[:20], max_tokens=3, sampling=params, verification=verification)
            found[engine.generate(request).tokens] += 1
        return found

    weights = Weights(good.target, replace(OPTIONS, heads=False))
    plain = texts(Engine(weights.open(64)), 300, "greedy")
    halves = texts(Engine(weights.open(64)), 600, "greedy") - plain
    weights.close()
    with (
        closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair,
        pair.open(64, policy=THREE, lookup=False) as session,
    ):
        for kind in ("greedy", "sampled"):
            found = texts(session.engine, 300, kind)
            assert _distance(found, plain) < 1.5 * _distance(halves, plain) + 0.1


def _distance(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    return sum(abs(one[text] / one.total() - other[text] / other.total()) for text in one | other) / 2


def test_a_schema_and_a_cancelled_request(good: Files) -> None:
    schema = {"enum": ["the river and the road", "the river and the sea"]}
    with (
        closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair,
        pair.open(256, policy=THREE) as session,
    ):
        answer = session.generate("the river", max_tokens=60, sampling=GREEDY, schema=schema)
        assert answer.text in ('"the river and the road"', '"the river and the sea"')
        request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
        number = session.engine.submit(request)
        for _ in range(4):
            session.engine.step()
        session.engine.cancel(number)
        assert session.engine.generate(request).tokens == plain_text(good, request)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_call_of_the_head_costs_nothing_but_itself(good: Files, failing: int) -> None:
    """Of those that read the target's states, and of those that read tokens."""
    request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
    pair = Pair.load(good.target, good.head, options=OPTIONS)
    if failing == 0 and pair.draft_card is not None and pair.draft_card.kind == "mtp":
        pair.close()
        pytest.skip("MTP layers read them as they are")
    with closing(pair), pair.open(256, policy=THREE, lookup=False) as session:
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
    assert completion.tokens == plain_text(good, request)


def test_what_a_head_costs_is_measured(good: Files) -> None:
    with closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair, pair.open(256) as session:
        [drafter] = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
        target, head = session.target, drafter.model
        assert isinstance(target, GgufModel) and isinstance(head, HeadModel)
        assert len({subject_of(model, "last").key() for model in (target, head)}) == 2
        curve = calibrate(head, seconds=0.2, rows="last")
        assert curve.is_measured and curve.call_s(1, context=0) > 0


def test_a_file_of_heads_is_left_alone_where_bits_must_be_equal(good: Files) -> None:
    with closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair:
        if pair.target.rewind != "free":
            pytest.skip("calls of equal bits are for attention alone")
        with pair.open(128, policy=THREE, bitwise=True) as session:
            assert any(n.startswith("head (") and n.endswith("bit-equal") for n in session.notices)
            assert not any(isinstance(drafter, ModelDrafter) for drafter in session.engine.drafters)


# What does not fit

WRONG_EAGLES: dict[str, dict[str, Any]] = {
    "states of 32 values, and those of target.gguf have 64": {"metadata": {"target_hidden_size": 32}},
    "reads layer 9, and target.gguf has 2": {"layers": (0, 1, 9)},
    "it reads 2 layers of its target": {"layers": (0, 1)},
    "with 2 of its own": {"layers_held": 2},
    "it knows 288 tokens, and target.gguf 289": {"merges": MERGES[:-1]},
    "these have other numbers": {"merges": MERGES[::-1]},
    "names some twice": {"drafted": (1, 2, 2)},
    "none of its 289": {"drafted": (1, 289)},
    "it takes embeddings or output from its target": {"sizes": Sizes(width=128, kv_heads=2)},
    "fc.weight": {"left_out": ("token_embd.weight", "fc.weight")},
    "dies at its first call (SIGABRT)": {"metadata": {"rope.dimension_count": 64}},
    "computes it wrongly": {"layers": (0, 1, 2)},  # llama.cpp gives no such state of Llama models
}


@pytest.mark.parametrize("why", WRONG_EAGLES)
def test_an_eagle3_head_that_does_not_fit_is_refused(why: str, tmp_path: Path) -> None:
    made = {"agrees": False, **WRONG_EAGLES[why]}
    if "layers_held" in made:
        made["metadata"] = {"block_count": made.pop("layers_held")}
    target = write_tiny(tmp_path / "target.gguf")
    assert why in Files(target, write_eagle(tmp_path / "head.gguf", **made)).why_refused()


WRONG_LAYERS: dict[str, dict[str, Any]] = {
    "made for a model of kind glm4moe of 2 layers, 64 wide": {"arch": "glm4moe"},
    "of kind qwen35 of 8 layers, 64 wide, and the target is qwen35 of 4": {"arch": "qwen35", "layers": 8},
    "of 4 layers, 128 wide": {"arch": "qwen35", "sizes": Sizes(width=128)},
    "it holds 2 MTP layers": {"arch": "qwen35", "mtp_layers": 2},
}


@pytest.mark.parametrize("why", WRONG_LAYERS)
def test_mtp_layers_of_another_model_are_refused(why: str, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", arch="qwen35")
    made: dict[str, Any] = {"mtp_layers": 1, "part": "heads", **WRONG_LAYERS[why]}
    assert why in Files(target, write_tiny(tmp_path / "head.gguf", **made)).why_refused()


def test_targets_and_libraries_that_give_no_states_are_named(tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head.gguf")
    other = write_tiny(tmp_path / "other.gguf", arch="qwen2moe")
    assert "does not give the inputs of layers of qwen2moe models" in Files(other, head).why_refused()
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
    block = write_heads(tmp_path / "head-dflash.gguf", "dflash")
    assert "drafts a block of tokens at once" in Files(target, block).why_refused()


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
        assert any(line.startswith("-md auto passes over head.gguf: ") for line in pair.notices)
