"""Weights, vocabularies and logs of the llama.cpp backend: what is freed, read and refused."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

import tiny_gguf
from llama_cpp_models import SMALL, TEXT, Load, fresh, next_rows, one_by_one, resident_bytes, store, tiny
from outrider.backends.gguf import LoadOptions, Weights, memory
from outrider.backends.gguf.library import lib
from outrider.core.data import Span
from outrider.core.errors import (
    BackendError,
    ModelFileError,
    OutOfMemory,
    OutriderError,
    SettingError,
)
from tiny_gguf import ARCHITECTURES, write_tiny

__all__ = ["tiny"]  # pytest finds the fixture by its name

# Closing


def test_a_closed_context_answers_with_errors(tiny: Load) -> None:
    model = tiny().open(64)
    store(model, TEXT[:4])
    model.close()
    model.close()
    with pytest.raises(BackendError, match="was closed"):
        model.decode([Span(0, (1,), 4, 1)])
    for length in (0, 2, 4):
        with pytest.raises(BackendError, match="was closed"):
            model.truncate(0, length)


def test_closed_weights_close_their_contexts_and_vocabulary(tmp_path: Path) -> None:
    weights = fresh(tmp_path)
    vocabulary, model = weights.vocabulary, weights.open(64)
    store(model, TEXT[:4])
    weights.close()
    weights.close()
    asked: list[Callable[[], Any]] = [
        lambda: model.decode([Span(0, (1,), 4, 1)]),
        lambda: model.truncate(0, 1),
        lambda: weights.open(64),
        lambda: weights.metadata("general.name"),
        lambda: vocabulary.tokenize("text"),
        lambda: vocabulary.piece(3),
        lambda: vocabulary.spelling(3),
        lambda: vocabulary.is_control(3),
        lambda: vocabulary.ends_generation(3),
    ]
    for ask in asked:
        with pytest.raises(BackendError, match="was closed"):
            ask()
    model.close()


def test_a_context_may_be_closed_after_its_weights(tmp_path: Path) -> None:
    weights = fresh(tmp_path)
    model = weights.open(64)
    weights.close()
    model.close()
    with pytest.raises(BackendError):
        model.truncate(0, 0)


def test_what_nobody_refers_to_is_freed_contexts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []

    def watch(name: str) -> None:
        real = getattr(lib, name)

        def free(pointer: Any) -> None:
            freed.append(name)
            real(pointer)

        monkeypatch.setattr(lib, name, free)

    watch("llama_free")
    watch("llama_model_free")
    weights = fresh(tmp_path)
    model, other = weights.open(64), weights.open(64)
    vocabulary = weights.vocabulary
    del weights, other
    gc.collect()
    assert freed == ["llama_free"]
    store(model, TEXT[:4])  # a context keeps its weights
    del model
    gc.collect()
    assert freed == ["llama_free"] * 2
    assert vocabulary.tokenize("the")  # and so does a vocabulary
    del vocabulary
    gc.collect()
    assert freed == ["llama_free", "llama_free", "llama_model_free"]
    model = fresh(tmp_path).open(64)
    del model
    gc.collect()
    assert freed[3:] == ["llama_free", "llama_model_free"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_opening_and_closing_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "own.gguf", context_length=2048)

    def rounds(number: int) -> int:
        for _ in range(number):
            weights = Weights(path, SMALL)
            for _ in range(2):
                model = weights.open(2048)
                store(model, TEXT[:8])
                model.close()
            weights.close()
        gc.collect()
        return resident_bytes()

    before = rounds(10)
    # Each round maps a megabyte of KV and of weights: leaking either would show tenfold.
    assert rounds(40) - before < 8e6


# Files and settings that cannot be used


def write_odd(path: Path, arch: str) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_name("Odd")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "reason"), [("oddity", "'oddity'"), ("clip", "main model"), ("llama", "key not found")]
)
def test_a_file_that_the_library_cannot_run_is_refused_in_its_words(
    tmp_path: Path, arch: str, reason: str
) -> None:
    path = write_odd(tmp_path / "memory-alloc.gguf", arch)
    with pytest.raises(ModelFileError) as caught:
        Weights(path)
    assert caught.value.what == str(path) and reason in caught.value.why


def test_a_model_that_embeds_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = ARCHITECTURES["llama"]

    def describe(writer: GGUFWriter) -> None:
        llama.describe(writer)
        writer.add_causal_attention(False)

    monkeypatch.setitem(ARCHITECTURES, "llama", replace(llama, describe=describe))
    with pytest.raises(ModelFileError, match="not a decoder-only language model"):
        fresh(tmp_path)


@pytest.mark.parametrize(
    "kind", ["cut", "renamed", "type", "offset", "dimension", "text", "missing", "folder"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    data = bytearray(write_tiny(tmp_path / "whole.gguf").read_bytes())
    name = b"blk.0.attn_q.weight"
    entry = data.index(name) + len(name)  # then: rank, two dimensions, type, offset
    if kind == "renamed":
        data[entry - 1 : entry] = b"u"
    elif kind == "type":
        data[entry + 20 : entry + 24] = (99).to_bytes(4, "little")
    elif kind == "offset":
        data[entry + 24 : entry + 32] = (2**31).to_bytes(8, "little")
    elif kind == "dimension":
        data[entry + 4 : entry + 12] = b"\xff" * 8
    path = tmp_path / "damaged.gguf"
    if kind == "cut":
        del data[len(data) // 2 :]
    path.write_bytes(b"no model " * 99 if kind == "text" else data)
    path = {"missing": tmp_path / "memory.gguf", "folder": tmp_path}.get(kind, path)
    with pytest.raises(ModelFileError) as caught:
        Weights(path)
    assert caught.value.why and "error loading model" not in str(caught.value)


def test_a_path_need_not_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "m\udcff.gguf"
    try:
        write_tiny(tmp_path / "own.gguf").rename(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    weights = Weights(path, SMALL)
    assert weights.path == path and weights.vocabulary.size > 0
    weights.close()


@pytest.mark.parametrize("context_length", [2**29, 2**31 - 1, 2**31, 2**32, 2**32 + 64])
def test_an_impossible_context_is_out_of_memory_at_once(
    tiny: Load, monkeypatch: pytest.MonkeyPatch, context_length: int
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the library was asked to allocate it")

    monkeypatch.setattr(memory, "available_bytes", lambda: 64e9)
    monkeypatch.setattr(lib, "llama_init_from_model", never)
    with pytest.raises(OutOfMemory) as caught:
        tiny().open(context_length)
    assert f"context of {context_length} tokens" in caught.value.what
    with pytest.raises(OutOfMemory):
        tiny().open(context_length // 2, max_sequences=4)


def test_more_positions_than_the_library_can_number_are_never_asked_for(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: float("inf"))
    monkeypatch.setattr(lib, "llama_init_from_model", lambda _model, params: params.n_ctx)
    for context_length in (2**31, 2**32 + 64):
        with pytest.raises(OutOfMemory, match="positions"):
            tiny().open(context_length)


def test_the_estimate_of_the_cache_is_what_the_library_takes(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 layers of K and V with 32 values of 32 bits, and 48 bytes for the cell.
    needed = 1024 * (2 * 2 * 32 * 4 + 48)
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    tiny().open(1024).close()
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemory):
        tiny().open(1024)
    tiny(options=replace(SMALL, cache_type_k="q8_0")).open(1024).close()
    tiny("mamba").open(1024).close()


def test_memory_left_on_this_machine_is_a_sensible_figure() -> None:
    assert 1e8 < memory.available_bytes() < 1e14


def test_a_context_that_the_library_cannot_build_is_out_of_memory(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib, "llama_init_from_model", lambda *_: None)
    with pytest.raises(OutOfMemory, match="could not create"):
        tiny().open(64)


@pytest.mark.parametrize(("flash_attention", "cache"), [("on", "k"), ("on", "v"), ("off", "k")])
def test_a_cache_type_that_does_not_fit_the_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flash_attention: str, cache: str
) -> None:
    # The library would end the process where flash attention is off.
    monkeypatch.setattr(tiny_gguf, "HEAD_WIDTH", 16)
    options = {"flash_attention": flash_attention, f"cache_type_{cache}": "q8_0"}
    weights = Weights(write_tiny(tmp_path / "narrow.gguf"), LoadOptions(**options))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="blocks of 32 values, and the model's heads have 16"):
        weights.open(64)
    weights.close()


def test_what_the_library_says_against_a_context_is_passed_on(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lib.llama_init_from_model
    monkeypatch.setattr(lib, "llama_init_from_model", lambda _model, params: real(None, params))
    with pytest.raises(BackendError, match="model cannot be NULL") as caught:
        tiny().open(64)
    assert not isinstance(caught.value, OutOfMemory)


@pytest.mark.parametrize(("context_length", "max_sequences"), [(1, 1), (-5, 1), (64, 0), (64, -1), (64, 257)])
def test_contexts_that_make_no_sense_are_refused(tiny: Load, context_length: int, max_sequences: int) -> None:
    with pytest.raises(SettingError):
        tiny().open(context_length, max_sequences=max_sequences)


def test_contexts_are_at_least_as_long_as_asked_for(tiny: Load) -> None:
    for context_length, max_sequences in [(2, 1), (100, 1), (300, 3), (64, 256)]:
        model = tiny().open(context_length, max_sequences=max_sequences)
        assert model.context_length >= context_length and model.max_sequences == max_sequences
        model.close()
    model = tiny().open()
    assert model.context_length == tiny().trained_context == 512
    model.close()


@pytest.mark.parametrize(
    "options",
    [
        {"cache_type_v": "q8_0", "flash_attention": "off"},
        {"cache_type_v": "iq4_nl", "flash_attention": "off"},
        {"cache_type_k": "q2"},
        {"flash_attention": "yes"},
        {"split_mode": "diagonal"},
        {"gpu_layers": -2},
        {"main_gpu": -1},
        {"threads": 513},
        {"threads_batch": -1},
        {"batch_tokens": 0},
        {"batch_tokens": 2**33},
        {"micro_batch_tokens": 0},
        {"max_rows": 0},
        {"max_rows": 2**31},
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        LoadOptions(**options)


@pytest.mark.parametrize("flash_attention", ["on", "off", "auto"])
@pytest.mark.parametrize("cache_type", ["f32", "bf16", "q4_0"])
def test_every_kind_of_cache_gives_about_the_same_logits(
    tiny: Load, flash_attention: str, cache_type: str
) -> None:
    value_type = "f16" if flash_attention == "off" and cache_type == "q4_0" else cache_type
    options = replace(
        SMALL, flash_attention=flash_attention, cache_type_k=cache_type, cache_type_v=value_type
    )
    model = tiny(options=options).open(64)
    rows, expected = next_rows(model, TEXT[:12]), one_by_one(tiny(), TEXT[:12])
    assert np.corrcoef(rows.ravel(), expected.ravel())[0, 1] > 0.98
    model.close()


@pytest.mark.parametrize(
    ("changes", "context", "chosen"),
    [
        ({}, 64, "off"),
        ({"flash_attention": "on"}, 64, "on"),
        ({"cache_type_v": "q8_0"}, 64, "auto"),
        ({"micro_batch_tokens": 2048}, 17_000, "auto"),
    ],
    ids=["narrow heads", "asked for", "a quantized cache needs it", "scores that take much memory"],
)
def test_narrow_heads_go_without_flash_attention_on_processors(
    tiny: Load, changes: dict[str, Any], context: int, chosen: str
) -> None:
    options = replace(LoadOptions(threads=1, gpu_layers=0), **changes)
    model = tiny(options=options).open(context)
    assert model.flash_attention == chosen
    model.close()


def test_threads_are_those_asked_for(tiny: Load) -> None:
    model = tiny(options=LoadOptions(threads=1, threads_batch=2)).open(64)
    assert (model.threads, model.threads_batch) == (1, 2)
    model.close()
    model = tiny(options=LoadOptions(threads=2)).open(64)
    assert (model.threads, model.threads_batch) == (2, 2)
    model.close()


def test_every_error_of_the_backend_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutriderError) as caught:
        Weights(write_odd(tmp_path / "odd.gguf", "oddity"))
    assert "\n" not in str(caught.value)
