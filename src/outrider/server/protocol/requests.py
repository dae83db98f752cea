"""The requests: chat completions, completions, responses, tokenize and detokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from outrider.server.protocol.base import (
    WHOLE,
    Body,
    GrammarFields,
    JsonObjectFormat,
    Many,
    MaxTokens,
    NamedSchema,
    NumChoices,
    NumLogprobs,
    SamplingFields,
    Shape,
    StreamOptions,
    TextFormat,
    explained,
    few,
)
from outrider.server.protocol.messages import (
    FunctionTool,
    Item,
    Message,
    NamedFunctionTool,
    NamedTool,
    Prediction,
    Tool,
    ToolMode,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[Many[Token], Field(min_length=1)]

_NO_VERBOSITY = explained("it is not supported. Ask for it in a message")
_CACHED = "Accepted, without effect: the beginning of a prompt is reused where it is kept."
_SLOTS = "Accepted, without effect: the server chooses where an answer is generated."
_SHIFT = "Accepted, without effect: nothing is cut out of a conversation."
_TIMINGS = "Accepted, without effect: `outrider` has the timings, with the end of the answer."
_MAX_METADATA = 64
_STATELESS = "nothing is stored here. Give the whole conversation as `input`"
_OF_CHAT = "it is a field of chat completions. Say "

REFUSED = {
    "audio": "this server writes text alone. Leave audio out",
    "functions": "functions are no longer in use. Say tools",
    "function_call": "function_call is no longer in use. Say tool_choice",
    "web_search_options": "this server does not search the web. Leave it out",
    "moderation": "nothing is moderated here. Leave it out",
    "n_probs": "it is llama.cpp's name. Say logprobs and top_logprobs",
    "guided_whitespace_pattern": "white space by a pattern is not supported. Leave it out",
    "structural_tag": "structural tags are not supported. Use tools, or a grammar",
}
"""Fields that other servers know, why they are not supported, and the way out."""


_RENAMED = {"n_predict": "max_tokens", "num_predict": "max_tokens"}
"""llama.cpp's and Ollama's names."""


class GenerationRequest(SamplingFields, Body):
    """What the endpoints of text share, with fields that clients send and that have nothing to act on here:
    these are accepted, without effect."""

    refused: ClassVar = REFUSED

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA), few(_MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = Field(None, description=_CACHED)
    cache_prompt: Any = Field(None, description=_CACHED)
    n_cache_reuse: Any = Field(None, description=_CACHED)
    keep_alive: Any = Field(None, description="Accepted, without effect: the model stays loaded.")
    service_tier: Any = Field(None, description="Accepted, without effect: there is one tier.")
    store: Any = Field(None, description="Accepted, without effect: no answer is stored.")
    request_id: Any = Field(None, description="Accepted, without effect: X-Request-Id names a request.")
    priority: Any = Field(None, description="Accepted, without effect: API keys take turns.")
    id_slot: Any = Field(None, description=_SLOTS)
    slot_id: Any = Field(None, description=_SLOTS)
    n_keep: Any = Field(None, description=_SHIFT)
    n_discard: Any = Field(None, description=_SHIFT)
    timings_per_token: Any = Field(None, description=_TIMINGS)
    return_progress: Any = Field(None, description=_TIMINGS)
    # vllm-router writes these into every body, with what holds here anyway.
    no_stop_trim: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None


_BUDGETS = dict.fromkeys(
    ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget", "thinking_budget"),
    "reasoning_budget",
)
"""llama-server's names of it, vLLM's and others'."""


class ReasoningFields(Shape):
    """How much the model is to think."""

    reasoning_budget: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="Tokens of reasoning, after which its end is forced. -1: no limit."
    )


