"""The extras of pyproject.toml, which some commands need."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from outrider.core.errors import SettingError

MODULES: Mapping[str, Mapping[str, str]] = {
    "serve": {"fastapi": "FastAPI", "uvicorn": "Uvicorn", "prometheus_client": "prometheus-client"},
    "ray": {"ray": "Ray"},
    "distill": {"torch": "PyTorch"},
}
"""By extra: the modules that its commands import, and their names for people."""


def require_extra(what: str, extra: str, otherwise: str = "") -> None:
    """Raise SettingError if a module of an extra, which `what` needs, is not installed. `otherwise` is
    another way out. Nothing is imported."""
    missing = [name for module, name in MODULES[extra].items() if find_spec(module) is None]
    if not missing:
        return
    listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
    be, come = ("is", "It comes") if len(missing) == 1 else ("are", "They come")
    way_out = f"{come} with the extra {extra}: in Outrider's checkout, pip install '.[{extra}]'"
    raise SettingError(
        what, f"{listed} {be} not installed", f"{way_out}; or {otherwise}." if otherwise else f"{way_out}."
    )
