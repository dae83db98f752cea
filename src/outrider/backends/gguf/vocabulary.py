"""A GGUF's tokenizer as a Vocabulary."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from outrider.backends.gguf.library import Handle, Library
from outrider.core.contracts import PartOf
from outrider.core.errors import PromptError, SettingError

_FAMILIES = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
_PIECE_BYTES = 64
_CONTROL = 1 << 3 | 1 << 1
"""the attributes "control" and "unused" of a token"""


class GgufVocabulary:
    """Tokens of a loaded model. Raises BackendError once the model was closed, SettingError for a
    token id that it does not have: llama.cpp would end the process."""

    def __init__(
        self, library: Library, model: Handle, pre_tokenizer: str, part_of: PartOf | None = None
    ) -> None:
        self._library, self._model = library, model
        lib = library.functions
        self._pointer = vocab = lib.llama_model_get_vocab(model.pointer)
        self.size: int = lib.llama_vocab_n_tokens(vocab)
        family = _FAMILIES.get(lib.llama_vocab_type(vocab), "unknown")
        self.kind = f"{family} ({pre_tokenizer})" if pre_tokenizer else family
        bos, eos = lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab)
        self.bos: int | None = bos if bos >= 0 else None
        self.eos: int | None = eos if eos >= 0 else None
        self.adds_bos: bool = lib.llama_vocab_get_add_bos(vocab)
        self.part_of = part_of
        # Asked for every token of every text; what the library says never changes.
        self.piece, self.is_control = cache(self._piece), cache(self._is_control)
        self.ends_generation = cache(self._ends_generation)

    @property
    def _vocab(self) -> Any:
        _ = self._model.pointer  # refuses when it was closed
        return self._pointer

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.size:
            raise SettingError("token", f"the vocabulary of {self.size} has no token {token}")
        return token

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError("text", f"it is not valid Unicode ({error.reason})", "Give UTF-8.") from error
        native, size, special = self._library.functions, len(data) + 8, (add_special, parse_special)
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = native.llama_tokenize(self._vocab, data, len(data), buffer, size, *special)
            if count >= 0:
                # A text that spells the start token itself gets no second one.
                is_double = add_special and self.adds_bos and buffer[: min(count, 2)] == [self.bos] * 2
                return buffer[is_double:count]
            size = -count

    def _piece(self, token: int) -> bytes:
        size = 0 if self.is_control(token) else _PIECE_BYTES
        while size:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.functions.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if count >= 0:
                return ctypes.string_at(buffer, count)
            size = -count
        return b""

    def spelling(self, token: int) -> bytes:
        text: bytes | None = self._library.functions.llama_vocab_get_text(self._vocab, self._checked(token))
        return text or b""

    def _is_control(self, token: int) -> bool:
        attributes = self._library.token_attributes(self._model.pointer, self._vocab, self._checked(token))
        return bool(attributes & _CONTROL)

    def _ends_generation(self, token: int) -> bool:
        return bool(self._library.functions.llama_vocab_is_eog(self._vocab, self._checked(token)))
