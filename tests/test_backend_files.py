"""What a native library cannot load or open is an error of one line, on every one of them."""

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from backends import IK, MAINLINE, Native, backend, next_rows, over_native
from kinds import KINDS
from llama_cpp_models import TEXT
from outrider.backends.gguf import context, guard
from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import open_library
from outrider.backends.gguf.log import LOG_CALLBACK
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import CONTEXT_TYPES, UNQUANTIZED, LoadOptions
from outrider.core.errors import (
    BackendCrash,
    BackendError,
    ModelFileError,
    OutOfMemory,
    SettingError,
)
from tiny import Sizes
from tiny_gguf import write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name


def refusal(backend: Native, path: Path) -> str:
    """Why a library does not load a file, in one line that names the file."""
    with pytest.raises(ModelFileError) as caught:
        Weights(path, backend.options())
    assert caught.value.what == str(path) and caught.value.why and caught.value.way_out
    assert "\n" not in str(caught.value) and "error loading model:" not in str(caught.value)
    return caught.value.why


def write_odd(path: Path, arch: str) -> Path:
    """A file of an architecture, with nothing that it needs."""
    writer = GGUFWriter(path, arch)
    writer.add_name("Odd")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Architectures


@over_native
def test_models_of_a_kind_that_a_library_does_not_run_are_refused(backend: Native) -> None:
    """Kinds that are a part of a model's, or another way to take it back, are no models of their own."""
    runs = {(KINDS[kind].arch, KINDS[kind].mtp_layers) for kind in backend.kinds}
    for kind, made in KINDS.items():
        if made.arch and (made.arch, made.mtp_layers) not in runs:
            why = refusal(backend, backend.path(kind))
            reasons = (made.arch, "recurrent", "hybrid", "MTP", "not found")
            assert any(reason in why for reason in reasons)


@over_native
@pytest.mark.parametrize(
    ("arch", "reason"), [("oddity", "'oddity'"), ("llama", "key not found"), ("clip", "")]
)
def test_a_file_that_no_library_can_run_is_refused_in_its_words(
    backend: Native, tmp_path: Path, arch: str, reason: str
) -> None:
    assert reason in refusal(backend, write_odd(tmp_path / "memory-alloc.gguf", arch))


