"""Outrider's proposer for vLLM, in a simulated worker."""

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import ROOT
from outrider.core.data import StepRecord
from outrider.core.errors import SettingError
from outrider.core.params import Drafting
from outrider.fleet.speculation import Speculation
from outrider.fleet.vllm import Proposer
from outrider.models.embedded import embedded_default
from outrider.policy.auto import AutoPolicy
from vllm_worker import MAX_LENGTH, Asked, SimulatedWorker, config

MAX_ROWS = 4


class Counting(AutoPolicy):
    """Counts what it observes."""

    begun = drafted = accepted = 0

    def begin(self, *given: Any, **named: Any) -> None:
        self.begun += 1
        super().begin(*given, **named)

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        self.drafted += sum(len(record.draft) for record in records.values())
        self.accepted += sum(record.num_accepted for record in records.values())
        super().observe(records)


def speculation(worker: SimulatedWorker, *, earlier: bool = False, max_draft: int = 8) -> Speculation:
    policy = Counting(limits=Drafting("lookup", max_draft))
    return Speculation(policy, max_length=MAX_LENGTH, chunk=64, earlier=earlier, clock=worker.clock)


def counted(spoken: Speculation) -> Counting:
    assert isinstance(spoken.policy, Counting)
    return spoken.policy


def trigrams(texts: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + 3]) for text in texts for i in range(len(text) - 2)}


def copying(rng: random.Random, first: int, length: int) -> list[int]:
    """Text that says the same again and again, with changes."""
    phrase = [first + rng.randrange(9) for _ in range(12)]
    text: list[int] = []
    while len(text) < length:
        text += [token if rng.random() < 0.95 else first + rng.randrange(9) for token in phrase]
    return text[:length]


@given(data=st.data())
@pytest.mark.parametrize("earlier", [False, True])
def test_drafts_go_on_from_recorded_text_whatever_becomes_of_the_batch(
    data: st.DataObject, earlier: bool
) -> None:
    """Requests arrive, end, are preempted and come back, and rows change places: each goes on with its own
    text, and is drafted for from it (or from those that ended) alone."""
    rng = random.Random(data.draw(st.integers(0, 999)))
    worker = SimulatedWorker(MAX_ROWS)
    spoken = speculation(worker, earlier=earlier)
    gone: list[Asked] = []
    shares_tokens = data.draw(st.booleans())
    arrivals = 0
    for action in data.draw(st.lists(st.sampled_from("asssspbec"), min_size=10, max_size=60)):
        here = len(worker.rows)
        if action == "a" and here < MAX_ROWS:
            first = 0 if shares_tokens else 10 * arrivals
            worker.arrive(Asked(copying(rng, first, rng.randrange(1, 50)), copying(rng, first, 90)))
            arrivals += 1
        elif action == "b" and worker.away and here < MAX_ROWS:
            worker.arrive(worker.away.pop(0))
        elif action in "pe" and here:
            asked = worker.leave(rng.randrange(here))
            gone.append(asked)
            if action == "p":
                worker.away.append(asked)
        elif action == "c" and here > 1:
            worker.swap(*rng.sample(range(here), 2))
        elif action == "s" and here:
            for row in worker.finished():
                gone.append(worker.leave(row))
            drafts = worker.step(spoken.propose, cut=data.draw(st.sampled_from([None, 1, 3])))
            for asked, draft in zip(worker.rows, drafts, strict=True):
                assert not (asked.unread and draft)
                known = trigrams([asked.text, *([other.text for other in gone] if earlier else [])])
                assert trigrams([asked.text[-2:] + draft]) <= known
    assert counted(spoken).begun <= worker.starts  # no request that stayed was taken for another


def run(worker: SimulatedWorker, spoken: Speculation, asked: Sequence[Asked]) -> float:
    """Tokens per request and call until all answers are there."""
    for one in asked:
        worker.arrive(one)
    shares = 0
    while worker.rows:
        shares += len(worker.rows)
        worker.step(spoken.propose)
        for row in worker.finished():
            worker.leave(row)
    return sum(one.done for one in asked) / shares


