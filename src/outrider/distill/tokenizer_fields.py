"""The tokenizer of a draft's file: its target's, or as much of it as the draft knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gguf import GGUFValueType, ReaderField, TokenType
from gguf.constants import Keys

from outrider.core.errors import SettingError
from outrider.distill.subset import OTHER, Subset

__all__ = ["Field", "TokenizerFields", "read_field", "token_spellings", "tokenizer_fields"]

_BOS, _EOS, _UNKNOWN = Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.UNK_ID
_ASSUMED = {"gpt2": {_BOS: 11, _EOS: 11}, "llama": {_BOS: 1, _EOS: 2, _UNKNOWN: 0}}
"""Ids that llama.cpp takes for granted where a file of this family is silent"""
_OTHER_SCORE = -10_000.0
_OF_THE_WHOLE = (Keys.Tokenizer.HF_JSON, Keys.Tokenizer.RWKV)
"""The same tokenizer in other formats: of all its tokens"""
_NOT_BY_TOKEN = (Keys.Tokenizer.PRECOMPILED_CHARSMAP, Keys.Tokenizer.CHAT_TEMPLATES)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a GGUF header; `items`: the kind of an array's entries. Strings are bytes."""

    value: Any
    kind: GGUFValueType
    items: GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class TokenizerFields:
    """What to write, and what its reader should know of it."""

    fields: Mapping[str, Field]
    notes: tuple[str, ...] = field(default=())


def token_spellings(metadata: Mapping[str, ReaderField]) -> list[bytes]:
    """The tokens that a file's metadata lists, in order of id; none where there is no list."""
    found = metadata.get(Keys.Tokenizer.LIST)
    return [] if found is None else read_field(found).value


def tokenizer_fields(metadata: Mapping[str, ReaderField], subset: Subset, size: int) -> TokenizerFields:
    """The tokenizer's fields for a draft that knows `subset` of a target's `size` tokens.

    `metadata` is the target's, or that of a draft that knows the same tokens. Raises SettingError when it
    is neither, or when too few tokens are kept for any to be put together from others.
    """
    fields = {key: read_field(found) for key, found in metadata.items() if key.startswith("tokenizer.")}
    listed = fields.get(Keys.Tokenizer.LIST)
    tokens: list[bytes] = [] if listed is None else listed.value
    if len(tokens) == subset.size and (not subset.has_other or tokens[-1] == OTHER.encode()):
        return TokenizerFields({key: found for key, found in fields.items() if not _is_empty(found)})
    if len(tokens) != size:
        reason = f"it has {len(tokens):,} tokens, the target {size:,} and the draft {subset.size:,}"
        raise SettingError("the draft's tokenizer", reason, "Start from the target, or from a draft of it.")
    return _Restriction(fields, tokens, subset).result()


def read_field(found: ReaderField) -> Field:
    """A field of a file that was read, strings as they are in it: not all are valid UTF-8."""
    kind = found.types[0]
    items = found.types[-1] if kind is GGUFValueType.ARRAY else None
    if items is GGUFValueType.STRING:
        return Field([found.parts[place].tobytes() for place in found.data], kind, items)
    if kind is GGUFValueType.STRING:
        return Field(found.parts[-1].tobytes(), kind)
    return Field(found.contents(), kind, items)


def _is_empty(found: Field) -> bool:
    return found.kind is GGUFValueType.ARRAY and not found.value


class _Restriction:
    """A tokenizer's fields for some of its tokens and `<|other|>`."""

    def __init__(self, fields: Mapping[str, Field], tokens: Sequence[bytes], subset: Subset) -> None:
        self._fields, self._tokens, self._subset = fields, tokens, subset
        self._known: list[int] = subset.to_target[:-1].tolist()
        self._other = subset.size - 1
        self._notes: list[str] = []

    def result(self) -> TokenizerFields:
        kept = dict(self._restricted())
        types = kept.setdefault(
            Keys.Tokenizer.TOKEN_TYPE, self._by_token(Field([], GGUFValueType.ARRAY, GGUFValueType.INT32), 0)
        )
        types.value[-1] = int(TokenType.CONTROL)
        kept |= self._special_ids()
        return TokenizerFields(kept, tuple(self._notes))

    def _restricted(self) -> Iterator[tuple[str, Field]]:
        """All but the special ids."""
        extra = {
            Keys.Tokenizer.LIST: OTHER.encode(),
            Keys.Tokenizer.TOKEN_TYPE: 0,
            Keys.Tokenizer.SCORES: _OTHER_SCORE,
        }
        for key, found in self._fields.items():
            if key.endswith("_token_id") or _is_empty(found):
                continue
            if key in extra:
                yield key, self._by_token(found, extra[key])
            elif key == Keys.Tokenizer.MERGES:
                yield key, self._merges(found)
            elif key in _OF_THE_WHOLE or (found.items is not None and key not in _NOT_BY_TOKEN):
                self._notes.append(f"{key} is left out: it is about tokens that the draft does not know")
            else:
                yield key, found

    def _by_token(self, found: Field, last: object) -> Field:
        normal = [int(TokenType.NORMAL)] * len(self._tokens)
        values = found.value or normal
        return replace(found, value=[*(values[token] for token in self._known), last])

    def _merges(self, found: Field) -> Field:
        """Those of which both parts and the result are kept."""
        kept = {self._tokens[token] for token in self._known}

        def is_kept(merge: bytes) -> bool:
            # A part may begin with a blank of its own.
            cut = merge.find(b" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            return left in kept and right in kept and left + right in kept

        merges = [merge for merge in found.value if is_kept(merge)]
        if not merges:
            reason = f"with {self._subset.size:,} tokens none is left that is put together from others"
            raise SettingError("vocabulary", reason, "Ask for more, or for 0: all of them.")
        return replace(found, value=merges)

    def _special_ids(self) -> Iterator[tuple[str, Field]]:
        given = {key: found for key, found in self._fields.items() if key.endswith("_token_id")}
        family = self._fields.get(Keys.Tokenizer.MODEL)
        assumed = _ASSUMED.get(family.value.decode(errors="replace"), {}) if family is not None else {}
        for key, token in assumed.items():
            given.setdefault(key, Field(token, GGUFValueType.UINT32))
        for key, found in given.items():
            place = self._place(found.value)
            if place is not None:
                yield key, replace(found, value=place)
                continue
            name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
            if key in (_BOS, _EOS, _UNKNOWN):
                # Left out, llama.cpp would take whatever token has the usual id.
                yield key, replace(found, value=self._other)
                self._notes.append(f"the {name} token is not known to the draft: {OTHER} stands for it")
            else:
                self._notes.append(f"the {name} token is not known to the draft, and is left out")

    def _place(self, token: int) -> int | None:
        """The draft's id of a token of the target; None where it is not known."""
        if not 0 <= token < len(self._tokens):
            return None
        place = int(self._subset.to_draft[token])
        return None if place == self._other else place
