"""Counters and histograms of steps and of generations: what is counted, and when.

Label values are bounded: what comes after the first so many of a kind is "other".
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram

from outrider.core.data import Completion, StepRecord
from outrider.readout import read_out

OTHER = "other"
MAX_DRAFTERS = 16
MAX_KEYS = 20
POSITIONS = 16
"""positions of a draft that are counted apart; those behind them are "16+" """

_KINDS = ("decode", "prefill")
_PARTS = ("target", "draft_model", "drafting", "sampling", "other")
_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_GAP_SECONDS = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1),
    *(0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CALL_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
_SEQUENCES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
_SPEEDUPS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


class Bounded:
    """Label values: the first `limit` of them as they are, all others as one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known and len(self._known) < self._limit:
            self._known.add(value)
        return value if value in self._known else OTHER


class StepCollectors:
    """What is counted while generations run."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafters = Bounded(MAX_DRAFTERS)
        self._target_calls = counter(
            registry, "target_calls", "Calls to the target model", "kind", values=(*_KINDS, "mixed")
        )
        self._draft_calls = counter(registry, "draft_calls", "Calls to draft models", "kind", values=_KINDS)
        self._seconds = counter(
            registry, "step_part_seconds", "Seconds of all steps by part", "part", values=_PARTS
        )
        self._constraint = counter(registry, "constraint_seconds", "Seconds spent on grammars, of the parts")
        self._step = histogram(registry, "step_seconds", "Seconds of a step", _GAP_SECONDS)
        self._sequences = histogram(registry, "step_sequences", "Sequences in a target call", _SEQUENCES)
        self._tokens = histogram(registry, "step_tokens", "Tokens in a target call", _CALL_TOKENS)
        self._shares = counter(
            registry, "sequence_steps", "Steps, counted for each sequence", "kind", values=_KINDS
        )
        self._prefill = counter(registry, "prefill_tokens", "Prompt tokens evaluated in prefill steps")
        self._generated = counter(registry, "generation_tokens", "Tokens generated")
        prefix = "spec_decode_num_"
        self._drafts = counter(registry, f"{prefix}drafts", "Drafts offered to the target")
        self._drafted = counter(registry, f"{prefix}draft_tokens", "Tokens drafted", "drafter")
        self._accepted = counter(registry, f"{prefix}accepted_tokens", "Drafted tokens emitted", "drafter")
        self._drafted_at = counter(
            registry, f"{prefix}draft_tokens_per_pos", "Tokens drafted at a position", "position"
        )
        self._accepted_at = counter(
            registry, f"{prefix}accepted_tokens_per_pos", "Of these, emitted", "position"
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        self._observe_call(records)
        for record in records:
            self._shares.labels(record.kind).inc()
            self._constraint.inc(record.constraint_s)
            self._generated.inc(len(record.tokens))
            if record.kind == "prefill":
                self._prefill.inc(record.num_evaluated)
            if record.draft:
                self._observe_draft(record)

    def _observe_call(self, records: Sequence[StepRecord]) -> None:
        """What the sequences share; each judges its own draft, and the last to be recorded saw it all."""
        shared = records[-1]
        kinds = {record.kind for record in records}
        self._target_calls.labels("mixed" if len(kinds) > 1 else shared.kind).inc()
        self._draft_calls.labels("decode").inc(shared.work.calls)
        self._draft_calls.labels("prefill").inc(shared.work.prefill_calls)
        self._sequences.observe(shared.num_sequences)
        self._tokens.observe(shared.batch_tokens)
        total_s = max(record.total_s for record in records)
        self._step.observe(total_s)
        parts = {
            "target": shared.verify_s,
            "draft_model": shared.work.model_s + shared.work.prefill_s,
            "drafting": shared.draft_s - shared.work.model_s,
            "sampling": sum(record.sampling_s for record in records),
        }
        parts["other"] = total_s - sum(parts.values())
        for part, seconds in parts.items():
            self._seconds.labels(part).inc(max(seconds, 0.0))

    def _observe_draft(self, record: StepRecord) -> None:
        self._drafts.inc()
        sources = [self._drafters(source) for source in record.draft.sources]
        for drafter, number in Tally(sources).items():
            self._drafted.labels(drafter).inc(number)
        for drafter, number in Tally(sources[: record.num_accepted]).items():
            self._accepted.labels(drafter).inc(number)
        for position in range(len(sources)):
            label = str(position) if position < POSITIONS else f"{POSITIONS}+"
            self._drafted_at.labels(label).inc()
            self._accepted_at.labels(label).inc(position < record.num_accepted)


class RequestCollectors:
    """What is counted when a generation has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._keys = Bounded(MAX_KEYS)
        self._finished = counter(
            registry, "requests_finished", "Generations that ended", "finish_reason", "key"
        )
        self._key_tokens = counter(registry, "key_tokens", "Tokens by API key", "key", "kind")
        self._prompt = counter(registry, "prompt_tokens", "Tokens of prompts")
        self._cached = counter(registry, "prompt_tokens_cached", "Of these, with KV kept from earlier ones")
        seconds = {
            "time_to_first_token": "Seconds from submission to the first token, waiting included",
            "e2e_request_latency": "Seconds from submission to the last token, waiting included",
            "request_queue_time": "Seconds that a request waited for a sequence",
            "request_prefill_time": "Seconds of the steps that read a prompt",
            "request_decode_time": "Seconds of the steps that generated",
            "request_time_per_output_token": "Mean seconds of a token after the first",
        }
        self._seconds = {
            name: histogram(registry, f"{name}_seconds", help_, _SECONDS) for name, help_ in seconds.items()
        }
        self._gaps = histogram(
            registry, "inter_token_latency_seconds", "Seconds between steps that emitted tokens", _GAP_SECONDS
        )
        self._prompts = histogram(registry, "request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answers = histogram(registry, "request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._speedups = histogram(
            registry, "request_estimated_speedup", "Estimated speed-up over plain decoding", _SPEEDUPS
        )

    def observe(self, completion: Completion, queued_s: float, key: str, speedup: float | None) -> None:
        readout = read_out(completion)
        key = self._keys(key) if key else ""
        self._finished.labels(completion.finish_reason, key).inc()
        self._prompt.inc(readout.prompt_tokens)
        self._cached.inc(readout.reused_tokens)
        self._key_tokens.labels(key, "prompt").inc(readout.prompt_tokens)
        self._key_tokens.labels(key, "generation").inc(readout.generated_tokens)
        self._prompts.observe(readout.prompt_tokens)
        self._answers.observe(readout.generated_tokens)
        self._seconds["request_queue_time"].observe(queued_s)
        self._seconds["request_prefill_time"].observe(readout.prefill_s)
        self._seconds["request_decode_time"].observe(readout.decode_s)
        if speedup is not None:
            self._speedups.observe(speedup)
        self._observe_bursts(completion, queued_s)

    def _observe_bursts(self, completion: Completion, queued_s: float) -> None:
        """When tokens came; nothing for a generation that emitted none."""
        bursts = [record for record in completion.records if record.tokens]
        if not bursts:
            return
        first_s, last_s = bursts[0].end_s, bursts[-1].end_s
        self._seconds["time_to_first_token"].observe(queued_s + first_s)
        self._seconds["e2e_request_latency"].observe(queued_s + last_s)
        for earlier, later in pairwise(bursts):
            self._gaps.observe(later.end_s - earlier.end_s)
        if behind := len(completion.tokens) - len(bursts[0].tokens):
            self._seconds["request_time_per_output_token"].observe((last_s - first_s) / behind)


def counter(
    registry: CollectorRegistry, name: str, help_: str, *labels: str, values: Sequence[str] = ()
) -> Counter:
    """A counter `outrider_NAME_total`; for `values` of its only label there is a 0 from the start."""
    made = Counter(f"outrider_{name}", help_, labels, registry=registry)
    for value in values:
        made.labels(value)
    return made


def histogram(registry: CollectorRegistry, name: str, help_: str, buckets: Sequence[float]) -> Histogram:
    """A histogram `outrider_NAME` without labels."""
    return Histogram(f"outrider_{name}", help_, registry=registry, buckets=buckets)
