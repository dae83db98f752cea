"""Fill-in-the-middle: the tokens between which a model was trained to write, and its prompts. Prompts of a
repository's files have the form of Qwen2.5-Coder's technical report (arXiv 2409.12186)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core.contracts import Vocabulary

_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "repository": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
}
"""Where a GGUF file names them."""
_SPELLINGS = {
    "prefix": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <|code_prefix|> ▁<PRE>",
    "suffix": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <|code_suffix|> ▁<SUF>",
    "middle": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <|code_middle|> ▁<MID>",
    "repository": "<|repo_name|> <repo_name> <reponame>",
    "file": "<|file_sep|> <file_sep>",
}
"""How models spell them that do not."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A model's tokens before the text that comes first, before the text that comes after the gap, and where
    the gap's text begins; those before a repository's name and before a file's, if it has them."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None

    def prompt(
        self, before: Sequence[int], after: Sequence[int], *, suffix_first: bool = False
    ) -> tuple[int, ...]:
        parts = [(self.prefix, *before), (self.suffix, *after)]
        first, second = reversed(parts) if suffix_first else parts
        return (*first, *second, self.middle)


def find_infill(vocabulary: Vocabulary, metadata: Callable[[str], str]) -> Infill | None:
    """The tokens that a file's `metadata` names, or that its vocabulary spells; None for a model without
    those that it takes. `metadata` gives the text of a GGUF key, empty where it is absent."""
    found: dict[str, int] = {}
    for name, keys in _KEYS.items():
        named = (metadata(f"tokenizer.ggml.{key}") for key in keys)
        tokens = [int(text) for text in named if text.isdecimal() and int(text) < vocabulary.size]
        for text in () if tokens else _SPELLINGS[name].split():
            tokens += _spelled(text, vocabulary)
        if tokens:
            found[name] = tokens[0]
    return Infill(**found) if found.keys() >= {"prefix", "suffix", "middle"} else None


def _spelled(text: str, vocabulary: Vocabulary) -> list[int]:
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    return tokens if len(tokens) == 1 and vocabulary.spelling(tokens[0]) == text.encode() else []
