"""Reading GGUF headers, and finding models on disk."""

import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from head_files import write_heads
from outrider.core.errors import ModelFileError
from outrider.models.gguf import read_card
from outrider.models.reference import resolve
from tiny import ARCHITECTURES
from tiny_gguf import EXPERTS, FEED_FORWARD, WIDTH, finish, vocabulary, write_tiny


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_card_agrees_with_the_reference_reader(tmp_path: Path, arch: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, chat_template="{{ messages }}", name="My model")
    card, reference = read_card(path), GGUFReader(path)
    assert card.architecture == arch
    assert card.parameters == sum(int(tensor.n_elements) for tensor in reference.tensors)
    assert card.num_tokens == len(reference.fields["tokenizer.ggml.tokens"].data) == len(vocabulary())
    assert (card.name, card.chat_template, card.tokenizer) == ("My model", "{{ messages }}", "gpt2 (gpt-2)")
    layers = int(reference.fields[f"{arch}.block_count"].contents())
    assert (card.context_length, card.block_count, card.embedding_length) == (512, layers, WIDTH)
    assert (card.file_bytes, card.path) == (path.stat().st_size, path)


def test_a_token_uses_the_share_of_its_chosen_experts(tmp_path: Path) -> None:
    dense = read_card(write_tiny(tmp_path / "m.gguf"))
    assert (dense.active_parameters, dense.chat_template) == (dense.parameters, None)
    assert (dense.expert_count, dense.expert_used_count, dense.sliding_window) == (0, 0, None)
    card = read_card(write_tiny(tmp_path / "m.gguf", arch="qwen2moe", layers=3))
    assert (card.expert_count, card.expert_used_count) == (EXPERTS, 2)
    assert card.parameters - card.active_parameters == 3 * 2 * 3 * WIDTH * FEED_FORWARD
    assert read_card(write_tiny(tmp_path / "m.gguf", arch="gemma3")).sliding_window == 16


@pytest.mark.parametrize(
    ("arch", "layers", "mtp_layers", "held", "kind"),
    [
        ("eagle3", 1, 0, [0], "eagle3"),
        ("dflash", 5, 0, range(5), "dflash"),
        ("qwen35", 5, 1, [4], "mtp"),
        ("deepseek2", 63, 2, [61, 62], "mtp"),
        ("gemma4-assistant", 4, 4, range(4), "assistant"),
        ("qwen35", 5, 1, range(5), "model"),  # embedded in the model
        ("qwen35", 4, 0, range(4), "model"),
        ("qwen35", 5, 1, [], "model"),
    ],
)
def test_heads_are_kept_apart_from_models(
    tmp_path: Path, arch: str, layers: int, mtp_layers: int, held: Sequence[int], kind: str
) -> None:
    card = read_card(write_heads(tmp_path / "m.gguf", arch, layers=layers, mtp_layers=mtp_layers, held=held))
    assert (card.kind, card.mtp_layers) == (kind, mtp_layers)


@pytest.mark.parametrize(("label", "name"), [(15, "Q4_K_M"), (1024, "F32"), (977, "F32")])
def test_quantization_is_the_declared_one_or_the_tensors(tmp_path: Path, label: int, name: str) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    _patch(path, b"general.file_type", struct.pack("<II", 4, label))
    assert read_card(path).quantization == name


def test_split_model_is_read_as_one(tmp_path: Path) -> None:
    whole = read_card(write_tiny(tmp_path / "whole.gguf"))
    first = write_tiny(tmp_path / "m.gguf", shards=3)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    for part in parts:
        card = read_card(part)
        assert card.path == first
        assert card.parameters == whole.parameters
        assert card.file_bytes == sum(part.stat().st_size for part in parts)


