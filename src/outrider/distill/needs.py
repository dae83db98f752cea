"""What distilling needs beyond the other commands."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.core.errors import SettingError

__all__ = ["require_torch"]


def require_torch() -> None:
    """Raise SettingError where PyTorch is not installed."""
    if find_spec("torch") is None:
        reason = "PyTorch is not installed, and drafts are trained with it"
        raise SettingError("outrider distill", reason, "Run pip install 'outrider[distill]'.")
