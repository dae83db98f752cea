"""The backends that the tests of the Model contract run over: the fake, and each native library here.

A test takes `backend`, and with `over` the kinds of model too. What a library cannot run it refuses, which
`test_backend_files` checks.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from kinds import KINDS
from llama_cpp_models import SMALL
from outrider.backends.fake import ContractBroken, FakeModel, FakeVocabulary, random_logits
from outrider.backends.gguf.libraries import DIALECTS, _file_of, installed
from outrider.backends.gguf.library import LibraryFile
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Model
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, RewindUnsupported
from tiny_gguf import write_tiny

REFUSED = (BackendError, ContractBroken)
"""What a call against the contract ends in: the fake calls it a bug of the caller's."""

_SIZE = 289
"""Tokens of the tiny models' vocabulary."""


class Backend(ABC):
    """Opens models of several kinds, and makes their calls fail."""

    name: str
    kinds: Sequence[str]
    """those of KINDS that it runs"""

    @abstractmethod
    def open(self, kind: str = "dense", context_length: int = 64, **room: int) -> Model:
        """A model with nothing stored; `room`: max_sequences, capacity_tokens, max_rows, batch_tokens."""

    @abstractmethod
    def failing(self, model: Model, status: int = -3) -> AbstractContextManager[object]:
        """Meanwhile every call fails after it was computed."""

    @abstractmethod
    def interrupted(self, model: Model) -> AbstractContextManager[object]:
        """Meanwhile every call is interrupted after it was computed."""

    def expected(self, tokens: Sequence[int], kind: str = "dense") -> Logits:
        """The logits after each token, evaluated one at a time in a context of their own."""
        model = self.open(kind, 512)
        rows = [model.decode([Span(0, (token,), i, 1)])[0][0].copy() for i, token in enumerate(tokens)]
        model.close()
        return np.array(rows)


class Fake(Backend):
    """The model that tests of the engine run on."""

    name = "fake"
    kinds = ("dense", "recurrent", "unforgetting")

    def __init__(self) -> None:
        self._vocabulary = FakeVocabulary("".join(chr(0x4E00 + i) for i in range(_SIZE - 1)))
        self._logits = random_logits(_SIZE, order=10**6)

    def open(self, kind: str = "dense", context_length: int = 64, **room: int) -> FakeModel:
        return FakeModel(
            self._vocabulary,
            self._logits,
            context_length=context_length,
            max_sequences=room.get("max_sequences", 1),
            capacity_tokens=room.get("capacity_tokens") or None,
            max_rows=room.get("max_rows", 128),
            max_batch_tokens=room.get("batch_tokens", 512),
            rewind=KINDS[kind].rewind,
        )

    def failing(self, model: Model, status: int = -3) -> AbstractContextManager[object]:
        del status
        return self._raising(model, BackendError("fake model", "it was told to fail"))

    def interrupted(self, model: Model) -> AbstractContextManager[object]:
        return self._raising(model, KeyboardInterrupt())

    def _raising(self, model: Model, error: BaseException) -> AbstractContextManager[object]:
        return patch.object(model, "_next_logits", Mock(side_effect=error))


class Native(Backend):
    """GGUF models on one native library, each of its kinds loaded once."""

    def __init__(self, file: LibraryFile, folder: Path, **made: Any) -> None:
        """`made`: what `write_tiny` takes."""
        self.name, self.file = file.source, file
        self._made = made
        self.is_ik = file.source.startswith("ik")
        self.kinds = kinds_of(file.source)
        self._folder = folder
        self._loaded: dict[tuple[str, LoadOptions], Weights] = {}

    def options(self, options: LoadOptions = SMALL) -> LoadOptions:
        """Options under which this library is used, or those that are nearest to them."""
        # Without flash attention ik_llama.cpp keeps V in no other type.
        value_type = "f16" if self.is_ik and options.flash_attention == "off" else options.cache_type_v
        return replace(options, library=str(self.file.path), cache_type_v=value_type)

    def path(self, kind: str = "dense") -> Path:
        """A tiny model's file."""
        made = KINDS[kind]
        path = self._folder / f"{made.arch}-{made.mtp_layers}.gguf"
        if not path.exists():
            write_tiny(path, arch=made.arch, mtp_layers=made.mtp_layers, **self._made)
        return path

    def weights(self, kind: str = "dense", options: LoadOptions = SMALL) -> Weights:
        """Weights that are shared: not the caller's to close."""
        asked = replace(options, full_window=KINDS[kind].full_window)
        asked = self.options(asked)
        if (kind, asked) not in self._loaded:
            self._loaded[kind, asked] = Weights(self.path(kind), asked)
        return self._loaded[kind, asked]

    def fresh(self, folder: Path, **made: Any) -> Weights:
        """Weights that are the caller's own to close; `made`: what `write_tiny` takes."""
        return Weights(write_tiny(folder / "own.gguf", **made), self.options())

    def close(self) -> None:
        """Free what was loaded."""
        for weights in self._loaded.values():
            weights.close()

    def open(self, kind: str = "dense", context_length: int = 64, **room: int) -> GgufModel:
        weights = self.weights(kind)
        rows, batch = room.get("max_rows", 128), room.get("batch_tokens", 512)
        options = replace(weights.options, max_rows=rows, batch_tokens=batch)
        # The kind's own way to go back, though `Weights.open` may choose another for several sequences.
        sequences = room.get("max_sequences", 1)
        return GgufModel(weights, context_length, sequences, options, room.get("capacity_tokens", 0))

    @property
    def functions(self) -> Any:
        """The library's functions, for tests that stand between them and the backend."""
        return self.weights().library.functions

    def failing(self, model: Model, status: int = -3) -> AbstractContextManager[object]:
        del model  # all of the library's calls fail
        real = self.functions.llama_decode
        return patch.object(self.functions, "llama_decode", lambda *call: real(*call) or status)

    def interrupted(self, model: Model) -> AbstractContextManager[object]:
        del model
        real = self.functions.llama_decode

        def interrupted(*call: Any) -> int:
            real(*call)
            raise KeyboardInterrupt

        return patch.object(self.functions, "llama_decode", interrupted)


