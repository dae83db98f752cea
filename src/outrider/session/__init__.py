"""The Python API: `Pair` loads the weights and tokenizers of a target and its draft; `Session.open` adds KV
caches and drafters, and generates. A session also takes models of any other backend directly.
"""

# Nothing is imported before it is used: who reads step records needs no model loader.

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from outrider.session.generation import Message
    from outrider.session.options import DEFAULT_CONTEXT_TOKENS, SessionOptions
    from outrider.session.pair import Pair
    from outrider.session.session import Session, settings_of

__all__ = ["DEFAULT_CONTEXT_TOKENS", "Message", "Pair", "Session", "SessionOptions", "settings_of"]

_MODULES = {"Message": "generation", "Pair": "pair", "Session": "session", "settings_of": "session"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(f"outrider.session.{_MODULES.get(name, 'options')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
