"""Quantizing through llama.cpp: what is made, what is refused, and what is left behind when it fails."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest.mock import patch

import numpy as np
import pytest
from gguf import LlamaFileType

from cli_helpers import COMMAND, Call, environment, refused, result
from llama_cpp_models import SMALL, TEXT
from outrider.backends.gguf import quantizer
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.quantizer import TYPES, Quantized, quantize, read_type
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendCrash, BackendError, ModelFileError, OutOfMemory, SettingError
from outrider.models.gguf import read_card
from outrider.models.reference import requantized_name, without_quantization
from tiny import ARCHITECTURES
from tiny_gguf import write_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("source") / "tiny.F32.gguf")


@pytest.fixture(scope="module")
def q8(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """The tiny model in Q8_0."""
    return quantize(source, "q8_0", tmp_path_factory.mktemp("q8") / "tiny.Q8_0.gguf", threads=1)


def logits(path: Path) -> Logits:
    """What a model says after each of some tokens."""
    with closing(Weights(path, SMALL)) as weights:
        model = weights.open(64)
        return np.array(model.decode([Span(0, TEXT[:32], 0, 32)])[0])


def only(folder: Path, *names: str) -> bool:
    """Whether a folder holds these and nothing else."""
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


@contextmanager
def child(words: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Meanwhile children are started with other words than their own."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(words(command), stdin=subprocess.PIPE, stderr=errors))
        return started[-1]

    with patch.object(quantizer, "_launch", launch):
        yield started


def half_done(script: str) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Meanwhile children write half a file, and then do this."""
    writes = (
        "import json, os, signal, sys, time; open(json.loads(sys.argv[1])['output'], 'w').write('half'); "
    )
    return child(lambda command: [command[0], "-c", writes + script, command[-1]])


# What is made


def test_a_quantized_model_runs_and_nearly_says_what_its_source_does(source: Path, q8: Quantized) -> None:
    card = read_card(q8.path)
    assert (card.quantization, q8.quantization, q8.source_quantization) == ("Q8_0", "Q8_0", "F32")
    assert card.file_bytes == q8.file_bytes < 0.5 * q8.source_bytes
    assert q8.source_bytes == source.stat().st_size
    assert q8.tensor_types == {"Q8_0": 1.0}
    assert q8.seconds > 0
    plain, quantized = logits(source), logits(q8.path)
    error = float(np.abs(plain - quantized).mean() / plain.std())
    assert 1e-5 < error < 0.05
    assert only(q8.path.parent, "tiny.Q8_0.gguf")


def test_back_to_floats_keeps_what_was_lost(source: Path, q8: Quantized, tmp_path: Path) -> None:
    before = hashlib.sha256(q8.path.read_bytes()).digest()
    back = quantize(q8.path, "F32", tmp_path / "back.gguf", threads=1)
    assert read_card(back.path).quantization == "F32"
    lossy, original, again = logits(q8.path), logits(source), logits(back.path)
    assert np.abs(again - lossy).mean() < np.abs(again - original).mean()
    assert hashlib.sha256(q8.path.read_bytes()).digest() == before


def test_a_split_source_is_read_in_all_its_parts(source: Path, q8: Quantized, tmp_path: Path) -> None:
    parts, first = list[float](), write_tiny(tmp_path / "parts.gguf", shards=3)
    second = first.with_name("parts-00002-of-00003.gguf")
    made = quantize(second, "Q8_0", tmp_path / "whole.gguf", threads=1, progress=parts.append)
    assert parts and parts == sorted(parts) and 0 <= parts[0] <= parts[-1] < 1
    assert made.source_bytes == sum(path.stat().st_size for path in tmp_path.glob("parts-*"))
    assert np.array_equal(logits(made.path), logits(q8.path))
    assert source.exists()


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch == "qwen2moe" else pytest.param(arch, marks=pytest.mark.slow)
        for arch in sorted(set(ARCHITECTURES) - {"llama"})
    ],
)
def test_other_kinds_of_models(tmp_path: Path, arch: str) -> None:
    made = quantize(write_tiny(tmp_path / "own.gguf", arch=arch), "Q8_0", tmp_path / "q.gguf", threads=1)
    assert made.tensor_types["Q8_0"] > 0.5
    assert np.isfinite(logits(made.path)).all()


