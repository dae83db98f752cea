"""Models as arrays: what is read of a GGUF, and the first weights of a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from distilling import random_model, spoken
from outrider.core.errors import ModelFileError
from outrider.lab.distill.checkpoint import (
    Array,
    Checkpoint,
    Shape,
    read_gguf,
    restrict,
    rotation_layout,
    tensor_sizes,
)
from outrider.models.vocab.subset import Subset
from tiny_gguf import write_tiny

TOKENS = [65, 256, 3, 258, 101, 200, 270, 12]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=3)


@pytest.fixture(scope="module")
def model(path: Path) -> Checkpoint:
    return read_gguf(path)


def logits(model: Checkpoint, tokens: list[int] = TOKENS) -> Array:
    torch = pytest.importorskip("torch")
    from outrider.lab.distill.network import Network

    network = Network.of(model, 64, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        found: Array = network.logits(network.states(torch.tensor([tokens])))[0].numpy()
    return found


# Reading


def test_a_model_that_is_read_says_what_llama_cpp_says(path: Path, model: Checkpoint) -> None:
    expected = spoken(path, TOKENS)
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-3 * expected.std())


def test_the_shape_is_that_of_the_file(model: Checkpoint) -> None:
    shape = model.shape
    assert shape == Shape("llama", 3, 64, 2, 1, 32, 96, 289, 512, 10_000.0, shape.norm_epsilon)
    assert shape.norm_epsilon == pytest.approx(1e-5)
    assert (
        shape.parameters
        == sum(values.size for name, values in model.weights.items() if values.ndim == 2) - 289 * 64
    )
    assert {name: values.shape for name, values in model.weights.items()} == tensor_sizes(shape) | {
        "output.weight": (289, 64)
    }
    assert {values.dtype for values in model.weights.values()} == {np.dtype(np.float32)}
    assert "tokenizer.ggml.tokens" in model.metadata and "llama.block_count" not in model.metadata


def test_the_layout_of_query_and_key_matrices_is_turned_back(path: Path, model: Checkpoint) -> None:
    stored = {t.name: np.array(t.data) for t in GGUFReader(path).tensors}
    turned = 0
    for name, values in model.weights.items():
        written = rotation_layout(name, values, model.shape, to_gguf=True)
        np.testing.assert_array_equal(written, stored[name], err_msg=name)
        turned += not np.array_equal(values, stored[name])
    assert turned == 2 * model.shape.layers
    qwen = random_model(model, "qwen2")
    for name, values in qwen.weights.items():
        assert rotation_layout(name, values, qwen.shape, to_gguf=True) is values


def test_a_quantized_model_is_read_as_numbers(path: Path, model: Checkpoint, tmp_path: Path) -> None:
    def encode(tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if values.ndim > 1:
                tensors[name] = (quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)

    back = read_gguf(rewritten(path, tmp_path / "q8.gguf", encode))
    assert back.shape == model.shape
    for name, values in model.weights.items():
        assert back.weights[name].shape == values.shape
        assert np.abs(back.weights[name] - values).max() <= np.abs(values).max() / 127


def rewritten(
    source: Path, path: Path, change: Callable[[dict[str, Any]], object] = len, **fields: Any
) -> Path:
    """The model with other tensors, and other fields of its architecture."""
    reader = GGUFReader(source)
    architecture = str(fields.pop("architecture", "llama"))
    writer = GGUFWriter(path, architecture)
    values = {
        key.removeprefix("llama."): (field.contents(), field.types[0])
        for key, field in reader.fields.items()
        if key.startswith("llama.")
    }
    for key, (value, kind) in values.items():
        if fields.get(key) != "":
            writer.add_key_value(f"{architecture}.{key}", fields.pop(key, value), kind)
    for key, value in fields.items():
        if value != "":
            kind = GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.UINT32
            writer.add_key_value(f"{architecture}.{key}", value, kind)
    tensors: dict[str, Any] = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    for name, values in tensors.items():
        data, stored = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        del tensors[name]

    return change


def with_one(name: str, *size: int) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: np.ones(size, dtype=np.float32)})


UNREADABLE: dict[str, tuple[Mapping[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "the architecture 'mamba' cannot be trained here"),
    "scaled": ({"rope.scaling.type": "yarn"}, "its rotary positions are scaled"),
    "frequencies": ({"change": with_one("rope_freqs.weight", 16)}, "its rotary positions are scaled"),
    "partly rotated": ({"rope.dimension_count": 16}, "a part of each head is rotated"),
    "no epsilon": ({"attention.layer_norm_rms_epsilon": ""}, "it lacks llama.attention.layer_norm_rms"),
    "no heads": ({"attention.head_count": 0}, r"its llama\.attention\.head_count is 0, not a number above 0"),
    "no embedding": ({"change": without("token_embd.weight")}, r"it lacks token_embd\.weight"),
    "no tensor": ({"change": without("blk.1.ffn_up.weight")}, r"it lacks 1 tensors, blk\.1\.ffn_up\.weight"),
    "experts": (
        {"change": with_one("blk.1.ffn_gate_inp.weight", 4, 64)},
        r"it has blk\.1\.ffn_gate_inp\.weight",
    ),
    "another size": (
        {"change": with_one("blk.2.attn_v.weight", 64, 64)},
        r"blk\.2\.attn_v\.weight has the size \(64, 64\), and its header says \(32, 64\)",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_trained_is_refused(path: Path, tmp_path: Path, kind: str) -> None:
    how, complaint = UNREADABLE[kind]
    odd = rewritten(path, tmp_path / "odd.gguf", **how)
    with pytest.raises(ModelFileError, match=complaint) as caught:
        read_gguf(odd)
    assert caught.value.what == str(odd) and caught.value.way_out


def test_damaged_and_split_files_are_refused(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="missing at its end"):
        read_gguf(cut)
    with pytest.raises(ModelFileError, match="its weights are in several files"):
        read_gguf(write_tiny(tmp_path / "split.gguf", shards=2))
    with pytest.raises(ModelFileError, match="there is no such file"):
        read_gguf(tmp_path / "none.gguf")


# Parts of a model


def test_a_restricted_model_has_a_mean_row_for_the_rest(model: Checkpoint) -> None:
    subset = Subset.of([1, 5, 288], 289)
    draft = restrict(model, subset)
    assert draft.shape == replace(model.shape, vocabulary=4)
    for name in ("token_embd.weight", "output.weight"):
        rows = model.weights[name]
        np.testing.assert_array_equal(draft.weights[name][:3], rows[[1, 5, 288]])
        np.testing.assert_allclose(
            draft.weights[name][3], np.delete(rows, [1, 5, 288], axis=0).mean(axis=0), atol=1e-6
        )
    assert restrict(model, Subset.whole(289)) is model
