"""Chat formats: how models are given tools, how they call them, and how they reason."""

from outrider.formats.chat_format import ChatFormat, format_of
from outrider.formats.grammar import Named, ToolChoice, ToolSpec

__all__ = ["ChatFormat", "Named", "ToolChoice", "ToolSpec", "format_of"]