class ChatRequest(GenerationRequest, GrammarFields, ReasoningFields):
    """A conversation to be continued."""

    renamed: ClassVar = _RENAMED | _BUDGETS

    messages: Annotated[Many[Message], Field(min_length=1)]
    n: NumChoices | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64), few(64)] | None = Field(
        None, description="Variables for the model's chat template."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is the assistant's, and the answer goes on where it ends."
    )
    add_generation_prompt: Any = Field(
        None, description="Accepted, without effect: continue_final_message says whether a turn begins."
    )
    modalities: Annotated[
        Many[Literal["text"]] | None,
        explained('this server writes text alone. Say ["text"], or leave it out'),
    ] = None
    verbosity: Annotated[Literal["medium"] | None, _NO_VERBOSITY] = None


class TextRequest(GenerationRequest, GrammarFields):
    """What completions have in common, whoever's they are."""

    n: NumChoices | None = None
    prediction: Prediction | None = None


class CompletionRequest(TextRequest):
    """Texts to be continued as they stand, without a chat template."""

    renamed: ClassVar = _RENAMED

    refused: ClassVar = REFUSED | {
        "prompt_embeds": "prompts are text or tokens. Leave it out",
        "use_beam_search": "beam search is not supported. Leave it out",
    }

    prompt: (
        Text
        | Tokens
        | Annotated[Many[Text], Field(min_length=1)]
        | Annotated[Many[Tokens], Field(min_length=1)]
    )
    suffix: str | None = Field(
        None, description="What follows the text that is asked for, with a model that can fill in a middle."
    )
    best_of: NumChoices | None = Field(
        None, description="Only as many as `n`: all that are generated are returned."
    )
    echo: bool | None = Field(None, description="The answer begins with the prompt; not with logprobs.")
    max_tokens: MaxTokens | None = Field(
        None, description="16 unless the server is set otherwise, as OpenAI's."
    )
    logprobs: NumLogprobs | None = None


class SchemaFormat(NamedSchema):
    """JSON of a schema; `strict` as in chat completions."""

    type: Literal["json_schema"]


class TextConfig(Shape):
    """What the text of the answer has to be."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Literal["medium"] | None, _NO_VERBOSITY] = None


class Reasoning(Shape):
    """How much the model is to think, where its template knows that."""

    refused: ClassVar = dict.fromkeys(
        ("summary", "generate_summary"), "reasoning is given as it is, without a summary. Leave it out"
    )

    effort: Effort | None = None


class ResponseRequest(GenerationRequest, ReasoningFields):
    """A conversation to be continued, as items."""

    renamed: ClassVar = _BUDGETS

    refused: ClassVar = REFUSED | {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": "prompts are not kept here. Give `instructions` and `input`",
        "context_management": "the conversation is not shortened here. Leave it out",
        "logprobs": f'{_OF_CHAT}"include": ["message.output_text.logprobs"]',
        "max_tokens": f"{_OF_CHAT}max_output_tokens",
        "n_predict": "it is llama.cpp's name. Say max_output_tokens",
        "messages": f"{_OF_CHAT}input",
        "response_format": f"{_OF_CHAT}text.format",
    }

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="Has no effect: it is about tools that the server itself runs."
    )
    tools: Annotated[Many[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: ToolMode | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Reasoning is never encrypted: it is given as it is."
    )
    top_logprobs: NumLogprobs | None = None
    truncation: Annotated[
        Literal["disabled"] | None,
        explained("the conversation is not shortened here. Say disabled, or leave it out"),
    ] = None
    store: Annotated[Literal[False] | None, explained(_STATELESS)] = None
    background: Annotated[
        Literal[False] | None, explained("nothing runs in the background here. Say false, or use stream")
    ] = None


class ControlRequest(Body):
    """What is to become of a running answer: `id` is its own, or the X-Request-Id of its request."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    action: Literal["reasoning_end"]
    model: str | None = None


class TokenizeRequest(Body):
    """A text (`content` as llama.cpp has it, `prompt` as vLLM has it) or a conversation; exactly one.

    Start tokens are added to a `prompt`, and to `content` where `add_special` says so.
    """

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = Field(None, description="vLLM's name of add_special.")
    parse_special: bool | None = Field(None, description="Read control tokens that are spelled out: true.")
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Tokens to be read as text."""

    tokens: Many[Token]
    model: str | None = None


class ModelRequest(Body):
    """A model, by its name."""

    model: str