@pytest.mark.parametrize(
    "name", [name if name == "Q4_K_M" else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_every_type_can_be_made_and_loaded(source: Path, tmp_path: Path, name: str) -> None:
    made = quantize(source, name, tmp_path / "made.gguf", threads=1)
    assert read_card(made.path).quantization == name
    error = np.abs(logits(made.path) - logits(source)).mean() / logits(source).std()
    assert error < 0.5
    if name == "Q4_K_M":  # rows that do not fit its blocks are of other types
        assert "Q4_K" not in made.tensor_types and sum(made.tensor_types.values()) == pytest.approx(1)


# What is refused


@pytest.mark.parametrize("name", ["Q7_0", "", "IQ2_XS"])
def test_types_that_cannot_be_made(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match=r"not a type .*--imatrix"):
        quantize(source, name, tmp_path / "out.gguf")
    assert only(tmp_path)


def test_types_are_read_in_any_case_and_a_size_is_added() -> None:
    asked, found = [" q4_k ", "iq4_nl", "bf16", "Q3_K"], ["Q4_K_M", "IQ4_NL", "BF16", "Q3_K_M"]
    assert list(map(read_type, asked)) == found


def test_places_that_cannot_be_written(source: Path, q8: Quantized, tmp_path: Path) -> None:
    there = tmp_path / "there.gguf"
    there.write_text("mine")
    alias = tmp_path / "alias.gguf"
    alias.symlink_to(source)
    for output, force, reason in (
        (there, False, "it exists"),
        (source, True, "the source itself"),
        (alias, True, "the source itself"),
        (tmp_path / "none" / "a.gguf", False, "folder does not exist"),
        (tmp_path, True, "it is a folder"),
    ):
        with pytest.raises(SettingError, match=reason):
            quantize(source, "Q8_0", output, force=force)
    assert there.read_text() == "mine" and read_card(source).quantization == "F32"
    made = quantize(source, "Q8_0", there, force=True, threads=1)
    assert there.read_bytes() == q8.path.read_bytes() and made.path == there


def test_sources_that_are_no_models(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    for path in (bad, tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            quantize(path, "Q8_0", tmp_path / "out.gguf")
    with pytest.raises(SettingError, match="threads: -1"):
        quantize(bad, "Q8_0", tmp_path / "out.gguf", threads=-1)
    assert only(tmp_path, "bad.gguf")


def test_weights_that_are_no_numbers_are_the_librarys_to_refuse(source: Path, tmp_path: Path) -> None:
    data = bytearray(source.read_bytes())
    data[-4000:] = b"\xff" * 4000
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(BackendError, match=r"bad\.gguf: llama\.cpp could not quantize it \(.*valid"):
        quantize(bad, "Q8_0", tmp_path / "out.gguf", threads=1)
    assert only(tmp_path, "bad.gguf")


def test_what_is_written_is_checked(source: Path, tmp_path: Path) -> None:
    """A library that takes its parameters otherwise than the bindings say would write another type."""

    def words(command: Sequence[str]) -> list[str]:
        return [*command[:-1], json.dumps(json.loads(command[-1]) | {"ftype": 2})]

    with child(words), pytest.raises(BackendError, match=r"wrote Q4_0 .* instead of Q8_0"):
        quantize(source, "Q8_0", tmp_path / "out.gguf", threads=1)
    assert only(tmp_path)


# What is left behind


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        (
            "print('GGML_ASSERT(x) failed', file=sys.stderr, flush=True); os.abort()",
            BackendCrash,
            "GGML_ASSERT",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", BackendCrash, "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", OutOfMemory, "memory"),
        ("sys.exit('no such module')", BackendError, "no such module"),
    ],
)
def test_a_child_that_dies_is_an_error(
    source: Path, tmp_path: Path, script: str, error: type[Exception], said: str
) -> None:
    kept = tmp_path / "out.gguf"
    kept.write_text("before")
    with half_done(script), pytest.raises(error, match=said) as raised:
        quantize(source, "Q8_0", kept, force=True)
    assert str(source) in str(raised.value)
    assert only(tmp_path, "out.gguf") and kept.read_text() == "before"


def test_a_disk_that_fills_up(source: Path, tmp_path: Path) -> None:
    limited = child(lambda command: ["sh", "-c", 'ulimit -f 40; exec "$@"', "sh", *command])
    with limited, pytest.raises(BackendError, match="took no more") as raised:
        quantize(source, "Q8_0", tmp_path / "out.gguf", threads=1)
    assert str(tmp_path) in str(raised.value) and "--out" in raised.value.way_out
    assert only(tmp_path)


def test_too_little_room_is_seen_ahead(
    q8: Quantized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(count: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=count))

    template = "much " * 40_000  # metadata takes room beside the weights
    source = write_tiny(tmp_path / "own.gguf", chat_template=template)
    free(q8.file_bytes + len(template) // 2)
    with pytest.raises(SettingError, match=r"it needs .* MB, and .* MB free"):
        quantize(source, "Q8_0", tmp_path / "out.gguf", threads=1)
    assert only(tmp_path, "own.gguf")
    free(q8.file_bytes + len(template) + 20_000)
    quantize(source, "Q8_0", tmp_path / "out.gguf", threads=1)


def test_an_interrupt_ends_the_child_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(part: float) -> None:
        if part:
            assert not only(tmp_path)
            raise KeyboardInterrupt

    with half_done("time.sleep(30)") as children, pytest.raises(KeyboardInterrupt):
        quantize(source, "Q8_0", tmp_path / "out.gguf", progress=interrupt)
    assert children[0].returncode == -signal.SIGKILL
    assert only(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)]
)
def test_a_program_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    words = [*COMMAND, "quantize", "--to", "IQ4_NL", "--out", str(tmp_path)]
    with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as program:
        while not list(tmp_path.glob("*.partial")):
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(number)
        said = program.communicate()[1]
    assert program.returncode == status
    assert number != signal.SIGINT or said.endswith("\ninterrupted\n")
    deadline = time.monotonic() + 20
    while not only(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert only(tmp_path)


# Names


@pytest.mark.parametrize(
    ("stem", "made"),
    [
        ("Model-UD-Q4_K_XL", "Model-Q8_0"),
        ("Model-f16-00001-of-00003", "Model-q8_0"),
        ("Model-IQ4_NL_v2", "Model-Q8_0_v2"),
        ("BF16-merge.F16", "BF16-merge.Q8_0"),
        ("Model.fp16", "Model.q8_0"),
        ("Q4_KM", "Q4_KM.Q8_0"),
    ],
)
def test_names_of_files(stem: str, made: str) -> None:
    assert requantized_name(stem, "Q8_0") == made


def test_names_without_their_quantization() -> None:
    spellings = ("Qwen2.5 Coder 1.5B GGUF", "qwen2.5-coder-1.5b-q4_k_m", "Qwen2.5_Coder_1.5B.IQ4_XS")
    assert {without_quantization(name) for name in spellings} == {"qwen2.5 coder 1.5b"}
    assert without_quantization("Qwen2.5 Coder 0.5B") != without_quantization("Qwen2.5 Coder 1.5B")


# The command


def test_the_command_makes_files_beside_their_source(tmp_path: Path, outrider: Call) -> None:
    path = write_tiny(tmp_path / "tiny-q4_1.gguf", file_type=LlamaFileType.MOSTLY_Q4_1)
    done = outrider("quantize", str(path), "--to", "Q8_0,f16", "--to", "q8_0", "-t", "1")
    assert done.status == 0
    assert only(tmp_path, "tiny-q4_1.gguf", "tiny-q8_0.gguf", "tiny-f16.gguf")
    lines = done.out.splitlines()
    assert lines[0] == "made of tiny-q4_1.gguf (Q4_1)"
    assert lines[1].split() == ["file", "type", "size", "ratio", "s", "weights", "in"]
    assert lines[2].split()[:2] == ["tiny-q8_0.gguf", "Q8_0"] and lines[2].split()[-1] == "Q8_0"
    assert lines[3].split()[:2] == ["tiny-f16.gguf", "F16"]
    assert [line.split(":")[0] for line in done.notes.splitlines()] == ["tiny-q8_0.gguf", "tiny-f16.gguf"]

    again = outrider("quantize", str(path), "--to", "BF16,Q8_0")
    assert again.status == 2 and "tiny-q8_0.gguf: it exists" in again.err
    assert not (tmp_path / "tiny-bf16.gguf").exists()


def test_the_command_says_that_a_source_is_quantized(q8: Quantized, tmp_path: Path, outrider: Call) -> None:
    folder = tmp_path / "new" / "folder"
    words = ("quantize", str(q8.path), "--to", "F16", "--out", str(folder), "-t", "1")
    done = outrider(*words, "--json")
    assert "note: tiny.Q8_0.gguf is itself quantized (Q8_0)" in done.err
    (file,) = result(done)["files"]
    assert file["path"] == str(folder / "tiny.F16.gguf") and file["tensor_types"] == {"F16": 1.0}
    assert file["file_bytes"] == Path(file["path"]).stat().st_size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", ","], "--to: it names no type"),
        (["--to", "Q8_0,Q9"], "Q9: it is not a type"),
        (["--to", "F32"], "it is the source itself"),
        (["--to", "Q8_0", "--out", "FILE"], "file: file exists. Check it, or name another."),
        (["--to", "Q8_0", "-t", "1000"], "threads: 1000"),
    ],
)
def test_what_the_command_refuses(
    source: Path, tmp_path: Path, outrider: Call, words: list[str], said: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = [str(file) if word == "FILE" else word for word in words]
    assert said in refused(outrider("quantize", str(source), *given))
    assert only(tmp_path, "file") and only(source.parent, source.name)
