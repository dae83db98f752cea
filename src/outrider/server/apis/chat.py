"""OpenAI's chat completions. Requests for responses, for Anthropic's messages and for Ollama's chats become
these."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from outrider.core.data import Grammar, Kind, Piece, Thought
from outrider.core.data import Request as EngineRequest
from outrider.core.errors import InputError
from outrider.core.notices import notify
from outrider.formats import Named, ToolChoice, ToolSpec
from outrider.server.apis import plan, shapes
from outrider.server.apis.answers import Choice, ChunkedAnswer, answer, joined, logprobs_of
from outrider.server.apis.shapes import Json, Many, Message, Tool, tool_call
from outrider.server.errors import invalid_field, problem_of
from outrider.server.service import Service

router = APIRouter(tags=["text"])


class ChatRequest(shapes.TextRequest, shapes.ReasoningFields):
    """A conversation to be continued."""

    renamed: ClassVar = dict.fromkeys(("max_completion_tokens", "n_predict", "num_predict"), "max_tokens")

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_tokens: shapes.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: shapes.NumLogprobs | None = None
    tools: shapes.Tools | None = None
    tool_choice: shapes.ToolMode | Tool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: shapes.Effort | None = None
    chat_template_kwargs: Annotated[Json, Field(max_length=64)] | None = None
    """variables for the model's chat template"""
    continue_final_message: bool | None = None
    """The last message is the assistant's, and the answer goes on where it ends."""
    modalities: Many[Literal["text"]] | None = None


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation; with `stream`, as server-sent events."""
    return await answer(request, body, plan_chat, ChatAnswer)


# The plan

_EFFORT_BUDGETS: dict[shapes.Effort, int] = {"none": 0, "minimal": 512, "low": 2048}
"""Reasoning budgets in tokens where the template knows no levels; other levels have no limit."""
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"})


def plan_chat(service: Service, body: ChatRequest, namespace: str) -> plan.GenerationPlan:
    """The engine requests for a chat request. Raises Problem."""
    tools, choice = _tools(body)
    text = rendered(service, body)
    prompt = "".join(service.controls.split(text))
    grammar = _grammar(service, body, tools, choice, prompt)
    tokens = service.check_prompt(tokens_of(service, text), "messages")
    max_tokens = plan.answer_tokens(service.settings, body.max_tokens, None, "max_tokens")
    room = min(max_tokens or service.context_tokens, service.context_tokens - len(tokens))
    must_call = choice not in ("none", "auto")
    asked = EngineRequest(
        tokens,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None,
        grammar=grammar,
        scope=namespace,
        visible=service.format.visible,
        thought=_thought(service, body, prompt, room, must_call=must_call),
        from_text=True,
        reader=partial(
            service.format.reader,
            [] if choice == "none" else tools,
            prompt=prompt,
            must_call=must_call,
        ),
    )
    return plan.plan_of(service, body, asked, [tokens])


def rendered(service: Service, body: ChatRequest) -> str:
    """The conversation as `render` gives it. Raises Problem."""
    tools, choice = _tools(body)
    into = partial(
        render,
        service,
        tools=tools,
        choice=choice,
        variables=_variables(service, body),
        parallel=body.parallel_tool_calls is not False,
    )
    if not body.continue_final_message:
        return into(body.messages)
    if choice not in ("none", "auto") or any(value is not None for *_, value in plan.limits_of(body)):
        why = "a constrained answer cannot be continued. Leave one of the two out."
        raise invalid_field("continue_final_message", why, code="unsupported")
    text, last, begun = into(body.messages[:-1]), body.messages[-1], None
    if last.role == "assistant" and not last.tool_calls:
        said, prompt = service.controls.escape(last.plain()), "".join(service.controls.split(text))
        begun = service.format.begun(prompt, said["content"], said.get("reasoning_content", ""))
    if begun is None:
        why = "the last one is not an assistant text that this model can continue. End with a user message."
        raise invalid_field("messages", why, code="unsupported")
    return text + begun


def _tools(body: ChatRequest) -> tuple[list[ToolSpec], ToolChoice]:
    functions = [tool.function for tool in shapes.served_tools(body.tools)]
    tools = [ToolSpec(f.name, f.description or "", f.parameters or {}, bool(f.strict)) for f in functions]
    names, asked = [tool.name for tool in tools], body.tool_choice
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid_field("tools", f"two of them are called {twice}. Rename one.")
    if isinstance(asked, Tool):
        if asked.function.name not in names:
            why = f"there is no tool {asked.function.name}. Choose one of `tools`."
            raise invalid_field("tool_choice", why)
        return tools, Named(asked.function.name)
    if asked == "required" and not tools:
        raise invalid_field("tool_choice", "there are no tools to choose from. Give some, or leave it out.")
    return tools, (asked or "auto") if tools else "none"


def render(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    choice: ToolChoice = "none",
    variables: Json | None = None,
    *,
    parallel: bool = True,
) -> str:
    """The conversation under the model's template, with marks in control tokens that the client spells (see
    `ControlTokens`). Raises Problem."""
    if service.template is None:
        why = f"{service.name} has no chat template. Use /v1/completions."
        raise invalid_field("messages", why, code="invalid_prompt")
    escape = service.controls.escape
    try:
        plain = [escape(message.plain()) for message in messages]
        described = [
            replace(tool, description=escape(tool.description), parameters=escape(tool.parameters))
            for tool in tools
        ]
        turns, listed = service.format.conversation(plain, described, choice, parallel=parallel)
        return service.template.render(turns, tools=listed, **escape(variables or {}))
    except InputError as error:
        raise problem_of(error, "messages") from None


def tokens_of(service: Service, text: str) -> list[int]:
    """The tokens of a rendered conversation: only the template's control tokens are read as such. Raises
    Problem for one that cannot fit."""
    assert service.template is not None
    service.check_length(text, "messages")
    first, *others = service.controls.split(text)
    tokens = service.template.tokenize(first, service.vocabulary)
    for part in others:
        tokens += service.vocabulary.tokenize(part, add_special=False, parse_special=True)
    return tokens


def _knows(service: Service, name: str) -> bool:
    return service.template is not None and name in service.template.source


def _variables(service: Service, body: ChatRequest) -> Json:
    variables = dict(body.chat_template_kwargs or {})
    if taken := sorted(_RESERVED & variables.keys()):
        raise invalid_field(f"chat_template_kwargs.{taken[0]}", "the server sets it. Leave it out.")
    effort = body.reasoning_effort
    if effort is not None:
        if _knows(service, "reasoning_effort") and effort != "none":
            variables["reasoning_effort"] = effort
        elif _knows(service, "enable_thinking"):
            variables["enable_thinking"] = effort != "none"
        elif not service.format.reasons:  # else a budget says it
            why = f"this model's template does not know {effort}. Leave it out."
            raise invalid_field("reasoning_effort", why, code="unsupported")
    if body.reasoning_budget is not None and _knows(service, "thinking_budget"):
        variables.setdefault("thinking_budget", body.reasoning_budget)
    unread = [name[:100] for name in variables if not _knows(service, name)]
    notify(*(f"chat_template_kwargs: this model's template does not read {name}" for name in unread))
    return variables


def fitting_effort(service: Service, wanted: shapes.Effort | None, field: str) -> shapes.Effort | None:
    """How much the model is to think, where it knows that; else None."""
    reads = any(_knows(service, name) for name in ("reasoning_effort", "enable_thinking"))
    if wanted is None or service.format.reasons or reads:
        return wanted
    notify(None if wanted == "none" else f"{field}: this model's template does not read it")
    return None


def _thought(
    service: Service, body: ChatRequest, prompt: str, room: int, *, must_call: bool
) -> Thought | None:
    """How the answer may reason. `room` is how many tokens the whole answer may have; where a
    tool call is required, half of them are kept for the call."""
    settings, budget, effort = service.settings, body.reasoning_budget, body.reasoning_effort
    thought = service.format.thought(prompt, settings.reasoning_budget_message or "")
    if thought is None:
        if budget is not None and budget >= 0 and not service.format.reasons:
            notify("reasoning_budget: this model's template has no reasoning")
        return None
    if budget is None and effort and not (effort != "none" and _knows(service, "reasoning_effort")):
        budget = _EFFORT_BUDGETS.get(effort)
    budget = settings.reasoning_budget if budget is None else budget
    if budget < 0 and must_call:
        budget = max(room // 2, 1)
        notify(f"tool_choice: reasoning is limited to {budget} tokens")
    return replace(thought, budget=None if budget < 0 else budget)


def _grammar(
    service: Service, body: ChatRequest, tools: Sequence[ToolSpec], choice: ToolChoice, prompt: str
) -> Grammar | None:
    content, field = plan.grammar_of(body)
    if choice == "none":
        limit = service.format.grammar((), choice, parallel=True, prompt=prompt, content=content)
        if limit is not None:
            plan.compile_grammar(service, body, limit, field)
        return limit
    if body.ignore_eos:
        why = "an answer that may call tools ends by itself. Leave one of the two out."
        raise invalid_field("ignore_eos", why)
    if content is not None:
        plan.compile_grammar(service, body, content, field)  # what is wrong with it is said of its own field
    size = sum(len(json.dumps(tool.parameters)) for tool in tools)
    plan.check_schema(size, "tools")
    try:
        grammar = service.format.grammar(
            tools,
            choice,
            parallel=body.parallel_tool_calls is not False,
            fast_forward=body.fast_forward,
            prompt=prompt,
            content=content,
        )
    except InputError as error:
        raise problem_of(error, "tools") from None
    if grammar is not None:
        service.compile(grammar, "tools")
    return grammar


# The answer

_FIELDS: dict[Kind, str] = {"content": "content", "reasoning": "reasoning_content", "call": "tool_calls"}
"""Of a message, and of its log probabilities."""


class ChatAnswer(ChunkedAnswer):
    """The answer to one chat request."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: ClassVar = {}

    def first(self) -> Iterator[Json]:
        for choice in self.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def _whole(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.request.logprobs is None else self._logprobs(choice.pieces),
        }

    def _deltas(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[tuple[Any, Sequence[Piece]]]:
        """Neighbours of one kind go into one delta. The first of a call is by itself: clients take it as it
        is."""
        for (kind, _), group in groupby(pieces, lambda piece: (piece.kind, piece.name)):
            found = list(group)
            if kind == "call":
                yield {"tool_calls": [_call_delta(choice, piece) for piece in found]}, found
            else:
                yield {_FIELDS[kind]: joined(found, kind)}, found

    def _entry(self, choice: Choice, delta: Any, pieces: Sequence[Piece], finish_reason: str | None) -> Json:
        logprobs = self._logprobs(pieces) if any(piece.logprobs for piece in pieces) else None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        """Those of the content, and beside them those of what else there is."""
        found = {name: logprobs_of(pieces, self.service, kind) for kind, name in _FIELDS.items()}
        return {"content": found.pop("content"), "refusal": None} | {k: v for k, v in found.items() if v}


def _call_delta(choice: Choice, piece: Piece) -> Json:
    if piece.name:
        return {"index": piece.call, **tool_call(choice.calls[piece.call].id, piece.name, "")}
    return {"index": piece.call, "function": {"arguments": piece.text}}