@pytest.mark.parametrize("size", [1, 3])
def test_copied_text_is_drafted_at_costs_that_real_steps_show(size: int) -> None:
    rng = random.Random(3)
    worker = SimulatedWorker(MAX_ROWS, lambda n: 0.02 * (1 + 0.05 * (n - 1)))
    spoken = speculation(worker)
    requests = [Asked(copying(rng, 10 * i, 60), copying(rng, 10 * i, 300)) for i in range(size)]
    for one in requests:
        one.answer = (one.prompt * 6)[:300]
    assert run(worker, spoken, requests) > 3
    costs = spoken.policy.state.costs
    drafted_s = costs.call_s(9 * size, context=200 * size)
    assert drafted_s == pytest.approx(0.02 * (1 + 0.05 * (9 * size - 1)), rel=0.15)  # a guess: 3 to 4 times


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    """Calls take as long as their tokens are many: even a draft that is always right gains nothing."""
    rng = random.Random(4)
    worker = SimulatedWorker(MAX_ROWS, lambda n: 0.02 * n)
    spoken = speculation(worker)
    for _ in range(2):
        run(worker, spoken, [Asked(copying(rng, 0, 60), copying(rng, 0, 300))])
    before, calls = worker.num_drafted, worker.num_calls
    run(worker, spoken, [Asked(copying(rng, 0, 60), copying(rng, 0, 300))])
    assert worker.num_drafted - before < 0.1 * (worker.num_calls - calls)


def test_earlier_texts_are_looked_up_unless_that_is_switched_off() -> None:
    rng = random.Random(5)
    answer = [rng.randrange(1000) for _ in range(200)]
    for earlier in (True, False):
        worker = SimulatedWorker(MAX_ROWS)
        spoken = speculation(worker, earlier=earlier)
        run(worker, spoken, [Asked([1, 2, 3], list(answer))])
        assert (run(worker, spoken, [Asked([1, 2, 3], list(answer))]) > 2) is earlier


def test_a_draft_that_the_scheduler_cut_counts_as_far_as_it_was_verified() -> None:
    rng = random.Random(6)
    worker = SimulatedWorker(MAX_ROWS, lambda n: 0.02 * (1 + 0.01 * n))
    spoken = speculation(worker)
    prompt = [rng.randrange(1000) for _ in range(100)]
    worker.arrive(Asked(prompt, prompt[:90]))
    while not worker.finished():
        worker.step(spoken.propose, cut=2)
    assert counted(spoken).drafted == counted(spoken).accepted > 30


def test_a_long_prompt_is_read_in_parts_and_then_drafted_from() -> None:
    worker = SimulatedWorker(1)
    rows = np.zeros((1, 5000), dtype=np.int32)
    rows[0, :4000] = np.arange(4000) % 1500
    spoken = Speculation(AutoPolicy(limits=Drafting("lookup")), max_length=5000, chunk=64, clock=worker.clock)
    length, drafts = 4000, list[int]()
    for step in range(8):
        worker.now_s += 0.01
        drafts = spoken.propose([rows[0, length - 1 : length].tolist()], [length], rows)[0]
        assert not drafts or step > 2
        rows[0, length] = length % 1500
        length += 1
    assert drafts


def test_a_failure_is_said_once_and_ends_no_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = Proposer(config())
    texts = np.zeros((2, MAX_LENGTH), dtype=np.int32)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of a bug")

    monkeypatch.setattr(proposer.speculation.policy, "propose", fail)
    with caplog.at_level(logging.INFO, "vllm.outrider"):
        for _ in range(3):
            assert proposer.propose([[0], [0]], [5, 6], texts, slot_mappings=None) == [[], []]
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line == "outrider: nothing is drafted any more: of a bug (ZeroDivisionError)"


@pytest.mark.parametrize("options", [3, {"erlier": True}, {"earlier": "no"}])
def test_settings_that_cannot_be_used_are_named(options: Any) -> None:
    with pytest.raises(SettingError, match="cannot be used"):
        Proposer(config(outrider=options))


# In a real vLLM: OUTRIDER_VLLM names a Python that has it, if this one has not

PYTHON = os.environ.get("OUTRIDER_VLLM") or (sys.executable if find_spec("vllm") else None)


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON is None, reason="vLLM is not installed, and OUTRIDER_VLLM names no Python that has it"
)
def test_texts_are_those_of_plain_decoding_and_drafts_are_accepted(tmp_path: Path) -> None:
    speculation = {"model": "outrider.fleet.vllm.Proposer", "num_speculative_tokens": 8}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    found = []
    for options in (None, speculation):
        command = [str(PYTHON), str(ROOT / "tests" / "vllm_program.py"), str(embedded_default())]
        command += [str(tmp_path / "model"), json.dumps(options)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "nothing is drafted any more" not in done.stdout + done.stderr
        found.append(
            json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tokens')))
        )
    plain, drafted = found
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["accepted"] > 0
