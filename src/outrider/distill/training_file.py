"""Where a training is, on disk: written whole or not at all, and taken up only by the same training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import InputError, SettingError

__all__ = ["read_training", "write_training"]

_PARTS = ("settings", "weights", "best", "optimizers", "state")


def write_training(path: Path, content: Mapping[str, Any]) -> None:
    """Raises SettingError when it cannot be written; what was there stays until then."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        torch.save(dict(content), partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = f"the checkpoint could not be written ({error})"
        way_out = "Free some space; training goes on from the last."
        raise SettingError(str(path.parent), reason, way_out) from error


def read_training(
    path: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """What `write_training` wrote, of a training with these settings and with weights of these shapes.

    Raises InputError for a file that is damaged, or of another training.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        found, held = [dict(content[part]) for part in _PARTS][:2]
    except Exception as error:  # torch.load raises whatever its parts do
        raise InputError(str(path), f"it is damaged ({error})", "Remove it: training starts anew.") from error
    if changed := [name for name, value in settings.items() if found.get(name) != value]:
        reason = f"it is of a training with other settings ({', '.join(changed)})"
        raise InputError(str(path), reason, "Use the same settings, or another folder.")
    if {name: w.shape for name, w in held.items()} != {name: w.shape for name, w in weights.items()}:
        raise InputError(str(path), "it is of a draft of another shape", "Use another folder.")
    return content
