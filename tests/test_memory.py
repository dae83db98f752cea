"""The least memory that models need, counted from their headers: against the libraries' own account, and in
arithmetic on GPUs that are not there."""

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
from cli_helpers import Call
from outrider.backends.gguf.head_model import HeadModel
from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.memory import GPUS, HOST, Contexts, check_memory
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.errors import OutOfMemory
from outrider.models.gguf import Layer, Layout, read_card
from tiny import ARCHITECTURES, WITH_HEADS
from tiny_gguf import write_tiny

_MIB = 2**20
_LOGGED = re.compile(r"(KV|model|CPU) buffer size = +([\d.]+) MiB")
_ROUNDED = 0.011 * 2
"""of the two numbers that a library logs, in MiB"""


def reported(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """MiB of weights and KV, by the library's own account."""
    show_log(shown=True)
    try:
        with closing(Weights(path, model.options)) as weights:
            target = GgufModel(weights, model.capacity_tokens, 1, support=RewindSupport("free"))
            if model.head_tokens:
                HeadModel(target, model.head_tokens).close()
            target.close()
    finally:
        show_log(shown=False)
    logged = [(what, float(mib)) for what, mib in _LOGGED.findall(capfd.readouterr().err)]
    return sum(mib for what, mib in logged if what != "KV"), sum(mib for what, mib in logged if what == "KV")


def unmapped(name: str = MAINLINE[0], **given: Any) -> LoadOptions:
    path = str(FILES[name].path)
    return LoadOptions(threads=1, library=path, mmap=False, extra_buffer_types=False, **given)


def check(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needed = [size / _MIB for size in model.needed(on_gpus=False)[HOST]]
    assert needed == pytest.approx(reported(model, path, capfd), abs=_ROUNDED)


@pytest.mark.parametrize("name", NATIVE)
def test_weights_and_kv_are_what_the_library_says(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", context_length=8192)
    check(Contexts(read_card(path).layout, unmapped(name, cache_type_k="q8_0"), 8192), path, capfd)


@pytest.mark.parametrize(
    ("arch", "heads"), [*((arch, 0) for arch in ARCHITECTURES), *((arch, 1) for arch in WITH_HEADS)]
)
def test_every_kind_is_counted(
    arch: str, heads: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192, mtp_layers=heads)
    check(Contexts(read_card(path).layout, unmapped(), 2048, head_tokens=2048 * heads), path, capfd)


def test_a_window_takes_no_less_than_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch="gemma3", context_length=8192)
    model = Contexts(read_card(path).layout, unmapped(full_window=False), 8192)
    _, kv = model.needed(on_gpus=False)[HOST]
    assert 0 < kv / _MIB < reported(model, path, capfd)[1]


def test_a_header_that_says_little_is_counted_with_what_it_says(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    for name in ("token_embd.weight", "blk.0.attn_k.weight", "blk.7.attn_k_b.weight", "blk.0.ssm_in.weight"):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = Contexts(read_card(tmp_path / "odd.gguf").layout, unmapped(), 8192)
    assert sum(model.needed(on_gpus=False)[HOST]) == 4 * 16


GB = 10**9
SIZES = Layout(
    name="big",
    tensors={
        "token_embd.weight": 2 * GB,
        **{f"blk.{i}.attn_q.weight": 4 * GB for i in range(4)},
        **{f"blk.{i}.ffn_up_exps.weight": 6 * GB for i in range(4)},
        "output.weight": 3 * GB,
    },
    layers=[Layer(125, 125)] * 4,
)
"""Layers of 10 GB, and KV of 500 bytes for each token and layer."""


@pytest.mark.parametrize(
    ("given", "host", "gpus"),
    [
        ({}, (0, 0), (43, 2)),
        ({"gpu_layers": 2}, (0, 1.5), (13, 0.5)),
        ({"gpu_layers": 1}, (0, 2), (3, 0)),
        ({"gpu_layers": 0}, (0, 2), (0, 0)),
        ({"devices": ("none",)}, (0, 2), (0, 0)),
        ({"kv_offload": False}, (0, 2), (43, 0)),
        ({"tensor_overrides": ("exps=CPU",)}, (0, 0), (19, 2)),
        ({"tensor_overrides": (r"blk\.0\..*exps=CUDA1", "exps=CPU")}, (0, 0), (25, 2)),
        ({"mmap": False, "gpu_layers": 2}, (32, 1.5), (13, 0.5)),
        ({"mlock": True, "gpu_layers": 0}, (45, 2), (0, 0)),
    ],
)
def test_weights_and_kv_lie_where_the_options_put_them(
    given: dict[str, Any], host: tuple[float, float], gpus: tuple[float, float]
) -> None:
    found = Contexts(SIZES, LoadOptions(**given), 10**6).needed(on_gpus=True)
    assert {place: tuple(size / GB for size in sizes) for place, sizes in found.items()} == {
        HOST: host,
        GPUS: gpus,
    }


SMALL = replace(SIZES, name="small", tensors={"blk.0.attn_q.weight": 5 * GB}, layers=[Layer(125, 125)])


@pytest.mark.parametrize(
    ("models", "free", "why", "way_out"),
    [
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0), 2 * 10**6)],
            {HOST: 2 * GB},
            "weights and KV cache take at least 0 MB and 4.00 GB, and 2.00 GB are free",
            "What would fit: a smaller context (-c: 999936 tokens over all requests).",
        ),
        (
            [Contexts(SIZES, LoadOptions())],
            {HOST: 100 * GB, GPUS: 24 * GB},
            "weights and KV cache take at least 43.0 GB and 0 MB on the GPUs, and 24.0 GB are free",
            "What would fit: 3 layers on the GPU (-ngl).",
        ),
        (
            [Contexts(SIZES, LoadOptions()), Contexts(SMALL, LoadOptions())],
            {HOST: 100 * GB, GPUS: 45 * GB},
            "take at least 48.0 GB",
            "What would fit: 4 layers on the GPU (-ngl); or no draft model (-md none).",
        ),
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0, mlock=True))],
            {HOST: 24 * GB},
            "take at least 45.0 GB",
            "What would fit: weights that are mapped (--mmap, without --mlock).",
        ),
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0), 10**6)],
            {HOST: 1.5 * GB},
            "2.00 GB",
            "What would fit: a smaller context (-c: 749824 tokens over all requests); or a smaller cache "
            "type (-ctk q8_0 -ctv q8_0).",
        ),
        (
            [Contexts(SIZES, LoadOptions(kv_offload=False), 10**6)],
            {HOST: 0, GPUS: 0},
            "take at least",
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
    assert caught.value.what.startswith(" and ".join(model.layout.name for model in models))
    tokens = models[0].capacity_tokens
    assert caught.value.what.endswith(f" with a context of {tokens} tokens") == bool(tokens)


@given(
    layers=st.integers(-1, 5),
    tokens=st.integers(0, 10**7),
    host=st.integers(0, 60),
    gpus=st.none() | st.integers(1, 60),
)
def test_what_is_said_to_fit_does(layers: int, tokens: int, host: int, gpus: int | None) -> None:
    options = LoadOptions(gpu_layers=layers, mmap=False)
    model, free = Contexts(SIZES, options, tokens), {HOST: float(host * GB)}
    free |= {} if gpus is None else {GPUS: float(gpus * GB)}
    found = model.needed(on_gpus=GPUS in free)
    weights, kv = (sum(sizes) for sizes in zip(*found.values(), strict=True))
    assert weights == 45 * GB and kv == pytest.approx(2000 * tokens)  # nothing twice, nothing lost
    try:
        check_memory([model], free)
    except OutOfMemory as error:
        if context := re.search(r"-c: (\d+) tokens", error.way_out):
            check_memory([replace(model, capacity_tokens=int(context[1]))], free)
        if fewer := re.search(r"(\d+) layers", error.way_out):
            check_memory([replace(model, options=replace(options, gpu_layers=int(fewer[1])))], free)
            if int(fewer[1]) <= len(SIZES.layers):
                more = replace(options, gpu_layers=int(fewer[1]) + 1)
                with pytest.raises(OutOfMemory):
                    check_memory([replace(model, options=more)], free)


def test_nothing_is_loaded_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outrider: Call
) -> None:
    model = write_tiny(tmp_path / "target.gguf", context_length=8192)
    monkeypatch.setattr("outrider.backends.gguf.memory.available_bytes", lambda: 1e6)
    monkeypatch.setattr(
        "outrider.session.pair.load_weights", lambda *_args, **_options: pytest.fail("loaded")
    )
    done = outrider("run", "-m", str(model), "-c", "8192", "--raw", "-p", "hi")
    assert done.status == 2 and done.said.startswith(
        "error: target with a context of 8192 tokens: weights and KV cache take at least 0 MB and 2.1"
    )
    assert "What would fit: a smaller context (-c: " in done.said
