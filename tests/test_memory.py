"""What models need on the host and on GPUs, counted from their headers: against the libraries' own account,
and in arithmetic on GPUs that are not there."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from backends import FILES, MAINLINE, NATIVE
from cli_helpers import call
from head_files import write_eagle
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.context import show_log
from outrider.backends.gguf.head_model import HeadModel, HeadWeights
from outrider.backends.gguf.memory import (
    CACHE,
    COMPUTE,
    HOST,
    STATES,
    WEIGHTS,
    Contexts,
    check_memory,
    needed,
)
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.rewinding import RewindSupport
from outrider.backends.gguf.sizes import Layer, ModelSizes, read_sizes
from outrider.core.errors import OutOfMemory
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from tiny.architectures import ARCHITECTURES, WITH_HEADS
from tiny.sizes import Sizes
from tiny_gguf import write_tiny

_MIB = 2**20
_LOGGED = re.compile(r"(KV|RS|model|CPU|reserve: +CPU compute) buffer size = +([\d.]+) MiB")
_REPORTED = {"KV": "cache", "RS": "states", "model": "weights", "CPU": "weights"}
MODELS = Path.home() / ".cache" / "outrider" / "models"


def reported(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, float]:
    """MiB of the parts of a context, by the library's own account."""
    show_log(shown=True)
    try:
        with closing(Weights(path, model.options)) as weights:
            length = model.capacity_tokens // model.max_sequences
            support = RewindSupport("snapshots" if model.options.snapshots else "free")
            GgufModel(weights, length, model.max_sequences, support=support).close()
    finally:
        show_log(shown=False)
    found = {"cache": 0.0, "states": 0.0, "weights": 0.0, "compute": 0.0}
    for what, mib in _LOGGED.findall(capfd.readouterr().err):
        found[_REPORTED.get(what, "compute")] += float(mib)
    return found


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2moe", "gemma3"])
@pytest.mark.parametrize("name", NATIVE)
def test_weights_and_cache_are_what_the_library_says(
    name: str, arch: str, cache: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192)
    options = LoadOptions(threads=1, library=str(FILES[name].path), mmap=False, cache_type_k=cache)
    model = Contexts(read_sizes(path), replace(options, extra_buffer_types=False), 8192)
    need, logged = needed(model, {})[HOST], reported(model, path, capfd)
    assert need[CACHE] / _MIB == pytest.approx(logged["cache"], abs=0.011 * 2)
    assert need[WEIGHTS] / _MIB == pytest.approx(logged["weights"], abs=0.011 * 2)


