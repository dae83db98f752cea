"""The weights of a GGUF file in a native library, and the contexts on them: each is a Model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakSet

import numpy as np

from outrider.backends.gguf.c_types import LibraryRefused
from outrider.backends.gguf.context import (
    LlamaBatch,
    choose_attention,
    load_adapters,
    open_context,
    use_adapters,
)
from outrider.backends.gguf.heads import HiddenStates, num_heads
from outrider.backends.gguf.libraries import load_model
from outrider.backends.gguf.library import Handle, Library
from outrider.backends.gguf.log import clear_log, last_error
from outrider.backends.gguf.options import LoadOptions, Opening
from outrider.backends.gguf.top_logits import TopSampling
from outrider.backends.machine import available_bytes
from outrider.backends.rewinding import MAX_DIFFERENCE, Rewinder, RewindSupport, difference_after_rewind
from outrider.core.contracts import (
    Bytes,
    PartOf,
    Rewinding,
    SavedState,
    check_copy,
    check_restore,
    check_spans,
)
from outrider.core.data import Logits, Span
from outrider.core.errors import (
    BackendError,
    ModelFileError,
    OutOfMemory,
    OutriderError,
    PromptError,
    RewindUnsupported,
    SettingError,
)
from outrider.models.gguf import Layout, read_card
from outrider.models.vocab.subset import REDUCED_KEYS, read_part

_FAMILIES = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
_PIECE_BYTES = 64
_CONTROL = 1 << 3 | 1 << 1
"""the attributes "control" and "unused" of a token"""
_NO_KV_SLOT = 1
_COPIES_SHARE = 4
"""This part of what is free when a context is opened may go to copies of states from where texts turn."""


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


class Weights:
    """A model's weights and vocabulary, on which contexts are opened, in the library that the options name;
    under "auto" in the first that can load the file. Raises ModelFileError when none can run the file,
    OutOfMemory when there is no room for it, SettingError for a library that cannot be used."""

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self.library, model = load_model(path, self.options)
        self.native = Handle(str(path), model, self.library.functions.llama_model_free)
        """the owner of the native model; a context keeps it alive"""
        self.contexts: WeakSet[GgufModel] = WeakSet()
        """those that are open"""
        try:
            self.adapters = load_adapters(self.library, model, self.options.adapters)
            if not self._generates_text():
                why = "it is not a decoder-only language model"
                raise ModelFileError(str(path), why, "Choose a text-generation model.")
        except BaseException:
            self.close()
            raise
        # The file says which quantization it is; its own general.name is often left from training.
        self.name = path.stem
        # The library hands out no arrays. It is asked whether there is such a map, the file for the map.
        part_of = read_part(path) if any(map(self.metadata, REDUCED_KEYS)) else None
        pre_tokenizer = self.metadata("tokenizer.ggml.pre")
        self.vocabulary = GgufVocabulary(self.library, self.native, pre_tokenizer, part_of)
        self.trained_context: int = self.library.functions.llama_model_n_ctx_train(self.handle)
        self.window_tokens = self.library.window_tokens(self.handle)
        """positions that a sliding-window layer looks back, its own included; 0 where there is none"""

    def _generates_text(self) -> bool:
        """Models that embed text have a decoder by llama.cpp's reckoning; what they lack is causality."""
        native, model = self.library.functions, self.handle
        is_causal = self.metadata(f"{self.metadata('general.architecture')}.attention.causal") != "false"
        decodes = native.llama_model_has_decoder(model) and not native.llama_model_has_encoder(model)
        return is_causal and decodes and not self.library.is_diffusion(model)

    @cached_property
    def layout(self) -> Layout:
        """What the file says of the model's parts."""
        return read_card(self.path).layout

    @cached_property
    def rewind_support(self) -> RewindSupport:
        """How contexts go back to an earlier token: known of attention alone, else tried at the first use."""
        native = self.library.functions
        if not (native.llama_model_is_recurrent(self.handle) or native.llama_model_is_hybrid(self.handle)):
            is_windowed = self.window_tokens > 0 and self.library.keeps_windows
            return RewindSupport("window" if is_windowed and not self.options.full_window else "free")
        return self._try_checkpoints()

    def _try_checkpoints(self) -> RewindSupport:
        asked = replace(self.options, micro_batch_tokens=8)  # so that the trial's calls are split
        try:
            trial = self.open(128, max_sequences=2, options=asked, support=RewindSupport("checkpoints"))
            with closing(trial):
                difference = difference_after_rewind(trial)
                state_bytes = self.library.state_bytes(trial.native_context, 0)
        except OutriderError as error:
            why = f"copies of its state could not be tried ({error})"
            return RewindSupport("none", notice=f"{self.name}: {why}")
        if state_bytes and difference <= MAX_DIFFERENCE:
            return RewindSupport("checkpoints", state_bytes)
        why = "has other logits after going back to a copy of its state than without, so none are used"
        why = why if state_bytes else "cannot copy its kind of state"
        return RewindSupport("none", notice=f"{self.name}: {self.library.title} {why}")

    @property
    def piece_tokens(self) -> int:
        """Of a sequence with whole windows the library copies no more than the next token looks back at: so
        many tokens at a time are copied whole. 0 where all are copied at once."""
        is_whole = self.library.keeps_windows and self.options.full_window
        # Its windows do not slide: a piece would lie in two of them.
        is_chunked = self.metadata("general.architecture") == "llama4"
        return max(self.window_tokens - 1, 0) if is_whole and not is_chunked else 0

    @property
    def rewinding(self) -> Rewinding:
        """How far contexts of a sequence go back."""
        return self.rewind_support.rewinding

    @cached_property
    def num_heads(self) -> int:
        """How many of its layers predict tokens after the next one, and can be drafted with here."""
        if not self.options.heads:
            return 0
        return num_heads(self.library, self.handle, self.metadata("general.architecture"))

    @property
    def library_line(self) -> str:
        """The library in use, and the GPUs with layers of the model."""
        gpus = self.library.gpu_names(self.options)
        where = f"; {'' if self.options.gpu_layers < 0 else f'{self.options.gpu_layers} '}layers on {gpus}"
        return str(self.library.file) + (where if gpus else "")

    @property
    def handle(self) -> int:
        """The native model. Raises BackendError when it was closed."""
        return self.native.pointer

    def metadata(self, key: str) -> str:
        return self.library.metadata(self.handle, key)

    def open(
        self,
        context_length: int = 0,
        *,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
        options: LoadOptions | None = None,
        support: RewindSupport | None = None,
    ) -> GgufModel:
        """A context of `context_length` tokens per sequence (0: as trained); `options`: its own, if any."""
        length = context_length or self.trained_context
        return GgufModel(self, length, max_sequences, options, capacity_tokens, support=support)

    def close(self) -> None:
        """Free the weights, and the contexts that are open on them. Closing twice is harmless."""
        for model in list(self.contexts):
            model.close()
        self.native.close()


