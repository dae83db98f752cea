"""Models as arrays and drafts as GGUF files: what is read, what llama.cpp makes of it, what is refused."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, TokenType

from distilling import PROVENANCE, random_model, spoken
from full_disk import file_size_limit
from llama_cpp_models import SMALL
from outrider.backends.gguf.model import Weights
from outrider.core.errors import ModelFileError, OutriderError, SettingError
from outrider.core.notices import collect_notices
from outrider.lab.distill.checkpoint import (
    ARCHITECTURES,
    Array,
    Checkpoint,
    Shape,
    pretrained_calibration,
    read_gguf,
    restrict,
    tensor_sizes,
    write_gguf,
)
from outrider.lab.model_file import Tensor, read_tensors, write_model_file
from outrider.models.header import Field, fields_of
from outrider.models.vocab import align, tokenizer_id
from outrider.models.vocab.subset import OTHER, OTHER_TOKEN, TARGET_TOKENIZER, TARGET_TOKENS, Subset
from outrider.session.learned import prior_in
from tiny_gguf import MERGES, write_tiny

SIZE = 256 + len(MERGES) + 2
BEGIN_ID, END_ID = SIZE - 2, SIZE - 1
KEPT = [*range(256), 256, 257, 258, 269, BEGIN_ID, END_ID]
"""All bytes, "Ġt", "he", "Ġthe", "ing" without the "in" of which it is made, and the control tokens"""
REDUCED = Subset.of(KEPT, SIZE)
TOKENS = [65, 256, 3, 258, 101, 200, 269, 12]
"""known to the reduced vocabulary too"""


@dataclass(frozen=True, slots=True)
class Target:
    path: Path
    checkpoint: Checkpoint
    weights: Weights

    def write(self, path: Path, draft: Checkpoint | None = None, **options: Any) -> None:
        """A draft of this target, whole and in 32 bits unless the options say otherwise."""
        floats = options.get("quantization", "F32")
        usual = {"subset": Subset.whole(SIZE), "provenance": PROVENANCE, "quantization": "F32"}
        given: dict[str, Any] = usual | {"embedding_quantization": floats} | options
        write_gguf(draft or self.checkpoint, path, target=self.weights.vocabulary, **given)

    def write_reduced(self, path: Path, subset: Subset = REDUCED, **options: Any) -> None:
        self.write(path, restrict(self.checkpoint, subset), subset=subset, **options)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = tmp_path_factory.mktemp("target") / "tiny.gguf"
    write_tiny(path, layers=3, chat_template="{{ messages }}")
    weights = Weights(path, SMALL)
    yield Target(path, read_gguf(path), weights)
    weights.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "draft.gguf"


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def logits(model: Checkpoint) -> Array:
    torch = pytest.importorskip("torch")
    from outrider.lab.distill.network import Network

    network = Network.of(model, torch.device("cpu"))
    with torch.inference_mode():
        found: Array = network.logits(network.states(torch.tensor([TOKENS])))[0].numpy()
    return found


# Reading


def test_a_model_that_is_read_says_what_llama_cpp_says(target: Target) -> None:
    expected = spoken(target.path, TOKENS)
    np.testing.assert_allclose(logits(target.checkpoint), expected, rtol=0, atol=1e-3 * expected.std())


def test_the_shape_is_that_of_the_file_in_one_part_or_several(target: Target, tmp_path: Path) -> None:
    model, shape = target.checkpoint, target.checkpoint.shape
    assert shape == Shape("llama", 3, 64, 2, 1, 32, 96, 289, 512, 10_000.0, shape.norm_epsilon)
    assert shape.norm_epsilon == pytest.approx(1e-5)
    sizes = {name: values.shape for name, values in model.weights.items()}
    assert sizes == tensor_sizes(shape) | {"output.weight": (289, 64)}
    assert {values.dtype for values in model.weights.values()} == {np.dtype(np.float32)}
    assert "tokenizer.ggml.tokens" in model.metadata and "llama.block_count" not in model.metadata
    parts = read_gguf(write_tiny(tmp_path / "split.gguf", shards=2, layers=3))
    assert parts.shape == shape and parts.weights.keys() == model.weights.keys()


def test_a_quantized_model_is_read_as_numbers(target: Target, path: Path) -> None:
    back = read_gguf(write_tiny(path, layers=3, quantized=GGMLQuantizationType.Q8_0))
    assert back.shape == target.checkpoint.shape
    for name, values in target.checkpoint.weights.items():
        assert back.weights[name].shape == values.shape
        assert np.abs(back.weights[name] - values).max() <= np.abs(values).max() / 127


Changes = Mapping[str, Any]
"""of fields or tensors by their names; None takes one away"""


def rewritten(source: Path, path: Path, changes: Changes, sizes: Changes) -> Path:
    """The model with other fields of its architecture, and other tensors."""
    header, tensors = read_tensors(source)
    found = fields_of(source, header)
    architecture = changes.get("architecture", "llama")
    kinds = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, type(None): GGUFValueType.BOOL}
    found |= {f"llama.{key}": Field(value, kinds[type(value)]) for key, value in changes.items()}
    kept = {
        key.replace("llama", architecture, 1): field
        for key, field in found.items()
        if field.value is not None
    }
    for name, size in sizes.items():
        data = np.ones(size or 1, np.float32)
        tensors[name] = Tensor(data.shape, GGMLQuantizationType.F32, data)
        if size is None:
            del tensors[name]
    del kept["general.architecture"]
    write_model_file(path, architecture, kept, tensors)
    return path


_NO_SHAPE = "its header does not say what the model is made of"
UNREADABLE: dict[str, tuple[Changes, Changes, str]] = {
    "architecture": ({"architecture": "mamba"}, {}, "the architecture 'mamba' cannot be trained here"),
    "scaled": ({"rope.scaling.type": "yarn"}, {}, "its rotary positions are scaled"),
    "frequencies": ({}, {"rope_freqs.weight": 16}, r"it has rope_freqs\.weight, and models"),
    "partly rotated": ({"rope.dimension_count": 16}, {}, "a part of each head is rotated"),
    "no epsilon": ({"attention.layer_norm_rms_epsilon": None}, {}, _NO_SHAPE),
    "no heads": ({"attention.head_count": 0}, {}, _NO_SHAPE),
    "no embedding": ({}, {"token_embd.weight": None}, _NO_SHAPE),
    "no tensor": ({}, {"blk.1.ffn_up.weight": None}, r"it lacks blk\.1\.ffn_up\.weight"),
    "experts": ({}, {"blk.1.ffn_gate_inp.weight": (4, 64)}, r"it has blk\.1\.ffn_gate_inp"),
    "another size": (
        {},
        {"blk.2.attn_v.weight": (64, 64)},
        r"blk\.2\.attn_v\.weight has the size \(64, 64\), and its header says \(32, 64\)",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_trained_is_refused(target: Target, path: Path, kind: str) -> None:
    *how, complaint = UNREADABLE[kind]
    odd = rewritten(target.path, path, *how)
    with pytest.raises(ModelFileError, match=complaint) as caught:
        read_gguf(odd)
    assert caught.value.what == str(odd) and caught.value.way_out


def test_a_damaged_file_is_refused(target: Target, path: Path) -> None:
    path.write_bytes(target.path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="missing at its end"):
        read_gguf(path)


# Writing


@pytest.mark.parametrize("floats", ["F32", "F16"])
def test_a_model_that_is_read_and_written_says_the_same(target: Target, path: Path, floats: str) -> None:
    target.write(path, quantization=floats)
    error = np.abs(spoken(path, TOKENS) - spoken(target.path, TOKENS)).max()
    assert error < (1e-4 if floats == "F32" else 0.05)
    kinds = types(path)
    assert kinds["blk.0.ffn_up.weight"] == floats and kinds["blk.0.ffn_norm.weight"] == "F32"
    ours, theirs = fields(path), fields(target.path)
    tokenizer = {key for key in theirs if key.startswith("tokenizer.")}
    assert {key: ours[key] for key in tokenizer} == {key: theirs[key] for key in tokenizer}
    assert not any(key.startswith("outrider.draft.") for key in ours)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_written_and_read_back(target: Target, path: Path, architecture: str) -> None:
    model = random_model(target.checkpoint, architecture)
    model = model.with_weights(replace(model.shape, rope_base=5e5, norm_epsilon=1e-3), model.weights)
    target.write(path, model)
    back, expected = read_gguf(path), logits(model)
    assert back.shape == replace(model.shape, norm_epsilon=back.shape.norm_epsilon)
    for name, values in model.weights.items():
        np.testing.assert_array_equal(back.weights[name], values, err_msg=name)
    assert expected.std() > 1
    np.testing.assert_allclose(spoken(path, TOKENS), expected, rtol=0, atol=1e-3 * expected.std())


def test_a_reduced_vocabulary_says_what_the_whole_one_does_of_its_tokens(target: Target, path: Path) -> None:
    target.write_reduced(path)
    rows, whole = spoken(path, REDUCED.to_draft[TOKENS].tolist()), spoken(target.path, TOKENS)
    np.testing.assert_allclose(rows[:, :-1], whole[:, KEPT], rtol=0, atol=1e-3)
    others = np.setdiff1d(np.arange(SIZE), KEPT)
    np.testing.assert_allclose(rows[:, -1], whole[:, others].mean(axis=1), rtol=0, atol=1e-3)


def test_what_to_expect_of_a_draft_stands_in_its_file(target: Target, tmp_path: Path) -> None:
    prior = pretrained_calibration("draft", [[(0.9, True), (0.4, False)] * 30])
    found = []
    with collect_notices() as notices:
        for name, given in (("a", prior), ("b", None), ("damaged", {**prior, "mean_confidence": 7})):
            target.write(tmp_path / f"{name}.gguf", prior=given)
            weights = Weights(tmp_path / f"{name}.gguf", SMALL)
            found.append(prior_in(weights.open(32)))
            weights.close()
    assert found == [prior, None, None]
    [line] = notices
    assert "damaged.gguf: what it says of its own acceptance is not used: " in line


def test_a_reduced_vocabulary_is_a_vocabulary(target: Target, path: Path) -> None:
    target.write_reduced(path, window=96)
    weights = Weights(path, SMALL)
    ours, theirs = weights.vocabulary, target.weights.vocabulary
    assert align(theirs, ours).window == 96
    for place, token in enumerate(KEPT):
        assert ours.spelling(place) == theirs.spelling(token) and ours.piece(place) == theirs.piece(token)
        assert ours.is_control(place) == theirs.is_control(token)
        assert ours.ends_generation(place) == theirs.ends_generation(token)
    assert ours.spelling(ours.size - 1) == OTHER.encode() and ours.is_control(ours.size - 1)
    assert (ours.bos, ours.eos) == (len(KEPT) - 2, len(KEPT) - 1)
    assert ours.tokenize(" the", add_special=False) == [258]
    assert len(ours.tokenize(" in", add_special=False)) == 3, "its merges are not known"
    weights.close()
    found = fields(path)
    assert found[TARGET_TOKENS] == [*KEPT, -1] and found[OTHER_TOKEN] == len(KEPT)
    assert found[TARGET_TOKENIZER] == tokenizer_id(theirs)
    assert found["llama.vocab_size"] == len(KEPT) + 1
    assert found["tokenizer.ggml.merges"] == ["Ġ t", "h e", "Ġt he"]
    assert found["tokenizer.chat_template"] == "{{ messages }}"


def test_special_tokens_that_are_lost_become_the_other_token(target: Target, path: Path) -> None:
    kept = [token for token in KEPT if token not in (3, END_ID)]
    more = {
        "tokenizer.ggml.padding_token_id": Field(END_ID, GGUFValueType.UINT32),
        "tokenizer.ggml.suppress_tokens": Field([1, 2], GGUFValueType.ARRAY, GGUFValueType.INT32),
        "general.license": Field("mit", GGUFValueType.STRING),
    }
    changed = replace(target.checkpoint, metadata={**target.checkpoint.metadata, **more})
    with collect_notices() as notices:
        replace(target, checkpoint=changed).write_reduced(path, Subset.of(kept, SIZE))
    found = fields(path)
    assert found["tokenizer.ggml.bos_token_id"] == len(kept) - 1
    assert found["tokenizer.ggml.eos_token_id"] == len(kept) and found["general.license"] == "mit"
    assert "tokenizer.ggml.padding_token_id" not in found
    assert "tokenizer.ggml.suppress_tokens" not in found
    said = [["tokenizer.ggml.suppress_tokens", "is"], ["the", "eos"], ["the", "padding"]]
    assert [note.split()[:2] for note in notices] == said


def write_sentencepiece(source: Path, path: Path) -> Path:
    """The tiny model with a tokenizer of the SentencePiece kind: scores instead of merges, and bytes."""
    control = ["<unk>", "<s>", "</s>"]
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁the", "he", "▁t", "▁the"]
    pieces += [f"w{i}" for i in range(SIZE - len(pieces))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (SIZE - len(kinds))
    scores = [0.0] * 259 + [-float(i) for i in range(SIZE - 259)]
    header, tensors = read_tensors(source)
    made = fields_of(source, header, ("llama.",)) | {
        "tokenizer.ggml.model": Field("llama", GGUFValueType.STRING),
        "tokenizer.ggml.tokens": Field(pieces, GGUFValueType.ARRAY, GGUFValueType.STRING),
        "tokenizer.ggml.scores": Field(scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
        "tokenizer.ggml.token_type": Field([*map(int, kinds)], GGUFValueType.ARRAY, GGUFValueType.INT32),
    }
    write_model_file(path, "llama", made, tensors)
    return path


def test_a_sentencepiece_tokenizer_is_reduced_too(target: Target, path: Path, tmp_path: Path) -> None:
    source = write_sentencepiece(target.path, tmp_path / "spm.gguf")
    weights = Weights(source, SMALL)
    kept = [*range(2, 264), 265, 280]
    with collect_notices() as notices:
        Target(source, read_gguf(source), weights).write_reduced(path, Subset.of(kept, SIZE))
    found = fields(path)
    assert found["tokenizer.ggml.scores"] == [*([0.0] * 257), -0.0, -1, -2, -3, -4, -6, -21, -10_000]
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.bos_token_id"]) == (0, len(kept))
    assert found["tokenizer.ggml.unknown_token_id"] == len(kept) and len(notices) == 2
    rows, whole = spoken(path, [0, 258, 60]), spoken(source, [2, 260, 62])
    np.testing.assert_allclose(rows[:, :-1], whole[:, kept], rtol=0, atol=1e-3)
    weights.close()


def test_layers_and_ends_have_types_of_their_own(target: Target, path: Path, tmp_path: Path) -> None:
    target.write_reduced(path, quantization="q4_0", embedding_quantization="Q8_0")
    kinds = types(path)
    ends = {kinds.pop("token_embd.weight"), kinds.pop("output.weight")}
    assert ends == {"Q8_0"} and set(kinds.values()) == {"Q4_0", "F32"}
    found = fields(path)
    assert {name: found[f"outrider.distill.{name}"] for name in PROVENANCE} == PROVENANCE
    assert [path.name for path in tmp_path.iterdir()] == ["draft.gguf"]
    rows = spoken(path, REDUCED.to_draft[TOKENS].tolist())[:, :-1]
    assert np.corrcoef(rows.ravel(), spoken(target.path, TOKENS)[:, KEPT].ravel())[0, 1] > 0.9


# What is refused, and what is left behind


@pytest.mark.parametrize("size", [0, 5_000, 200_000])
def test_a_full_disk_leaves_what_was_there(target: Target, path: Path, size: int) -> None:
    path.write_text("an earlier draft")
    said = r"draft\.gguf: the draft could not be written"
    with file_size_limit(size), pytest.raises(SettingError, match=said):
        target.write(path)
    assert os.listdir(path.parent) == ["draft.gguf"] and path.read_text() == "an earlier draft"


@pytest.mark.parametrize("value", [np.nan, np.inf, 70_000.0])
def test_weights_that_are_no_numbers_are_refused(target: Target, path: Path, value: float) -> None:
    weights = {key: values.copy() for key, values in target.checkpoint.weights.items()}
    weights["blk.1.ffn_up.weight"].flat[5] = value
    broken = target.checkpoint.with_weights(target.checkpoint.shape, weights)
    with pytest.raises(SettingError, match=r"blk\.1\.ffn_up\.weight holds numbers that are infinite"):
        target.write(path, broken)
    assert os.listdir(path.parent) == []


def test_what_does_not_fit_together_is_refused(target: Target, path: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"its 289 tokens are not those of its map \(263\)"):
        target.write(path, subset=REDUCED)
    with pytest.raises(SettingError, match="tiny: it is not a type"):
        target.write(path, embedding_quantization="tiny")
    with pytest.raises(SettingError, match="its folder does not exist"):
        target.write(tmp_path / "none" / "d.gguf")
    padded = read_gguf(write_tiny(tmp_path / "padded.gguf", padding=3))
    with pytest.raises(SettingError, match="it has 292 tokens, the target 289"):
        target.write(path, replace(target.checkpoint, metadata=padded.metadata))
    few = Subset.of([*range(256), BEGIN_ID, END_ID], SIZE)
    with pytest.raises(SettingError, match="none is left that is put together"):
        target.write_reduced(path, few)
    swapped = write_tiny(tmp_path / "other.gguf", merges=[*MERGES[1:], MERGES[0]])
    with pytest.raises(OutriderError):
        target.write(path, replace(target.checkpoint, metadata=read_gguf(swapped).metadata))
    assert not path.exists()
