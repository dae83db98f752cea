"""Sequences in, one target call a step for all of them, tokens out."""

from outrider.engine.limits import PreferredTokenization
from outrider.engine.loop import Engine
from outrider.engine.prefill import MAX_TOKENS as PREFILL_CHUNK_TOKENS

__all__ = ["PREFILL_CHUNK_TOKENS", "Engine", "PreferredTokenization"]