@over_native
def test_a_log_that_another_package_took_comes_back(backend: Native, tmp_path: Path) -> None:
    taken = list[bytes]()

    def take(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        taken.append(text)

    callback = LOG_CALLBACK(take)
    open_library(backend.file).functions.llama_log_set(callback, None)
    assert "'oddity'" in refusal(backend, write_odd(tmp_path / "memory-alloc.gguf", "oddity"))
    assert taken == []


@over_native
def test_a_model_that_embeds_text_is_refused(backend: Native, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a decoder-only language model"):
        backend.fresh(tmp_path, metadata={"attention.causal": False})


@pytest.mark.parametrize("backend", IK, indirect=True)
@pytest.mark.parametrize(("layers", "pattern"), [(5, 6), (12, 2)], ids=["few layers", "pattern"])
def test_windows_that_ik_reads_in_another_way_are_refused(
    backend: Native, tmp_path: Path, layers: int, pattern: int
) -> None:
    sizes = Sizes(window_pattern=pattern)
    path = write_tiny(tmp_path / "own.gguf", arch="gemma3", layers=layers, sizes=sizes)
    assert "window" in refusal(backend, path)


# Damaged files

DAMAGES = ("cut", "renamed", "type", "offset", "dimension", "text", "empty", "missing", "folder")


def damaged(folder: Path, kind: str) -> Path:
    """A file that is no model any more."""
    data = bytearray(write_tiny(folder / "whole.gguf").read_bytes())
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
    path = folder / "damaged.gguf"
    if kind == "cut":
        del data[len(data) // 2 :]
    path.write_bytes({"text": b"no model " * 99, "empty": b""}.get(kind, bytes(data)))
    return {"missing": folder / "memory.gguf", "folder": folder}.get(kind, path)


def survives(backend: Native, kind: str) -> bool:
    """ik_llama.cpp ends the process over some of them: in the child that tries it out first."""
    return not (backend.is_ik and kind in ("type", "dimension"))


@over_native
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_refused(
    backend: Native, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(tmp_path, kind)
    if survives(backend, kind):
        refusal(backend, path)
        return
    monkeypatch.setenv("PYTHONPATH", str(Path(guard.__file__).parents[3]))
    with pytest.raises(BackendCrash) as caught:
        card = SimpleNamespace(path=path, architecture="llama", quantization="F32")
        check_build(card, backend.options(), backend.weights().library)  # type: ignore[arg-type]
    assert caught.value.what == str(path) and "\n" not in str(caught.value)


@over_native
def test_a_path_need_not_be_utf_8(backend: Native, tmp_path: Path) -> None:
    path = tmp_path / "m\udcff.gguf"
    try:
        write_tiny(tmp_path / "own.gguf").rename(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    weights = Weights(path, backend.options())
    assert weights.path == path and weights.vocabulary.size > 0
    weights.close()


# Contexts


@over_native
@pytest.mark.parametrize("context_length", [2**29, 2**31 - 1, 2**31, 2**32, 2**32 + 64])
def test_an_impossible_context_is_out_of_memory_at_once(
    backend: Native, monkeypatch: pytest.MonkeyPatch, context_length: int
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the library was asked to allocate it")

    weights = backend.weights()
    monkeypatch.setattr(context, "available_bytes", lambda: 64e9)
    monkeypatch.setattr(backend.functions, "llama_init_from_model", never)
    with pytest.raises(OutOfMemory) as caught:
        weights.open(context_length)
    assert f"context of {context_length} tokens" in caught.value.what
    with pytest.raises(OutOfMemory):
        weights.open(context_length // 2, max_sequences=4)


@over_native
def test_more_positions_than_the_library_can_number_are_never_asked_for(
    backend: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = backend.weights()
    monkeypatch.setattr(context, "available_bytes", lambda: float("inf"))
    monkeypatch.setattr(backend.functions, "llama_init_from_model", lambda _model, params: params.n_ctx)
    for context_length in (2**31, 2**32 + 64):
        with pytest.raises(OutOfMemory, match="positions"):
            weights.open(context_length)


@over_native
def test_the_estimate_of_the_cache_is_what_the_library_takes(
    backend: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = backend.weights()
    value_bytes = 2 if weights.options.cache_type_v == "f16" else 4
    # 2 layers of K and V with 32 values, and 48 bytes for the cell.
    needed = 1024 * (2 * 32 * (4 + value_bytes) + 48)
    monkeypatch.setattr(context, "available_bytes", lambda: needed)
    weights.open(1024).close()
    monkeypatch.setattr(context, "available_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemory):
        weights.open(1024)
    weights.open(1024, options=replace(weights.options, cache_type_k="q8_0")).close()
    if "recurrent" in backend.kinds:
        backend.weights("recurrent").open(1024).close()


@over_native
def test_a_context_that_the_library_cannot_build_is_out_of_memory(
    backend: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = backend.weights()
    monkeypatch.setattr(backend.functions, "llama_init_from_model", lambda *_: None)
    with pytest.raises(OutOfMemory, match="could not create"):
        weights.open(64)


@over_native
@pytest.mark.parametrize(("flash_attention", "cache"), [("on", "k"), ("on", "v"), ("off", "k")])
def test_a_cache_type_that_does_not_fit_the_model_is_refused(
    backend: Native, tmp_path: Path, flash_attention: str, cache: str
) -> None:
    # The library would end the process where flash attention is off.
    asked = LoadOptions(flash_attention=flash_attention, **{f"cache_type_{cache}": "q8_0"})  # type: ignore[arg-type]
    weights = Weights(
        write_tiny(tmp_path / "narrow.gguf", sizes=Sizes(head=16)),
        replace(asked, library=str(backend.file.path)),
    )
    why = "blocks of 32 values, and the model's heads have 16"
    with pytest.raises(SettingError, match="not right with q8_0" if backend.is_ik and cache == "v" else why):
        weights.open(64)
    weights.close()


@over_native
def test_what_the_library_says_against_a_context_is_passed_on(
    backend: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = backend.weights()
    real = backend.functions.llama_init_from_model
    monkeypatch.setattr(backend.functions, "llama_init_from_model", lambda _model, params: real(None, params))
    with pytest.raises(BackendError) as caught:
        weights.open(64)
    assert "NULL" in caught.value.why and not isinstance(caught.value, OutOfMemory)


@over_native
@pytest.mark.parametrize(("context_length", "max_sequences"), [(1, 1), (-5, 1), (64, 0), (64, -1), (64, 257)])
def test_contexts_that_make_no_sense_are_refused(
    backend: Native, context_length: int, max_sequences: int
) -> None:
    with pytest.raises(SettingError):
        backend.weights().open(context_length, max_sequences=max_sequences)


@over_native
def test_contexts_are_at_least_as_long_as_asked_for(backend: Native) -> None:
    weights = backend.weights()
    for context_length, max_sequences in [(2, 1), (100, 1), (300, 3), (64, 256)]:
        model = weights.open(context_length, max_sequences=max_sequences)
        assert model.context_length >= context_length and model.max_sequences == max_sequences
        model.close()
    model = weights.open()
    assert model.context_length == weights.trained_context == 512
    model.close()


# Options


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
        {"backend": "vllm"},
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        LoadOptions(**options)


@over_native
@pytest.mark.parametrize("flash_attention", ["on", "off", "auto"])
@pytest.mark.parametrize("cache_type", CONTEXT_TYPES)
def test_a_kind_of_cache_gives_about_the_same_logits_or_is_refused(
    backend: Native, flash_attention: str, cache_type: str
) -> None:
    value_type = "f16" if flash_attention == "off" and cache_type not in UNQUANTIZED else cache_type
    if backend.is_ik:
        value_type = "f16"  # the only one that it is right with
    options = replace(
        backend.options(), flash_attention=flash_attention, cache_type_k=cache_type, cache_type_v=value_type
    )
    weights = backend.weights()
    right = ("f16", "q8_0", *(("f32", "bf16") if flash_attention == "off" else ()))
    if backend.is_ik and cache_type not in right:
        with pytest.raises(SettingError, match="is not right with") as caught:
            weights.open(64, options=options)
        assert cache_type in caught.value.why and "f16" in caught.value.way_out
        return
    model = weights.open(64, options=options)
    rows, expected = next_rows(model, TEXT[:12]), backend.expected(TEXT[:12])
    assert np.corrcoef(rows.ravel(), expected.ravel())[0, 1] > 0.98
    model.close()


@pytest.mark.parametrize("backend", MAINLINE, indirect=True)
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
    backend: Native, changes: dict[str, Any], context: int, chosen: str
) -> None:
    options = replace(LoadOptions(threads=1, gpu_layers=0), **changes)
    model = backend.weights(options=options).open(context)
    assert model.flash_attention == chosen
    model.close()


@pytest.mark.parametrize("backend", IK, indirect=True)
@pytest.mark.parametrize(
    ("kind", "max_sequences", "chosen"),
    [("dense", 1, "auto"), ("dense", 2, "off"), ("whole window", 1, "off")],
    ids=["one sequence", "several", "a window"],
)
def test_ik_goes_without_flash_attention_where_its_own_is_wrong(
    backend: Native, kind: str, max_sequences: int, chosen: str
) -> None:
    weights = backend.weights(kind)
    options = replace(LoadOptions(threads=1, gpu_layers=0), library=weights.options.library)
    model = weights.open(64, max_sequences=max_sequences, options=options)
    assert model.flash_attention == chosen
    model.close()
    if chosen == "off":
        for asked in (replace(options, flash_attention="on"), replace(options, cache_type_v="q8_0")):
            with pytest.raises(SettingError, match="right for a single sequence"):
                weights.open(64, max_sequences=max_sequences, options=asked)


@over_native
def test_threads_are_those_asked_for(backend: Native) -> None:
    for threads, threads_batch, expected in [(1, 2, (1, 2)), (2, 0, (2, 2))]:
        options = LoadOptions(threads=threads, threads_batch=threads_batch)
        model = backend.weights(options=options).open(64)
        assert (model.threads, model.threads_batch) == expected
        model.close()
