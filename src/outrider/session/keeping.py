"""KV and texts that outlive a target's cache: in memory, and in a folder of files."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.backends.tuning.scoring import Loaded, subject_of
from outrider.core.contracts import Model
from outrider.costs.store import fingerprint
from outrider.engine.tiers import Disk, Folder, KvTiers, RememberedTexts
from outrider.session.options import Keeping

SAVE_S = 20.0
"""what a session that ends may take to save what its target still holds"""
_OF_SPEED = ("rows", "several_sequences", "threads", "threads_batch")
"""settings of a cost curve that change no KV"""


def open_tiers(model: Loaded, keeping: Keeping) -> KvTiers | None:
    """What keeps a target's KV; None where nothing does. Raises SettingError for a folder that cannot be
    used."""
    disk = None
    if keeping.folder is not None:
        disk = Disk(Folder(keeping.folder, identity_of(model), "--cache-dir"), keeping.disk_bytes)
    if disk is None and not keeping.memory_bytes:
        return None
    return KvTiers(model, memory_bytes=keeping.memory_bytes, disk=disk)


def open_texts(path: Path, keeping: Keeping) -> RememberedTexts | None:
    """Where the earlier texts of a model file are kept; None where they are not. Raises SettingError."""
    if keeping.folder is None or not keeping.remember:
        return None
    return RememberedTexts(Folder(keeping.folder, fingerprint(path), "--cache-dir"))


def identity_of(model: Model) -> str:
    """What KV belongs to: the model's content, the library's build, and the options that change KV."""
    if not isinstance(model, Loaded):
        return model.name
    subject = subject_of(model, "all")
    settings = {name: value for name, value in subject.settings.items() if name not in _OF_SPEED}
    return json.dumps([subject.file, subject.build, sorted(settings.items())])
