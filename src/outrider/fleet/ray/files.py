"""A model's file sent to a node that lacks it, piece by piece through Ray's object store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import ray

from outrider.core.errors import BackendError
from outrider.core.files import reason_of
from outrider.fleet.ray.joining import on_node
from outrider.lab.copies import copies_dir
from outrider.lab.models import ModelFile
from outrider.models.reference import local_shards

_PART_BYTES = 32 * 2**20


def send(file: ModelFile, node: str, progress: Callable[[float], None] = lambda _part: None) -> None:
    """Put the files of a model among the copies of a node. They are there whole, or not at all: the receiver
    hashes what it wrote. Raises BackendError where that fails, and Ray's own errors."""
    where = on_node(node)
    receive = ray.remote(num_cpus=0, max_retries=0)(_receive).options(scheduling_strategy=where)
    finish = ray.remote(num_cpus=0, max_retries=0)(_finish).options(scheduling_strategy=where)
    paths, digests = local_shards(file.path), dict[str, str]()
    total, sent = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        digest, at = blake2b(), 0
        with path.open("rb") as source:
            while data := source.read(_PART_BYTES):
                digest.update(data)
                ray.get(receive.remote(file.fingerprint, path.name, at, data))
                at += len(data)
                sent += len(data)
                progress(sent / total)
        digests[path.name] = digest.hexdigest()
    ray.get(finish.remote(file.fingerprint, digests))


def _part(fingerprint: str) -> Path:
    return copies_dir(f"{fingerprint}.part")


def _receive(fingerprint: str, name: str, at: int, data: bytes) -> None:
    path = _part(fingerprint) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if at else "wb") as file:
            file.seek(at)
            file.write(data)
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise BackendError(str(path), reason_of(error), "Make room there, or set OUTRIDER_CACHE.") from None


def _finish(fingerprint: str, digests: dict[str, str]) -> None:
    part, folder = _part(fingerprint), copies_dir(fingerprint)
    for name, wanted in digests.items():
        digest = blake2b()
        with (part / name).open("rb") as file:
            while data := file.read(_PART_BYTES):
                digest.update(data)
        if digest.hexdigest() != wanted:
            shutil.rmtree(part, ignore_errors=True)
            raise BackendError(str(folder / name), "it came over damaged", "Send it again.")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
