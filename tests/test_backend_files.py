"""What a native library cannot load or open is an error of one line, on every one of them."""

import ctypes
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

import tiny_gguf
from backends import FILES, IK, MAINLINE, NATIVE, Native, backend, next_rows, over_native
from kinds import KINDS
from llama_cpp_models import TEXT
from outrider.backends.gguf import context
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
    PromptError,
    SettingError,
)
from tiny import Sizes
from tiny_gguf import BEGIN, END, finish, write_tiny

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
    finish(writer)
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
def test_a_damaged_file_is_refused(backend: Native, tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind)
    if survives(backend, kind):
        refusal(backend, path)
        return
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


# Vocabulary

texts = st.text(st.characters(codec="utf-8"), max_size=40)


@over_native
def test_text_survives_tokenizing(backend: Native) -> None:
    vocabulary = backend.weights().vocabulary

    @given(texts)
    def check(text: str) -> None:
        tokens = vocabulary.tokenize(text)
        assert b"".join(vocabulary.piece(token) for token in tokens) == text.encode()
        assert all(0 <= token < vocabulary.size for token in tokens)

    check()


@pytest.mark.skipif(len(NATIVE) < 2, reason="compares libraries")
def test_all_libraries_read_text_alike(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    vocabularies = [Native(file, folder).weights().vocabulary for file in FILES.values()]

    @given(texts, st.booleans())
    def check(text: str, parse_special: bool) -> None:
        text = text.replace("<", END)
        one, *others = (v.tokenize(text, parse_special=parse_special) for v in vocabularies)
        assert all(other == one for other in others)

    check()
    one, *others = vocabularies
    for token in range(one.size):
        for other in others:
            assert other.piece(token) == one.piece(token) and other.spelling(token) == one.spelling(token)
            assert other.is_control(token) == one.is_control(token)
            assert other.ends_generation(token) == one.ends_generation(token)


@over_native
def test_control_tokens_are_read_only_when_asked(backend: Native) -> None:
    vocabulary = backend.weights().vocabulary
    end = vocabulary.tokenize(END, parse_special=True)
    assert end == [vocabulary.eos] and vocabulary.spelling(end[0]) == END.encode()
    spelled_out = vocabulary.tokenize(f"a{END}b")
    assert vocabulary.eos not in spelled_out
    assert b"".join(map(vocabulary.piece, spelled_out)) == f"a{END}b".encode()
    parsed = vocabulary.tokenize(f"a{END}b", parse_special=True)
    assert parsed == [*vocabulary.tokenize("a"), vocabulary.eos, *vocabulary.tokenize("b")]


@over_native
def test_a_vocabulary_says_what_its_tokens_are(backend: Native, tmp_path: Path) -> None:
    weights = backend.fresh(tmp_path, padding=3)
    vocabulary = weights.vocabulary
    spelled = tiny_gguf.vocabulary(padding=3)
    assert vocabulary.size == len(spelled)
    assert [vocabulary.spelling(i).decode() for i in range(vocabulary.size)] == spelled
    assert vocabulary.kind == "bpe (gpt-2)" and not vocabulary.adds_bos
    controls = [i for i in range(vocabulary.size) if vocabulary.is_control(i)]
    assert [spelled[i] for i in controls] == [BEGIN, END, "[PAD0]", "[PAD1]", "[PAD2]"]
    assert all(vocabulary.piece(i) == b"" for i in controls)
    assert all(vocabulary.piece(i) for i in range(vocabulary.size) if i not in controls)
    assert [i for i in range(vocabulary.size) if vocabulary.ends_generation(i)] == [vocabulary.eos]
    assert (vocabulary.bos, vocabulary.eos) == (spelled.index(BEGIN), spelled.index(END))


@over_native
@pytest.mark.parametrize("token", [-1, 289, 2**31, 2**70])
def test_a_token_id_that_is_none_is_an_error(backend: Native, token: int) -> None:
    vocabulary = backend.weights().vocabulary
    for ask in (vocabulary.piece, vocabulary.spelling, vocabulary.is_control, vocabulary.ends_generation):
        with pytest.raises(SettingError):
            ask(token)


@over_native
def test_text_that_is_no_unicode_is_a_prompt_error(backend: Native) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        backend.weights().vocabulary.tokenize("half a \ud83d")


@over_native
def test_long_pieces_and_long_metadata_are_read_whole(backend: Native, tmp_path: Path) -> None:
    merges = ["a a", "aa aa", "aaaa aaaa"]
    merges += [f"{'a' * n} {'a' * n}" for n in (8, 16, 32, 64)]
    weights = backend.fresh(tmp_path, merges=merges, name="n" * 700)
    vocabulary = weights.vocabulary
    assert weights.metadata("general.name") == "n" * 700
    assert max(len(vocabulary.piece(i)) for i in range(vocabulary.size)) == 128
    assert [len(vocabulary.piece(t)) for t in vocabulary.tokenize("a" * 128)] == [128]


# The library's log

LOADS_AND_FAILS = """
    import sys
    from pathlib import Path
    from outrider.backends.gguf.log import show_log
    from outrider.backends.gguf.model import Weights
    from outrider.backends.gguf.options import LoadOptions
    from outrider.core.data import Span
    _, path, library, log = sys.argv
    if log == "shown":
        show_log(True)
    options = LoadOptions(library=library)
    weights = Weights(Path(path), options)
    model = weights.open(64)
    model.decode([Span(0, (1, 2, 3), 0, 1)])
    try:
        Weights(Path(path + ".none"), options)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@over_native
@pytest.mark.parametrize("log", ["hidden", "shown"])
def test_the_log_is_silent_unless_asked_for(backend: Native, tmp_path: Path, log: str) -> None:
    path = write_tiny(tmp_path / "own.gguf")
    code = textwrap.dedent(LOADS_AND_FAILS)
    child = subprocess.run(
        [sys.executable, "-c", code, str(path), str(backend.file.path), log],
        capture_output=True,
        text=True,
        check=False,
    )
    # Whatever is still open at the end of the program is no reason to crash, either.
    assert (child.returncode, child.stdout) == (0, "ModelFileError\n")
    assert ("llama_model_loader" in child.stderr) if log == "shown" else child.stderr == ""
