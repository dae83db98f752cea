"""The weights of a GGUF file, loaded by one of the native libraries."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakSet

from outrider.backends.gguf.context import clear_log, last_error, speaks_of_memory
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.library import Handle, Library
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.vocabulary import GgufVocabulary
from outrider.core.contracts import RewindKind
from outrider.core.errors import ModelFileError, OutOfMemory
from outrider.models.reduced import REDUCED_KEYS, read_part


class Weights:
    """A model's weights and vocabulary, on which contexts are opened.

    The library is the one that the options name; under "auto" the first that can load the file.
    Raises ModelFileError when none can run the file, OutOfMemory when there is no room for it, SettingError
    for a library that cannot be used.
    """

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self.library, model = _load(path, self.options)
        self._native = Handle(str(path), model, self.library.functions.llama_model_free)
        self._contexts: WeakSet[GgufModel] = WeakSet()
        if not self._generates_text():
            self.close()
            raise ModelFileError(
                str(path), "it is not a decoder-only language model", "Choose a text-generation model."
            )
        # The file says which quantization it is; its own general.name is often left from training.
        self.name = path.stem
        # The library hands out no arrays. It is asked whether there is such a map, the file for the map.
        part_of = read_part(path) if any(map(self.metadata, REDUCED_KEYS)) else None
        pre_tokenizer = self.metadata("tokenizer.ggml.pre")
        self.vocabulary = GgufVocabulary(self.library, self._native, pre_tokenizer, part_of)
        self.trained_context: int = self.library.functions.llama_model_n_ctx_train(self.handle)
        self.window_tokens = self.library.window_tokens(self.handle)
        """positions that a sliding-window layer looks back, its own included; 0 where there is none"""
        self.rewind = self._rewind_kind()
        self.compared = ""
        """why this library, in a line, where it was chosen among several"""

    def _generates_text(self) -> bool:
        """Models that embed text have a decoder by llama.cpp's reckoning; what they lack is causality."""
        native = self.library.functions
        causal = self.metadata(f"{self.metadata('general.architecture')}.attention.causal") != "false"
        encodes = native.llama_model_has_encoder(self.handle)
        decodes = native.llama_model_has_decoder(self.handle) and not encodes
        return causal and decodes and not self.library.is_diffusion(self.handle)

    def _rewind_kind(self) -> RewindKind:
        native = self.library.functions
        if native.llama_model_is_recurrent(self.handle) or native.llama_model_is_hybrid(self.handle):
            return "none"
        windowed = self.window_tokens > 0 and self.library.keeps_windows and not self.options.full_window
        return "window" if windowed else "free"

    @property
    def library_line(self) -> str:
        """The library in use, and why it is this one."""
        return self.compared or str(self.library.file)

    @property
    def native(self) -> Handle:
        """Who owns the native model; a context keeps it alive."""
        return self._native

    @property
    def handle(self) -> int:
        """The native model. Raises BackendError when it was closed."""
        pointer: int = self._native.pointer
        return pointer

    def metadata(self, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        return self.library.metadata(self.handle, key)

    def open(
        self,
        context_length: int = 0,
        *,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
        options: LoadOptions | None = None,
    ) -> GgufModel:
        """A context of `context_length` tokens per sequence (0: as trained), of `capacity_tokens` over all
        sequences (0: as many as each of them may have); `options`: its own, if any."""
        length = context_length or self.trained_context
        model = GgufModel(self, length, max_sequences, options, capacity_tokens)
        self._contexts.add(model)
        return model

    def close(self) -> None:
        """Free the weights, and the contexts that are open on them. Closing twice is harmless."""
        for model in list(self._contexts):
            model.close()
        self._native.close()


def _load(path: Path, options: LoadOptions) -> tuple[Library, int]:
    failure: ModelFileError | None = None
    for library in candidates(options):
        library.take_log()
        clear_log()
        model = library.load_model(path, options)
        if model is None:
            failure = _failure(path, library)
        elif why := library.why_not(model):
            library.functions.llama_model_free(model)
            failure = ModelFileError(str(path), why, "Choose another library (--backend), or another model.")
        else:
            return library, model
    assert failure is not None, "candidates raises where there is none"
    raise failure


def _failure(path: Path, library: Library) -> ModelFileError:
    """What the library logged. Raises OutOfMemory where that is the reason."""
    reason = last_error(f"{library.title} could not load it").replace("error loading model: ", "")
    if speaks_of_memory(reason.replace(str(path), "")):
        raise OutOfMemory(str(path), reason, "Choose a smaller quantization, or offload fewer layers (-ngl).")
    way_out = f"Fetch the file again, or choose a model that this build of {library.title} supports."
    return ModelFileError(str(path), reason, way_out)
