"""Targets with a recurrent state, whose rejected drafts are taken back by snapshots: texts are plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends import MAINLINE, Native, backend, over
from engines import (
    END,
    GREEDY,
    LANGUAGE,
    PROMPT,
    Guess,
    ScriptedDrafter,
    asked,
    language_model,
    oracle,
    random_guess,
)
from outrider.backends.gguf import LoadOptions
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.rewinding import MAX_SNAPSHOTS, Rewinding
from outrider.core.data import Completion, Logits, Request, Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy
from outrider.session.pair import Pair
from tiny_gguf import write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name

KINDS = ("delta net", "convolution")
ALONG = FixedPolicy(draft_max=16, p_min=0.0)


def run(engine: Engine, *requests: Request) -> list[Completion]:
    """These requests, and what runs already, side by side."""
    for request in requests:
        engine.submit(request)
    found: dict[int, Completion] = {}
    while engine.num_running:
        found |= {u.record.request: u.completion for u in engine.step() if u.completion is not None}
    return [found[number] for number in sorted(found)]


# The engine, on a model that is exact


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("num_right", [0, 1, 2, 1000])
def test_drafts_are_no_longer_than_there_are_snapshots(most: int, num_right: int) -> None:
    target = language_model(rewind="snapshots", max_draft=most)
    drafter = ScriptedDrafter(oracle(LANGUAGE, num_right))
    completion = Engine(target, [drafter], ALONG).generate(asked(PROMPT, max_tokens=60, sampling=GREEDY))
    plain = Engine(language_model()).generate(asked(PROMPT, max_tokens=60, sampling=GREEDY))
    assert completion.tokens == plain.tokens
    lengths = [len(record.draft) for record in completion.records if record.kind == "decode"]
    assert max(lengths) == most
    # Nothing was read twice: what was rejected was gone back from, not read again.
    assert sum(len(span.tokens) for call in target.calls for span in call) == (
        len(PROMPT) - 1 + sum(length + 1 for length in lengths)
    )


@pytest.mark.parametrize("seed", range(8))
def test_sequences_with_any_drafts_say_what_they_say_plainly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, END, rng.integers(2, 9)).tolist()) for _ in range(4)]
    requests = [asked(prompt, max_tokens=30, sampling=GREEDY) for prompt in prompts]
    target = language_model(rewind="snapshots", max_draft=4, max_sequences=4)
    found = run(Engine(target, [ScriptedDrafter(random_guess(seed))], ALONG), *requests)
    assert [c.tokens for c in found] == [Engine(language_model()).generate(r).tokens for r in requests]


def test_a_failed_call_is_made_good_by_reading_again() -> None:
    request = asked(PROMPT, max_tokens=40, sampling=GREEDY, ignore_end=True)
    target = language_model(rewind="snapshots", max_draft=4)
    engine = Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 2))], ALONG)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    target.fail_at_call = len(target.calls) + 1
    with pytest.raises(BackendError):
        engine.step()
    [completion] = run(engine)
    assert completion.tokens == Engine(language_model()).generate(request).tokens


# Real libraries, tiny models


@over(*KINDS, names=MAINLINE)
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_greedy_texts_equal_plain_ones(backend: Native, kind: str, num_sequences: int) -> None:
    target = backend.open(kind, 256, max_sequences=num_sequences)
    plain = Engine(backend.open(kind, 256))
    rng = np.random.default_rng(3)
    accepted: Counter[bool] = Counter()
    for _ in range(3):
        prompts = [tuple(rng.integers(97, 123, 24).tolist()) for _ in range(num_sequences)]
        requests = [asked(p, max_tokens=60, sampling=GREEDY, ignore_end=True) for p in prompts]
        texts = [(*request.prompt, *plain.generate(request).tokens) for request in requests]
        found = run(Engine(target, [ScriptedDrafter(_mistaken(texts, rng))], ALONG), *requests)
        assert [(*r.prompt, *c.tokens) for r, c in zip(requests, found, strict=True)] == texts
        accepted.update(r.num_accepted == len(r.draft) for c in found for r in c.records if r.draft)
    assert accepted[True] and accepted[False]
    target.close()


def _mistaken(texts: Sequence[tuple[int, ...]], rng: np.random.Generator) -> Guess:
    """Goes on as one of these texts does, with a mistake at any place or none."""

    def guess(tokens: Sequence[int], length: int) -> list[int]:
        [text] = [text for text in texts if text[: len(tokens)] == tuple(tokens)]
        right = list(text[len(tokens) : len(tokens) + int(rng.integers(1, length + 1))])
        wrong = int(rng.integers(0, length + 1))
        return [token if i != wrong else (token + 1) % 256 for i, token in enumerate(right)]

    return guess


@over(*KINDS, names=MAINLINE)
def test_sampled_texts_have_the_distribution_of_plain_ones(backend: Native, kind: str) -> None:
    def texts(engine: Engine, count: int) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(count):
            params = SamplingParams(temperature=0.7, top_k=3, seed=seed)
            found[engine.generate(asked(range(97, 121), max_tokens=3, sampling=params)).tokens] += 1
        return found

    def guess(tokens: object, length: int) -> list[int]:
        del tokens
        return [int(rng.choice(likely)) for _ in range(min(length, 2))]

    rng = np.random.default_rng(1)
    target = backend.open(kind, 64)
    plain = texts(Engine(target), 200)
    likely = [token for text in plain for token in text]
    found = texts(Engine(target, [ScriptedDrafter(guess)], ALONG), 200)
    distance = sum(abs(plain[text] - found[text]) for text in plain | found) / 400
    same = sum(abs(a - b) for a, b in zip(*_halves(plain), strict=True)) / 200
    assert distance < 2 * same + 0.1
    target.close()


def _halves(counts: Counter[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(2)
    first = [int(rng.binomial(count, 0.5)) for count in counts.values()]
    return first, [count - half for count, half in zip(counts.values(), first, strict=True)]


@over(*KINDS, names=MAINLINE)
def test_the_next_turn_reads_only_what_is_new(backend: Native, kind: str) -> None:
    target = backend.open(kind, 256)
    engine = Engine(target, [SuffixDrafter()], ALONG)
    prompt = tuple(range(97, 121))
    first = engine.generate(asked(prompt, max_tokens=20, sampling=GREEDY, ignore_end=True))
    longer = (*prompt, *first.tokens, 5, 6, 7)
    second = engine.generate(asked(longer, max_tokens=10, sampling=GREEDY, ignore_end=True))
    assert second.reused_tokens == len(prompt) + len(first.tokens) - 1
    plain = Engine(backend.open(kind, 256)).generate(
        asked(longer, max_tokens=10, sampling=GREEDY, ignore_end=True)
    )
    assert second.tokens == plain.tokens
    target.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid's file."""
    return write_tiny(tmp_path_factory.mktemp("hybrid") / "hybrid.gguf", arch="qwen35", context_length=1024)


