"""Models in Hugging Face's layout: what is written, what is read, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distilling import random_model
from outrider.core.errors import ModelFileError, SettingError
from outrider.lab.distill.checkpoint import ARCHITECTURES, Checkpoint, read_gguf
from outrider.lab.distill.starting import restrict
from outrider.models.vocab.subset import Subset
from tiny_gguf import Reduced, write_tiny

pytest.importorskip("torch")
from safetensors.numpy import load_file, save_file

from outrider.lab.distill.hugging_face import read_safetensors, write_safetensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_gguf(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_written_is_read_back(
    whole: Checkpoint, tmp_path: Path, architecture: str, tied: bool
) -> None:
    model = random_model(whole, architecture)
    if tied:
        kept = {name: values for name, values in model.weights.items() if name != "output.weight"}
        model = model.with_weights(replace(model.shape, rope_base=5e5), kept)
    (note,) = write_safetensors(model, tmp_path / "new", "F32")
    assert "tokenizer" in note
    back = read_safetensors(tmp_path / "new", whole)
    assert back.shape == model.shape and back.metadata is whole.metadata
    assert back.weights.keys() == model.weights.keys()
    for name, values in model.weights.items():
        np.testing.assert_array_equal(back.weights[name], values, err_msg=name)
    assert read_safetensors(tmp_path / "new" / "model.safetensors").metadata == {}


def test_the_files_are_what_other_engines_expect(whole: Checkpoint, tmp_path: Path) -> None:
    model = random_model(whole, "qwen2")
    write_safetensors(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    shape = model.shape
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["model_type"] == "qwen2"
    assert (config["vocab_size"], config["hidden_size"]) == (shape.vocabulary, shape.width)
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 32)
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (False, "bfloat16")
    assert (config["bos_token_id"], config["eos_token_id"]) == (287, 288)
    header = header_of(tmp_path / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    inner = (
        "self_attn.q_proj.bias",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
    )
    assert {*names, *(f"model.layers.1.{name}" for name in inner)} < header.keys()
    entry = header["model.layers.1.mlp.down_proj.weight"]
    assert (entry["dtype"], entry["shape"]) == ("BF16", [shape.width, shape.feed_forward])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    size = (tmp_path / "model.safetensors").stat().st_size
    length = size - end - 8
    assert length % 8 == 0 and length > 0 and header["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize(("kind", "error"), [("BF16", 2**-8), ("F16", 2**-10)])
def test_16_bits_keep_their_precision(whole: Checkpoint, tmp_path: Path, kind: Any, error: float) -> None:
    write_safetensors(whole, tmp_path, kind)
    back = read_safetensors(tmp_path, whole)
    for name, values in whole.weights.items():
        np.testing.assert_allclose(back.weights[name], values, rtol=error, atol=1e-6, err_msg=name)
    write_safetensors(back, tmp_path / "again", kind)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_a_model_in_parts_is_read(whole: Checkpoint, tmp_path: Path) -> None:
    write_safetensors(whole, tmp_path, "F32")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts: dict[str, dict[str, Any]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, values) in enumerate(tensors.items()):
        parts[sorted(parts)[number % 2]][name] = values
    for file, held in parts.items():
        save_file(held, tmp_path / file)
    places = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    back = read_safetensors(tmp_path, whole)
    assert all(np.array_equal(back.weights[name], values) for name, values in whole.weights.items())
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"b\.safetensors: no such file"):
        read_safetensors(tmp_path, whole)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../b.safetensors"}}')
    with pytest.raises(ModelFileError, match="it names no files beside it"):
        read_safetensors(tmp_path, whole)


def test_padding_is_cut_and_a_smaller_vocabulary_refused(whole: Checkpoint, tmp_path: Path) -> None:
    padded = read_gguf(write_tiny(tmp_path / "padded.gguf", padding=5))
    write_safetensors(padded, tmp_path / "padded", "F32")
    back = read_safetensors(tmp_path / "padded", whole)
    assert back.shape == whole.shape
    assert np.array_equal(back.weights["output.weight"], padded.weights["output.weight"][:-5])
    write_safetensors(whole, tmp_path / "whole", "F32")
    with pytest.raises(ModelFileError, match="it has 289 tokens, and its target 294"):
        read_safetensors(tmp_path / "whole", padded)


# What is refused


def test_what_the_layout_has_no_place_for_is_refused(whole: Checkpoint, tmp_path: Path) -> None:
    subset = Subset.of(range(270), whole.shape.vocabulary)
    with pytest.raises(SettingError, match="a reduced vocabulary needs a map"):
        write_safetensors(restrict(whole, subset), tmp_path / "x")
    named = read_gguf(write_tiny(tmp_path / "reduced.gguf", reduced=Reduced(10, "0")))
    with pytest.raises(SettingError, match="a reduced vocabulary needs a map"):
        write_safetensors(named, tmp_path / "x")
    (tmp_path / "reduced.gguf").unlink()
    biased = whole.with_weights(whole.shape, random_model(whole, "qwen2").weights)
    with pytest.raises(SettingError, match="LlamaForCausalLM and this model differ in biases"):
        write_safetensors(biased, tmp_path / "x")
    broken = whole.with_weights(
        whole.shape, {**whole.weights, "output_norm.weight": np.full(64, np.nan, np.float32)}
    )
    with pytest.raises(SettingError, match=r"model\.norm\.weight holds numbers that are infinite"):
        write_safetensors(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        size = len(text) if length is None else length
        (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text)

    return write


ENTRY = b'{"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'


def foreign(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: values.astype(np.float64) for name, values in load_file(path).items()}, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (changed(model_type="mamba"), "the architecture 'mamba' cannot be trained here"),
    "scaled": (changed(rope_scaling={"rope_type": "llama3", "factor": 8}), "it sets rope_scaling"),
    "scaled, newer": (changed(rope_parameters={"rope_type": "yarn"}), "it sets rope_parameters"),
    "quantized": (changed(quantization_config={"bits": 4}), "it sets quantization_config"),
    "another function": (changed(hidden_act="gelu"), "it sets hidden_act"),
    "no number": (changed(hidden_size="wide"), "its hidden_size is 'wide', not a number above 0"),
    "nothing": (changed(num_attention_heads=0), "its num_attention_heads is 0"),
    "endless": (changed(hidden_size=float("inf")), "its hidden_size is inf"),
    "countless layers": (changed(num_hidden_layers=10**15), "more layers than there are"),
    "odd groups": (changed(num_attention_heads=3, num_key_value_heads=2), "heads that cannot be shared"),
    "another size": (changed(intermediate_size=97), r"blk\.0\.ffn_\w+\.weight has the size"),
    "more layers": (changed(num_hidden_layers=3), r"it lacks 9 tensors, blk\.2\."),
    "fewer layers": (changed(num_hidden_layers=1), r"it has blk\.1\."),
    "cut short": (cut, "it is damaged, or cut short"),
    "no safetensors": (header(b"{}", 2**60), "it is damaged, or cut short"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "it is damaged, or cut short"),
    "no JSON": (header(b"{]"), "it is damaged, or cut short"),
    "a list": (header(b"[]"), "it is damaged, or cut short"),
    "beyond the end": (header(ENTRY), "it is damaged, or cut short"),
    "another type": (foreign, "is of the type torch.float64, and only F32, F16, BF16 can be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no such file"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "broken configuration": (
        lambda folder: (folder / "config.json").write_text("{"), "it is no JSON"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_unsupported_models_are_refused(whole: Checkpoint, tmp_path: Path, damage: str) -> None:
    write_safetensors(whole, tmp_path, "F32")
    change, complaint = DAMAGES[damage]
    change(tmp_path)
    with pytest.raises(ModelFileError, match=complaint) as caught:
        read_safetensors(tmp_path, whole)
    assert str(tmp_path) in caught.value.what and caught.value.way_out


def test_an_output_layer_that_is_missing_is_said(whole: Checkpoint, tmp_path: Path) -> None:
    tied = {name: values for name, values in whole.weights.items() if name != "output.weight"}
    write_safetensors(whole.with_weights(whole.shape, tied), tmp_path, "F32")
    changed(tie_word_embeddings=False)(tmp_path)
    with pytest.raises(ModelFileError, match=r"it has no lm_head\.weight"):
        read_safetensors(tmp_path, whole)
