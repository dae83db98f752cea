"""A model's own heads (MTP) as a drafter, on tiny models of random weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from backends import FILES, MAINLINE, assert_near, next_rows, store
from engines import GREEDY, asked, run
from head_files import with_good_head
from llama_cpp_models import SMALL, TEXT
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.head_model import HeadModel
from outrider.backends.gguf.model import GgufModel
from outrider.backends.tuning.scoring import subject_of
from outrider.core.data import Logits, Request, Span
from outrider.core.errors import BackendError
from outrider.core.params import DraftSampling, SamplingParams, Verification
from outrider.costs.calibrate import calibrate
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy
from outrider.session.pair import Pair
from tiny_gguf import write_tiny

ARCHITECTURES = ("qwen35", "glm4moe", "qwen3next")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose last layer is a head."""
    folder = tmp_path_factory.mktemp("heads")
    return write_tiny(folder / "it.gguf", arch=request.param, mtp_layers=1, context_length=512)


@pytest.fixture(params=MAINLINE)
def weights(request: pytest.FixtureRequest, file: Path) -> Iterator[Weights]:
    """It, in each library that has the calls."""
    loaded = Weights(file, replace(SMALL, library=str(FILES[request.param].path), heads=True))
    yield loaded
    loaded.close()


def pair(weights: Weights, max_sequences: int = 1) -> tuple[GgufModel, HeadModel]:
    target = weights.open(256, max_sequences=max_sequences)
    return target, HeadModel(target, 256 * max_sequences)


def expected(weights: Weights, text: tuple[int, ...], drafted: tuple[int, ...] = ()) -> Logits:
    """The head's rows after each token of a text that the target has evaluated but for its last, and of
    tokens drafted after it: read one at a time by a head that never did anything else."""
    target, head = pair(weights)
    store(target, text[:-1])
    rows = [head.decode([Span(0, (token,), i, 1)])[0][0] for i, token in enumerate((*text, *drafted))]
    head.close()
    target.close()
    return np.array(rows)


def test_a_head_reads_in_one_call_what_it_reads_one_by_one(weights: Weights) -> None:
    assert weights.num_heads == 1
    text, drafted = TEXT[:40], TEXT[60:64]
    rows = expected(weights, text, drafted)
    target, head = pair(weights, 2)
    store(target, TEXT[100:130], sequence=1)
    store(target, text[:-1])
    assert_near(head.decode([Span(0, text, 0, 1), Span(1, TEXT[100:120], 0, 0)])[0], rows[39:40])
    assert head.reach(0, 40) == 40
    [found] = head.decode([Span(0, drafted, 40, 1)])
    assert_near(found, rows[-1:])
    assert head.length(0) == 44 and head.reach(0, 44) == 40
    head.close()
    target.close()


def test_after_a_rejection_it_reads_with_the_targets_states(weights: Weights) -> None:
    """Two of four drafted tokens are accepted, and the target adds one: what the head drafts then is what
    one drafts that was never wrong."""
    text, drafted = TEXT[:20], TEXT[60:64]
    after = (*text, *drafted[:2], TEXT[90])
    target, head = pair(weights)
    store(target, text[:-1])
    head.decode([Span(0, text, 0, 1)])
    head.decode([Span(0, drafted, 20, 1)])
    target.decode([Span(0, (text[-1], *drafted), 19, 5, checkpoint=True)])
    target.truncate(0, target.reach(0, 22))
    store(target, after[target.length(0) : 22])
    head.truncate(0, head.reach(0, 22))
    assert head.length(0) == 20
    assert_near(next_rows(head, after[20:])[-1:], expected(weights, after)[-1:])
    target.decode([Span(0, (after[22],), 22, 1)])
    head.truncate(0, 10)
    longer = (*after, TEXT[91])
    assert_near(next_rows(head, longer[10:])[-1:], expected(weights, longer)[-1:])
    head.close()
    target.close()


def test_a_copied_sequence_has_the_states_too(weights: Weights) -> None:
    target, head = pair(weights, 2)
    store(target, TEXT[:20])
    target.copy(0, 1, 20)
    target.decode([Span(1, TEXT[20:22], 20, 1)])
    assert_near(head.decode([Span(1, TEXT[:23], 0, 1)])[0], expected(weights, TEXT[:23])[-1:])
    head.close()
    target.close()


# In the engine


