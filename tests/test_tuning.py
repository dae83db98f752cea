"""The load options that suit a machine: tried, judged, remembered; and curves kept for loaded models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import options, scoring
from outrider.backends.tuning.options import choose_options, tune, tuned_options
from outrider.backends.tuning.scoring import costs_of, subject_of
from outrider.core.contracts import Model
from outrider.core.notices import collect_notices
from outrider.costs import CallCosts, CallPoint
from outrider.costs.store import store_refined
from tiny_gguf import write_tiny

Speed = Callable[[LoadOptions, int], float]
"""How many times as long a call over n tokens takes under these options."""


LIBRARIES = {library.backend: library for library in candidates(LoadOptions())}
ONE = LIBRARIES["llama.cpp"]


def named(backend: str = "llama.cpp", **changes: Any) -> LoadOptions:
    """Options under which a library is named."""
    return LoadOptions(backend=backend, library=str(LIBRARIES[backend].file.path), **changes)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(options, "check_build", lambda _path, given, **_settings: (given, None))
    for module in (options, scoring):
        monkeypatch.setattr(module, "physical_cores", lambda: 4)
    monkeypatch.setattr(options, "logical_cores", lambda: 4)
    monkeypatch.setattr(options, "candidates", lambda _given: [ONE])
    return write_tiny(tmp_path / "tiny.gguf")


def script(
    monkeypatch: pytest.MonkeyPatch,
    speed: Speed,
    reading: Callable[[LoadOptions], float] = lambda _given: 1.0,
) -> list[list[LoadOptions]]:
    """Let calls take what `speed` says, and prompts what `reading` says; returns the sets that are measured
    together, as they come."""
    measured: list[list[LoadOptions]] = []

    def measure(models: Sequence[Model], **_settings: Any) -> list[CallCosts]:
        sets = [model.options for model in models if isinstance(model, GgufModel)]
        measured.append(sets)
        return [
            CallCosts(
                [
                    CallPoint(n, (1 + 0.2 * (n - 1)) * speed(given, n), spread_ratio=0.001)
                    for n in (1, 2, 4, 8, 16, 32)
                ],
                prefill_token_s=0.2 * reading(given),
            )
            for given in sets
        ]

    monkeypatch.setattr(options, "measure_side_by_side", measure)
    return measured


def kept(model: Path, given: LoadOptions) -> LoadOptions | None:
    found = tuned_options(model, given)
    return found.options if found else None


def _plain_kernels_win(given: LoadOptions, _n: int) -> float:
    return 1.0 if given.extra_buffer_types else 0.8


def _alike(_given: LoadOptions, _n: int) -> float:
    return 1.0


def test_each_option_is_tried_against_the_best_so_far(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _plain_kernels_win, lambda given: _plain_kernels_win(given, 1))
    found = tune(model, LoadOptions())
    assert found.options == named(extra_buffer_types=False)
    assert [len(sets) for sets in measured] == [3, 3]
    kernels = [(given.extra_buffer_types, given.flash_attention) for given in measured[0]]
    assert kernels == [(True, "auto"), (True, "off"), (False, "auto")]
    assert not any(given.extra_buffer_types for given in measured[1])
    assert [(given.threads, given.threads_batch) for given in measured[1]] == [(0, 0), (2, 2), (3, 3)]
    assert [trial.score for trial in found.trials] == pytest.approx([1.0, 0.8, 1.0, 0.8, 0.8])
    assert "repacked kernels off" in found.trials[1].changed


def test_single_tokens_and_batches_get_threads_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(given: LoadOptions, n: int) -> float:
        fewer = {0: 1.0, 2: 0.7, 3: 0.8}[given.threads]
        return fewer if n == 1 else 1 / fewer

    script(monkeypatch, speed)
    found = tune(model, LoadOptions()).options
    assert (found.threads, found.threads_batch) == (2, 4)


@pytest.mark.parametrize(("plain", "chosen"), [(1.015, True), (1.03, False)])
def test_plain_decoding_is_never_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch, plain: float, chosen: bool
) -> None:
    # Far better at everything but single tokens.
    def speed(given: LoadOptions, n: int) -> float:
        return 1.0 if given.extra_buffer_types else plain if n == 1 else 0.3

    script(monkeypatch, speed)
    assert tune(model, LoadOptions()).options.extra_buffer_types is not chosen


def test_what_is_hardly_better_changes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda given, _n: 1.0 if given == named() else 0.99)
    assert tune(model, LoadOptions()).options == named()
    assert kept(model, LoadOptions()) == named()


def test_a_draft_is_judged_by_its_own_short_calls(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(given: LoadOptions, n: int) -> float:
        return 1.0 if given.extra_buffer_types else 0.9 if n < 3 else 5.0

    script(monkeypatch, speed)
    assert not tune(model, LoadOptions(), draft=True).options.extra_buffer_types
    assert tune(model, LoadOptions()).options.extra_buffer_types


def test_the_choice_is_remembered_for_what_it_was_made_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuned_options(model, LoadOptions()) is None
    script(monkeypatch, _plain_kernels_win)
    tune(model, LoadOptions())
    found = kept(model, LoadOptions(max_rows=9, mmap=False))
    assert found == named(max_rows=9, mmap=False, extra_buffer_types=False)
    assert tuned_options(model, LoadOptions(), draft=True) is None
    assert tuned_options(model, LoadOptions(gpu_layers=0)) is None
    other = write_tiny(model.with_name("other.gguf"), seed=1)
    assert tuned_options(other, LoadOptions()) is None


def test_what_the_user_has_set_is_neither_tried_nor_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = script(monkeypatch, lambda given, _n: 1.0 if given.flash_attention == "auto" else 0.8)
    given = LoadOptions(threads=1, extra_buffer_types=False)
    expected = named(threads=1, extra_buffer_types=False, flash_attention="off")
    assert tune(model, given).options == expected
    assert len(measured) == 1
    assert kept(model, given) == expected
    assert tuned_options(model, LoadOptions()) is None


def test_kernels_that_crash_are_not_tried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def survives(_path: Path, given: LoadOptions, **_settings: Any) -> tuple[LoadOptions, str]:
        return replace(given, extra_buffer_types=False), "it crashes"

    monkeypatch.setattr(options, "check_build", survives)
    measured = script(monkeypatch, _alike)
    tune(model, LoadOptions(threads=1))
    assert [given.flash_attention for given in measured[0]] == ["auto", "off"]
    assert not any(given.extra_buffer_types for sets in measured for given in sets)


def test_a_quantized_cache_keeps_flash_attention(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _alike)
    tune(model, LoadOptions(cache_type_v="q8_0", threads=1))
    assert [len(sets) for sets in measured] == [2]


def test_one_copy_of_the_weights_at_a_time_where_memory_is_short(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "available_bytes", lambda: 1.0)
    measured = script(monkeypatch, _plain_kernels_win)
    assert not tune(model, LoadOptions(threads=1)).options.extra_buffer_types
    assert [len(sets) for sets in measured] == [2, 1]


@pytest.mark.parametrize("content", ["{", "[]", '{"tuned": {"mmap": false}}', '{"tuned": {"threads": -7}}'])
def test_a_damaged_memory_means_no_choice(model: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    script(monkeypatch, _plain_kernels_win)
    tune(model, LoadOptions())
    [file] = (model.parent / "cache" / "costs").glob("tuned-*.json")
    file.write_text(content)
    assert tuned_options(model, LoadOptions()) is None


# The library


def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "candidates", lambda _given: [LIBRARIES["ik"], ONE])


def _ik_checks_cheaply(given: LoadOptions, n: int) -> float:
    return 0.5 if given.backend == "ik" and n > 1 else 1.0


def test_the_faster_library_is_chosen_and_named_in_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(monkeypatch)
    measured = script(monkeypatch, _ik_checks_cheaply)
    found = tune(model, LoadOptions(threads=1), quick=True)
    assert found.options.backend == "ik"
    assert found.compared == (
        "ik_llama.cpp: a plain step as fast, a check of 4 tokens 2.0x faster, against llama.cpp"
    )
    assert {given.backend for given in measured[0]} == {"ik", "llama.cpp"}
    again = tuned_options(model, LoadOptions(threads=1))
    assert again is not None and (again.options, again.compared) == (found.options, found.compared)


@pytest.mark.parametrize(("ik_reading", "chosen"), [(1.0, "ik"), (4.0, "llama.cpp")])
def test_prompts_are_waited_for_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, ik_reading: float, chosen: str
) -> None:
    both(monkeypatch)
    script(
        monkeypatch,
        lambda given, n: 0.8 if given.backend == "ik" and n > 1 else 1.0,
        lambda given: ik_reading if given.backend == "ik" else 1.0,
    )
    assert tune(model, LoadOptions(threads=1), quick=True).options.backend == chosen


def test_a_library_that_cannot_load_the_file_is_left_out(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.exists()
    both(monkeypatch)
    script(monkeypatch, _ik_checks_cheaply)
    path = write_tiny(tmp_path / "jamba.gguf", arch="jamba")  # ik_llama.cpp does not know it
    assert tune(path, LoadOptions(threads=1)).options.backend == "llama.cpp"


def test_a_small_file_is_not_worth_a_trial(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _alike)
    assert choose_options(model, LoadOptions()).options == LoadOptions() and measured == []
    monkeypatch.setattr(options, "_MIN_FILE_BYTES", 1)
    assert choose_options(model, LoadOptions()).options == named() and measured
    del measured[:]
    assert choose_options(model, LoadOptions()).options == named() and measured == [], "it is remembered"


def test_tuning_for_real(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "physical_cores", lambda: 1)
    monkeypatch.setattr(options, "logical_cores", lambda: 1)
    stages: list[str] = []
    found = tune(model, LoadOptions(), seconds=0.2, progress=lambda what, _part: stages.append(what))
    assert len(found.trials) == 3
    assert set(stages) == {"kernels"}


# Curves of loaded models


def test_a_curve_is_measured_once_and_then_found(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    target = weights.open(128)
    with collect_notices() as notices:
        costs = costs_of(target, seconds=0.2)
    assert notices == [] and len(costs.points) >= 8
    again = costs_of(target, seconds=0.2)
    assert again.points == costs.points
    fresh = costs_of(target, seconds=0.2, fresh=True)
    assert fresh.points != costs.points
    last = costs_of(target, seconds=0.2, rows="last")
    assert last.points != fresh.points, "a draft's calls are others"
    weights.close()


def test_a_curve_belongs_to_the_settings_in_force(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    usual = subject_of(weights.open(128), "all")
    assert subject_of(weights.open(256), "all") == usual
    for changed in (LoadOptions(threads=2), LoadOptions(threads=1, flash_attention="on")):
        assert subject_of(weights.open(128, options=changed), "all") != usual
    assert subject_of(weights.open(128, max_sequences=2), "all") != usual
    assert usual.machine and usual.build
    weights.close()


def test_a_session_teaches_the_stored_curve(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    target = weights.open(128)
    costs = costs_of(target, seconds=0.2)
    for _ in range(50):
        costs.observe(1, 100 * costs.points[0].seconds, context=0)
    store_refined(subject_of(target, "all"), costs)
    again = costs_of(target)
    assert again.call_s(1, context=0) > 1.5 * costs.points[0].seconds
    weights.close()


def test_a_measurement_that_came_to_little_is_not_kept(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    target = weights.open(128)
    with collect_notices() as notices:
        costs = costs_of(target, seconds=0.0)
    [notice] = notices
    assert "too busy" in notice and costs.is_measured
    assert list((model.parent / "cache").glob("costs/*.json")) == []
    weights.close()
