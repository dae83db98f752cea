"""Families of models as data: which small model on the hub has the tokenizer of its larger relatives.

What the rows rest on: the labels `gpt2 (qwen2)`, `gpt2 (smollm)` and `llama (default)` were read from files
of these families, the others are those that llama.cpp's converter writes. No repository was opened for this
table: that they exist, and hold a file that can be taken, comes from public texts of 2025 and 2026 that
download from them. Whether a draft lines up is found out when it is loaded, as of any other."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.gguf import ModelCard

_MAX_PADDING = 256
"""tokens by which vocabularies of one family differ: they are padded to different multiples"""


@dataclass(frozen=True, slots=True)
class Relative:
    """The small model of a family. `tokenizer` is its label in a `ModelCard`, with `num_tokens` tokens, and
    `parameters` are those that a token uses. `architectures` are its larger relatives', `word` is in the
    names of those that it suits best."""

    name: str
    repository: str
    parameters: float
    tokenizer: str
    num_tokens: int
    architectures: tuple[str, ...]
    word: str = ""


RELATIVES = (
    Relative("Qwen2.5-Coder-0.5B", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", 0.49e9,
             "gpt2 (qwen2)", 151_936, ("qwen2",), "coder"),
    Relative("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", 0.49e9,
             "gpt2 (qwen2)", 151_936, ("qwen2", "qwen2moe", "qwen2vl")),
    Relative("Qwen3-0.6B", "Qwen/Qwen3-0.6B-GGUF", 0.6e9,
             "gpt2 (qwen2)", 151_936, ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe")),
    Relative("Llama-3.2-1B", "bartowski/Llama-3.2-1B-Instruct-GGUF", 1.24e9,
             "gpt2 (llama-bpe)", 128_256, ("llama",)),
    Relative("Gemma-3-270M", "ggml-org/gemma-3-270m-it-GGUF", 0.27e9,
             "llama (default)", 262_144, ("gemma3",)),
    Relative("Mistral-Small-3.1-DRAFT-0.5B", "bartowski/alamios_Mistral-Small-3.1-DRAFT-0.5B-GGUF", 0.5e9,
             "gpt2 (tekken)", 131_072, ("llama", "mistral3"), "small"),
    Relative("SmolLM2-135M", "bartowski/SmolLM2-135M-Instruct-GGUF", 0.135e9,
             "gpt2 (smollm)", 49_152, ("llama",)),
    Relative("Phi-3-mini", "bartowski/Phi-3-mini-4k-instruct-GGUF", 3.8e9,
             "llama (default)", 32_064, ("phi3", "phimoe")),
    Relative("gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF", 3.6e9,
             "gpt2 (gpt-4o)", 201_088, ("gpt-oss",)),
)  # fmt: skip


def relative_of(target: ModelCard) -> Relative | None:
    """The small relative of a target; None where none is known. It may be as large as the target itself."""
    suitable = [
        relative
        for relative in RELATIVES
        if target.architecture in relative.architectures
        and target.tokenizer == relative.tokenizer
        and abs((target.num_tokens or 0) - relative.num_tokens) <= _MAX_PADDING
    ]
    name = f"{target.path.name} {target.name}".lower()
    named = [relative for relative in suitable if relative.word and relative.word in name]
    usual = [relative for relative in suitable if not relative.word]
    return next(iter((*named, *usual, *suitable)), None)
