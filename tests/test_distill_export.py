"""Drafts as GGUF files: what llama.cpp makes of them, what their headers say, what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, TokenType

from cli_helpers import ROOT
from distilling import PROVENANCE, random_model, spoken
from full_disk import file_size_limit
from llama_cpp_models import SMALL
from outrider.backends.gguf.model import Weights
from outrider.core.errors import ModelFileError, OutriderError, SettingError, VocabularyMismatch
from outrider.core.notices import collect_notices
from outrider.lab.distill.calibration import pretrained_calibration
from outrider.lab.distill.checkpoint import ARCHITECTURES, Checkpoint, read_gguf, restrict
from outrider.lab.distill.export import Written, read_provenance, read_subset, write_gguf
from outrider.models.header import fields_of, read_header
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

    def write(self, path: Path, draft: Checkpoint | None = None, **options: Any) -> Written:
        """A draft of this target, whole and in 32 bits unless the options say otherwise."""
        floats = options.get("quantization", "F32")
        usual = {"subset": Subset.whole(SIZE), "provenance": PROVENANCE, "quantization": "F32"}
        given: dict[str, Any] = usual | {"embedding_quantization": floats} | options
        return write_gguf(draft or self.checkpoint, path, target=self.weights.vocabulary, **given)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be on this process's path only by pytest's doing; the quantizer runs in another."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_tiny(tmp_path_factory.mktemp("target") / "tiny.gguf", chat_template="{{ messages }}")
    weights = Weights(path, SMALL)
    yield Target(path, read_gguf(path), weights)
    weights.close()


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


# What llama.cpp makes of it


@pytest.mark.parametrize("floats", ["F32", "F16"])
def test_a_model_that_is_read_and_written_says_the_same(target: Target, tmp_path: Path, floats: str) -> None:
    made = target.write(tmp_path / "draft.gguf", quantization=floats)
    error = np.abs(spoken(made.path, TOKENS) - spoken(target.path, TOKENS)).max()
    assert error < (1e-4 if floats == "F32" else 0.05)
    assert made.tensor_types == {floats: 1.0} and made.notes == ()
    assert made.file_bytes == made.path.stat().st_size
    kinds = types(made.path)
    assert kinds["blk.0.ffn_up.weight"] == floats and kinds["blk.0.ffn_norm.weight"] == "F32"
    ours, theirs = fields(made.path), fields(target.path)
    tokenizer = {key for key in theirs if key.startswith("tokenizer.")}
    assert {key: ours[key] for key in tokenizer} == {key: theirs[key] for key in tokenizer}
    assert not any(key.startswith("outrider.draft.") for key in ours)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_written_and_read_back(
    target: Target, tmp_path: Path, architecture: str
) -> None:
    torch = pytest.importorskip("torch")
    from outrider.lab.distill.network import Network

    model = random_model(target.checkpoint, architecture)
    model = model.with_weights(replace(model.shape, rope_base=5e5, norm_epsilon=1e-3), model.weights)
    made = target.write(tmp_path / "draft.gguf", model)
    back = read_gguf(made.path)
    assert back.shape == replace(model.shape, norm_epsilon=back.shape.norm_epsilon)
    for name, values in model.weights.items():
        np.testing.assert_array_equal(back.weights[name], values, err_msg=name)
    network = Network.of(model, 64, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        expected = network.logits(network.states(torch.tensor([TOKENS])))[0].numpy()
    assert expected.std() > 1
    np.testing.assert_allclose(spoken(made.path, TOKENS), expected, rtol=0, atol=1e-3 * expected.std())


# A reduced vocabulary


def test_a_reduced_vocabulary_says_what_the_whole_one_does_of_its_tokens(
    target: Target, tmp_path: Path
) -> None:
    draft = restrict(target.checkpoint, REDUCED)
    made = target.write(tmp_path / "draft.gguf", draft, subset=REDUCED)
    rows = spoken(made.path, REDUCED.to_draft[TOKENS].tolist())
    whole = spoken(target.path, TOKENS)
    np.testing.assert_allclose(rows[:, :-1], whole[:, KEPT], rtol=0, atol=1e-3)
    others = np.setdiff1d(np.arange(SIZE), KEPT)
    np.testing.assert_allclose(rows[:, -1], whole[:, others].mean(axis=1), rtol=0, atol=1e-3)


def test_a_window_stands_in_the_file_and_goes_along_with_the_map(target: Target, tmp_path: Path) -> None:
    draft = restrict(target.checkpoint, REDUCED)
    made = target.write(tmp_path / "draft.gguf", draft, subset=REDUCED, window=96)
    weights = Weights(made.path)
    assert weights.vocabulary.part_of is not None and weights.vocabulary.part_of.window == 96
    assert align(target.weights.vocabulary, weights.vocabulary).window == 96
    weights.close()


def test_what_to_expect_of_a_draft_stands_in_its_file(target: Target, tmp_path: Path) -> None:
    prior = pretrained_calibration("draft", [[(0.9, True), (0.4, False)] * 30])
    known = target.write(tmp_path / "draft.gguf", prior=prior)
    damaged = target.write(tmp_path / "damaged.gguf", prior={**prior, "mean_confidence": 7})
    silent = target.write(tmp_path / "silent.gguf")
    found = []
    with collect_notices() as notices:
        for made in (known, silent, damaged):
            weights = Weights(made.path, SMALL)
            found.append(prior_in(weights.open(32)))
            weights.close()
    assert found == [prior, None, None]
    [line] = notices
    assert "damaged.gguf: what it says of its own acceptance is not used: " in line


def test_a_reduced_vocabulary_is_a_vocabulary(target: Target, tmp_path: Path) -> None:
    draft = restrict(target.checkpoint, REDUCED)
    made = target.write(tmp_path / "draft.gguf", draft, subset=REDUCED)
    weights = Weights(made.path, SMALL)
    ours, theirs = weights.vocabulary, target.weights.vocabulary
    for place, token in enumerate(KEPT):
        assert ours.spelling(place) == theirs.spelling(token) and ours.piece(place) == theirs.piece(token)
        assert ours.is_control(place) == theirs.is_control(token)
        assert ours.ends_generation(place) == theirs.ends_generation(token)
    assert ours.spelling(ours.size - 1) == OTHER.encode() and ours.is_control(ours.size - 1)
    assert (ours.bos, ours.eos) == (len(KEPT) - 2, len(KEPT) - 1)
    assert ours.tokenize(" the", add_special=False) == [258]
    assert len(ours.tokenize(" in", add_special=False)) == 3, "its merges are not known"
    weights.close()
    found = fields(made.path)
    assert found[TARGET_TOKENS] == [*KEPT, -1] and found[OTHER_TOKEN] == len(KEPT)
    assert found[TARGET_TOKENIZER] == tokenizer_id(theirs)
    assert found["llama.vocab_size"] == len(KEPT) + 1
    assert found["tokenizer.ggml.merges"] == ["Ġ t", "h e", "Ġt he"]
    assert found["tokenizer.chat_template"] == "{{ messages }}"


def test_what_a_file_knows_is_read_back(target: Target, tmp_path: Path) -> None:
    draft = restrict(target.checkpoint, REDUCED)
    made = target.write(tmp_path / "draft.gguf", draft, subset=REDUCED)
    found = read_subset(made.path, target.weights.vocabulary)
    assert found.has_other and found.to_target.tolist() == [*KEPT, -1]
    assert found.to_draft.tolist() == REDUCED.to_draft.tolist()
    whole = read_subset(target.path, target.weights.vocabulary)
    assert not whole.has_other and whole.size == SIZE
    # Continued: its own metadata are those of its tokens already.
    again = target.write(tmp_path / "again.gguf", read_gguf(made.path), subset=found)
    first, second = fields(made.path), fields(again.path)
    assert first == second


def test_another_tokenizers_draft_is_refused(target: Target, tmp_path: Path) -> None:
    stranger = write_tiny(tmp_path / "padded.gguf", padding=3)
    with pytest.raises(VocabularyMismatch, match=r"draft padded: its 292 tokens are not the target's 289"):
        read_subset(stranger, target.weights.vocabulary)
    made = target.write(tmp_path / "draft.gguf", restrict(target.checkpoint, REDUCED), subset=REDUCED)
    weights = Weights(stranger, SMALL)
    with pytest.raises(VocabularyMismatch, match="made for another tokenizer"):
        read_subset(made.path, weights.vocabulary)
    weights.close()


def test_special_tokens_that_are_lost_become_the_other_token(target: Target, tmp_path: Path) -> None:
    kept = [token for token in KEPT if token not in (3, END_ID)]
    subset = Subset.of(kept, SIZE)
    changed = replace(target.checkpoint, metadata=with_padding_token(target, tmp_path))
    made = target.write(tmp_path / "draft.gguf", restrict(changed, subset), subset=subset)
    found = fields(made.path)
    assert found["tokenizer.ggml.bos_token_id"] == len(kept) - 1
    assert found["tokenizer.ggml.eos_token_id"] == len(kept)
    assert "tokenizer.ggml.padding_token_id" not in found
    assert "tokenizer.ggml.suppress_tokens" not in found
    assert [note.split()[:2] for note in made.notes] == [
        ["tokenizer.ggml.suppress_tokens", "is"], ["the", "eos"], ["the", "padding"]
    ]  # fmt: skip


def with_padding_token(target: Target, folder: Path) -> Mapping[str, Any]:
    """The target's metadata with fields that a tiny model lacks: a token for padding, a list of ids."""
    path = folder / "more.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_pad_token_id(END_ID)
    writer.add_array("tokenizer.ggml.suppress_tokens", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    more = fields_of(path, read_header(path), ("tokenizer.",))
    return {**target.checkpoint.metadata, **more}


def write_sentencepiece(source: Path, path: Path) -> Path:
    """The tiny model with a tokenizer of the SentencePiece kind: scores instead of merges, and bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "he",
        "▁t",
        "▁the",
    ]
    tokens = [*pieces, *(f"w{i}" for i in range(SIZE - len(pieces)))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer, reader = GGUFWriter(path, "llama"), GGUFReader(source)
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(SIZE - 259)])
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * (SIZE - len(kinds))])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sentencepiece_tokenizer_is_reduced_too(target: Target, tmp_path: Path) -> None:
    path = write_sentencepiece(target.path, tmp_path / "spm.gguf")
    weights = Weights(path, SMALL)
    kept = [*range(2, 264), 265, 280]
    subset = Subset.of(kept, SIZE)
    spm = Target(path, read_gguf(path), weights)
    made = spm.write(tmp_path / "draft.gguf", restrict(spm.checkpoint, subset), subset=subset)
    found = fields(made.path)
    assert found["tokenizer.ggml.scores"] == [*([0.0] * 257), -0.0, -1, -2, -3, -4, -6, -21, -10_000]
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.bos_token_id"]) == (0, len(kept))
    assert found["tokenizer.ggml.unknown_token_id"] == len(kept) and len(made.notes) == 2
    rows, whole = spoken(made.path, [0, 258, 60]), spoken(path, [2, 260, 62])
    np.testing.assert_allclose(rows[:, :-1], whole[:, kept], rtol=0, atol=1e-3)
    assert read_subset(made.path, weights.vocabulary).to_target.tolist() == [*kept, -1]
    weights.close()


# What is stored


def test_layers_and_ends_have_types_of_their_own(target: Target, tmp_path: Path) -> None:
    draft = restrict(target.checkpoint, REDUCED)
    made = target.write(
        tmp_path / "draft.gguf", draft, subset=REDUCED, quantization="q4_0", embedding_quantization="Q8_0"
    )
    kinds = types(made.path)
    ends = {kinds.pop("token_embd.weight"), kinds.pop("output.weight")}
    assert ends == {"Q8_0"} and set(kinds.values()) == {"Q4_0", "F32"}
    assert made.tensor_types.keys() == {"Q4_0", "Q8_0"} and made.notes == ()
    assert read_subset(made.path, target.weights.vocabulary).to_target.tolist() == [*KEPT, -1]
    assert read_provenance(made.path) == PROVENANCE
    assert [path.name for path in tmp_path.iterdir()] == ["draft.gguf"]
    rows, whole = (
        spoken(made.path, REDUCED.to_draft[TOKENS].tolist())[:, :-1],
        spoken(target.path, TOKENS)[:, KEPT],
    )
    assert np.corrcoef(rows.ravel(), whole.ravel())[0, 1] > 0.9


def test_provenance_is_read_back_and_its_lack_is_said(target: Target, tmp_path: Path) -> None:
    made = target.write(tmp_path / "draft.gguf")
    assert read_provenance(made.path) == PROVENANCE
    unlicensed = target.write(tmp_path / "free.gguf", provenance=replace(PROVENANCE, licence=None))
    assert read_provenance(unlicensed.path) == replace(PROVENANCE, licence=None)
    assert "general.license" not in fields(unlicensed.path)
    assert read_provenance(target.path) is None
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_string("outrider.distill.teacher", "x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(
        ModelFileError, match=r"part\.gguf: its header lacks outrider\.distill\.teacher_sha256"
    ):
        read_provenance(tmp_path / "part.gguf")


# What is refused, and what is left behind


@pytest.mark.parametrize("size", [0, 5_000, 200_000])
def test_a_full_disk_leaves_what_was_there(target: Target, tmp_path: Path, size: int) -> None:
    path = tmp_path / "draft.gguf"
    path.write_text("an earlier draft")
    with (
        file_size_limit(size),
        pytest.raises(SettingError, match=r"draft\.gguf: the draft could not be written"),
    ):
        target.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["draft.gguf"]
    assert path.read_text() == "an earlier draft"


def broken(target: Target, name: str, value: float) -> Checkpoint:
    weights = {key: values.copy() for key, values in target.checkpoint.weights.items()}
    weights[name].flat[5] = value
    return target.checkpoint.with_weights(target.checkpoint.shape, weights)


@pytest.mark.parametrize("value", [np.nan, np.inf, 70_000.0])
def test_weights_that_are_no_numbers_are_refused(target: Target, tmp_path: Path, value: float) -> None:
    with pytest.raises(SettingError, match=r"blk\.1\.ffn_up\.weight holds numbers that are infinite"):
        target.write(tmp_path / "d.gguf", broken(target, "blk.1.ffn_up.weight", value), quantization="F16")
    assert os.listdir(tmp_path) == []


def test_what_does_not_fit_together_is_refused(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    with pytest.raises(SettingError, match=r"its 289 tokens are not those of its map \(263\)"):
        target.write(path, subset=REDUCED)
    with pytest.raises(SettingError, match="Q9: it is not a type"):
        target.write(path, quantization="Q9")
    with pytest.raises(SettingError, match="it is not a type"):
        target.write(path, embedding_quantization="tiny")
    with pytest.raises(SettingError, match="its folder does not exist"):
        target.write(tmp_path / "none" / "d.gguf")
    padded = read_gguf(write_tiny(tmp_path / "padded.gguf", padding=3))
    draft = target.checkpoint.with_weights(target.checkpoint.shape, target.checkpoint.weights)
    with pytest.raises(SettingError, match="it has 292 tokens, the target 289"):
        target.write(path, replace(draft, metadata=padded.metadata))
    few = Subset.of([*range(256), BEGIN_ID, END_ID], SIZE)
    with pytest.raises(SettingError, match="none is left that is put together"):
        target.write(path, restrict(draft, few), subset=few)
    swapped = write_tiny(tmp_path / "other.gguf", merges=[*MERGES[1:], MERGES[0]])
    with pytest.raises(OutriderError):
        target.write(path, replace(draft, metadata=read_gguf(swapped).metadata))
    assert not path.exists()
