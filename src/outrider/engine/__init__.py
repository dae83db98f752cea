"""Sequences in, one target call a step for all of them, tokens out."""

from outrider.engine.limits import PreferredTokenization
from outrider.engine.loop import MAX_TOKENS as PREFILL_CHUNK_TOKENS
from outrider.engine.loop import Engine

__all__ = ["PREFILL_CHUNK_TOKENS", "Engine", "PreferredTokenization"]
