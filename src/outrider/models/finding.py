"""A draft model for a target, found among the files that are here: `-md auto`.

Whether a draft lines up with the target is known for certain only when both are loaded; what a header says is
enough to leave out those that do not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from outrider.core.errors import ModelFileError
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import HubOptions
from outrider.models.reference import is_companion, resolve, resolve_pair, shard_names

AUTO_DRAFT = "auto"
"""the reference of a draft that is to be found"""

_MAX_SHARE = 0.6
"""of the target's weights that a token reads: a draft that reads more of them cannot pay"""
_USUAL_SHARE = 0.1
"""Drafts near this share come first: cheap enough to pay, large enough to agree."""
_MAX_PADDING = 256
"""tokens by which vocabularies of one family differ: they are padded to different multiples"""
_MAX_FILES = 400
"""headers that are read"""
_MAX_TRIED = 3
"""drafts that are loaded until one lines up with the target"""

_FAMILIES = (
    ("gpt2 (qwen2)", ("qwen3", "qwen3moe"), "Qwen/Qwen3-0.6B-GGUF"),
    ("gpt2 (qwen2)", ("qwen2",), "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
    ("gpt2 (llama-bpe)", ("llama",), "bartowski/Llama-3.2-1B-Instruct-GGUF"),
    ("gpt2 (smollm)", ("llama",), "bartowski/SmolLM2-135M-Instruct-GGUF"),
    ("llama", ("gemma3",), "ggml-org/gemma-3-270m-it-GGUF"),
    ("gpt2 (gpt-4o)", ("gpt-oss",), "ggml-org/gpt-oss-20b-GGUF"),
)
"""Tokenizer, architectures, and the small relative on the hub that shares the tokenizer"""


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A file that may be a target's draft. `share`: its weights that a token reads, in parts of the
    target's; `place`: where it lies, in words."""

    card: ModelCard
    share: float
    place: str

    def __str__(self) -> str:
        size = f"{self.card.file_bytes / 1e6:,.0f} MB, {self.share:.2f} of the target's weights"
        return f"{self.card.path.name} ({size}, {self.place})"


def resolve_models(
    model: str | None, draft: str | None, hub: HubOptions
) -> tuple[Path, list[Path], str | None]:
    """The target's file; the draft's, or of one that is to be found (`AUTO_DRAFT`) those that may be it, best
    first; and what was found, in a line. The embedded default has a draft of its own.

    Raises what `resolve_pair` raises.
    """
    if draft != AUTO_DRAFT or model is None:
        target, named = resolve_pair(model, None if draft == AUTO_DRAFT else draft, hub)
        return target, [] if named is None else [named], None
    target = resolve(model, hub=hub)
    card = read_card(target)
    found = find_drafts(card, hub)
    if not found:
        return target, [], _nothing_found(card)
    others = f"; {len(found) - 1} more could be named with -md" if len(found) > 1 else ""
    line = f"-md auto: {found[0]}{others}. `outrider check` says whether it pays"
    return target, [draft.card.path for draft in found[:_MAX_TRIED]], line


def find_drafts(target: ModelCard, hub: HubOptions) -> list[FoundDraft]:
    """Smaller models with the target's tokenizer, in its folder and in the hub's cache: those made for it
    first ("draft" in the name), then by how near they are to a tenth of it."""
    found: dict[Path, FoundDraft] = {}
    for number, (path, place) in enumerate(_files(target.path, hub)):
        if number == _MAX_FILES:
            break
        try:
            card = read_card(path)
        except ModelFileError:  # damaged, or no language model
            continue
        share = card.active_parameters / target.active_parameters
        if share <= _MAX_SHARE and _may_line_up(target, card):
            found.setdefault(path.resolve(), FoundDraft(card, share, place))
    return sorted(found.values(), key=_rank)


def _relative_of(target: ModelCard) -> str | None:
    """The repository of a small model of the target's family, for what the table knows."""
    for tokenizer, architectures, repository in _FAMILIES:
        if (target.tokenizer, True) == (tokenizer, target.architecture in architectures):
            return repository
    return None


def _nothing_found(target: ModelCard) -> str:
    """Why `-md auto` found nothing, and what could be taken."""
    line = (
        f"-md auto: no smaller file beside {target.path.name} or in the hub's cache has its tokenizer, "
        f"{target.tokenizer}; lookup drafts alone"
    )
    repository = _relative_of(target)
    return line if repository is None else f"{line}. Of its family: -hfd {repository}"


def _rank(draft: FoundDraft) -> tuple[bool, float]:
    return "draft" not in draft.card.path.name.lower(), abs(math.log(draft.share / _USUAL_SHARE))


def _may_line_up(target: ModelCard, draft: ModelCard) -> bool:
    if draft.tokenizer != target.tokenizer or target.num_tokens is None or draft.num_tokens is None:
        return False
    is_part = "draft" in draft.path.name.lower() and draft.num_tokens < target.num_tokens
    return is_part or abs(draft.num_tokens - target.num_tokens) <= _MAX_PADDING


def _files(target: Path, hub: HubOptions) -> Iterator[tuple[Path, str]]:
    """GGUF files that may be models of their own, the first part of split ones."""
    cache = Path(hub.cache_dir or constants.HF_HUB_CACHE).expanduser()
    places = (
        (target.parent, "*.gguf", "beside the target"),
        (cache, "models--*/snapshots/*/**/*.gguf", "in the hub's cache"),
    )
    own = {target.resolve().with_name(name) for name in shard_names(target.resolve().name)}
    for folder, pattern, place in places:
        for path in sorted(folder.glob(pattern)) if os.access(folder, os.R_OK) else ():
            is_first = shard_names(path.name)[0] == path.name
            if is_first and not is_companion(path.name) and path.resolve() not in own:
                yield path, place
