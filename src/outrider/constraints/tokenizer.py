"""What llguidance gets of a vocabulary, and what its errors mean. It needs the bytes of every token, which
tokens end a text, which are no text at all, and how the model's own tokenizer cuts text: forced text is
tokenized as the model is used to."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError

_SENTINEL = "\x02"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary for llguidance, and those of its tokens that need care."""

    native: LLTokenizer
    size: int
    ends: tuple[int, ...]
    """all tokens by which the model may end its text"""
    controls: tuple[int, ...]
    """the other tokens that are no text"""


_tokenizers: weakref.WeakKeyDictionary[Vocabulary, Tokenizer] = weakref.WeakKeyDictionary()


def tokenizer_for(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a vocabulary, made once (1.5 seconds for 150,000 tokens). The caller keeps the
    vocabulary alive. Raises SettingError for one without a token that ends a text."""
    if vocabulary in _tokenizers:
        return _tokenizers[vocabulary]
    tokens = range(vocabulary.size)
    ends = tuple(filter(vocabulary.ends_generation, tokens))
    if not ends:
        why = "the model has no token that ends a text, so that no constraint could end one"
        raise SettingError("grammar", why, "Use another model.")
    special = [token for token in tokens if vocabulary.is_control(token) or token in ends]
    native = LLTokenizer(TokenizerWrapper(_Described(vocabulary, special, ends[0])), eos_token=list(ends))
    controls = tuple(token for token in special if token not in ends)
    made = _tokenizers[vocabulary] = Tokenizer(native, vocabulary.size, ends, controls)
    return made


class _Described:
    """What llguidance's wrapper asks of a tokenizer. Control tokens are listed as special, so that no
    text is ever made of them, however they are spelled."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, special: list[int], end: int) -> None:
        self.special_token_ids = special
        self.eos_token_id = end
        self.tokens = [vocabulary.piece(token) for token in range(vocabulary.size)]
        for token in special:
            self.tokens[token] = vocabulary.spelling(token)
        self._vocabulary = weakref.ref(vocabulary)
        plain = b"".join(self.tokens[t] for t in self._tokenize("{")) == b"{"
        self._cut: Callable[[str], list[int]] = self._tokenize if plain else self._tokenize_after_sentinel

    def __call__(self, text: bytes | str) -> list[int]:
        return self._cut(text if isinstance(text, str) else text.decode("utf-8"))

    def _tokenize(self, text: str) -> list[int]:
        vocabulary = self._vocabulary()
        return [] if vocabulary is None else vocabulary.tokenize(text, add_special=False)

    def _tokenize_after_sentinel(self, text: str) -> list[int]:
        """For tokenizers that put a blank before the first word: the sentinel takes it."""
        tokens = self._tokenize(_SENTINEL + text)
        for i, token in enumerate(tokens):
            if self.tokens[token].endswith(_SENTINEL.encode()):
                return tokens[i + 1 :]
        return tokens


# Its error messages, cut down to the reason

_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_LEADS = re.compile(
    r'^(?:failed to compile JSON schema: |Unsatisfiable schema: |invalid regex ".*" \(in regex\): )+'
)
NOTHING_FITS = "NoExtensionBias"
_TOO_LARGE = ("too big", "too large", "too many expressions", "size limit", "too complex", "limit exceeded")


def reason(message: str) -> str:
    """What is wrong, in one line without a full stop."""
    if NOTHING_FITS in message:
        return "nothing can match it"
    line = message.strip().split("\n", 1)[0]
    line = _LEADS.sub("", _PLACE.sub("", line))
    detail = _REGEX_ERROR.search(message)
    if is_too_large(line):
        return f"it is too large ({line})"
    return (detail[1] if detail else line).strip().rstrip(".:")


def is_too_large(message: str) -> bool:
    """Whether a limit of llguidance's was reached."""
    return any(sign in message for sign in _TOO_LARGE)


def place(message: str) -> tuple[int, int] | None:
    """The line and the column that a message names."""
    found = _PLACE.match(message)
    return (int(found[1]), int(found[2])) if found else None


def dead_end(message: str) -> str:
    """Why a matcher cannot go on."""
    if NOTHING_FITS in message:
        return "the grammar leaves no token that may follow"
    return f"the next token could not be worked out ({reason(message)})"
