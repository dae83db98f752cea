"""A reduced vocabulary: the tokens of the target that its answers really use, and their tokenizer. The output
layer is often most of a small draft's cost, and most of a vocabulary is hardly ever drafted (FR-Spec, arXiv
2502.14856). What the draft does not know, it reads as one token more and says with it that something else
comes next."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import PartOf, Vocabulary
from outrider.core.errors import SettingError
from outrider.core.notices import notify
from outrider.models.constants import GGUFValueType, Keys, TokenType
from outrider.models.header import Field, read_header
from outrider.models.vocab.alignment import tokenizer_id

OTHER = "<|other|>"
"""The token in whose place a draft reads and predicts all that it does not know."""

Ids = npt.NDArray[np.int64]

_PLACEHOLDER = re.compile(rb"(unused|reserved|dummy|control|placeholder|extra|pad)\D*\d+", re.IGNORECASE)
"""Control tokens that no text has: there can be thousands."""
_MAX_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Subset:
    """Which of a target's tokens a draft knows. `to_target` (draft tokens,): the target's ids in ascending
    order; with `has_other`, the last entry is -1, for the one token for all others. `to_draft` (target
    tokens,): a draft id for every token of the target, that of the last token for those that are not known.
    """

    to_target: Ids
    to_draft: Ids
    has_other: bool

    @property
    def size(self) -> int:
        return len(self.to_target)

    @classmethod
    def whole(cls, size: int) -> Subset:
        return cls(np.arange(size), np.arange(size), has_other=False)

    @classmethod
    def of(cls, kept: Sequence[int], size: int) -> Subset:
        """These tokens of a target's vocabulary of `size`, and one for all others."""
        tokens = np.unique(np.asarray(kept, dtype=np.int64))
        to_draft = np.full(size, len(tokens), dtype=np.int64)
        to_draft[tokens] = np.arange(len(tokens))
        return cls(np.append(tokens, -1), to_draft, has_other=True)


def choose_subset(vocabulary: Vocabulary, counts: Ids, size: int) -> Subset:
    """The `size` - 1 tokens that count most, and one for the others; `counts`: uses of each token. Those of
    `needed_tokens` are kept in any case; of tokens that never occur the first. Raises SettingError."""
    total = vocabulary.size
    if size >= total:
        return Subset.whole(total)
    needed = needed_tokens(vocabulary)
    if size <= len(needed) + 1:
        reason = f"{size} tokens are too few: {len(needed) + 1} are needed in any case"
        raise SettingError("vocabulary", reason, "Ask for more, or for 0: all of them.")
    return Subset.of(ranked(counts, needed)[: size - 1].tolist(), total)


def ranked(counts: npt.NDArray[Any], needed: Ids) -> Ids:
    """All tokens in the order in which they are kept: those that are needed, then the most frequent."""
    is_needed = np.zeros(len(counts), dtype=bool)
    is_needed[needed] = True
    return np.lexsort((np.arange(len(counts)), -counts, ~is_needed))


def needed_tokens(vocabulary: Vocabulary) -> Ids:
    """Tokens that are kept in any case: those of one byte, without which some text cannot be written at all,
    digits, white space, control tokens that are in use, and all that end an answer."""
    return np.array([t for t in range(vocabulary.size) if _is_needed(vocabulary, t)], dtype=np.int64)


def _is_needed(vocabulary: Vocabulary, token: int) -> bool:
    if vocabulary.ends_generation(token):
        return True
    if vocabulary.is_control(token):
        return not _PLACEHOLDER.search(vocabulary.spelling(token))
    piece = vocabulary.piece(token)
    is_number = len(piece) <= _MAX_DIGITS and piece.isdigit()
    return len(piece) == 1 or is_number or (bool(piece) and piece.isspace())


def coverage(subset: Subset, texts: Iterable[npt.NDArray[np.int32]]) -> float:
    """Share of the tokens of some texts that the draft knows, 0-1; 1 for no text."""
    known = total = 0
    for text in texts:
        known += int((subset.to_draft[text] != subset.size - subset.has_other).sum()) if len(text) else 0
        total += len(text)
    return known / total if total else 1.0