@pytest.fixture(scope="module", params=["qwen35", "glm4moe"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose head is right now and then."""
    return with_good_head(tmp_path_factory.mktemp("good") / "good.gguf", request.param)


OPTIONS = LoadOptions(backend="llama.cpp", threads=1, cache_type_k="f32", cache_type_v="f32")
THREE = FixedPolicy(draft_max=3, p_min=0.0)


def plain_text(file: Path, request: Request) -> tuple[int, ...]:
    weights = Weights(file, replace(OPTIONS, heads=False))
    found = Engine(weights.open(256)).generate(request)
    weights.close()
    return found.tokens


def test_greedy_texts_with_heads_equal_plain_ones(good: Path) -> None:
    outcomes: Counter[bool] = Counter()
    with closing(Pair.load(good, options=OPTIONS)) as pair:
        assert pair.draft_name == "its own MTP head"
        with pair.open(256, policy=THREE, lookup=False, max_running=4) as session:
            assert any("its own MTP head" in notice for notice in session.notices)
            requests = [
                asked(TEXT[7 * i : 7 * i + 20], max_tokens=60, sampling=GREEDY, ignore_end=True)
                for i in range(4)
            ]
            found = run(session.engine, *requests)
            again = session.engine.generate(requests[0])  # on the KV that is there
    for request, completion in zip(requests, found, strict=True):
        assert completion.tokens == plain_text(good, request)
        outcomes.update(r.num_accepted == len(r.draft) for r in completion.records if r.draft)
        assert sum(record.work.calls for record in completion.records) > 20
    assert again.tokens == found[0].tokens
    assert outcomes[True] > 5 and outcomes[False] > 5


def test_sampled_texts_with_heads_have_the_distribution_of_plain_ones(good: Path) -> None:
    def texts(engine: Engine, count: int, draft_sampling: DraftSampling) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(count):
            params = SamplingParams(temperature=1.0, top_k=3, seed=seed)
            verification = Verification(draft_sampling=draft_sampling)
            request = asked(TEXT[:20], max_tokens=3, sampling=params, verification=verification)
            found[engine.generate(request).tokens] += 1
        return found

    weights = Weights(good, replace(OPTIONS, heads=False))
    plain = texts(Engine(weights.open(64)), 300, "greedy")
    halves = texts(Engine(weights.open(64)), 600, "greedy") - plain
    weights.close()
    with (
        closing(Pair.load(good, options=OPTIONS)) as pair,
        pair.open(64, policy=THREE, lookup=False) as session,
    ):
        for kind in ("greedy", "sampled"):
            found = texts(session.engine, 300, kind)
            assert _distance(found, plain) < 1.5 * _distance(halves, plain) + 0.1


def _distance(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    return sum(abs(one[text] / one.total() - other[text] / other.total()) for text in one | other) / 2


def test_a_schema_and_a_cancelled_request(good: Path) -> None:
    schema = {"enum": ["the river and the road", "the river and the sea"]}
    with closing(Pair.load(good, options=OPTIONS)) as pair, pair.open(256, policy=THREE) as session:
        answer = session.generate("the river", max_tokens=60, sampling=GREEDY, schema=schema)
        assert answer.text in ('"the river and the road"', '"the river and the sea"')
        request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
        number = session.engine.submit(request)
        for _ in range(4):
            session.engine.step()
        session.engine.cancel(number)
        assert session.engine.generate(request).tokens == plain_text(good, request)


def test_a_failed_call_of_the_head_costs_nothing_but_itself(good: Path) -> None:
    request = asked(TEXT[:30], max_tokens=30, sampling=GREEDY, ignore_end=True)
    pair = Pair.load(good, options=OPTIONS)
    with closing(pair), pair.open(256, policy=THREE, lookup=False) as session:
        session.engine.submit(request)
        for _ in range(3):
            session.engine.step()
        native = pair.target.library.functions
        real = native.llama_process
        failing = patch.object(native, "llama_process", lambda *call: real(*call) or -3)
        with failing, pytest.raises(BackendError):
            session.engine.step()
        [completion] = run(session.engine)
    assert completion.tokens == plain_text(good, request)


def test_heads_are_left_alone_where_they_are_not_wanted(good: Path, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path / "draft.gguf")
    for options, named in ((replace(OPTIONS, heads=False), None), (OPTIONS, draft), (OPTIONS, "none")):
        with closing(Pair.load(good, named, options=options)) as pair:
            assert pair.draft_name == ("draft" if named is draft else None)
            with pair.open(128, policy=THREE) as session:
                assert not any("MTP" in notice for notice in session.notices)
                target = session.target
                assert isinstance(target, GgufModel) and target.hidden is None


def test_without_the_librarys_calls_a_line_says_so(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.backends.gguf.heads._SIGNATURES", {"llama_no_such_call": (None,)})
    with closing(Pair.load(good, options=OPTIONS)) as pair, pair.open(128, policy=THREE) as session:
        assert pair.draft_name is None
        [notice] = [notice for notice in session.notices if "MTP" in notice]
        assert (
            notice
            == "good has an MTP head, which is not used: llama.cpp as it is here lacks the calls for it"
        )


def test_what_a_head_costs_is_measured(good: Path) -> None:
    with closing(Pair.load(good, options=OPTIONS)) as pair, pair.open(256) as session:
        [drafter] = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
        target, head = session.target, drafter.model
        assert isinstance(target, GgufModel) and isinstance(head, HeadModel)
        assert len({subject_of(model, "last").key() for model in (target, head)}) == 2
        curve = calibrate(head, seconds=0.2, rows="last")
        assert curve.is_measured and curve.call_s(1, context=0) > 0


def test_layers_that_llama_cpp_would_die_of_are_left_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "two.gguf", arch="qwen35", mtp_layers=2)
    with closing(Pair.load(path, options=OPTIONS)) as pair, pair.open(64, policy=THREE) as session:
        assert pair.draft_name is None
        [notice] = [notice for notice in session.notices if "MTP" in notice]
        why = "it is one of 2, and llama.cpp runs no more than one in a model of kind qwen35"
        assert notice == f"two has an MTP head, which is not used: {why}"
        assert session.generate("the river", max_tokens=4, sampling=GREEDY).text
