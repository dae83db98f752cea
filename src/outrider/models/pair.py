"""The files of a target and its draft, by what a user names; the embedded default has a draft of its own."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import ModelFileError
from outrider.models.embedded import embedded_default, embedded_draft
from outrider.models.hub import HubOptions
from outrider.models.reference import resolve

__all__ = ["DEFAULT_DRAFT", "NO_DRAFT", "resolve_pair"]

NO_DRAFT = "none"
"""As the draft's reference: no draft model, also not the one that comes with the default."""

DEFAULT_DRAFT = "default-draft"
"""As the draft's reference: the one that comes with the default, for its other quantizations and its kin."""


def resolve_pair(model: str | None, draft: str | None, hub: HubOptions) -> tuple[Path, Path | None]:
    """The target's file and the draft's.

    `model` None: the embedded default; its own draft then goes with it unless another is named, or
    `NO_DRAFT`.
    Raises HubError and ModelFileError for references that cannot be resolved.
    """
    target = embedded_default() if model is None else resolve(model, hub=hub)
    if draft == NO_DRAFT:
        return target, None
    if draft == DEFAULT_DRAFT:
        return target, _own_draft()
    if draft is not None:
        return target, resolve(draft, hub=hub)
    return target, embedded_draft() if model is None else None


def _own_draft() -> Path:
    path = embedded_draft()
    if path is None:
        reason = "this installation came without the embedded default's draft"
        raise ModelFileError(DEFAULT_DRAFT, reason, "Install Outrider anew, or name a draft of your own.")
    return path