def check_contexts(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Compare KV and states, which are exact, and compute buffers: no less, and not much more."""
    need, logged = needed(model, {})[HOST], reported(model, path, capfd)
    copies = 0 if model.snapshots else 2 * model.max_sequences * model.sizes.state_bytes
    assert need[CACHE] / _MIB == pytest.approx(logged["cache"], abs=0.011 * 2)
    assert (need[STATES] - copies) / _MIB == pytest.approx(logged["states"], abs=0.011)
    rows = min(model.micro_batch_tokens, model.options.max_rows) * model.sizes.vocabulary * 4
    compute = (need[COMPUTE] - rows) / _MIB
    assert logged["compute"] <= compute <= 1.5 * logged["compute"] + 2, (compute, logged)


def on_mainline(**given: Any) -> LoadOptions:
    return LoadOptions(threads=1, library=str(FILES[MAINLINE[0]].path), **given)


@pytest.mark.parametrize("attention", ["on", "off"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_contexts_of_every_kind_are_what_llama_cpp_says(
    arch: str, attention: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192)
    options = on_mainline(flash_attention=attention)
    check_contexts(Contexts(read_sizes(path), options, 8192, 2), path, capfd)


@pytest.mark.parametrize("arch", ["qwen35", "lfm2", "nemotron_h"])
def test_snapshots_are_what_llama_cpp_says(
    arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192)
    sizes = read_sizes(path)
    for count, sequences in ((4, 1), (16, 2)):
        check_contexts(Contexts(sizes, on_mainline(snapshots=count), 512 * sequences, sequences), path, capfd)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_window_is_what_llama_cpp_says(
    sequences: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch="gemma3", context_length=8192)
    options = on_mainline(full_window=False)
    check_contexts(Contexts(read_sizes(path), options, 8192 * sequences, sequences), path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compute_buffers_of_a_wide_model_are_estimated(
    arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, sizes=Sizes.wide(512), context_length=8192)
    sizes = read_sizes(path)
    for attention, tokens in (("on", 8192), ("off", 2048)):
        check_contexts(Contexts(sizes, on_mainline(flash_attention=attention), tokens), path, capfd)
    check_contexts(Contexts(sizes, on_mainline(micro_batch_tokens=128, max_rows=512), 4096, 2), path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M", "gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_contexts_of_real_models_are_what_llama_cpp_says(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = next(MODELS.glob(f"{name}*.gguf"), None)
    if path is None:
        pytest.skip(f"{name} is not there")
    sizes = read_sizes(path)
    for attention, tokens in (("auto", 2048), ("auto", 8192), ("on", 32768), ("off", 4096)):
        check_contexts(Contexts(sizes, on_mainline(flash_attention=attention), tokens), path, capfd)


@pytest.mark.parametrize("arch", WITH_HEADS)
def test_a_head_is_counted(arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192, mtp_layers=1)
    sizes, options = read_sizes(path), on_mainline(mmap=False, extra_buffer_types=False)
    with_head = needed(Contexts(sizes, options, 2048, 1, has_head=True, head_tokens=2048), {})[HOST]
    without = needed(Contexts(sizes, options, 2048), {})[HOST]
    show_log(shown=True)
    try:
        with closing(Weights(path, options)) as weights:
            assert weights.num_heads == 1
            target = GgufModel(weights, 2048, 1, support=RewindSupport("none"))
            HeadModel(target, 2048).close()
            target.close()
    finally:
        show_log(shown=False)
    log = capfd.readouterr().err
    logged = {"cache": 0.0, "states": 0.0, "weights": 0.0, "compute": 0.0}
    for what, mib in _LOGGED.findall(log):
        logged[_REPORTED.get(what, "compute")] += float(mib)
    assert with_head[CACHE] / _MIB == pytest.approx(logged["cache"], abs=0.011 * 2)
    assert with_head[WEIGHTS] / _MIB == pytest.approx(logged["weights"], abs=0.011 * 2)
    assert with_head[COMPUTE] / _MIB > logged["compute"] > without[COMPUTE] / _MIB


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_file_of_heads_is_counted(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arch = "llama" if kind == "eagle3" else "qwen35"
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192)
    if kind == "eagle3":
        file = write_eagle(tmp_path / "e.gguf", layers=(0, 1, 1))
    else:
        file = write_tiny(tmp_path / "e.gguf", arch=arch, mtp_layers=1, part="heads")
    sizes, options = read_sizes(file), on_mainline(mmap=False, extra_buffer_types=False)
    model = Contexts(sizes, options, 2048, state_values=3 * 64)
    if kind == "mtp":
        model = Contexts(sizes, options, 0, 1, has_head=True, head_tokens=2048, state_values=64)
    with closing(Weights(path, options)) as weights, closing(weights.open(2048)) as target:
        show_log(shown=True)
        try:
            head = HeadWeights(read_head(read_card(file), read_card(path)), options)
            head.open_beside(target, 2048).close()
        finally:
            show_log(shown=False)
        head.close()
    need = needed(model, {})[HOST]
    logged = {"cache": 0.0, "states": 0.0, "weights": 0.0, "compute": 0.0}
    for what, mib in _LOGGED.findall(capfd.readouterr().err):
        logged[_REPORTED.get(what, "compute")] += float(mib)
    assert need[CACHE] / _MIB == pytest.approx(logged["cache"], abs=0.011 * 2)
    assert need[WEIGHTS] / _MIB == pytest.approx(logged["weights"], abs=0.011 * 2)
    assert need[COMPUTE] / _MIB > logged["compute"] > 0


def test_a_header_that_says_little_is_counted_with_what_it_says(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    for name in ("token_embd.weight", "blk.0.attn_k.weight", "blk.7.attn_k_b.weight", "blk.0.ssm_in.weight"):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    need = needed(Contexts(read_sizes(tmp_path / "odd.gguf"), LoadOptions(mmap=False), 8192), {})[HOST]
    assert need[WEIGHTS] == 4 * 16 and need[COMPUTE] >= _MIB


GB = 10**9
SIZES = ModelSizes(
    name="big",
    tensors={
        "token_embd.weight": 2 * GB,
        **{f"blk.{i}.attn_q.weight": 4 * GB for i in range(4)},
        **{f"blk.{i}.ffn_up_exps.weight": 6 * GB for i in range(4)},
        "output.weight": 3 * GB,
    },
    layers=[Layer(125, 125)] * 4,
    vocabulary=1000,
    trained_context=10**7,
)
"""Layers of 10 GB, and KV of 500 bytes for each token and layer."""
GPUS = {"CUDA0": 30 * GB, "CUDA1": 10 * GB}


def weights_of(**given: Any) -> dict[str, float]:
    """Gigabytes of weights by device."""
    found = needed(Contexts(SIZES, LoadOptions(**given)), GPUS)
    return {name: need[WEIGHTS] / GB for name, need in found.items() if need[WEIGHTS]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"CUDA0": 40, "CUDA1": 3}),  # by free memory: 3 to 1
        ({"tensor_split": (1.0, 1.0)}, {"CUDA0": 30, "CUDA1": 13}),
        ({"tensor_split": (0.0, 1.0)}, {"CUDA1": 43}),
        ({"gpu_layers": 2, "tensor_split": (1.0, 1.0)}, {"CUDA0": 10, "CUDA1": 3}),
        ({"gpu_layers": 1}, {"CUDA0": 3}),
        ({"gpu_layers": 0}, {}),
        ({"devices": ("none",)}, {}),
        ({"devices": ("CUDA1",)}, {"CUDA1": 43}),
        ({"split_mode": "none", "main_gpu": 1}, {"CUDA1": 43}),
        ({"split_mode": "row"}, {"CUDA0": 32.25, "CUDA1": 10.75}),
        ({"tensor_overrides": ("exps=CPU",)}, {"CUDA0": 16, "CUDA1": 3}),
        ({"tensor_overrides": (r"blk\.0\..*exps=CUDA1", "exps=CPU")}, {"CUDA0": 16, "CUDA1": 9}),
        ({"mmap": False, "gpu_layers": 2, "devices": ("CUDA0",)}, {HOST: 32, "CUDA0": 13}),
        ({"mlock": True, "gpu_layers": 0}, {HOST: 45}),
    ],
)
def test_weights_lie_where_the_options_put_them(given: dict[str, Any], expected: dict[str, float]) -> None:
    assert weights_of(**given) == expected


def test_a_gpu_holds_tied_embeddings_again() -> None:
    tensors = {name: size for name, size in SIZES.tensors.items() if name != "output.weight"}
    tied = replace(SIZES, tensors=tensors)
    found = needed(Contexts(tied, LoadOptions(devices=("CUDA0",), mmap=False)), GPUS)
    assert (found["CUDA0"][WEIGHTS], found[HOST][WEIGHTS]) == (42 * GB, 2 * GB)


def test_the_cache_lies_with_its_layer_or_on_the_host() -> None:
    def cache(**given: Any) -> dict[str, float]:
        found = needed(Contexts(SIZES, LoadOptions(**given), 10**6), GPUS)
        return {name: need[CACHE] / GB for name, need in found.items() if need[CACHE]}

    assert cache(tensor_split=(1.0, 1.0)) == {"CUDA0": 1.5, "CUDA1": 0.5}
    assert cache(gpu_layers=2) == {HOST: 1.5, "CUDA0": 0.5}
    assert cache(kv_offload=False) == {HOST: 2.0}
    assert cache(split_mode="tensor") == {"CUDA0": 1.5, "CUDA1": 0.5}
    assert cache(gpu_layers=0, cache_type_k="q8_0", cache_type_v="q4_0") == {
        HOST: 4 * 125 * (34 / 32 + 18 / 32) / 1000
    }


SMALL = replace(SIZES, name="small", tensors={"blk.0.attn_q.weight": 5 * GB}, layers=[Layer(125, 125)])


@pytest.mark.parametrize(
    ("models", "free", "why", "way_out"),
    [
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0), 2 * 10**6)],
            {HOST: 2 * GB},
            "are needed (KV cache 4.0 GB, ",
            "What would fit: a smaller context (-c: 998912 tokens over all requests).",
        ),
        (
            [Contexts(SIZES, LoadOptions(), 0)],
            {HOST: 100 * GB, "CUDA0": 24 * GB},
            "43.0 GB are needed on CUDA0 (weights 43.0 GB), and 24.0 GB are free",
            "What would fit: 3 layers on the GPU (-ngl).",
        ),
        (
            [Contexts(SIZES, LoadOptions(), 0), Contexts(SMALL, LoadOptions(), 0)],
            {HOST: 100 * GB, "CUDA0": 45 * GB},
            "48.0 GB are needed on CUDA0",
            "What would fit: 4 layers on the GPU (-ngl); or no draft model (-md none).",
        ),
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0, mlock=True), 0)],
            {HOST: 24 * GB},
            "45.0 GB are needed (weights 45.0 GB), and 24.0 GB are free",
            "What would fit: weights that are mapped (--mmap, without --mlock).",
        ),
        (
            [Contexts(SIZES, LoadOptions(kv_offload=False), 10**6)],
            {HOST: 0, "CUDA0": 0},
            "are needed",
            "Choose a smaller quantization, or a smaller cache type (-ctk, -ctv).",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    models: list[Contexts], free: dict[str, float], why: str, way_out: str
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        check_memory(models, free)
    assert why in caught.value.why and caught.value.way_out == way_out
    assert caught.value.what.startswith(" and ".join(model.sizes.name for model in models))
    tokens = models[0].capacity_tokens
    assert caught.value.what.endswith(f" with a context of {tokens} tokens") == bool(tokens)


def test_fewer_snapshots_or_requests_or_a_smaller_cache_would_fit() -> None:
    sizes = replace(SIZES, layers=[Layer(125, 125), Layer(state_bytes=GB)] * 2)

    def way_out(free: float, tokens: int = 0, sequences: int = 1, head: bool = False, **given: Any) -> str:
        of_head = replace(sizes, num_heads=1) if head else sizes
        model = Contexts(of_head, LoadOptions(gpu_layers=0, **given), tokens, sequences, head, tokens)
        with pytest.raises(OutOfMemory) as caught:
            check_memory([model], {HOST: free * GB})
        assert "recurrent states" in caught.value.why
        return caught.value.way_out

    assert way_out(14.5, snapshots=16) == "What would fit: --snapshots 6."
    assert way_out(6.5, snapshots=16) == "What would fit: --snapshots 2."
    assert way_out(3.9, snapshots=16).startswith("Choose a smaller quantization")
    assert way_out(25, sequences=8) == "What would fit: 4 at once (--parallel), each with its context."
    assert "smaller cache type (-ctk q8_0 -ctv q8_0)" in way_out(9.5, tokens=2 * 10**6)
    assert "without its own head (--no-mtp)" in way_out(8, tokens=2 * 10**6, head=True)


def test_windows_alone_would_fit() -> None:
    sizes = replace(SIZES, layers=[Layer(125, 125, has_window=i < 3) for i in range(4)], window_tokens=512)
    model = Contexts(sizes, LoadOptions(gpu_layers=0), 10**6)
    with pytest.raises(OutOfMemory) as caught:
        check_memory([model], {HOST: GB})
    assert caught.value.way_out.endswith("or the KV of its sliding windows alone (--no-swa-full).")
    check_memory([replace(model, options=replace(model.options, full_window=False))], {HOST: GB})


@given(
    layers=st.integers(-1, 5),
    split=st.lists(st.integers(0, 3), max_size=2),
    tokens=st.integers(0, 10**7),
    host=st.integers(0, 60),
    gpus=st.lists(st.integers(1, 40), max_size=2),
    mode=st.sampled_from(["none", "layer", "row", "tensor"]),
)
def test_what_is_said_to_fit_does(
    layers: int, split: list[int], tokens: int, host: int, gpus: list[int], mode: str
) -> None:
    options = LoadOptions(
        gpu_layers=layers, tensor_split=tuple(map(float, split)), split_mode=mode, mmap=False
    )
    model = Contexts(SIZES, options, tokens)
    free = {HOST: float(host * GB), **{f"CUDA{i}": float(size * GB) for i, size in enumerate(gpus)}}
    found = needed(model, {name: int(size) for name, size in free.items() if name != HOST})
    assert sum(need[WEIGHTS] for need in found.values()) == pytest.approx(
        45 * GB
    )  # nothing twice, nothing lost
    assert sum(need[CACHE] for need in found.values()) == pytest.approx(2000 * tokens)
    try:
        check_memory([model], free)
    except OutOfMemory as error:
        if context := re.search(r"-c: (\d+) tokens", error.way_out):
            check_memory([replace(model, capacity_tokens=int(context[1]))], free)
        if fewer := re.search(r"(\d+) layers", error.way_out):
            check_memory([replace(model, options=replace(options, gpu_layers=int(fewer[1])))], free)
            if int(fewer[1]) <= len(SIZES.layers):
                with pytest.raises(OutOfMemory):
                    check_memory(
                        [replace(model, options=replace(options, gpu_layers=int(fewer[1]) + 1))], free
                    )


def test_nothing_is_loaded_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    model = write_tiny(tmp_path / "target.gguf", context_length=8192)
    monkeypatch.setattr("outrider.backends.gguf.memory.available_bytes", lambda: 30e6)
    monkeypatch.setattr(
        "outrider.session.pair.load_weights", lambda *_args, **_options: pytest.fail("loaded")
    )
    done = call(monkeypatch, capfdbinary, "run", "-m", str(model), "-c", "8192", "--raw", "-p", "hi")
    assert done.status == 2 and done.said.startswith(
        "error: target with a context of 8192 tokens: 54.5 MB are needed (KV cache 2.1 MB"
    )
    assert "What would fit: a smaller context (-c: " in done.said


def test_snapshots_that_do_not_fit_are_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    model = str(write_tiny(tmp_path / "hybrid.gguf", arch="qwen35"))
    monkeypatch.setattr("outrider.backends.gguf.memory.available_bytes", lambda: 10e6)
    line = ["run", "-m", model, "-c", "256", "--raw", "-p", "hi", "-n", "2", "--backend", "llama.cpp"]
    line += ["-t", "1", "--policy", "fixed"]
    done = call(monkeypatch, capfdbinary, *line, "--snapshots", "64")
    assert done.status == 2 and "recurrent states 7.0 MB" in done.said
    found = re.search(r"What would fit: --snapshots (\d+)\.", done.said)
    assert found and 1 < int(found[1]) < 64
    assert call(monkeypatch, capfdbinary, *line, "--snapshots", found[1]).status == 0