class GgufModel:
    """A context on some weights: KV state for `max_sequences` sequences of up to `context_length` tokens, and
    of `capacity_tokens` together (0: as many as each of them may have). `support`: how it is to go back,
    right or not, instead of as these weights' contexts can; `beside` lends what they lack. Raises OutOfMemory
    when the KV cache does not fit."""

    is_head: ClassVar[bool] = False
    """whether it computes a head rather than a model"""
    context_type: ClassVar[int] = 0

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        max_sequences: int,
        options: LoadOptions | None = None,
        capacity_tokens: int = 0,
        support: RewindSupport | None = None,
        beside: GgufModel | None = None,
    ) -> None:
        self.weights = weights
        self.options = options or weights.options
        self.name, self.vocabulary = weights.name, weights.vocabulary
        support = support or weights.rewind_support
        self.max_sequences = max_sequences
        capacity = capacity_tokens or context_length * max_sequences
        self._library = weights.library
        in_order = max_sequences == 1 and weights.window_tokens == 0 and not weights.adapters
        attention = choose_attention(self._library, weights.layout, self.options, capacity, in_order=in_order)
        self.flash_attention = attention
        """whether it is in use: "on", "off", or "auto" where that was left to the library"""
        chosen = replace(self.options, flash_attention=attention)
        opening = Opening(
            self.name,
            chosen,
            context_length,
            max_sequences,
            capacity,
            int(weights.piece_tokens > 0),
            self.context_type,
            beside.native_context if beside else 0,
        )
        context = open_context(self._library, weights.handle, weights.layout, opening)
        native = self._library.functions
        self._native = Handle(self.name, context, native.llama_free, keeps=weights.native)
        use_adapters(self._library, context, weights.adapters)
        weights.contexts.add(self)
        # Libraries round contexts up; the length that was asked for is the one that holds.
        self.capacity_tokens: int = min(capacity, native.llama_n_ctx(context))
        self.context_length: int = min(context_length, self.capacity_tokens)
        self.attends_to_all: bool = max_sequences > 1 and self._library.flash_mixes_sequences
        self.max_batch_tokens: int = native.llama_n_batch(context)
        self.micro_batch_tokens: int = native.llama_n_ubatch(context)
        self.threads: int = native.llama_n_threads(context)
        self.threads_batch: int = native.llama_n_threads_batch(context)
        self._lengths = [0] * max_sequences
        self.max_rows, self._may_have_gaps = self.options.max_rows, False
        self._rewinder = self._open_rewinder(context, support.rewinding)
        self.rewinding = self._rewinder.rewinding
        self.hidden: HiddenStates | None = None
        """what a head reads, where they are kept"""
        self._batch = LlamaBatch(self._library.Batch, self.max_batch_tokens)
        self._buffers: dict[tuple[int, int], Logits] = {}
        """views of the library's logits, by address and number of rows: making one takes long"""
        self._sampling = self._open_sampling(context)

    def _open_rewinder(self, context: int, rewinding: Rewinding) -> Rewinder:
        library, weights = self._library, self.weights
        states = partial(library.save_state, context), partial(library.restore_state, context)
        return Rewinder(
            rewinding,
            states if rewinding.keeps_turns else None,
            max_bytes=available_bytes() / _COPIES_SHARE,
            window_tokens=weights.window_tokens if library.keeps_windows else 0,
            oldest=partial(library.oldest_position, context),
            is_copied=weights.piece_tokens > 0,
        )

    @property
    def samples(self) -> bool:
        """Whether rows may come as TopLogits."""
        return self._sampling is not None and not self._sampling.is_off

    def _open_sampling(self, context: int) -> TopSampling | None:
        """The samplers in its graph, where they pay; a call that they leave in doubt is made once more."""
        num_layers = len(self.weights.layout.layers)
        if self.is_head or not self.rewinding.is_free or not self._library.samples(self.options, num_layers):
            return None
        try:
            return TopSampling(self._library, context, self.vocabulary.size)
        except LibraryRefused:
            return None

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        context = self._native.pointer
        check_spans(self, spans)
        clear_log()
        self._close_gaps(context)
        self._rewinder.before_call(spans)
        try:
            rows = self._answer(context, spans)
            for span in spans:
                self._lengths[span.sequence] = span.start + len(span.tokens)
            if self.hidden is not None:
                self.hidden.after_call(spans)
        except BaseException:  # Ctrl-C included: it is raised when the native call returns
            self._undo(spans)
            raise
        return rows

    def _answer(self, context: Any, spans: Sequence[Span]) -> list[Logits]:
        if self._sampling is not None and (rows := self._sample(context, spans)) is not None:
            return rows
        self._call(context, spans)
        return self._rows(context, spans)

    def _call(self, context: Any, spans: Sequence[Span]) -> None:
        status = self._evaluate(context, spans)
        if status == _NO_KV_SLOT and self._make_room(context, spans):
            status = self._evaluate(context, spans)
        self._check(status, sum(len(span.tokens) for span in spans))

    def _check(self, status: int, num_tokens: int) -> None:
        if status == _NO_KV_SLOT:
            why = f"the KV cache has no room for {num_tokens} more tokens"
            raise OutOfMemory(self.name, why, "Give a larger context (-c).")
        if status != 0:
            why = last_error(f"{self._library.title} failed with status {status}")
            raise BackendError(self.name, why)

    def _sample(self, context: Any, spans: Sequence[Span]) -> list[Logits] | None:
        sampling = cast(TopSampling, self._sampling)
        if not sampling.prepare(spans if self.hidden is None else _whole(spans)):
            return None
        self._call(context, spans)
        found = sampling.read(spans)
        if found is not None and sampling.is_checked(spans):
            return cast(list[Logits], found)
        self._undo(spans)
        sampling.prepare(_whole(spans))
        self._call(context, spans)
        rows = self._rows(context, spans)
        if found is not None:
            sampling.check(found, rows)
        return rows

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        return int(self._library.functions.llama_decode(context, self._batch.fill(spans)))

    def keep_hidden_states(self, layers: Sequence[int] = ()) -> HiddenStates:
        """Keep the hidden states of all tokens from now on, for a head: `HiddenStates` of these layers. A
        library that lacks heads raises, one that does not give these inputs ends the process."""
        self.hidden = HiddenStates(self._library, self._native.pointer, self.weights.handle, layers)
        return self.hidden

    def _rows(self, context: Any, spans: Sequence[Span]) -> list[Logits]:
        """Views of the library's own buffer, which holds the wanted rows in batch order."""
        num_rows = sum([span.rows for span in spans])
        if num_rows:
            address = self._library.functions.llama_get_logits(context)
            if not address:
                raise BackendError(self.name, "the library gave no logits", "Choose a text-generation model.")
        else:
            self._library.functions.llama_synchronize(context)
            address = 0
        if (buffer := self._buffers.get((address, num_rows))) is None:
            buffer = self._buffers[address, num_rows] = self._view(address, num_rows)
        if len(spans) == 1:
            return [buffer]
        ends = accumulate(span.rows for span in spans)
        return [buffer[end - span.rows : end] for span, end in zip(spans, ends, strict=True)]

    def _view(self, address: int, num_rows: int) -> Logits:
        size = self.vocabulary.size
        if not num_rows:
            return np.empty((0, size), dtype=np.float32)
        values = (ctypes.c_float * (num_rows * size)).from_address(address)
        return np.ctypeslib.as_array(values).reshape(num_rows, size)

    def _close_gaps(self, context: int) -> None:
        """A single sequence is only ever cut at its end; several leave free cells among each other's."""
        if self._may_have_gaps and self.max_sequences > 1 and not self._library.close_gaps(context):
            raise BackendError(self.name, last_error(f"{self._library.title} could not tidy its KV cache"))
        self._may_have_gaps = False

    def _make_room(self, context: int, spans: Sequence[Span]) -> bool:
        """Whether a call that found no room is to be tried again, after what it stored was taken back."""
        self._undo(spans)
        kept = all(self._lengths[span.sequence] == span.start for span in spans)
        return kept and self._library.make_room(context)

    def _undo(self, spans: Sequence[Span]) -> None:
        """A failed call may have stored some of its micro-batches. Where they cannot be forgotten, or have
        pushed out what the sequence still needs, the sequence starts again empty."""
        for span in spans:
            length = span.start
            self._lengths[span.sequence] = length + len(span.tokens)
            if not self._cut(span.sequence, length):
                self._forget(span.sequence, -1)
                length = 0
                self._rewinder.truncated(span.sequence, 0)
            self._lengths[span.sequence] = length
            if self.hidden is not None:
                self.hidden.truncate(span.sequence, length)

    @property
    def _memory(self) -> Any:
        return self._library.memory(self._native.pointer)

    def _forget(self, sequence: int, start: int) -> bool:
        """Remove a sequence's tokens from position `start` on (-1: all); False where that is impossible."""
        self._may_have_gaps = True
        return bool(self._library.functions.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def length(self, sequence: int) -> int:
        _ = self._native.pointer  # refuses when it was closed
        # A negative number means all sequences to the libraries.
        if not 0 <= sequence < self.max_sequences:
            raise BackendError("sequence", f"there is none numbered {sequence}")
        return self._lengths[sequence]

    def _cut(self, sequence: int, length: int) -> bool:
        """Whether a sequence could be left with its first `length` tokens, its state included."""
        if self.reach(sequence, length) != length:
            return False
        is_back = length == 0 or self._rewinder.put_back(sequence, length, sequence)
        return is_back and self._forget(sequence, length)

    def reach(self, sequence: int, length: int) -> int:
        stored = self.length(sequence)
        return length if length in (0, stored) else self._rewinder.reach(sequence, length)

    def truncate(self, sequence: int, length: int) -> None:
        stored = self.length(sequence)
        if not 0 <= length <= stored:
            raise BackendError("truncate", f"{stored} tokens are stored, so {length} cannot be kept")
        if length == stored:
            return
        if not self._cut(sequence, length):
            # llama.cpp itself reports success even where needed cells are gone.
            way_out = "Use --swa-full." if self.weights.window_tokens else ""
            why = f"it no longer has what goes on from {length} of {stored} tokens"
            raise RewindUnsupported(self.name, why, way_out)
        self._lengths[sequence] = length
        self._rewinder.truncated(sequence, length)
        if self.hidden is not None:
            self.hidden.truncate(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        memory = self._memory
        check_copy(self, source, sequence, length)
        stored = self._lengths[source]
        if not self._rewinder.can_copy(source, stored, length):
            raise RewindUnsupported(self.name, "it keeps no state of every part of a text")
        # One cache for all sequences: the cells are shared, nothing is moved.
        self._library.functions.llama_memory_seq_cp(memory, source, sequence, 0, length)
        if length < stored and not self._rewinder.put_back(source, length, sequence):
            self._forget(sequence, -1)
            raise RewindUnsupported(self.name, f"{self._library.title} cannot copy its state")
        self._rewinder.copied(source, sequence, length)
        self._lengths[sequence] = length
        if self.hidden is not None:
            self.hidden.copy(source, sequence, length)

    def save(self, sequence: int) -> SavedState:
        if not (stored := self.length(sequence)):
            raise BackendError("save", f"sequence {sequence} is empty")
        extent, states = self._rewinder.save(sequence, stored)
        return SavedState(extent, (*self._copy_out(sequence, stored), *states))

    def restore(self, sequence: int, state: SavedState) -> None:
        check_restore(self, sequence, state)
        self._may_have_gaps = True
        self._copy_in(sequence, state.copies)
        self._lengths[sequence] = state.extent.length
        self._rewinder.restored(sequence, state)
        if self.hidden is not None:
            self.hidden.restored(sequence, state.extent.length)

    def _copy_out(self, sequence: int, length: int) -> list[Bytes]:
        """All that the library stores of a sequence, piece by piece (`Weights.piece_tokens`), for which one
        more sequence is lent. Raises RewindUnsupported where the library cannot say."""
        size, spare, pieces = self.weights.piece_tokens or length, self.max_sequences, list[Bytes]()
        if length <= size:
            return [self._state_of(sequence)]
        for start in range(0, length, size):
            native = self._library.functions
            native.llama_memory_seq_cp(self._memory, sequence, spare, start, start + size)
            try:
                pieces.append(self._state_of(spare))
            finally:
                self._forget(spare, -1)
        return pieces

    def _copy_in(self, sequence: int, pieces: Sequence[Bytes]) -> None:
        """Give an empty sequence what `_copy_out` copied. Raises RewindUnsupported, and the sequence is empty
        then."""
        target = sequence if len(pieces) == 1 else self.max_sequences
        for piece in pieces:
            if not self._is_written(target, piece):
                why = last_error(f"{self._library.title} cannot copy its state")
                for wrong in (target, sequence):
                    self._forget(wrong, -1)
                raise RewindUnsupported(self.name, why)
            if target != sequence:
                self._library.functions.llama_memory_seq_cp(self._memory, target, sequence, -1, -1)
                self._forget(target, -1)

    def _state_of(self, sequence: int) -> Bytes:
        native, given = self._library.functions, (sequence, *self._library.state_flags)
        clear_log()
        data = np.empty(native.llama_state_seq_get_size(self.native_context, *given), dtype=np.uint8)
        size = native.llama_state_seq_get_data(self.native_context, data.ctypes.data, data.nbytes, *given)
        if not size:
            raise RewindUnsupported(self.name, last_error(f"{self._library.title} cannot copy its state"))
        return data[:size]

    def _is_written(self, sequence: int, data: Bytes) -> bool:
        clear_log()
        context, write = self.native_context, self._library.functions.llama_state_seq_set_data
        given = context, data.ctypes.data, data.nbytes, sequence, *self._library.state_flags
        return bool(write(*given) or (self._library.make_room(context) and write(*given)))

    @property
    def native_context(self) -> int:
        """The native context. Raises BackendError when it was closed."""
        return self._native.pointer

    def close(self) -> None:
        self._native.close()


def _whole(spans: Sequence[Span]) -> list[Span]:
    return [span._replace(top=0) for span in spans]
