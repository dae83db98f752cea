"""Calibration finds the curve that a scripted clock hides, within its time, and leaves no trace."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.options import measure_side_by_side
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError
from outrider.costs import CallCosts
from outrider.costs.calibrate import calibrate
from outrider.models.embedded import embedded_default
from timed_models import TimedModel, noise, stairs_s
from tiny_gguf import write_tiny


def measured(costs: CallCosts, context: int = 0) -> dict[int, float]:
    """Seconds by size of the points at a context."""
    return {p.num_tokens: p.seconds for p in costs.points if p.context_tokens == context}


def test_every_measured_size_is_exact_and_others_lie_on_the_line_between_them() -> None:
    model = TimedModel()
    costs = calibrate(model, seconds=200, clock=model.clock)
    found = measured(costs)
    assert found == {n: pytest.approx(stairs_s(n)) for n in found}
    assert set(found) >= {*range(1, 18), 24, 25, 32, 33, 64} and not {26, 27} & set(found)
    assert found[4] < found[3] and found[16] < found[15], "stairs are kept"
    middle = (stairs_s(25) * 1 + stairs_s(28) * 2) / 3
    assert costs.call_s(27, context=0) == pytest.approx(middle)


def test_short_drafts_are_measured_first_when_time_is_short() -> None:
    model = TimedModel()
    found = measured(calibrate(model, seconds=6, clock=model.clock))
    assert set(found) >= set(range(1, 9)) | {16} and 64 not in found


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("max_sequences", [1, 4])
def test_the_time_is_kept(seconds: float, max_sequences: int) -> None:
    model = TimedModel(max_sequences=max_sequences)
    costs = calibrate(model, seconds=seconds, clock=model.clock)
    assert measured(costs)[1] == pytest.approx(stairs_s(1))
    warm_up_s = 2 * stairs_s(1) + stairs_s(4)
    assert model.now <= max(seconds, 3 * stairs_s(1)) + warm_up_s + 1e-9


def test_firm_medians_end_it_early() -> None:
    model = TimedModel()
    calibrate(model, seconds=10_000, clock=model.clock)
    at_start = [len(call[0].tokens) for call in model.calls if call[0].start == 0 and call[0].rows]
    assert at_start.count(5) == at_start.count(64) == 5


def test_the_context_slope_is_found() -> None:
    model = TimedModel()
    costs = calibrate(model, seconds=400, clock=model.clock)
    assert measured(costs, 512) and measured(costs, 8192)
    for n in (1, 2, 4, 8, 16, 32):
        assert costs.call_s(n, context=4096) == pytest.approx(stairs_s(n, 4096), rel=0.01)
    assert costs.prefill_token_s == pytest.approx(stairs_s(128, 8064) / 128, rel=0.05)


def test_outliers_do_not_show() -> None:
    model = TimedModel(disturb=noise(seed=3, spread=0.05, outliers=0.08))
    found = measured(calibrate(model, seconds=150, clock=model.clock))
    assert found == {n: pytest.approx(stairs_s(n), rel=0.15) for n in found if n <= 16} | {
        n: pytest.approx(stairs_s(n), rel=0.4) for n in found if n > 16
    }


@pytest.mark.parametrize("rows", ["all", "last"])
def test_the_rows_are_those_that_the_engine_asks_for(rows: str) -> None:
    model = TimedModel()
    calibrate(model, seconds=5, clock=model.clock, rows="all" if rows == "all" else "last")
    asked = {(len(span.tokens), span.rows) for call in model.calls for span in call if span.rows}
    assert asked and all(given == (size if rows == "all" else 1) for size, given in asked)


def test_the_models_limits_are_kept() -> None:
    # The fake model raises where a call leaves its batch, its rows or its context.
    model = TimedModel(context_length=20, max_batch_tokens=12, max_rows=10)
    assert max(measured(calibrate(model, seconds=50, clock=model.clock))) == 10


def test_a_model_that_cannot_rewind_is_measured_at_an_empty_context() -> None:
    model = TimedModel(rewind="none")
    costs = calibrate(model, seconds=50, clock=model.clock)
    assert {point.context_tokens for point in costs.points} == {0} and len(costs.points) > 8


class Card(TimedModel):
    """A GPU of stairs after 8 tokens: the first of equal calls takes 1.3 times as long as those that repeat
    it, the second three times."""

    def __init__(self) -> None:
        super().__init__(lambda n, c, _m: (0.008 if n <= 8 else 0.012) + 1e-7 * c)
        self._row = (0, 0)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        tokens, before = sum(len(span.tokens) for span in spans), self.now
        self._row = (tokens, self._row[1] + 1 if tokens == self._row[0] else 0)
        rows = super().decode(spans)
        self.now += (self.now - before) * (0.3, 2.0, 0.0)[min(self._row[1], 2)]
        return rows


def test_on_a_gpu_plain_decoding_is_what_equal_calls_take_and_drafts_what_a_switch_takes() -> None:
    model = Card()
    costs = calibrate(model, seconds=4.5, on_gpu=True, clock=model.clock)
    assert model.now <= 5.0
    assert set(measured(costs)) >= {1, 2, 3, 4, 8, 9, 16}
    calls_s = [0.008, *[0.0104] * 7, 0.0156]
    assert costs.calls_s(9, context=0).tolist() == pytest.approx(calls_s, rel=0.01)
    for calls in ([1] * 20, [9, 1, 1] * 20, [1, 1, 1, 9, 9, 9, 5] * 10, [1] * 20):
        for n in calls:
            before = model.now
            model.decode([Span(0, tuple([0] * n), model.length(0), n)])
            costs.observe(n, model.now - before, context=0)
            model.truncate(0, 0)
    assert costs.drift == pytest.approx(1.0, rel=0.02)


class Interrupted(TimedModel):
    """Raises in its 40th call."""

    error: type[BaseException] = KeyboardInterrupt

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        if len(self.calls) == 40:
            raise self.error("now")
        return rows


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_left_empty(error: type[BaseException]) -> None:
    model = Interrupted(max_sequences=3)
    model.error = error
    model.decode([Span(1, (0, 1, 2), 0, 0)])
    with pytest.raises(error):
        calibrate(model, seconds=100, clock=model.clock)
    assert [model.length(sequence) for sequence in range(3)] == [0, 0, 0]
    calibrate(model, seconds=20, clock=model.clock)
    assert [model.length(sequence) for sequence in range(3)] == [0, 0, 0]


def test_a_failing_call_is_passed_on() -> None:
    model = TimedModel()
    model.fail_at_call = 20
    with pytest.raises(BackendError):
        calibrate(model, seconds=100, clock=model.clock)
    assert model.length(0) == 0


def test_progress_runs_from_nothing_to_one() -> None:
    model, parts = TimedModel(), list[float]()
    calibrate(model, seconds=5, clock=model.clock, progress=parts.append)
    assert parts == sorted(parts) and 0 <= parts[0] < 0.1 and 0.8 < parts[-1] <= 1


def test_models_side_by_side_share_what_slows_them() -> None:
    clock = TimedModel()

    class Shared(TimedModel):
        """A model that moves the common clock."""

        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            before = self.now
            rows = super().decode(spans)
            clock.now += (self.now - before) * (1 + clock.now / 60)  # it grows ever slower
            return rows

    models = [Shared(), Shared(lambda n, c, m: 0.9 * stairs_s(n, c, m))]
    slow, fast = measure_side_by_side(models, seconds=600, clock=clock.clock)
    for n in (1, 2, 4, 16, 32):
        assert fast.call_s(n, context=0) / slow.call_s(n, context=0) == pytest.approx(0.9, rel=0.02)
    assert fast.prefill_s(100) / slow.prefill_s(100) == pytest.approx(0.9, rel=0.05)
    assert [model.length(0) for model in models] == [0, 0]


def test_side_by_side_at_a_context_that_the_time_allows() -> None:
    models = [TimedModel(), TimedModel()]
    measure_side_by_side(models, seconds=1000, context=300, clock=lambda: models[0].now + models[1].now)
    starts = {span.start for call in models[0].calls for span in call if span.rows}
    assert starts == {0, 300}  # the warm-up, and all that counts


def test_a_tiny_model_of_the_real_backend(tmp_path: Path) -> None:
    weights = Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))
    model = weights.open(512, max_sequences=2)
    costs = calibrate(model, seconds=0.2)
    assert costs.is_measured and measured(costs)[1] > 0
    assert [model.length(sequence) for sequence in range(2)] == [0, 0]
    weights.close()


@pytest.mark.slow
def test_the_embedded_model() -> None:
    weights = Weights(embedded_default(), LoadOptions(threads=1))
    costs = calibrate(weights.open(2048), seconds=4.0)
    found = measured(costs)
    assert set(found) >= {1, 2, 3, 4, 5, 6, 8}
    assert found[8] > found[1]
    weights.close()
