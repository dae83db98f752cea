"""The map of a draft's reduced vocabulary, in its GGUF header."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.core.contracts import PartOf, Vocabulary
from outrider.models.constants import GGUFValueType
from outrider.models.fields import Field
from outrider.models.header import read_header
from outrider.models.vocab.alignment import tokenizer_id

TARGET_TOKENS = "outrider.draft.target_tokens"
"""INT32 array: for each token of the draft the target's id, -1 for the one that represents all others"""
OTHER_TOKEN = "outrider.draft.other_token"
"""UINT32: the draft's id of the token that represents all tokens of the target that it does not know"""
TARGET_TOKENIZER = "outrider.draft.target_tokenizer"
"""string: `vocab.tokenizer_id` of the target's vocabulary"""
WINDOW = "outrider.draft.window"
"""UINT32: the last tokens of a text that are enough for the draft; it need not read what is before"""
READS_PIECES = "outrider.draft.reads_pieces"
"""BOOL: a token that the draft does not know is read as several of its tokens, with the same bytes"""
REDUCED_KEYS = (OTHER_TOKEN, TARGET_TOKENIZER)
"""fields of one value that only a reduced vocabulary has"""


def read_part(path: Path) -> PartOf:
    """What the file says of its reduced vocabulary, empty where it says nothing: lining it up with a target
    verifies the map and says what is wrong with it. Raises ModelFileError when the header cannot be read."""
    header = read_header(path)
    return PartOf(
        target_tokens=header.numbers(TARGET_TOKENS, path),
        other_token=header.number(OTHER_TOKEN),
        target_tokenizer=header.text(TARGET_TOKENIZER) or "",
        name=path.stem,
        window=header.number(WINDOW) or 0,
        reads_pieces=header.fields.get(READS_PIECES) is True,
    )


def part_fields(
    target_tokens: Sequence[int], target: Vocabulary, *, window: int = 0, reads_pieces: bool = False
) -> dict[str, Field]:
    """The fields of a file whose tokens are those of `target` (the last, -1, for all others)."""
    return {
        TARGET_TOKENS: Field([*target_tokens], GGUFValueType.ARRAY, GGUFValueType.INT32),
        OTHER_TOKEN: Field(len(target_tokens) - 1, GGUFValueType.UINT32),
        TARGET_TOKENIZER: Field(tokenizer_id(target), GGUFValueType.STRING),
        WINDOW: Field(window, GGUFValueType.UINT32),
        READS_PIECES: Field(reads_pieces, GGUFValueType.BOOL),
    }
