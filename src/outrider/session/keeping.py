"""KV and texts that outlive a target's cache: in memory, and in a folder of files."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from outrider.backends.tuning.scoring import Loaded, native_of, subject_of
from outrider.core.contracts import Model
from outrider.core.errors import ModelFileError
from outrider.core.files import reason_of
from outrider.engine.tiers import Disk, Folder, KvTiers, RememberedTexts
from outrider.models.reference import local_shards
from outrider.session.options import Keeping

SAVE_S = 20.0
"""what a session that ends may take to save what its target still holds"""
_SAMPLES, _SAMPLE_BYTES = 1024, 16 * 2**10
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
    return RememberedTexts(Folder(keeping.folder, content_of(path), "--cache-dir"))


def identity_of(model: Model) -> str:
    """What KV belongs to: the model's content, the library's build, and the options that change KV."""
    if not isinstance(model, Loaded):
        return model.name
    subject = subject_of(model, "all")
    settings = {name: value for name, value in subject.settings.items() if name not in _OF_SPEED}
    content = content_of(native_of(model).weights.path)
    return json.dumps([content, subject.build, sorted(settings.items())])


def content_of(path: Path) -> str:
    """Names a model's content: the size of each of its files and a hash of many small parts, evenly spread,
    since two trainings of one model may differ in few tensors. Raises ModelFileError."""
    digest = sha256()
    for file in local_shards(path):
        try:
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                digest.update(f"{size}\n".encode())
                for i in range(_SAMPLES):
                    stream.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelFileError(str(file), reason_of(error), "Check the file, and start again.") from error
    return digest.hexdigest()
