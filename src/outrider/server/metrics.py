"""The metrics of `/metrics`, for Prometheus. Counts and times are taken from a `StepRecord` or a
`Completion`; gauges are read at each scrape. Names follow vLLM's where it has the same metric
(docs/metrics.md). No label has a value that a client chose."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from outrider.core.data import Completion, StepRecord, Update
from outrider.server.worker import WorkerState
from outrider.session.readout import read_out

POSITIONS = 16
"""positions of a draft that are counted apart; later ones share a label"""

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

_Labels = Mapping[str, Sequence[str]]
"""The values of each label that are there from the start."""

_KINDS = {"kind": ("decode", "prefill")}
_COUNTERS: dict[str, tuple[str, _Labels]] = {
    # of steps
    "target_calls": ("Calls to the target model", {"kind": ("decode", "prefill", "mixed")}),
    "draft_calls": ("Calls to draft models", _KINDS),
    "step_part_seconds": (
        "Seconds of all steps by part",
        {"part": ("target", "draft_model", "drafting", "sampling", "other")},
    ),
    "constraint_seconds": ("Seconds spent on grammars, of the parts", {}),
    "sequence_steps": ("Steps, counted for each sequence", _KINDS),
    "prefill_tokens": ("Prompt tokens evaluated in prefill steps", {}),
    "generation_tokens": ("Tokens generated", {}),
    "spec_decode_num_drafts": ("Drafts offered to the target", {}),
    "spec_decode_num_draft_tokens": ("Tokens drafted", {"drafter": ()}),
    "spec_decode_num_accepted_tokens": ("Drafted tokens emitted", {"drafter": ()}),
    "spec_decode_num_draft_tokens_per_pos": ("Tokens drafted at a position", {"position": ()}),
    "spec_decode_num_accepted_tokens_per_pos": ("Of these, emitted", {"position": ()}),
    # of generations and requests
    "requests_finished": ("Generations that ended", {"finish_reason": (), "key": ()}),
    "key_tokens": ("Tokens by API key", {"key": (), "kind": ()}),
    "prompt_tokens": ("Tokens of prompts", {}),
    "prompt_tokens_cached": ("Of these, with KV kept from earlier ones", {}),
    "errors": ("Requests that got an error", {"status": (), "code": ()}),
}
"""Help and labels of each counter, `outrider_NAME_total`."""

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "step_seconds": ("Seconds of a step", _GAP_SECONDS),
    "step_sequences": ("Sequences in a target call", _SEQUENCES),
    "step_tokens": ("Tokens in a target call", _CALL_TOKENS),
    "time_to_first_token_seconds": ("Seconds from submission to the first token, waiting included", _SECONDS),
    "e2e_request_latency_seconds": ("Seconds from submission to the last token, waiting included", _SECONDS),
    "request_queue_time_seconds": ("Seconds that a request waited for a sequence", _SECONDS),
    "request_prefill_time_seconds": ("Seconds that reading a prompt took", _SECONDS),
    "request_decode_time_seconds": ("Seconds of the steps that generated, but for that", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean seconds of a token after the first", _SECONDS),
    "inter_token_latency_seconds": ("Seconds between steps that emitted tokens", _GAP_SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer", _TOKENS),
    "request_estimated_speedup": ("Estimated speed-up over plain decoding", _SPEEDUPS),
}
"""Help and buckets of each histogram, `outrider_NAME`."""

_GAUGES = {
    "num_requests_running": ("Generations that the engine works on", "running"),
    "num_requests_waiting": ("Generations that wait for a sequence", "waiting"),
    "max_requests_running": ("Sequences that the engine has", "max_running"),
    "kv_cache_used_tokens": ("Tokens whose KV is kept", "kv_tokens_used"),
    "kv_cache_capacity_tokens": ("Tokens that the KV cache has room for", "kv_tokens_capacity"),
    "draining": ("1 while the server takes no new requests and ends", "draining"),
}
"""Help of each gauge, `outrider_NAME`, and the field of the worker's state that it shows."""


_TIERS: dict[str, tuple[str, str, type[CounterMetricFamily | GaugeMetricFamily]]] = {
    "kv_tier_hits": ("Prompts whose beginning was restored", "hits", CounterMetricFamily),
    "kv_tier_restored_tokens": ("Tokens of these beginnings", "restored_tokens", CounterMetricFamily),
    "kv_tier_bytes": ("Bytes that are kept", "num_bytes", GaugeMetricFamily),
    "kv_tier_misses": ("Prompts of which nothing was restored", "misses", CounterMetricFamily),
    "kv_tier_kept": ("Texts that left the cache and were kept", "kept", CounterMetricFamily),
    "kv_tier_not_written": ("Texts that were not written to disk", "not_written", CounterMetricFamily),
    "kv_tier_refused": ("Files and copies of no use", "refused", CounterMetricFamily),
}
"""Help of each metric of the tiers, `outrider_NAME`, the field of `TierCounts`, and its type."""


