"""Model files: what they say of themselves, and how a name leads to one."""

from outrider.models.embedded import embedded_default, embedded_draft, embedded_is_intact
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import HubOptions, cache_dir
from outrider.models.reference import DEFAULT, DEFAULT_DRAFT, NO_DRAFT, resolve, resolve_pair

__all__ = [
    "DEFAULT",
    "DEFAULT_DRAFT",
    "NO_DRAFT",
    "HubOptions",
    "ModelCard",
    "cache_dir",
    "embedded_default",
    "embedded_draft",
    "embedded_is_intact",
    "read_card",
    "resolve",
    "resolve_pair",
]
