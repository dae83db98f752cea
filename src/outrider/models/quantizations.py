"""Names of quantizations, as they occur in the names of files and models."""

from __future__ import annotations

import re

_WORD = re.compile(
    r"""(?<![a-z0-9]) (?:ud[-_])?
    (?: i?q[1-8]_(?: k(?:_(?:xxs|xs|s|m|l|xl))? | [01](?:_[48]_[48])? | nl | xxs | xs | s | m | l )
      | tq[12]_0 | mxfp4(?:_moe)? | nvfp4 | bf16 | fp?16 | fp?32 )
    (?![a-z0-9])""",
    re.IGNORECASE | re.VERBOSE,
)
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.IGNORECASE)
_FORMAT = re.compile(r"(?<![a-z0-9])(?:gguf|ggml)(?![a-z0-9])", re.IGNORECASE)


def requantized_name(stem: str, quantization: str) -> str:
    """The name of a file, without its suffix, once it is of another quantization. The old one is replaced,
    in its own case; where there is none, the new one is appended to the name.

    >>> requantized_name("Tiny.Q4_K_M", "Q8_0"), requantized_name("tiny-q4_k_m-00001-of-00002", "IQ4_NL")
    ('Tiny.Q8_0', 'tiny-iq4_nl')
    >>> requantized_name("tiny", "Q8_0")
    'tiny.Q8_0'
    """
    stem = _PART.sub("", stem)
    matches = list(_WORD.finditer(stem))
    if not matches:
        return f"{stem}.{quantization}"
    last = matches[-1]
    written = quantization.lower() if last[0].islower() else quantization
    return stem[: last.start()] + written + stem[last.end() :]


def without_quantization(name: str) -> str:
    """A model's name as words in lower case, without its quantization: what its variants share.

    >>> without_quantization("Qwen2.5 Coder 1.5B GGUF"), without_quantization("qwen2.5-coder-1.5b-Q4_K_M")
    ('qwen2.5 coder 1.5b', 'qwen2.5 coder 1.5b')
    """
    bare = _FORMAT.sub(" ", _WORD.sub(" ", _PART.sub("", name)))
    words = (word.strip(".") for word in re.split(r"[\s_/-]+", bare.lower()))
    return " ".join(word for word in words if word)
