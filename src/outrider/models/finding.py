"""A draft for a target, looked for where a user would: beside it, in its hub repository, in the hub's cache,
and in a table of families. Headers are read, nothing is loaded or downloaded. Whether a draft lines up with
the target is known for certain only when both are loaded; what a header says is enough to leave out those
that do not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from outrider.core.errors import HubError, ModelFileError
from outrider.models.embedded import embedded_draft
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import HubOptions, list_files
from outrider.models.reference import (
    is_companion,
    is_sidecar,
    repository_of,
    shard_names,
    without_quantization,
)

AUTO_DRAFT = "auto"
"""the reference of a draft that is to be found"""
MAX_SHARE = 0.6
"""of the bytes that the target reads for a token: a draft that reads more of them cannot pay"""

_USUAL_SHARE = 0.1
"""Drafts near this share come first: cheap enough to pay, large enough to agree."""
_TOO_LARGE = 2.0
"""A draft that is too large loses more than one that is too small."""
_STRANGER = 0.7
"""What a word of the target's name that a draft's lacks counts, as a logarithm of the share."""
_SAME_TOKENS = 0.95
"""Vocabularies of one tokenizer begin with the same tokens; control tokens and padding at the end differ."""

_BESIDE, _OWN, _CACHED = "beside the target", "in its hub repository", "in the hub's cache"
_EMBEDDED = "comes with Outrider"


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A file here that may draft for a target. `share`: the bytes that a token reads of it, in parts of the
    target's; `place`: where it lies, in words."""

    card: ModelCard
    share: float
    place: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to. `drafts` are models, best first; `heads` draft from the target's hidden states;
    `broken` are files that draft by their name and cannot be read, with the reason; `relative` is of the
    target's family, whether or not it is smaller."""

    drafts: tuple[FoundDraft, ...] = ()
    heads: tuple[FoundDraft, ...] = ()
    on_hub: tuple[str, ...] = ()
    broken: tuple[ModelFileError, ...] = ()
    relative: Relative | None = None


def find_drafts(target: ModelCard, hub: HubOptions, reference: str = "") -> Found:
    """All that could draft for a target. Of a `reference` to the hub the files of its repository are listed,
    too, where the hub or its cache answers."""
    return _Search(target, hub).found(reference)


class _Search:
    def __init__(self, target: ModelCard, hub: HubOptions) -> None:
        self._target = target
        self._hub = hub
        self._words = set(_stem(target.path.name).split())
        path = Path(os.path.abspath(target.path))
        snapshots = [folder for folder in path.parents if folder.parent.name == "snapshots"]
        self._snapshot = snapshots[0] if snapshots else None

    def found(self, reference: str) -> Found:
        drafts, heads, broken = [], [], []
        for path, place in self._files():
            try:
                card = read_card(path)
            except ModelFileError as error:  # damaged, or no language model
                if place in (_BESIDE, _OWN) and is_sidecar(path.name):
                    broken.append(error)
                continue
            share = card.bytes_per_token / max(self._target.bytes_per_token, 1)
            draft = FoundDraft(card, share, place)
            if card.kind != "model" and place in (_BESIDE, _OWN):
                heads.append(draft)
            elif card.kind == "model" and share <= MAX_SHARE and self._may_line_up(card):
                drafts.append(draft)
        return Found(
            drafts=tuple(sorted(drafts, key=self._rank)),
            heads=tuple(heads),
            on_hub=tuple(self._on_hub(reference)),
            broken=tuple(broken),
            relative=relative_of(self._target),
        )

    def _files(self) -> Iterator[tuple[Path, str]]:
        """GGUF files that may be models of their own, no larger than the target, each once."""
        folders = [(self._target.path.parent, _BESIDE)]
        folders += [] if self._snapshot is None else [(self._snapshot, _OWN)]
        folders += [(folder, _CACHED) for folder in sorted(self._hub.cache.glob("models--*/snapshots"))]
        own = self._target.path.resolve()
        seen = {_identity(own.with_name(name)) for name in shard_names(own.name)}
        files = [
            (path, place)
            for folder, place in folders
            for path in _gguf_files(folder, is_deep=place != _BESIDE)
        ]
        embedded = embedded_draft()
        files += [] if embedded is None else [(embedded, _EMBEDDED)]
        for path, place in files:
            identity = _identity(path)
            is_first = shard_names(path.name)[0] == path.name
            if identity is None or identity in seen or not is_first:
                continue
            seen.add(identity)
            is_other = is_companion(path.name) and not is_sidecar(path.name)
            if not is_other and path.stat().st_size <= self._target.file_bytes:
                yield path, place

    def _may_line_up(self, draft: ModelCard) -> bool:
        target = self._target
        if draft.has_reduced_vocabulary:
            return draft.tokenizer == target.tokenizer and (draft.num_tokens or 0) < (target.num_tokens or 0)
        if draft.tokenizer.split(" ")[0] != target.tokenizer.split(" ")[0]:
            return False
        return _same_beginning(self._tokens, _tokens_of(draft)) >= _SAME_TOKENS

    @cached_property
    def _tokens(self) -> bytes:
        return _tokens_of(self._target)

    def _rank(self, draft: FoundDraft) -> tuple[bool, float]:
        """Those made for the target first, then by share and name."""
        is_made_for_it = draft.place in (_BESIDE, _OWN) and is_sidecar(draft.card.path.name)
        distance = math.log(max(draft.share, 1e-6) / _USUAL_SHARE)
        if distance > 0:
            distance *= _TOO_LARGE
        missing = len(self._words - set(_stem(draft.card.path.name).split()))
        return not is_made_for_it, abs(distance) + _STRANGER * missing

    def _on_hub(self, reference: str) -> Iterator[str]:
        """Files of the target's repository that draft for it by their name, and are not here."""
        try:
            repository = repository_of(reference)
            names = [] if repository is None else list_files(repository, self._hub)
        except HubError:  # the target itself came out of the cache
            return
        here = {PurePosixPath(path.name).name for path in _gguf_files(self._snapshot, is_deep=True)}
        for name in names:
            file = PurePosixPath(name).name
            is_other = file not in here and _stem(file) != _stem(self._target.path.name)
            if is_sidecar(file) and is_other and shard_names(file)[0] == file:
                yield f"hf:{repository}/{name}"


def _stem(name: str) -> str:
    return without_quantization(PurePosixPath(name).stem)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _gguf_files(folder: Path | None, *, is_deep: bool) -> Iterator[Path]:
    """GGUF files of a folder, of those below it too where it `is_deep`; of what may not be read none."""
    if folder is None:
        return
    walk = os.walk(folder)
    for place, _, names in sorted(walk) if is_deep else islice(walk, 1):
        yield from (Path(place, name) for name in sorted(names) if name.lower().endswith(".gguf"))


def _tokens_of(card: ModelCard) -> bytes:
    if card.tokens is None:
        return b""
    with suppress(OSError), card.path.open("rb") as file:
        file.seek(card.tokens.start_byte)
        return file.read(card.tokens.num_bytes)
    return b""


def _same_beginning(one: bytes, other: bytes) -> float:
    length = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    same = int(np.argmax(differs)) if differs.any() else length
    return same / max(len(one), len(other), 1)


# Families of models as data: which small model on the hub has the tokenizer of its larger relatives. The
# labels `gpt2 (qwen2)`, `gpt2 (smollm)` and `llama (default)` were read from files of these families, the
# others are those that llama.cpp's converter writes. No repository was opened for this table: that they
# exist, and hold a file that can be taken, comes from public texts of 2025 and 2026.

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
