"""The load options that suit a machine: tried, judged, remembered; and curves kept for loaded models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.backends import tuning
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import choose_options, costs_of, subject_of
from outrider.core.contracts import Model
from outrider.core.notices import collect_notices
from outrider.costs import CallCosts, CallPoint
from outrider.costs.store import store_refined
from tiny_gguf import write_tiny

Speed = Callable[[LoadOptions, int], float]
"""How many times as long a call over n tokens takes under these options."""


LIBRARIES = {library.backend: library for library in candidates(LoadOptions())}


def within(library: Library, given: LoadOptions) -> LoadOptions:
    return replace(given, backend=library.backend, library=str(library.file.path))


def named(backend: str = "llama.cpp", **changes: Any) -> LoadOptions:
    """Options under which a library is named."""
    return within(LIBRARIES[backend], LoadOptions(**changes))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is worth a trial, in the one library that is there."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "check_build", lambda _card, given, library: (within(library, given), None))
    monkeypatch.setattr(tuning, "candidates", lambda _given: [LIBRARIES["llama.cpp"]])
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 1)
    return write_tiny(tmp_path / "tiny.gguf")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    """The same with two libraries."""
    monkeypatch.setattr(tuning, "candidates", lambda _given: [LIBRARIES["ik"], LIBRARIES["llama.cpp"]])
    return model


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

    monkeypatch.setattr(tuning, "measure_side_by_side", measure)
    return measured


def kept(model: Path, given: LoadOptions) -> LoadOptions:
    return choose_options(model, given, measure=False)


def _plain_kernels_win(given: LoadOptions, _n: int) -> float:
    return 1.0 if given.extra_buffer_types else 0.8


def _alike(_given: LoadOptions, _n: int) -> float:
    return 1.0


def test_each_kernel_is_tried_against_what_is_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _plain_kernels_win, lambda given: _plain_kernels_win(given, 1))
    assert choose_options(model, LoadOptions()) == named(extra_buffer_types=False)
    [sets] = measured
    kernels = [(given.extra_buffer_types, given.flash_attention) for given in sets]
    assert kernels == [(True, "auto"), (True, "off"), (False, "auto")]


@pytest.mark.parametrize(("plain", "chosen"), [(1.015, True), (1.03, False)])
def test_plain_decoding_is_never_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch, plain: float, chosen: bool
) -> None:
    # Far better at everything but single tokens.
    def speed(given: LoadOptions, n: int) -> float:
        return 1.0 if given.extra_buffer_types else plain if n == 1 else 0.3

    script(monkeypatch, speed)
    assert choose_options(model, LoadOptions()).extra_buffer_types is not chosen


def test_what_is_hardly_better_changes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda given, _n: 1.0 if given == named() else 0.99)
    assert choose_options(model, LoadOptions()) == named()
    assert kept(model, LoadOptions()) == named()


def test_the_choice_is_remembered_for_what_it_was_made_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(model, LoadOptions()) == LoadOptions()
    measured = script(monkeypatch, _plain_kernels_win)
    choose_options(model, LoadOptions())
    found = kept(model, LoadOptions(max_rows=9, mmap=False))
    assert found == named(max_rows=9, mmap=False, extra_buffer_types=False)
    assert choose_options(model, LoadOptions()) == named(extra_buffer_types=False)
    assert len(measured) == 1
    assert kept(model, LoadOptions(gpu_layers=0)) == LoadOptions(gpu_layers=0)
    other = write_tiny(model.with_name("other.gguf"), seed=1)
    assert kept(other, LoadOptions()) == LoadOptions()


def test_what_the_user_has_set_is_neither_tried_nor_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = script(monkeypatch, lambda given, _n: 1.0 if given.flash_attention == "auto" else 0.8)
    given = LoadOptions(threads=1, extra_buffer_types=False)
    expected = named(threads=1, extra_buffer_types=False, flash_attention="off")
    assert choose_options(model, given) == expected
    assert len(measured) == 1
    assert kept(model, given) == expected
    assert kept(model, LoadOptions()) == LoadOptions()


def test_kernels_that_crash_are_not_tried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def survives(_card: object, given: LoadOptions, library: Library) -> tuple[LoadOptions, str]:
        return replace(within(library, given), extra_buffer_types=False), "it crashes"

    monkeypatch.setattr(tuning, "check_build", survives)
    measured = script(monkeypatch, _alike)
    choose_options(model, LoadOptions(threads=1))
    assert [given.flash_attention for given in measured[0]] == ["auto", "off"]
    assert not any(given.extra_buffer_types for sets in measured for given in sets)


def test_a_quantized_cache_keeps_flash_attention(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _alike)
    choose_options(model, LoadOptions(cache_type_v="q8_0"))
    assert [len(sets) for sets in measured] == [2]


def test_one_copy_of_the_weights_at_a_time_where_memory_is_short(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "available_bytes", lambda: 1.0)
    measured = script(monkeypatch, _plain_kernels_win)
    assert not choose_options(model, LoadOptions()).extra_buffer_types
    assert [len(sets) for sets in measured] == [2, 1]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"tuned": {"mmap": false}}', '{"tuned": {"flash_attention": 7}}']
)
def test_a_damaged_memory_means_no_choice(model: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    script(monkeypatch, _plain_kernels_win)
    choose_options(model, LoadOptions())
    [file] = (model.parent / "cache" / "costs").glob("tuned-*.json")
    file.write_text(content)
    assert kept(model, LoadOptions()) == LoadOptions()


def test_a_small_file_is_not_worth_a_trial(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _alike)
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 1 << 30)
    assert choose_options(model, LoadOptions()) == LoadOptions() and measured == []


def _ik_checks_cheaply(given: LoadOptions, n: int) -> float:
    return 0.5 if given.backend == "ik" and n > 1 else 1.0


def test_the_faster_library_is_chosen(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script(monkeypatch, _ik_checks_cheaply)
    found = choose_options(both, LoadOptions())
    assert found.backend == "ik"
    assert [{given.backend for given in sets} for sets in measured] == [{"ik", "llama.cpp"}, {"ik"}]
    assert kept(both, LoadOptions()) == found


@pytest.mark.parametrize(("ik_reading", "chosen"), [(1.0, "ik"), (4.0, "llama.cpp")])
def test_prompts_are_waited_for_too(
    both: Path, monkeypatch: pytest.MonkeyPatch, ik_reading: float, chosen: str
) -> None:
    script(
        monkeypatch,
        lambda given, n: 0.8 if given.backend == "ik" and n > 1 else 1.0,
        lambda given: ik_reading if given.backend == "ik" else 1.0,
    )
    assert choose_options(both, LoadOptions()).backend == chosen


def test_a_library_that_cannot_load_the_file_is_left_out(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, _ik_checks_cheaply)
    path = write_tiny(both.with_name("jamba.gguf"), arch="jamba")  # ik_llama.cpp does not know it
    assert choose_options(path, LoadOptions()).backend == "llama.cpp"


def test_a_trial_for_real(model: Path) -> None:
    stages: list[str] = []
    found = choose_options(model, LoadOptions(threads=1), progress=lambda what, _part: stages.append(what))
    assert replace(found, extra_buffer_types=True, flash_attention="auto") == named(threads=1)
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


def test_a_curve_belongs_to_the_settings_in_force(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    usual = subject_of(weights.open(128), "all")
    assert subject_of(weights.open(256), "all") == usual
    for changed in (LoadOptions(threads=2), LoadOptions(threads=1, flash_attention="on")):
        assert subject_of(weights.open(128, options=changed), "all") != usual
    assert subject_of(weights.open(128, max_sequences=2), "all") != usual
    assert usual.machine and usual.build


def test_a_session_teaches_the_stored_curve(model: Path) -> None:
    weights = Weights(model, LoadOptions(threads=1))
    target = weights.open(128)
    costs = costs_of(target, seconds=0.2)
    for _ in range(50):
        costs.observe(1, 100 * costs.points[0].seconds, context=0)
    store_refined(subject_of(target, "all"), costs)
    again = costs_of(target)
    assert again.call_s(1, context=0) > 1.5 * costs.points[0].seconds
