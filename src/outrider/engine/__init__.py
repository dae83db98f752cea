"""Sequences in, one target call a step for all of them, tokens out."""

from outrider.engine.loop import Engine
from outrider.engine.reading import MAX_PAUSE_S
from outrider.engine.reading import MAX_TOKENS as PREFILL_CHUNK_TOKENS
from outrider.engine.spelling import Spelling

__all__ = ["MAX_PAUSE_S", "PREFILL_CHUNK_TOKENS", "Engine", "Spelling"]
