"""What `/metrics` says, fed with real steps of the engine on tiny models."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from constrained import OneOf, Pieces
from engines import (
    GREEDY,
    LANGUAGE,
    PROMPT,
    ScriptedDrafter,
    language_model,
    model_drafter,
    oracle,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel, scripted_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Grammar, Request, StepRecord
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers import TierCounts
from outrider.policy.fixed import FixedPolicy
from outrider.server.metrics import Metrics
from outrider.server.worker import WorkerState

DOCS = Path(__file__).parents[1] / "docs"
REQUEST = Request(PROMPT, GREEDY, max_tokens=12, ignore_end=True)

IDLE = WorkerState(max_running=4, kv_tokens_capacity=1024)


def new_metrics(state: WorkerState = IDLE) -> Metrics:
    metrics = Metrics("tiny")
    metrics.states = lambda: [state]
    return metrics


def value(metrics: Metrics, name: str, /, **labels: str) -> float:
    """One sample as it would be scraped; 0 for one that is not there yet."""
    return metrics.registry.get_sample_value(f"outrider_{name}", labels) or 0.0


def total(metrics: Metrics, name: str) -> float:
    """A counter's sum over its labels."""
    samples = [s for family in metrics.registry.collect() for s in family.samples]
    return sum(s.value for s in samples if s.name == f"outrider_{name}_total")


def engine(target: FakeModel, *drafters: Drafter, draft_max: int = 4, **options: Any) -> Engine:
    return Engine(target, drafters, FixedPolicy(draft_max, p_min=0, hand_over=0), **options)


def run(metrics: Metrics, running: Engine, *requests: Request) -> list[StepRecord]:
    """Run requests side by side and show every step to the metrics; all records."""
    for request in requests:
        running.submit(request)
    records: list[StepRecord] = []
    while updates := running.step():
        metrics.observe_steps(updates)
        records += [update.record for update in updates]
    return records


# Steps


def test_sequences_of_one_step_share_its_calls() -> None:
    metrics, target, draft = new_metrics(), language_model(), language_model()
    drafter = ModelDrafter(draft, same_vocabulary())
    records = run(metrics, engine(target, drafter), *[replace(REQUEST, prompt=PROMPT * n) for n in (1, 30)])
    calls = target.calls
    kinds: list[set[str]] = [
        {kind for r in records if r.step == i + 1 for kind in (r.kind, *["prefill"] * (r.read_tokens > 0))}
        for i in range(len(calls))
    ]
    assert {"prefill", "decode"} in kinds
    for kind, expected in (
        ("prefill", {"prefill"}),
        ("decode", {"decode"}),
        ("mixed", {"prefill", "decode"}),
    ):
        assert value(metrics, "target_calls_total", kind=kind) == kinds.count(expected)
    assert total(metrics, "target_calls") == len(calls) < len(records)
    assert total(metrics, "draft_calls") == len(draft.calls) > 0
    assert value(metrics, "draft_calls_total", kind="prefill") > 0
    assert value(metrics, "step_sequences_count") == value(metrics, "step_seconds_count") == len(calls)
    assert value(metrics, "step_sequences_sum") == sum(map(len, calls))
    assert value(metrics, "step_tokens_sum") == sum(len(span.tokens) for spans in calls for span in spans)
    assert total(metrics, "sequence_steps") == len(records)


def test_tokens_are_counted_as_they_come() -> None:
    metrics, running = new_metrics(), engine(language_model())
    running.submit(REQUEST)
    seen = []
    while updates := running.step():
        metrics.observe_steps(updates)
        seen.append(
            (value(metrics, "prefill_tokens_total"), value(metrics, "generation_tokens_total")),
        )
    assert seen == [(4, n) for n in range(1, 13)]


def test_times_of_a_step_are_counted_once_and_add_up() -> None:
    metrics = new_metrics()
    drafter = model_drafter(LANGUAGE)
    records = run(metrics, engine(language_model(), drafter), REQUEST, replace(REQUEST, prompt=PROMPT[:2]))
    steps = {record.step: record for record in records}  # what a step's sequences share is the same in each
    parts = {
        part: value(metrics, "step_part_seconds_total", part=part)
        for part in ("target", "draft_model", "drafting", "sampling", "other")
    }
    assert parts["target"] == pytest.approx(sum(r.verify_s + r.read_s for r in steps.values()))
    model_s = sum(r.work.model_s + r.work.prefill_s for r in steps.values())
    assert parts["draft_model"] == pytest.approx(model_s)
    assert parts["sampling"] == pytest.approx(sum(r.sampling_s for r in records))
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(value(metrics, "step_seconds_sum"))
    assert value(metrics, "step_seconds_sum") < sum(r.total_s for r in records)


def test_drafts_are_counted_by_drafter_and_position() -> None:
    """Two right tokens, then wrong ones: of 12 tokens three a step are made with drafts of 4, 4, 4 and
    2 (no room for more), the last of which stands whole."""
    metrics = new_metrics()
    run(metrics, engine(language_model(), ScriptedDrafter(oracle(LANGUAGE, 2), "copycat")), REQUEST)
    assert value(metrics, "spec_decode_num_drafts_total") == 4
    assert value(metrics, "spec_decode_num_draft_tokens_total", drafter="copycat") == 14
    assert value(metrics, "spec_decode_num_accepted_tokens_total", drafter="copycat") == 8
    for name, expected in (("draft", [4, 4, 3, 3]), ("accepted", [4, 4, 0, 0])):
        counted = [
            value(metrics, f"spec_decode_num_{name}_tokens_per_pos_total", position=str(i)) for i in range(4)
        ]
        assert counted == expected