def test_a_session_speculates_and_says_what_snapshots_take(hybrid: Path) -> None:
    options = LoadOptions(backend="llama.cpp", threads=1)
    with closing(Pair.load(hybrid, options=options)) as pair, pair.open(512, policy=ALONG) as session:
        [notice] = [line for line in session.notices if "snapshots" in line]
        size = pair.target.rewinding.state_bytes * MAX_SNAPSHOTS / 1e6
        assert f"({MAX_SNAPSHOTS} for each sequence, {size:.1f} MB)" in notice
        prompt = "the river and the road and " * 8
        schema = {"enum": ["the river and the road"]}
        answer = session.generate(prompt, max_tokens=60, sampling=GREEDY, schema=schema)
        assert answer.text == '"the river and the road"'
        assert len(answer.tokens) > sum(record.kind == "decode" for record in answer.records)


def test_a_library_that_does_not_restore_the_state_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: of what was rejected one token stays in the state."""
    forget = GgufModel._forget

    def one_too_few(self: GgufModel, sequence: int, start: int) -> bool:
        return forget(self, sequence, start + 1 if start > 0 else start)

    monkeypatch.setattr(GgufModel, "_forget", one_too_few)
    weights = Weights(write_tiny(tmp_path / "it.gguf", arch="lfm2"), LoadOptions(backend="llama.cpp"))
    assert weights.rewinding.kind == "none" and weights.rewinding.notice
    model = weights.open(64)
    assert (model.rewind, model.max_draft) == ("none", 0)
    weights.close()


def test_other_logits_after_going_back_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the library says that it went back, and goes on from another state."""
    decode = GgufModel.decode

    def from_another_state(self: GgufModel, spans: Sequence[Span]) -> list[Logits]:
        first = spans[0]
        if self._snapshots.is_past(first.sequence):
            spans = [replace(first, tokens=(first.tokens[0] + 1, *first.tokens[1:])), *spans[1:]]
        return decode(self, spans)

    monkeypatch.setattr(GgufModel, "decode", from_another_state)
    weights = Weights(write_tiny(tmp_path / "it.gguf", arch="lfm2"), LoadOptions(backend="llama.cpp"))
    assert weights.rewinding.kind == "none" and "other logits" in (weights.rewinding.notice or "")
    weights.close()


def test_snapshots_take_a_part_of_the_memory_and_less_than_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.backends.gguf.rewinding.available_bytes", lambda: 8 * 100e6)
    known = Rewinding("snapshots", state_bytes=10_000_000)
    assert known.snapshots(1, 512) == 9 and known.snapshots(4, 512) == 1 and known.snapshots(20, 512) == 0
    assert Rewinding("snapshots", 1).snapshots(1, 512) == MAX_SNAPSHOTS
    assert Rewinding("snapshots", 1).snapshots(1, 8) == 6
    assert Rewinding("free").snapshots(1, 512) == 0
