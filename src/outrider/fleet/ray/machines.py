"""What a node is: the physical host that it runs on, the kind of machine that this is, and whether it has a
model's file."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from outrider.backends.gguf.libraries import device_names
from outrider.backends.machine import physical_cores, total_bytes
from outrider.core.errors import BackendError, ModelFileError, OutriderError
from outrider.lab.machine import machine, versions
from outrider.lab.models import OWN_HEAD, ModelFile, find_models
from outrider.models.cache import fingerprint
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions
from outrider.models.reference import DEFAULT

LABEL = "outrider-machine"
"""The label of a node that names its kind: `ray start --labels outrider-machine=NAME`."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_COMPARED = ("cpu", "physical_cores", "devices", "memory_gb", "llama_cpp")
"""what makes a machine another kind"""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster that can work."""

    id: str
    name: str
    """its address, for people"""
    host: str
    kind: str
    cpus: float
    gpus: float
    memory_bytes: float
    facts: Mapping[str, Any]


def host_id() -> str:
    """Names the physical host: containers on it share the kernel's boot, and several nodes do."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"


def facts_here(backends: Sequence[str], check: Callable[[str], None]) -> dict[str, Any]:
    """What this machine is, as plain data, and why a backend cannot be used here: `check` raises it."""
    refused = {}
    for backend in backends:
        try:
            check(backend)
        except BackendError as error:
            refused[backend] = error.why
    memory_bytes = total_bytes()
    return {
        "host": host_id(),
        "refused": refused,
        "facts": {
            **machine(),
            "physical_cores": physical_cores(),
            "devices": list(device_names()),
            "memory_gb": round(memory_bytes / 1e9) if isfinite(memory_bytes) else None,
            **versions(version("outrider")),
        },
    }


def same_kind(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is alike on machines of one kind."""
    return tuple(repr(facts.get(name)) for name in _COMPARED)


def kind_name(facts: Mapping[str, Any], label: str | None) -> str:
    """A kind's name: the label that its nodes were given, or the machine in a few words."""
    if label:
        return label
    devices = [str(name) for name in facts.get("devices", ()) if name and name not in facts["cpu"]]
    parts = [facts["cpu"], f"{facts['physical_cores']} cores", f"{facts['memory_gb']} GB", *devices]
    return ", ".join(map(str, parts))


class MissingFile(ModelFileError):
    """A machine lacks a model's file."""


def at_hand(file: ModelFile, references: Sequence[str], hub: HubOptions) -> ModelFile:
    """A model with a path that holds here: the same, or that of the hub or of what comes with Outrider, by
    one of the references. Raises MissingFile."""
    if _is(file.path, file.fingerprint):
        return file
    for reference in references:
        if reference.startswith("hf:") or reference == DEFAULT:
            try:
                [found] = find_models([reference], hub=hub)
            except (OutriderError, ValueError):
                continue  # it may be another one's
            if found.fingerprint == file.fingerprint:
                card = read_card(found.path)
                head = card.own_head if file.name == OWN_HEAD else None
                return replace(file, path=found.path, card=head or card)
    way_out = "Put it at the same path on every machine, or name it by the hub (hf:OWNER/REPO)."
    raise MissingFile(str(file.path), f"{platform.node()} does not have it", way_out)


def _is(path: Path, wanted: str) -> bool:
    try:
        return path.exists() and fingerprint(path) == wanted
    except OutriderError:
        return False