# Generations


def finished(request: Request = REQUEST, drafter: Drafter | None = None) -> Completion:
    drafters = (drafter or ScriptedDrafter(oracle(LANGUAGE, 2), "copycat"),)
    return engine(language_model(), *drafters).generate(request)


def test_a_generation_is_counted_when_it_ends() -> None:
    metrics, done = new_metrics(), finished()
    metrics.observe_request(done, queued_s=0.5, key="alice", speedup=1.3)
    ends = [record.end_s for record in done.records if record.tokens]
    assert len(ends) == 4
    assert value(metrics, "requests_finished_total", finish_reason="length", key="alice") == 1
    assert value(metrics, "prompt_tokens_total") == 5 and value(metrics, "prompt_tokens_cached_total") == 0
    assert value(metrics, "key_tokens_total", key="alice", kind="prompt") == 5
    assert value(metrics, "key_tokens_total", key="alice", kind="generation") == 12
    expected = {
        "time_to_first_token_seconds": (1, 0.5 + ends[0]),
        "e2e_request_latency_seconds": (1, 0.5 + ends[3]),
        "inter_token_latency_seconds": (3, ends[3] - ends[0]),
        "request_queue_time_seconds": (1, 0.5),
        "request_time_per_output_token_seconds": (1, (ends[3] - ends[0]) / 9),
        "request_prompt_tokens": (1, 5),
        "request_generation_tokens": (1, 12),
        "request_estimated_speedup": (1, 1.3),
        "request_prefill_time_seconds": (1, sum(r.read_s for r in done.records)),
        "request_decode_time_seconds": (1, sum(r.total_s - r.read_s for r in done.records)),
    }
    for name, (count, sum_) in expected.items():
        assert value(metrics, f"{name}_count") == count, name
        assert value(metrics, f"{name}_sum") == pytest.approx(sum_), name


def test_a_generation_without_tokens_has_no_latencies() -> None:
    metrics = new_metrics()
    nothing = replace(finished(), tokens=(), records=(), finish_reason="cancelled")
    metrics.observe_request(nothing, queued_s=2.0)
    assert value(metrics, "requests_finished_total", finish_reason="cancelled", key="") == 1
    assert value(metrics, "request_queue_time_seconds_sum") == 2
    for name in ("time_to_first_token", "e2e_request_latency", "inter_token_latency"):
        assert value(metrics, f"{name}_seconds_count") == 0
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_estimated_speedup_count") == 0


# Errors, gauges, labels


def test_gauges_are_read_when_somebody_asks() -> None:
    states: list[WorkerState] = []
    metrics = Metrics()
    metrics.states = lambda: states
    states.append(replace(IDLE, running=3, waiting=7, kv_tokens_used=512, draining=True))
    text = metrics.render()[0].decode()
    read = {sample.name: sample.value for family in read_text(text) for sample in family.samples}
    assert read["outrider_num_requests_running"] == 3
    assert read["outrider_num_requests_waiting"] == 7
    assert read["outrider_max_requests_running"] == 4
    assert read["outrider_kv_cache_used_tokens"] == 512
    assert read["outrider_kv_cache_capacity_tokens"] == 1024
    assert read["outrider_draining"] == 1
    states.append(replace(IDLE, running=1))  # of another model: what is shown is the sum
    text = metrics.render()[0].decode()
    assert "outrider_num_requests_running 4.0" in text and "outrider_draining 1.0" in text


# What is sent


def everything() -> Metrics:
    """A server on which all has happened that is counted."""
    one_each = {"memory": 1, "disk": 1}
    tiers = TierCounts(one_each, one_each, one_each, misses=1, kept=1, not_written=1, refused=1)
    metrics = new_metrics(WorkerState(1, 1, 4, 5, 1024, True, tiers=tiers))
    run(metrics, engine(language_model(), model_drafter(LANGUAGE)), REQUEST, REQUEST)
    words = Pieces("a", "b")
    limited = engine(FakeModel(words, LANGUAGE_AB), constrain=lambda _grammar: OneOf(words, ["ab"]))
    run(metrics, limited, Request((0,), GREEDY, grammar=Grammar("choice", '["ab"]')))
    running = engine(language_model())
    for _ in range(2):
        metrics.observe_request(running.generate(REQUEST), queued_s=0.1, key="alice", speedup=1.0)
    metrics.observe_error(500, "server_error")
    return metrics


LANGUAGE_AB = scripted_logits(Pieces("a", "b"), "ab")


def families(metrics: Metrics) -> dict[str, float]:
    """Every family of ours by its full name, and the sum of its samples."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): sum(
            sample.value for sample in family.samples if not sample.name.endswith("_created")
        )
        for family in read_text(metrics.render()[0].decode())
        if family.name.startswith("outrider_") and not family.name.endswith("_created")
    }


def test_nothing_that_is_offered_stays_at_zero() -> None:
    assert [name for name, sum_ in families(everything()).items() if sum_ == 0] == []


# The documents


def test_the_page_lists_every_metric() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(outrider_\w+)", page, re.MULTILINE))
    assert listed == set(families(everything()))


def test_the_dashboard_asks_for_what_exists() -> None:
    board = (DOCS / "grafana" / "outrider.json").read_text(encoding="utf-8")
    text = everything().render()[0].decode()
    known = {sample.name for family in read_text(text) for sample in family.samples}
    queries = "".join(re.findall(r'"expr": "(.*)"', board))
    asked = set(re.findall(r"\b(?:outrider|process)_[a-z_]+\b", queries))
    assert len(asked) > 25 and asked <= known, asked - known
