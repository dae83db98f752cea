"""What `/metrics` tells Prometheus: collectors that are fed step records and finished generations.

Every count is taken from a `StepRecord` or a `Completion`, every time is theirs; only the gauges are read
when somebody asks. Names follow vLLM's where it has the same metric (docs/metrics.md lists both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.core.data import Completion
from outrider.server.collectors import Bounded, RequestCollectors, StepCollectors, counter
from outrider.server.worker import StepView, WorkerState

MAX_CODES = 40


class Metrics:
    """All collectors of one server, in a registry of their own.

    `state` is called at each scrape. `model` and `build` become labels of two metrics that are always 1.
    `observe_…` may be called from any thread.
    """

    def __init__(
        self, state: Callable[[], WorkerState], *, model: Mapping[str, str], build: Mapping[str, str]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._steps = StepCollectors(self.registry)
        self._requests = RequestCollectors(self.registry)
        self._errors = counter(self.registry, "errors", "Requests that got an error", "status", "code")
        self._codes = Bounded(MAX_CODES)
        self.registry.register(_Gauges(state))
        for name, values in (("model", model), ("build", build)):
            info = Info(f"outrider_{name}", f"The {name} that is served", registry=self.registry)
            info.info({key: str(value) for key, value in values.items()})
        ProcessCollector(registry=self.registry)

    def observe_steps(self, updates: StepView) -> None:
        """Count one step of the engine: the updates of all sequences that took part in it. What they share
        (the target's call, the drafters' work, the times) counts once."""
        if updates:
            self._steps.observe([update.record for update in updates])

    def observe_request(
        self, completion: Completion, *, queued_s: float = 0.0, key: str = "", speedup: float | None = None
    ) -> None:
        """Count one generation that has ended, of whatever finish reason.

        `queued_s` is how long it waited before the engine took it, `key` the name of the API key that
        it came with (empty: none), `speedup` its estimated speed-up over plain decoding.
        """
        self._requests.observe(completion, queued_s, key, speedup)

    def observe_error(self, status: int, code: str) -> None:
        """Count a request that got an error: its HTTP status and the error's code."""
        self._errors.labels(str(status), self._codes(code)).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type: OpenMetrics where the `Accept` header names it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Gauges(Collector):
    """The worker's state at the moment of a scrape."""

    def __init__(self, state: Callable[[], WorkerState]) -> None:
        self._state = state

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else registering would ask for the state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, help_, value in (
            ("num_requests_running", "Generations that the engine works on", state.running),
            ("num_requests_waiting", "Generations that wait for a sequence", state.waiting),
            ("max_requests_running", "Sequences that the engine has", state.max_running),
            ("kv_cache_used_tokens", "Tokens whose KV is kept", state.kv_tokens_used),
            ("kv_cache_capacity_tokens", "Tokens that the KV cache has room for", state.kv_tokens_capacity),
            ("draining", "1 while the server takes no new requests and ends", int(state.draining)),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", help_, value=value)
