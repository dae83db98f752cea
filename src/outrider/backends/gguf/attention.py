"""With flash attention or without: where that was left open, and where a library's own is not right."""

from __future__ import annotations

from outrider.backends.gguf.library import Library
from outrider.backends.gguf.memory import head_widths
from outrider.backends.gguf.options import UNQUANTIZED, LoadOptions
from outrider.core.errors import SettingError

__all__ = ["choose_attention"]

_NARROW_HEAD = 64
"""values. On a processor llama.cpp's flash attention goes through the cache token by token: with heads of 64
a call over four tokens at 600 of context took 1.9 times as long so (SmolLM2-135M; Qwen2.5 0.5B: 1.4), with
heads of 128 and 256 about the same (benchmarks/attention)."""
_MAX_BYTES = 256 * 2**20
"""of the scores that are held at once without it"""


def choose_attention(
    library: Library, model: int, options: LoadOptions, capacity_tokens: int, max_sequences: int
) -> str:
    """What `options.flash_attention` comes to: "on", "off", or "auto" for the library's own choice.

    Raises SettingError where flash attention is needed and the library's gives wrong results.
    """
    if not library.flash_mixes_sequences:
        return _where_it_pays(library, model, options, capacity_tokens)
    # It takes the cells of a sequence to lie in order and without gaps, and those of a window at the end.
    if max_sequences == 1 and library.window_tokens(model) == 0:
        return options.flash_attention
    if options.flash_attention == "on" or options.cache_type_v != "f16":
        what = (
            "flash attention" if options.flash_attention == "on" else f"cache type v {options.cache_type_v}"
        )
        why = (
            f"{library.title}'s flash attention is right for a single sequence without a sliding window only"
        )
        raise SettingError(what, why, "Choose --backend llama.cpp, or leave it at its default.")
    return "off"


def _where_it_pays(library: Library, model: int, options: LoadOptions, capacity_tokens: int) -> str:
    """What "auto" comes to: "off" on the processor alone for models with narrow heads, as long as the scores
    of a call over all of the context take little memory."""
    is_open = options.flash_attention == "auto" and options.cache_type_v in UNQUANTIZED
    on_processor = options.gpu_layers == 0 or not library.functions.llama_supports_gpu_offload()
    if not (is_open and on_processor) or max(head_widths(library, model)) > _NARROW_HEAD:
        return options.flash_attention
    rows = min(options.micro_batch_tokens, max(options.batch_tokens, options.max_rows))
    scores_bytes = 4 * rows * capacity_tokens * library.num_heads(model)
    return "off" if scores_bytes <= _MAX_BYTES else options.flash_attention