class Metrics:
    """All collectors of one model, in a registry of their own. `observe_…` may be called from any thread.
    `build` is the library's; `facts` about the model become labels."""

    def __init__(self, name: str = "", build: str = "", **facts: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.states: Callable[[], Sequence[WorkerState]] = tuple
        """of the loaded models; called at each scrape"""
        self._counters: dict[str, Counter] = {}
        for counted, (help_, labels) in _COUNTERS.items():
            counter = Counter(f"outrider_{counted}", help_, tuple(labels), registry=self.registry)
            self._counters[counted] = counter
            for known in labels.values():
                for value in known:
                    counter.labels(value)
        self._histograms = {
            observed: Histogram(f"outrider_{observed}", help_, registry=self.registry, buckets=buckets)
            for observed, (help_, buckets) in _HISTOGRAMS.items()
        }
        for gauge_name, (help_, shown) in _GAUGES.items():
            gauge = Gauge(f"outrider_{gauge_name}", help_, registry=self.registry)
            gauge.set_function(partial(self._gauge, shown))
        builds = {"version": version("outrider"), "llama_cpp": build}
        for what, found in (("model", {"name": name} | facts), ("build", builds)):
            Info(f"outrider_{what}", f"The {what} that is served", registry=self.registry).info(found)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """What is collected here depends on the state."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What became of KV that left the cache; nothing where there are no tiers."""
        counts = [state.tiers for state in self.states() if state.tiers is not None]
        for name, (help_, field, kind) in _TIERS.items() if counts else ():
            values = [getattr(each, field) for each in counts]
            by_tier = isinstance(values[0], dict)
            family = kind(f"outrider_{name}", help_, labels=["tier"] if by_tier else [])
            for tier in values[0] if by_tier else [None]:
                sum_ = sum(value[tier] if tier else value for value in values)
                family.add_metric([tier] if tier else [], sum_)
            yield family

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type: OpenMetrics where the `Accept` header names it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _gauge(self, name: str) -> float:
        values = [getattr(state, name) for state in self.states()]
        return float(any(values) if name == "draining" else sum(values))

    def _count(self, name: str, amount: float, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def observe_error(self, status: int, code: str) -> None:
        """Count a request that got an error: its HTTP status and the error's code."""
        self._count("errors", 1, str(status), code)

    # Steps

    def observe_steps(self, updates: Sequence[Update]) -> None:
        """Count one step of the engine from the updates of its sequences. What they share (the target's call,
        the drafters' work, the times) counts once."""
        records = [update.record for update in updates]
        if records:
            self._observe_call(records)
        for record in records:
            self._count("sequence_steps", 1, record.kind)
            self._count("constraint_seconds", record.constraint_s)
            self._count("generation_tokens", len(record.tokens))
            read = record.num_evaluated if record.kind == "prefill" else record.read_tokens
            self._count("prefill_tokens", read)
            if record.draft:
                self._observe_draft(record)

    def _observe_call(self, records: Sequence[StepRecord]) -> None:
        """What the sequences share. Each verifies its own draft; the last record has the whole step."""
        shared, work = records[-1], records[-1].work
        total_s = max(record.total_s for record in records)
        parts = {
            "target": shared.verify_s + shared.read_s,
            "draft_model": work.model_s + work.prefill_s,
            "drafting": shared.draft_s - work.model_s,
            "sampling": sum(record.sampling_s for record in records),
        }
        parts["other"] = total_s - sum(parts.values())
        for part, seconds in parts.items():
            self._count("step_part_seconds", max(seconds, 0.0), part)
        is_mixed = len({record.kind for record in records}) > 1 or any(r.read_tokens for r in records)
        self._count("target_calls", 1, "mixed" if is_mixed else shared.kind)
        self._count("draft_calls", work.calls, "decode")
        self._count("draft_calls", work.prefill_calls, "prefill")
        self._observe("step_sequences", shared.num_sequences)
        self._observe("step_tokens", shared.batch_tokens)
        self._observe("step_seconds", total_s)

    def _observe_draft(self, record: StepRecord) -> None:
        self._count("spec_decode_num_drafts", 1)
        sources = record.draft.sources
        for drafter, number in Tally(sources).items():
            self._count("spec_decode_num_draft_tokens", number, drafter)
        for drafter, number in Tally(sources[: record.num_accepted]).items():
            self._count("spec_decode_num_accepted_tokens", number, drafter)
        for position in range(len(sources)):
            label = str(position) if position < POSITIONS else f"{POSITIONS}+"
            self._count("spec_decode_num_draft_tokens_per_pos", 1, label)
            self._count("spec_decode_num_accepted_tokens_per_pos", position < record.num_accepted, label)

    # Generations

    def observe_request(
        self, completion: Completion, *, queued_s: float = 0.0, key: str = "", speedup: float | None = None
    ) -> None:
        """Count one generation that has ended. `queued_s` is how long it waited before the engine took it,
        `key` the name of its API key (empty: none), `speedup` the estimate over plain decoding."""
        readout = read_out(completion)
        self._count("requests_finished", 1, completion.finish_reason, key)
        self._count("prompt_tokens", readout.prompt_tokens)
        self._count("prompt_tokens_cached", readout.reused_tokens)
        self._count("key_tokens", readout.prompt_tokens, key, "prompt")
        self._count("key_tokens", readout.generated_tokens, key, "generation")
        self._observe("request_prompt_tokens", readout.prompt_tokens)
        self._observe("request_generation_tokens", readout.generated_tokens)
        self._observe("request_queue_time_seconds", queued_s)
        self._observe("request_prefill_time_seconds", readout.prefill_s)
        self._observe("request_decode_time_seconds", readout.decode_s)
        if speedup is not None:
            self._observe("request_estimated_speedup", speedup)
        if bursts := [record for record in completion.records if record.tokens]:
            self._observe_bursts(bursts, queued_s, len(completion.tokens))

    def _observe_bursts(self, bursts: Sequence[StepRecord], queued_s: float, num_tokens: int) -> None:
        first_s, last_s = bursts[0].end_s, bursts[-1].end_s
        self._observe("time_to_first_token_seconds", queued_s + first_s)
        self._observe("e2e_request_latency_seconds", queued_s + last_s)
        for earlier, later in pairwise(bursts):
            self._observe("inter_token_latency_seconds", later.end_s - earlier.end_s)
        if num_later := num_tokens - len(bursts[0].tokens):
            self._observe("request_time_per_output_token_seconds", (last_s - first_s) / num_later)
