"""Targets with a recurrent state, whose rejected drafts are taken back by checkpoints: texts are plain
ones."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from backends import MAINLINE, Native, backend, over
from engines import (
    END,
    GREEDY,
    LANGUAGE,
    PROMPT,
    ScriptedDrafter,
    asked,
    language_model,
    oracle,
    random_guess,
    run,
)
from llama_cpp_models import resident_bytes
from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import Rewinder
from outrider.core.contracts import CHECKPOINTS as OF_CHECKPOINTS
from outrider.core.contracts import UNABLE
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError
from outrider.engine import Engine
from outrider.policy.fixed import FixedPolicy
from tiny_gguf import write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name

ALONG = FixedPolicy(draft_max=16, p_min=0.0)
MAX_RECOMPUTED = OF_CHECKPOINTS.max_recomputed or 0


# The engine, on a model that is exact


@pytest.mark.parametrize("num_right", [0, 1, 2, 1000])
def test_what_a_rejected_draft_left_is_read_with_the_next_call(num_right: int) -> None:
    target = language_model(rewind="checkpoints")
    asked_for = asked(PROMPT, max_tokens=60, sampling=GREEDY, ignore_end=True)
    engine = Engine(
        target, [ScriptedDrafter(oracle(LANGUAGE, num_right))], FixedPolicy(draft_max=4, p_min=0.0)
    )
    completion = engine.generate(asked_for)
    assert completion.tokens == Engine(language_model()).generate(asked_for).tokens
    missing, decoded = 0, [record for record in completion.records if record.kind == "decode"]
    for record in decoded:
        assert record.num_evaluated == missing + 1 + len(record.draft)
        assert not record.draft or missing <= MAX_RECOMPUTED
        rejected = record.num_accepted < len(record.draft)
        missing = missing + 1 + record.num_accepted if rejected else 0
    assert any(len(record.draft) == 4 for record in decoded)
    if num_right < 1000:  # else a rejection would follow another for ever
        assert any(not record.draft and record.num_evaluated > MAX_RECOMPUTED for record in decoded)


@pytest.mark.parametrize("seed", range(8))
def test_sequences_with_any_drafts_say_what_they_say_plainly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, END, rng.integers(2, 9)).tolist()) for _ in range(4)]
    requests = [asked(prompt, max_tokens=30, sampling=GREEDY) for prompt in prompts]
    target = language_model(rewind="checkpoints", max_sequences=4, max_batch_tokens=40)
    found = run(Engine(target, [ScriptedDrafter(random_guess(seed))], ALONG), *requests)
    assert [c.tokens for c in found] == [Engine(language_model()).generate(r).tokens for r in requests]


def test_a_failed_call_is_made_good_by_reading_again() -> None:
    request = asked(PROMPT, max_tokens=40, sampling=GREEDY, ignore_end=True)
    target = language_model(rewind="checkpoints")
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@over("delta net", "recurrent", names=MAINLINE)
def test_a_long_answer_takes_no_more_memory(backend: Native, kind: str) -> None:
    """2,000 tokens with drafts that are accepted and rejected: a copy of the state that was left at each step
    would be a hundred megabytes."""
    target = backend.open(kind, 2100)
    drafter = ScriptedDrafter(random_guess(3, 256))
    request = asked(range(97, 121), max_tokens=2000, sampling=GREEDY, ignore_end=True)
    sizes: dict[int, int] = {}
    for update in Engine(target, [drafter], FixedPolicy(draft_max=4, p_min=0.0)).stream(request):
        sizes[update.record.position] = resident_bytes()
    target.close()
    began = next(size for position, size in sizes.items() if position > 500)
    assert max(sizes.values()) - began < 8e6  # records of the steps


def test_a_session_speculates_and_says_what_that_takes(tmp_path: Path) -> None:
    hybrid = write_tiny(tmp_path / "hybrid.gguf", arch="qwen35", context_length=1024)
    options = LoadOptions(backend="llama.cpp", threads=1)
    with (
        closing(Pair.load(hybrid, options=options)) as pair,
        Session.open(pair, SessionOptions(512, policy=ALONG)) as session,
    ):
        [notice] = [line for line in session.notices if "recurrent state" in line]
        size = pair.target.rewind_support.state_bytes / 1e6
        assert size > 0
        assert f"checkpoints of its recurrent state ({2 * size:.1f} MB)" in notice
        prompt = "the river and the road and " * 8
        schema = {"enum": ["the river and the road"]}
        answer = session.generate(prompt, max_tokens=60, sampling=GREEDY, schema=schema)
        assert answer.text == '"the river and the road"'
        assert len(answer.tokens) > sum(record.kind == "decode" for record in answer.records)


def test_a_library_that_does_not_restore_the_state_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a checkpoint is of the token before."""

    def one_too_early(self: Rewinder, sequence: int, length: int) -> int:
        return reach(self, sequence, length) and length

    def earlier(self: Rewinder, source: int, length: int, sequence: int) -> bool:
        return put_back(self, source, reach(self, source, length), sequence)

    reach, put_back = Rewinder.reach, Rewinder.put_back
    monkeypatch.setattr(Rewinder, "reach", one_too_early)
    monkeypatch.setattr(Rewinder, "put_back", earlier)
    weights = Weights(write_tiny(tmp_path / "it.gguf", arch="lfm2"), LoadOptions(backend="llama.cpp"))
    assert weights.rewind_support.kind == "none" and weights.rewind_support.notice
    assert weights.open(64).rewinding == UNABLE
    weights.close()


def test_other_logits_after_going_back_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the library says that it went back, and goes on from another state."""
    decode, truncate, went_back = GgufModel.decode, GgufModel.truncate, set[int]()

    def noted(self: GgufModel, sequence: int, length: int) -> None:
        truncate(self, sequence, length)
        went_back.add(sequence)

    def from_another_state(self: GgufModel, spans: Sequence[Span]) -> list[Logits]:
        first = spans[0]
        if first.sequence in went_back:
            went_back.discard(first.sequence)
            spans = [first._replace(tokens=tuple(token // 2 for token in first.tokens)), *spans[1:]]
        return decode(self, spans)

    monkeypatch.setattr(GgufModel, "truncate", noted)
    monkeypatch.setattr(GgufModel, "decode", from_another_state)
    weights = Weights(write_tiny(tmp_path / "it.gguf", arch="lfm2"), LoadOptions(backend="llama.cpp"))
    assert weights.rewind_support.kind == "none"
    assert "other logits" in (weights.rewind_support.notice or "")
    weights.close()
