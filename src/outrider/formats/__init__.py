"""Chat formats: how models are given tools, how they call them, and how they reason."""

from outrider.formats.chat_format import ChatFormat, format_of
from outrider.formats.conversation import (
    ContentDelta,
    Event,
    Named,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolChoice,
    ToolSpec,
)
from outrider.formats.reader import AnswerReader, Reader

__all__ = [
    "AnswerReader",
    "ChatFormat",
    "ContentDelta",
    "Event",
    "Named",
    "Reader",
    "ReasoningDelta",
    "ToolArgumentsDelta",
    "ToolCallStart",
    "ToolChoice",
    "ToolSpec",
    "format_of",
]
