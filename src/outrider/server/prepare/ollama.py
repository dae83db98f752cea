"""Ollama's requests as those for a chat or a completion, and the rest is one way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.server.errors import Problem, invalid_field
from outrider.server.prepare.chat import fitting_effort, plan_chat
from outrider.server.prepare.completions import plan_completions
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.base import (
    CommonSampling,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    SamplingFields,
)
from outrider.server.protocol.messages import Message, ToolCall
from outrider.server.protocol.ollama import GenerateRequest, OllamaChatRequest, OllamaFields, OllamaMessage
from outrider.server.protocol.requests import ChatRequest, CompletionRequest, Effort
from outrider.server.service import Service

_NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
"""What the fields of the other requests are called here."""


def plan_ollama_chat(service: Service, body: OllamaChatRequest, namespace: str) -> GenerationPlan:
    """The request that is asked for. Raises Problem, in terms of this endpoint's fields."""
    return _plan(service, body, [_message(message) for message in body.messages or ()], namespace)


def plan_generate(service: Service, body: GenerateRequest, namespace: str) -> GenerationPlan:
    """The request that is asked for. Raises Problem, in terms of this endpoint's fields."""
    prompt = body.prompt or ""
    if body.suffix or body.raw or service.template is None:
        if body.system:
            raise invalid_field("system", "it goes with the chat template. Leave it out, or raw and suffix.")
        fields = _shared(body) | {"prompt": prompt or " ", "suffix": body.suffix or None}
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        limits = (service.context_tokens, service.settings.default_max_tokens, service.settings.max_tokens)
        fields["max_tokens"] = fields["max_tokens"] or min(limit for limit in limits if limit)
        try:
            plan = plan_completions(service, CompletionRequest(**fields), namespace)
        except Problem as error:
            raise error.renamed(_NAMES) from None
        return _continued(service, body, replace(plan, notices=(*plan.notices, *_notices(service, body))))
    system = [Message(role="system", content=body.system)] if body.system else []
    plan = _plan(service, body, [*system, Message(role="user", content=prompt)], namespace)
    return _continued(service, body, plan)


def _plan(service: Service, body: OllamaFields, messages: list[Message], namespace: str) -> GenerationPlan:
    effort, notices = fitting_effort(service, _effort(body.think), "think")
    request = ChatRequest(
        **_shared(body),
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        tools=getattr(body, "tools", None) or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        reasoning_effort=effort,
    )
    try:
        plan = plan_chat(service, request, namespace)
    except Problem as error:
        raise error.renamed(_NAMES) from None
    return replace(plan, notices=(*plan.notices, *notices, *_notices(service, body)))


def _continued(service: Service, body: GenerateRequest, plan: GenerationPlan) -> GenerationPlan:
    """The plan after the tokens of an earlier answer's `context`."""
    if not body.context:
        return plan
    service.check_tokens(body.context, "context")
    [request], start = plan.requests, service.vocabulary.tokenize("", add_special=True)[:1]
    new = request.prompt[1:] if list(request.prompt[:1]) == start else request.prompt
    prompt = service.check_prompt([*body.context, *new], "context")
    return replace(plan, requests=(replace(request, prompt=prompt),))


def _shared(body: OllamaFields) -> dict[str, Any]:
    options = body.options
    given = options.model_dump(include={*CommonSampling.model_fields}, exclude_none=True) if options else {}
    asked = options.num_predict if options else None
    return {
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
        **given,
        "model": body.model,
        "max_tokens": None if asked is None or asked < 0 else max(asked, 1),
        "response_format": _format(body.format),
    }


def _format(asked: Any) -> JsonObjectFormat | JsonSchemaFormat | None:
    if not asked:
        return None
    if asked == "json":
        return JsonObjectFormat(type="json_object", schema=None)
    return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(schema=asked, strict=False))


def _effort(think: bool | str | None) -> Effort | None:
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think  # type: ignore[return-value]


def _notices(service: Service, body: OllamaFields) -> list[str]:
    asked = body.options.num_ctx if body.options else None
    if asked is None or asked <= service.context_tokens:
        return []
    return [f"options.num_ctx: the context here is {service.context_tokens} tokens"]


def _message(message: OllamaMessage) -> Message:
    calls = [
        ToolCall.of(call.id or f"call_{i}", call.function.name, call.function.arguments)
        for i, call in enumerate(message.tool_calls or ())
    ]
    return Message(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )
