"""A model's file on a machine that is not the one that found it: the same path, the hub, or a copy that was
sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.core.errors import ModelFileError, OutriderError
from outrider.costs.store import fingerprint
from outrider.lab.models import DEFAULT, OWN_HEAD, ModelFile, find_models
from outrider.models import HubOptions, read_card
from outrider.models.hub import cache_dir


class MissingFile(ModelFileError):
    """A machine lacks a model's file; `what` is the path that it has elsewhere."""


def copies_dir(name: str) -> Path:
    """Where the files of a model are kept that were sent, by its fingerprint."""
    return cache_dir() / "copies" / name


def at_hand(file: ModelFile, references: Sequence[str], hub: HubOptions) -> ModelFile:
    """The model with a path that holds here, found by its fingerprint: as it is, among the copies, or by one
    of the references to the hub or to what comes with Outrider.

    Raises MissingFile.
    """
    copy = copies_dir(file.fingerprint) / file.path.name
    for path in (file.path, copy):
        if _is(path, file.fingerprint):
            return file if path == file.path else _moved(file, path)
    for reference in references:
        if reference.startswith("hf:") or reference == DEFAULT:
            try:
                found = find_models([reference], hub=hub)
            except OutriderError:
                continue  # it may be another one's
            if found[0].fingerprint == file.fingerprint:
                return _moved(file, found[0].path)
    raise MissingFile(str(file.path), "this machine does not have it", "Put it there.")


def _is(path: Path, wanted: str) -> bool:
    try:
        return path.exists() and fingerprint(path) == wanted
    except OutriderError:
        return False


def _moved(file: ModelFile, path: Path) -> ModelFile:
    card = read_card(path)
    head = card.own_head if file.name == OWN_HEAD else None
    return replace(file, path=path, card=head or card)
