"""A draft for a target, looked for where a user would: beside it, in its hub repository and in the hub's
cache. Headers are read, nothing is loaded or downloaded. Whether a draft lines up with the target is known
for certain only when both are loaded; what a header says is enough to leave out those that do not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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
    `on_hub` are not downloaded; `broken` draft by their name and cannot be read, with the reason."""

    drafts: tuple[FoundDraft, ...] = ()
    heads: tuple[FoundDraft, ...] = ()
    on_hub: tuple[str, ...] = ()
    broken: tuple[ModelFileError, ...] = ()


def find_drafts(target: ModelCard, hub: HubOptions, reference: str = "") -> Found:
    """All that could draft for a target. Of a `reference` to the hub the files of its repository are listed,
    too, where the hub or its cache answers."""
    parents = Path(os.path.abspath(target.path)).parents
    snapshot = next((folder for folder in parents if folder.parent.name == "snapshots"), None)
    drafts, heads, broken = list[FoundDraft](), list[FoundDraft](), list[ModelFileError]()
    tokens = _tokens_of(target)
    for path, place in _files(target, hub, snapshot):
        is_beside = place in (_BESIDE, _OWN)
        try:
            card = read_card(path)
        except ModelFileError as error:  # damaged, or no language model
            broken += [error] if is_beside and is_sidecar(path.name) else []
            continue
        draft = FoundDraft(card, card.bytes_per_token / max(target.bytes_per_token, 1), place)
        if card.kind != "model":
            heads += [draft] if is_beside else []
        elif draft.share <= MAX_SHARE and _may_line_up(target, tokens, card):
            drafts.append(draft)
    drafts.sort(key=lambda draft: _rank(target, draft))
    return Found(tuple(drafts), tuple(heads), tuple(_on_hub(target, hub, snapshot, reference)), tuple(broken))


def _files(target: ModelCard, hub: HubOptions, snapshot: Path | None) -> Iterator[tuple[Path, str]]:
    """GGUF files that may be models of their own, no larger than the target, each once."""
    files = [(path, _BESIDE) for path in _gguf_files(target.path.parent, is_deep=False)]
    files += [(path, _OWN) for path in _gguf_files(snapshot)]
    for folder in sorted(hub.cache.glob("models--*/snapshots")):
        files += [(path, _CACHED) for path in _gguf_files(folder)]
    if embedded := embedded_draft():
        files.append((embedded, _EMBEDDED))
    own = target.path.resolve()
    seen = {_identity(own.with_name(name)) for name in shard_names(own.name)}
    for path, place in files:
        identity = _identity(path)
        if identity is None or identity in seen or shard_names(path.name)[0] != path.name:
            continue
        seen.add(identity)
        is_other = is_companion(path.name) and not is_sidecar(path.name)
        if not is_other and path.stat().st_size <= target.file_bytes:
            yield path, place


def _may_line_up(target: ModelCard, tokens: bytes, draft: ModelCard) -> bool:
    if draft.has_reduced_vocabulary:
        return draft.tokenizer == target.tokenizer and (draft.num_tokens or 0) < (target.num_tokens or 0)
    if draft.tokenizer.split(" ")[0] != target.tokenizer.split(" ")[0]:
        return False
    return _same_beginning(tokens, _tokens_of(draft)) >= _SAME_TOKENS


def _rank(target: ModelCard, draft: FoundDraft) -> tuple[bool, float]:
    """Those made for the target first, then by share and name."""
    is_made_for_it = draft.place in (_BESIDE, _OWN) and is_sidecar(draft.card.path.name)
    distance = math.log(max(draft.share, 1e-6) / _USUAL_SHARE)
    if distance > 0:
        distance *= _TOO_LARGE
    missing = set(_stem(target.path.name).split()) - set(_stem(draft.card.path.name).split())
    return not is_made_for_it, abs(distance) + _STRANGER * len(missing)


def _on_hub(target: ModelCard, hub: HubOptions, snapshot: Path | None, reference: str) -> Iterator[str]:
    """Files of the target's repository that draft for it by their name, and are not here."""
    try:
        repository = repository_of(reference)
        names = [] if repository is None else list_files(repository, hub)
    except HubError:  # the target itself came out of the cache
        return
    here = {path.name for path in _gguf_files(snapshot)}
    for name in names:
        file = PurePosixPath(name).name
        is_other = file not in here and _stem(file) != _stem(target.path.name)
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


def _gguf_files(folder: Path | None, *, is_deep: bool = True) -> Iterator[Path]:
    """GGUF files of a folder, of those below it too where it `is_deep`; of what may not be read none."""
    walk = os.walk(folder or "")  # of nothing, nothing
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
