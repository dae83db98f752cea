"""Sequences in, one target call a step for all of them, tokens out."""

from outrider.engine.loop import PREFILL_CHUNK_TOKENS, Engine

__all__ = ["PREFILL_CHUNK_TOKENS", "Engine"]
