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

from outrider.core.errors import HubError, ModelFileError, VocabularyMismatch
from outrider.core.numbers import gigabytes
from outrider.models.constants import Keys, TokenType
from outrider.models.embedded import embedded_draft
from outrider.models.gguf import HEADS, ModelCard, read_card
from outrider.models.header import fields_of, read_header
from outrider.models.heads import why_no_head
from outrider.models.hub import HubOptions, list_files
from outrider.models.reference import (
    is_companion,
    is_sidecar,
    repository_of,
    shard_names,
    without_quantization,
)
from outrider.models.vocab.alignment import MIN_TEXT_RATIO, OTHER_DRAFT, too_few_in_common

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
_EMBEDDED, _ON_HUB = "comes with Outrider", "in its hub repository, not downloaded"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that could draft for a target: what to give to `-md`, where it was found, and the bytes that a
    token reads of it, relative to the target's."""

    reference: str
    place: str
    file_bytes: int | None = None
    share: float | None = None
    note: str = ""

    def __str__(self) -> str:
        name = self.reference if self.reference.startswith("hf:") else PurePosixPath(self.reference).name
        size = [] if self.file_bytes is None else [gigabytes(self.file_bytes)]
        share = [] if self.share is None else [f"{self.share:.2f} of what the target reads for a token"]
        words = f"{name} ({', '.join([*size, *share, self.place])})"
        return f"{words}: {self.note}" if self.note else words


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: the cards of `drafts` that are here, the best first, and all `files`: first
    theirs, then those that cannot be used, with the reason, and those that are not downloaded."""

    drafts: tuple[ModelCard, ...] = ()
    files: tuple[FoundFile, ...] = ()


def find_drafts(target: ModelCard, hub: HubOptions, reference: str = "") -> Found:
    """All that could draft for a target, heads before models. Of a `reference` to the hub the files of its
    repository are listed, too, where the hub or its cache answers."""
    parents = Path(os.path.abspath(target.path)).parents
    snapshot = next((folder for folder in parents if folder.parent.name == "snapshots"), None)
    heads, drafts = list[tuple[ModelCard, FoundFile]](), list[tuple[ModelCard, FoundFile]]()
    others: list[FoundFile] = []
    tokens = _tokens_of(target)
    for path, place in _files(target, hub, snapshot):
        is_beside = place in (_BESIDE, _OWN)
        try:
            card = read_card(path)
        except ModelFileError as error:  # damaged, or no language model
            is_named = is_beside and is_sidecar(path.name)
            others += [FoundFile(str(path), place, note=error.why)] if is_named else []
            continue
        share = card.bytes_per_token / max(target.bytes_per_token, 1)
        if card.kind != "model":
            if is_beside and (why_not := why_no_head(card, target)):
                others.append(FoundFile(str(path), place, card.file_bytes, note=why_not))
            elif is_beside:
                note = f"it holds {HEADS[card.kind]}"
                heads.append((card, FoundFile(str(path), place, card.file_bytes, share, note)))
        elif share <= MAX_SHARE and _may_line_up(target, tokens, card):
            drafts.append((card, FoundFile(str(path), place, card.file_bytes, share)))
    drafts.sort(key=lambda draft: _rank(target, draft[1]))
    here = [*heads, *drafts]
    others += _on_hub(target, hub, snapshot, reference)
    return Found(tuple(card for card, _ in here), (*(file for _, file in here), *others))


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


def _rank(target: ModelCard, draft: FoundFile) -> tuple[bool, float]:
    name = PurePosixPath(draft.reference).name
    is_made_for_it = draft.place in (_BESIDE, _OWN) and is_sidecar(name)
    distance = math.log(max(draft.share or 0.0, 1e-6) / _USUAL_SHARE)
    if distance > 0:
        distance *= _TOO_LARGE
    missing = set(_stem(target.path.name).split()) - set(_stem(name).split())
    return not is_made_for_it, abs(distance) + _STRANGER * len(missing)


def _on_hub(target: ModelCard, hub: HubOptions, snapshot: Path | None, reference: str) -> Iterator[FoundFile]:
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
            words = file.lower().replace("dspark", "dflash")
            kind = next((kind for kind in HEADS if kind in words), None)
            note = f"by its name it holds {HEADS[kind]}" if kind else ""
            yield FoundFile(f"hf:{repository}/{name}", _ON_HUB, note=note)


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


# Whether two tokenizers can line up: a pair that cannot is refused before anything is loaded. Whether they
# cut text alike shows once both are loaded (`vocab`).

_CONTROL = (int(TokenType.CONTROL), int(TokenType.UNUSED))


def check_tokenizers(target: ModelCard, draft: ModelCard) -> None:
    """Raise VocabularyMismatch where too few spellings of text tokens are the target's. A file that has no
    tokens is passed over, and a reduced vocabulary, whose map is read when it is loaded."""
    if target.tokens is None or draft.tokens is None or draft.has_reduced_vocabulary:
        return
    ours, theirs = _spellings(target), _spellings(draft)
    (_, texts), (others, _) = sorted((theirs, ours), key=lambda tokens: len(tokens[1]))
    known = set(others)
    num_common = sum(text in known for text in texts)
    if num_common < MIN_TEXT_RATIO * len(texts):
        why = too_few_in_common(target.tokenizer, draft.tokenizer, num_common, len(texts))
        raise VocabularyMismatch("draft", why, OTHER_DRAFT)


def _spellings(card: ModelCard) -> tuple[list[bytes], list[bytes]]:
    keys = (Keys.Tokenizer.LIST, Keys.Tokenizer.TOKEN_TYPE)
    fields = fields_of(card.path, read_header(card.path), keys)
    tokens: list[bytes] = fields[Keys.Tokenizer.LIST].value
    kinds = fields[Keys.Tokenizer.TOKEN_TYPE].value if Keys.Tokenizer.TOKEN_TYPE in fields else []
    return tokens, [
        t for t, kind in zip(tokens, kinds or [0] * len(tokens), strict=False) if kind not in _CONTROL
    ]
