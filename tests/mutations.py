"""Mutated GGUF files: deterministic changes to a model's header, metadata, tensors' entries and its end.

    python mutations.py LIBRARY FILE...

goes the way of a user's file with each: the header is checked, the first call is made in a child process,
then the file is loaded, asked for tokens and a row of logits. A line of JSON says what became of each file.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

from gguf import GGUFReader, ReaderField

from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Span
from outrider.core.errors import OutriderError
from outrider.models.gguf import read_card
from outrider.session.loading import load_weights, template_of

__all__ = ["MUTATIONS", "Layout", "layout_of", "mutated"]

_EDGES = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
_COUNTS = (slice(4, 8), slice(8, 16), slice(16, 24))
"""the version, and how many tensors and fields there are"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a file everything is. An entry is a field of the metadata or a tensor's, cut into its parts:
    lengths, names, types, values, dimensions, offsets. `data_start`: the first byte of the weights."""

    entries: list[list[slice]]
    data_start: int


def layout_of(path: Path) -> Layout:
    """The layout of a whole GGUF file."""
    reader = GGUFReader(path)
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    fields += [tensor.field for tensor in reader.tensors]
    return Layout([_parts(field) for field in fields], int(reader.data_offset))


def _parts(field: ReaderField) -> list[slice]:
    ends = [*accumulate((part.nbytes for part in field.parts), initial=field.offset)]
    return [slice(start, end) for start, end in pairwise(ends) if end > start]


def _edge(data: bytearray, number: slice, random: Random) -> None:
    """Write a number at the edge of what its bytes can hold, or one more or less than it is."""
    size, now = number.stop - number.start, int.from_bytes(data[number], "little")
    written = random.choice([edge for edge in (now - 1, now + 1, *_EDGES) if edge != now])
    data[number] = (written % 256**size).to_bytes(size, "little")


def _flip(data: bytearray, part: slice, random: Random) -> None:
    """Change a byte somewhere in it."""
    data[random.randrange(part.start, part.stop)] ^= random.randrange(1, 256)


def _number(data: bytearray, layout: Layout, random: Random) -> None:
    """A length, a type, a value, a dimension or an offset."""
    part = random.choice(
        [part for part in random.choice(layout.entries) if (part.stop - part.start) % 4 == 0]
    )
    size = 8 if (part.stop - part.start) % 8 == 0 else 4
    start = random.randrange(part.start, part.stop, size)
    _edge(data, slice(start, start + size), random)


def _zero(data: bytearray, layout: Layout, random: Random) -> None:
    """A part that is all zeros."""
    part = random.choice([part for part in random.choice(layout.entries) if any(data[part])])
    data[part] = bytes(part.stop - part.start)


def _whole(entry: list[slice]) -> slice:
    return slice(entry[0].start, entry[-1].stop)


def _lost(data: bytearray, layout: Layout, random: Random) -> None:
    """An entry that is not there, though it is counted."""
    del data[_whole(random.choice(layout.entries))]


def _twice(data: bytearray, layout: Layout, random: Random) -> None:
    """An entry in the place of another one, and so there twice."""
    source, target = map(_whole, random.sample(layout.entries, 2))
    data[target] = data[source]


def _noise(data: bytearray, layout: Layout, random: Random) -> None:
    """Bytes here and there in the header."""
    for _ in range(random.randrange(1, 9)):
        _flip(data, slice(8, layout.data_start), random)


def _blank(data: bytearray, layout: Layout, random: Random) -> None:
    """A stretch of zeros, as a download leaves that was given up."""
    start = random.randrange(layout.data_start - 64)
    data[start : start + 64] = bytes(64)


def _cut_in_header(data: bytearray, layout: Layout, random: Random) -> None:
    del data[random.randrange(layout.data_start) :]


def _cut_in_weights(data: bytearray, layout: Layout, random: Random) -> None:
    del data[random.choice((layout.data_start, random.randrange(layout.data_start, len(data)))) :]


MUTATIONS: dict[str, Callable[[bytearray, Layout, Random], None]] = {
    "magic": lambda data, _layout, random: _flip(data, slice(0, 4), random),
    "count": lambda data, _layout, random: _edge(data, random.choice(_COUNTS), random),
    "number": _number,
    "byte": lambda data, layout, random: _flip(data, random.choice(random.choice(layout.entries)), random),
    "zero": _zero,
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


def outcome_of(path: Path, library: str) -> tuple[str, tuple[str, str, str] | None]:
    """Go the way of a user's file with it: where it ended ("header", "library" or "use"), and the message
    (input, reason, way out), none if it can be used. What is no OutriderError is raised."""
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
        return stage, (error.what, error.why, error.way_out)
    return stage, None


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
        print(json.dumps(outcome_of(Path(file), sys.argv[1])), flush=True)
