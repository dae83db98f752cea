"""Mutated GGUF files: deterministic changes to a model's header, metadata, tensors' entries and its end.

    python mutations.py LIBRARY FILE...

goes the way of a user's file with each: the header is checked, the first call is made in a child process,
then the file is loaded, asked for tokens and a row of logits. A line of JSON says what became of each file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gguf import GGUFReader, ReaderField

from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Span
from outrider.core.errors import OutriderError
from outrider.models.gguf import read_card
from outrider.session.loading import load_weights, template_of

__all__ = ["MUTATIONS", "Layout", "Outcome", "layout_of", "mutated", "outcome_of"]

_EDGES = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_WIDE_EDGES = (*_EDGES, 2**32, 2**62, 2**63, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a header: where they begin, and how many there are."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A field of the metadata, or a tensor's entry, cut into its parts. A field's are the key's length, the
    key, the type, and the value's; a tensor's the name's length, the name, rank, shape, type and offset."""

    parts: tuple[Part, ...]

    @property
    def whole(self) -> Part:
        """All of it."""
        first, last = self.parts[0], self.parts[-1]
        return Part(first.start, last.start + last.size - first.start)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a file everything is; `data_start`: the first byte of the weights."""

    fields: tuple[Entry, ...]
    tensors: tuple[Entry, ...]
    data_start: int


def layout_of(path: Path) -> Layout:
    """The layout of a whole GGUF file."""
    reader = GGUFReader(path)
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    return Layout(
        tuple(map(_entry, fields)),
        tuple(_entry(tensor.field) for tensor in reader.tensors),
        int(reader.data_offset),
    )


def _entry(field: ReaderField) -> Entry:
    parts, at = [], field.offset
    for part in field.parts:
        parts.append(Part(at, part.nbytes))
        at += part.nbytes
    return Entry(tuple(parts))


Mutate = Callable[[bytearray, Layout, Random], None]


def _write(data: bytearray, part: Part, number: int) -> None:
    data[part.start : part.start + part.size] = (number % 256**part.size).to_bytes(part.size, "little")


def _edge(data: bytearray, part: Part, random: Random) -> None:
    """A number at the edge of what its bytes can hold, or one more or less than it is."""
    now = int.from_bytes(data[part.start : part.start + part.size], "little")
    edges = _WIDE_EDGES if part.size == 8 else _EDGES
    _write(data, part, random.choice([number for number in (now - 1, now + 1, *edges) if number != now]))


def _flip(data: bytearray, part: Part, random: Random) -> None:
    """Another byte somewhere in it."""
    data[part.start + random.randrange(max(part.size, 1))] ^= random.randrange(1, 256)


def _header(part: Part) -> Mutate:
    return lambda data, _layout, random: _edge(data, part, random)


def _of_field(number: int, change: Callable[[bytearray, Part, Random], None]) -> Mutate:
    return lambda data, layout, random: change(data, random.choice(layout.fields).parts[number], random)


def _of_tensor(number: int, change: Callable[[bytearray, Part, Random], None]) -> Mutate:
    return lambda data, layout, random: change(data, random.choice(layout.tensors).parts[number], random)


def _value(data: bytearray, layout: Layout, random: Random) -> None:
    """A value that is a number, or the length of a text or an array."""
    _edge(data, random.choice(layout.fields).parts[3], random)


def _zero(data: bytearray, layout: Layout, random: Random) -> None:
    """A value, or the length of a text or an array, that is zero."""
    values = [field.parts[3] for field in layout.fields]
    number = random.choice([part for part in values if any(data[part.start : part.start + part.size])])
    _write(data, number, 0)


def _content(data: bytearray, layout: Layout, random: Random) -> None:
    """A byte of a text or of an array's entries."""
    _flip(data, random.choice([field for field in layout.fields if len(field.parts) > 4]).parts[-1], random)


def _kind(data: bytearray, part: Part, random: Random) -> None:
    """Another type, known or not."""
    _write(data, part, data[part.start] + random.randrange(1, 48))