_BOS, _EOS, _UNKNOWN = Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.UNK_ID
_ASSUMED = {b"gpt2": {_BOS: 11, _EOS: 11}, b"llama": {_BOS: 1, _EOS: 2, _UNKNOWN: 0}}
"""Ids that llama.cpp takes for granted where a file of this family is silent"""
_OTHER_SCORE = -10_000.0
_OF_THE_WHOLE = (Keys.Tokenizer.HF_JSON, Keys.Tokenizer.RWKV)
"""The same tokenizer in other formats: of all its tokens"""
_NOT_BY_TOKEN = (Keys.Tokenizer.PRECOMPILED_CHARSMAP, Keys.Tokenizer.CHAT_TEMPLATES)


def tokenizer_fields(metadata: Mapping[str, Field], subset: Subset, size: int) -> dict[str, Field]:
    """The tokenizer's fields for a draft that knows `subset` of a tokenizer's `size` tokens. `metadata` is of
    a file with that tokenizer. Raises SettingError when it is not, or when too few tokens are kept for any to
    be put together from others."""
    fields = {key: found for key, found in metadata.items() if key.startswith("tokenizer.")}
    fields = {key: found for key, found in fields.items() if found.value or found.items is None}
    tokens: list[bytes] = fields[Keys.Tokenizer.LIST].value if Keys.Tokenizer.LIST in fields else []
    if len(tokens) != size:
        reason = f"it has {len(tokens):,} tokens, the target {size:,} and the draft {subset.size:,}"
        raise SettingError("the draft's tokenizer", reason, "Start from the target.")
    if not subset.has_other:
        return fields
    known = subset.to_target[:-1].tolist()
    normal = Field([int(TokenType.NORMAL)] * size, GGUFValueType.ARRAY, GGUFValueType.INT32)
    fields.setdefault(Keys.Tokenizer.TOKEN_TYPE, normal)
    last: dict[str, Any] = {
        Keys.Tokenizer.LIST: OTHER.encode(),
        Keys.Tokenizer.TOKEN_TYPE: int(TokenType.CONTROL),
        Keys.Tokenizer.SCORES: _OTHER_SCORE,
    }
    kept: dict[str, Field] = {}
    for key, found in fields.items():
        if key.endswith("_token_id"):
            continue
        if key in last:
            kept[key] = replace(found, value=[*(found.value[token] for token in known), last[key]])
        elif key == Keys.Tokenizer.MERGES:
            kept[key] = replace(found, value=_kept_merges(found.value, {tokens[token] for token in known}))
        elif key in _OF_THE_WHOLE or (found.items is not None and key not in _NOT_BY_TOKEN):
            notify(f"{key} is left out: it is about tokens that the draft does not know")
        else:
            kept[key] = found
    return kept | _special_ids(fields, subset)


def _kept_merges(merges: Sequence[bytes], kept: Collection[bytes]) -> list[bytes]:
    found = []
    for merge in merges:
        cut = merge.find(b" ", 1)  # a part may begin with a blank of its own
        left, right = merge[:cut], merge[cut + 1 :]
        if left in kept and right in kept and left + right in kept:
            found.append(merge)
    if not found:
        reason = f"with {len(kept) + 1:,} tokens none is left that is put together from others"
        raise SettingError("vocabulary", reason, "Ask for more, or for 0: all of them.")
    return found


def _special_ids(fields: Mapping[str, Field], subset: Subset) -> dict[str, Field]:
    given = {key: found for key, found in fields.items() if key.endswith("_token_id")}
    family = fields.get(Keys.Tokenizer.MODEL)
    for key, token in _ASSUMED.get(family.value if family else b"", {}).items():
        given.setdefault(key, Field(token, GGUFValueType.UINT32))
    ids, other = {}, subset.size - 1
    for key, found in given.items():
        is_token = 0 <= found.value < len(subset.to_draft)
        place = int(subset.to_draft[found.value]) if is_token else other
        name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
        if place == other and key not in (_BOS, _EOS, _UNKNOWN):
            notify(f"the {name} token is not known to the draft, and is left out")
            continue
        # Left out, llama.cpp would take whatever token has the usual id.
        ids[key] = replace(found, value=place)
        if place == other:
            notify(f"the {name} token is not known to the draft: {OTHER} is in its place")
    return ids


# The map of a reduced vocabulary, in its draft's GGUF header

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
