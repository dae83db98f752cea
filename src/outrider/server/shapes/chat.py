"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from outrider.server.shapes.base import WHOLE, Many, explained, few
from outrider.server.shapes.grammars import GrammarFields
from outrider.server.shapes.messages import Message, Prediction
from outrider.server.shapes.sampling import Harmless, SamplingFields, StreamOptions
from outrider.server.shapes.tools import NamedTool, Tool, ToolMode

__all__ = ["ChatRequest", "Effort", "refused_everywhere"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

refused_everywhere = {
    "audio": "this server writes text alone. Leave audio out",
    "functions": "functions are no longer in use. Say tools",
    "function_call": "function_call is no longer in use. Say tool_choice",
    "web_search_options": "this server does not search the web. Leave it out",
    "moderation": "nothing is moderated here. Leave it out",
    "prompt_cache_options": "prompts are cached by themselves. Leave it out",
    "n_predict": "it is llama.cpp's name. Say max_tokens",
    "mirostat": "mirostat is not supported. Leave it out",
    "samplers": "the order of samplers is fixed (docs/sampling.md). Leave it out",
    "n_probs": "it is llama.cpp's name. Say logprobs and top_logprobs",
    "guided_whitespace_pattern": "white space by a pattern is not supported. Leave it out",
    "structural_tag": "structural tags are not supported. Use tools, or a grammar",
}
"""Fields that other servers know, why they are not supported, and the way out."""


class ChatRequest(SamplingFields, GrammarFields, Harmless):
    """A conversation to be continued."""

    refused: ClassVar = refused_everywhere

    messages: Annotated[Many[Message], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64), few(64)] | None = Field(
        None, description="Variables for the model's chat template."
    )
    store: Annotated[
        Literal[False] | None, explained("nothing is stored here. Say false, or leave it out")
    ] = None
    modalities: Annotated[
        Many[Literal["text"]] | None,
        explained('this server writes text alone. Say ["text"], or leave it out'),
    ] = None
    verbosity: Annotated[
        Literal["medium"] | None, explained("it is not supported. Ask for it in a message")
    ] = None