def kinds_of(name: str) -> Sequence[str]:
    """The kinds of model that a backend runs."""
    if name == "fake":
        return Fake.kinds
    is_ik = name.startswith("ik")
    return [kind for kind, made in KINDS.items() if made.arch and (made.on_ik or not is_ik)]


def _files() -> Iterator[LibraryFile]:
    """Every native library that is here, those too that another of their backend is preferred to."""
    yield from installed()
    for distribution, module in (package for row in DIALECTS for package in row.packages):
        file = _file_of(distribution, module)
        if file and file not in installed():
            yield file


FILES = {file.source: file for file in _files()}
NATIVE = tuple(FILES)
"""The native libraries that are here, by what they come from."""
IK = tuple(name for name in NATIVE if name.startswith("ik"))
MAINLINE = tuple(sorted(set(NATIVE) - set(IK), reverse=True))
"""those of llama.cpp, the ready-made xllamacpp before a build of llama-cpp-python"""
ALL = ("fake", *NATIVE)
_OTHER_BUILDS = MAINLINE[1:]
"""of the library that is preferred, under the same dialect: for slow tests"""


def over(
    *kinds: str, names: Sequence[str] = ALL, quick: Collection[tuple[str, str]] | None = None
) -> pytest.MarkDecorator:
    """Runs a test with every `backend` and `kind` of model that go together: the slow kinds, or all pairs but
    the `quick` ones, and other builds of a library, as slow tests."""
    pairs = [(name, kind) for name in names for kind in kinds if kind in kinds_of(name)]
    parameters = []
    for name, kind in pairs:
        is_slow = KINDS[kind].slow if quick is None else (name, kind) not in quick
        marks = [pytest.mark.slow] if is_slow or name in _OTHER_BUILDS else []
        parameters.append(pytest.param(name, kind, marks=marks, id=f"{name}-{kind}"))
    return pytest.mark.parametrize(("backend", "kind"), parameters, indirect=["backend"])


def _each(names: Sequence[str]) -> pytest.MarkDecorator:
    """Runs a test with each of these backends, on other builds of a library as a slow test."""
    parameters = [
        pytest.param(name, marks=[pytest.mark.slow] if name in _OTHER_BUILDS else []) for name in names
    ]
    return pytest.mark.parametrize("backend", parameters, indirect=True)


over_all = _each(ALL)
over_native = _each(NATIVE)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """The backend that a test is run with."""
    if request.param == "fake":
        yield Fake()
        return
    native = Native(FILES[request.param], tmp_path_factory.mktemp("tiny"))
    yield native
    native.close()


@dataclass
class Kept:
    """What a model should hold of each of three sequences: parts of `source`, at most `limit` tokens.
    `may_refuse`: to forget and to copy."""

    model: Model
    source: Sequence[int]
    limit: int
    may_refuse: bool
    texts: list[tuple[int, ...]] = field(default_factory=lambda: [()] * 3)

    def do(self, operation: str, sequence: int, number: int) -> None:
        """Do something that is allowed, or nothing."""
        text, other = self.texts[sequence], (sequence + 1) % 3
        if operation == "grow":
            self._grow((sequence, other), number)
        elif operation == "shrink":
            self._shrink(sequence, max(0, len(text) - number))
        elif text:
            self._shrink(other, 0)
            length = self._reach(sequence, 1 + number % len(text))
            with self._refusing():
                if length:
                    self.model.copy(sequence, other, length)
                    self.texts[other] = text[:length]

    def _refusing(self) -> AbstractContextManager[object]:
        return suppress(RewindUnsupported) if self.may_refuse else nullcontext()

    def _reach(self, sequence: int, length: int) -> int:
        return self.model.reach(sequence, length) if self.may_refuse else length

    def _grow(self, sequences: Sequence[int], number: int) -> None:
        spans = []
        for sequence in sequences:
            text = self.texts[sequence]
            more = tuple(self.source[7 * number + sequence : 8 * number + sequence + 1])
            more = more[: self.limit - len(text)]
            if more:
                spans.append(
                    Span(sequence, more, len(text), len(more) // 2, number % 3 > 0, is_turn=number % 2 > 0)
                )
                self.texts[sequence] += more
        if spans:
            self.model.decode(spans)

    def _shrink(self, sequence: int, length: int) -> None:
        length = self._reach(sequence, length)
        with self._refusing():
            self.model.truncate(sequence, length)
            self.texts[sequence] = self.texts[sequence][:length]


def store(model: Model, tokens: Sequence[int], sequence: int = 0) -> None:
    """Append tokens, at most 32 in a call: the window of a sliding cache moves on with each."""
    for i in range(0, len(tokens), 32):
        part = tuple(tokens[i : i + 32])
        model.decode([Span(sequence, part, model.length(sequence), 0)])


def next_rows(model: Model, tokens: Sequence[int], sequence: int = 0) -> Logits:
    """The logits after each of these next tokens."""
    span = Span(sequence, tuple(tokens), model.length(sequence), len(tokens))
    return model.decode([span])[0].copy()


def assert_near(actual: Logits, expected: Logits) -> None:
    """Equal but for sums in another order: 0.006 was seen, while the logits spread over several units
    and one wrong position moves them by tenths."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-2)