def _dimension(data: bytearray, layout: Layout, random: Random) -> None:
    shape = random.choice(layout.tensors).parts[3]
    _edge(data, Part(shape.start + 8 * random.randrange(shape.size // 8), 8), random)


def _offset(data: bytearray, layout: Layout, random: Random) -> None:
    """Weights that lie elsewhere: past the end, on another tensor's, or out of line."""
    offset = random.choice(layout.tensors).parts[5]
    _write(data, offset, random.choice((1, 32, len(data), 2**40, 2**63, 2**64 - 32)))


def _lost(data: bytearray, layout: Layout, random: Random) -> None:
    """An entry that is not there, though it is counted."""
    whole = random.choice((*layout.fields, *layout.tensors)).whole
    del data[whole.start : whole.start + whole.size]


def _twice(data: bytearray, layout: Layout, random: Random) -> None:
    """An entry in the place of another one, and so there twice."""
    source, target = (entry.whole for entry in random.sample((*layout.fields, *layout.tensors), 2))
    data[target.start : target.start + target.size] = data[source.start : source.start + source.size]


def _noise(data: bytearray, layout: Layout, random: Random) -> None:
    """Bytes here and there in the header."""
    for _ in range(random.randrange(1, 9)):
        _flip(data, Part(8, layout.data_start - 8), random)


def _blank(data: bytearray, layout: Layout, random: Random) -> None:
    """A stretch of zeros, as a download leaves that was given up."""
    start = random.randrange(layout.data_start)
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def _cut_in_header(data: bytearray, layout: Layout, random: Random) -> None:
    del data[random.randrange(layout.data_start) :]


def _cut_in_weights(data: bytearray, layout: Layout, random: Random) -> None:
    del data[random.choice((layout.data_start, random.randrange(layout.data_start, len(data)))) :]


MUTATIONS: dict[str, Mutate] = {
    "magic": lambda data, _layout, random: _flip(data, Part(0, 4), random),
    "version": _header(Part(4, 4)),
    "number of tensors": _header(Part(8, 8)),
    "number of fields": _header(Part(16, 8)),
    "key's length": _of_field(0, _edge),
    "key": _of_field(1, _flip),
    "field's type": _of_field(2, _kind),
    "value": _value,
    "zero": _zero,
    "content": _content,
    "name's length": _of_tensor(0, _edge),
    "name": _of_tensor(1, _flip),
    "rank": _of_tensor(2, _edge),
    "dimension": _dimension,
    "tensor's type": _of_tensor(4, _kind),
    "offset": _offset,
    "lost entry": _lost,
    "entry twice": _twice,
    "noise": _noise,
    "blank": _blank,
    "cut in the header": _cut_in_header,
    "cut in the weights": _cut_in_weights,
}
"""By what is changed."""


def mutated(path: Path, layout: Layout, kind: str, seed: int) -> bytes:
    """The content of a file after one of MUTATIONS; always the same for the same seed."""
    data = bytearray(path.read_bytes())
    MUTATIONS[kind](data, layout, Random(seed))
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a file: refused with a message (input, reason, way out), or used, with no message.
    `stage` is "header", "library" or "use"."""

    file: str
    stage: str
    message: tuple[str, str, str] | None = None


def outcome_of(path: Path, library: str) -> Outcome:
    """Go the way of a user's file with it. What is no OutriderError is raised."""
    stage = "header"
    try:
        card = read_card(path)
        stage = "library"
        weights = load_weights(card, LoadOptions(threads=1, gpu_layers=0, library=library))
        stage = "use"
        try:
            _use(weights, card)
        finally:
            weights.close()
    except OutriderError as error:
        return Outcome(path.name, stage, (error.what, error.why, error.way_out))
    return Outcome(path.name, stage)


def _use(weights: Any, card: Any) -> None:
    """What every answer begins with: a template, tokens, and a row of logits."""
    template_of(weights, card.chat_template)
    vocabulary = weights.vocabulary
    tokens = vocabulary.tokenize("the returns of 10 (and an é)")[:16]
    for token in (0, *tokens, vocabulary.size - 1):
        vocabulary.piece(token), vocabulary.spelling(token), vocabulary.ends_generation(token)
    model = weights.open(32)
    model.decode([Span(0, tuple(tokens) or (0,), 0, 1)])


if __name__ == "__main__":
    for file in sys.argv[2:]:
        made = outcome_of(Path(file), sys.argv[1])
        print(json.dumps([made.file, made.stage, made.message]), flush=True)
