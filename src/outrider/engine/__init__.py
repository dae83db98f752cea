"""Sequences in, one target call a step for all of them, tokens out."""

from outrider.engine.loop import PREFILL_CHUNK_TOKENS, Engine
from outrider.engine.spelling import Spelling

__all__ = ["PREFILL_CHUNK_TOKENS", "Engine", "Spelling"]