def test_parts_of_different_models_and_renamed_ones_are_told_apart(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "m.gguf", shards=2)
    write_tiny(tmp_path / "n.gguf", shards=2, layers=4)
    (tmp_path / "n-00002-of-00002.gguf").replace(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(ModelFileError, match="instead of"):
        read_card(first)
    with pytest.raises(ModelFileError, match=r"-00001-of-00002\.gguf"):
        read_card(first.rename(tmp_path / "renamed.gguf"))


def test_only_models_are_models(tmp_path: Path) -> None:
    adapter = GGUFWriter(tmp_path / "adapter.gguf", "llama")
    adapter.add_type("adapter")
    finish(adapter)
    with pytest.raises(ModelFileError, match="LoRA adapter"):
        read_card(tmp_path / "adapter.gguf")
    finish(GGUFWriter(tmp_path / "vocabulary.gguf", "llama"))
    with pytest.raises(ModelFileError, match="no weights"):
        read_card(tmp_path / "vocabulary.gguf")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GG", "within its header"),
        (b"hello, world", "not a GGUF"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x40\0\0\0\0\0\0\0{\"__metadata__\":{}}", "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + bytes(40), "within its header"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77) + bytes(20), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60) + bytes(20), "within its header"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60) + bytes(20), "within its header"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(20), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQcIQ", 3, 1, 0, 1, b"t", 2**31, 0) + bytes(20), "dimensions"),
        (b"GGUF" + struct.pack("<IQQQcIQQIQ", 3, 1, 0, 1, b"t", 2, 2**40, 2**40, 0, 0), "impossible size"),
    ],
)  # fmt: skip
def test_file_that_is_no_model_is_named_for_what_it_is(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_card(path)
    assert reason in caught.value.why
    assert str(path) in str(caught.value)
    assert caught.value.way_out


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "m.gguf")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by its mode: the superuser, as whom tests run in containers, may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match=r"(?i)permission"):
        read_card(path)


def test_weights_cut_short_say_how_much_is_missing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelFileError, match="1,000 of") as caught:
        read_card(path)
    assert "download it again" in caught.value.way_out


@pytest.mark.parametrize("field", ["block_count", "wkv.head_size"])
def test_a_model_without_layers_or_states_is_refused(field: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch="rwkv7")
    _patch(path, field.encode(), struct.pack("<II", 4, 0))
    with pytest.raises(ModelFileError, match=f"its field rwkv7.{field} is 0"):
        read_card(path)


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", arch="qwen2moe").read_bytes()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_file_cut_anywhere_is_refused(tmp_path: Path, tiny_bytes: bytes, share: float) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_bytes[: int(share * len(tiny_bytes))])
    with pytest.raises(ModelFileError):
        read_card(path)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 12_000), value=st.binary(min_size=1, max_size=8))
def test_damaged_header_is_read_or_refused(tmp_path: Path, tiny_bytes: bytes, at: int, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_bytes[:at] + value + tiny_bytes[at + len(value) :])
    try:
        assert read_card(path).file_bytes == len(tiny_bytes)
    except ModelFileError as error:
        assert str(path) in error.what


def test_path_resolves_to_itself_and_a_part_to_the_first(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    first = write_tiny(tmp_path / "s.gguf", shards=2)
    assert resolve(str(path)) == path
    assert resolve(str(first)) == resolve(str(tmp_path / "s-00002-of-00002.gguf")) == first


@pytest.mark.parametrize(
    ("reference", "why", "way_out"),
    [
        ("~nobody-of-this-name/m.gguf", "no such file", "Check the path."),
        ("~/absent.gguf", "no such file", "Check the path."),
        ("owner/model-GGUF", "no such file", "hf:owner/model-GGUF"),
        ("~", "directory", "m.gguf"),
        ("/dev/null", "device", ".gguf"),
        ("~/s-00001-of-00003.gguf", "missing: s-00002-of-00003.gguf", "Put"),
    ],
)
def test_a_path_that_leads_to_no_file_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, why: str, way_out: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_tiny(tmp_path / "m.gguf")
    write_tiny(tmp_path / "s.gguf", shards=3)
    (tmp_path / "s-00002-of-00003.gguf").unlink()
    assert resolve("~/m.gguf") == path
    with pytest.raises(ModelFileError) as caught:
        resolve(reference)
    assert why in caught.value.why and way_out in caught.value.way_out


def test_path_does_not_import_the_hubs_client(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    program = (
        "import sys; from outrider.models.gguf import read_card; "
        "from outrider.models.reference import resolve; "
        f"read_card(resolve({str(path)!r})); print('huggingface_hub' in sys.modules, 'httpx2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def _patch(path: Path, key: bytes, replacement: bytes) -> None:
    """Overwrite a field's type and value in place."""
    data = path.read_bytes()
    at = data.index(key) + len(key)
    path.write_bytes(data[:at] + replacement + data[at + len(replacement) :])
