"""The models of an experiment: globs, paths and hub references to files, each with a short name."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError
from outrider.models.cache import fingerprint
from outrider.models.gguf import ModelCard, check_whole, read_card
from outrider.models.hub import HubOptions
from outrider.models.reference import resolve

OWN_HEAD = "mtp"
"""The name of the head in a target's own file; as a reference, that of every target."""

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_WAY_OUT = "Check the path; a pattern may hold *, ?, [abc] and ** for folders at any depth."


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file that takes part. `path` is the file to load, of a split model the first part."""

    name: str
    """short, and no other's within the sweep"""
    path: Path
    card: ModelCard
    fingerprint: str
    backend: str = "auto"
    """what loads it, where it is a target: one of `LoadOptions`' backends"""

    @property
    def is_head(self) -> bool:
        """Whether it drafts from a target's hidden states; its file may be the target's."""
        return self.card.kind != "model"


def own_head(target: ModelFile) -> ModelFile | None:
    """The head in the target's own file, as a draft; None where there is none."""
    head = target.card.own_head
    return None if head is None else replace(target, name=OWN_HEAD, card=head)


def find_models(
    references: Sequence[str], *, hub: HubOptions, taken: Sequence[ModelFile] = ()
) -> list[ModelFile]:
    """The models that are meant, in this order, each file once; those of a pattern are sorted by path.

    Files of heads are among them. Files among `taken` keep the names that they have there, and no other gets
    one of these. Names are the files' stems; with their folder where two are alike, with a number where that
    is alike too.
    Raises ModelFileError and HubError, which name the reference that leads nowhere.
    """
    known = {_identity(model.path): model for model in taken}
    found: dict[tuple[int, int], Path] = {}
    for reference in references:
        for path in _paths(reference, hub):
            found.setdefault(_identity(path), path)
    stems = {identity: _PART.sub("", path.stem) for identity, path in found.items() if identity not in known}
    names = {model.name for model in taken}
    counts = Counter([*stems.values(), *names])
    for identity, stem in stems.items():
        path = found[identity]
        name = stem if counts[stem] == 1 else f"{_folder(path)}/{stem}"
        tries = chain([name], (f"{name} ({number})" for number in count(2)))
        name = next(name for name in tries if name not in names)
        names.add(name)
        known[identity] = ModelFile(name, path, read_card(path), fingerprint(path))
    return [known[identity] for identity in found]


def find_model(reference: str, *, hub: HubOptions) -> ModelFile:
    """The one whole model that is meant. Raises what `find_models` raises."""
    found = find_models([reference], hub=hub)
    if len(found) > 1:
        way_out = "Name one of them; `outrider bench` compares several."
        raise ModelFileError(reference, f"{len(found)} files match", way_out)
    check_whole(found[0].card)
    return found[0]


def _paths(reference: str, hub: HubOptions) -> list[Path]:
    expanded = os.path.expanduser(reference)
    if reference.startswith("hf:") or not glob.has_magic(expanded) or os.path.exists(expanded):
        return [resolve(reference, hub=hub)]
    matches = sorted(path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path))
    models = [path for path in matches if path.lower().endswith(".gguf")]
    if not models:
        why = f"none of the {len(matches)} files that it matches is a .gguf" if matches else "nothing matches"
        raise ModelFileError(reference, why, _WAY_OUT)
    return [resolve(path) for path in models]


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _folder(path: Path) -> str:
    repository = next((part for part in path.parts if part.startswith("models--")), None)
    return repository.split("--")[-1] if repository else path.absolute().parent.name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's file. `bytes_per_token` are the weights that a call over one token reads."""

    name: str
    path: str
    architecture: str
    quantization: str
    parameters: int
    active_parameters: int
    experts: int
    experts_used: int
    file_bytes: int
    bytes_per_token: int
    trained_context: int | None

    @classmethod
    def of(cls, file: ModelFile) -> ModelFacts:
        card = file.card
        experts = {"experts": card.expert_count, "experts_used": card.expert_used_count}
        given = card_fields(card) | experts | {"bytes_per_token": card.bytes_per_token}
        return cls(name=file.name, path=str(card.path), **given)


def card_fields(card: ModelCard) -> dict[str, Any]:
    """What reports and sweeps show of a model's card, by the names that they have there."""
    return {
        "architecture": card.architecture,
        "quantization": card.quantization,
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "file_bytes": card.file_bytes,
        "trained_context": card.context_length,
    }
