"""Ollama's API, as far as its clients need it. Its requests become those for a chat or a completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from outrider.core.data import Piece
from outrider.core.notices import notify
from outrider.server.apis import shapes
from outrider.server.apis.answers import (
    LINES,
    Answer,
    Choice,
    ToolCall,
    answer,
    joined,
    logprobs_of,
    parsed_arguments,
)
from outrider.server.apis.chat import ChatRequest, fitting_effort, plan_chat
from outrider.server.apis.completions import CompletionRequest, plan_completions
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import MAX_INT, WHOLE, Json, Many, Message, SamplingFields, Shape
from outrider.server.errors import invalid_field, renamed_fields
from outrider.server.models import Models, models_of
from outrider.server.service import Service

router = APIRouter(tags=["Ollama"])


class Options(SamplingFields):
    """How the model is run and the next token chosen."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), WHOLE] | None = None
    """below 0: no limit but the server's"""
    num_ctx: Annotated[int, Field(ge=0), WHOLE] | None = None
    """The context is the server's; the answer's notices say where it is smaller."""


class OllamaFields(shapes.GenerationRequest):
    """What both endpoints for text have in common. Without `stream` the answer is a stream."""

    stream: bool | None = True
    format: Literal["json", ""] | Json | None = None
    """"json", or a JSON schema"""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: shapes.NumLogprobs | None = None


class OllamaChatRequest(OllamaFields):
    """A conversation to be continued; without messages the model is loaded."""

    messages: Many[Message] | None = None
    tools: shapes.Tools | None = None


class GenerateRequest(OllamaFields):
    """A text to be answered, under the chat template unless it is `raw`; without one the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: shapes.NoImages = None


class ShowRequest(Shape):
    """A model to be described; `name` is the older name of `model`."""

    renamed: ClassVar = {"name": "model"}

    model: str | None = None


# The endpoints

VERSION = "0.12.6"
"""the version of Ollama's API that is followed; clients check whether it has tools and thinking"""


@router.post("/api/chat")
async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
    """Continue a conversation, as Ollama; unless `stream` is false, as lines of JSON."""
    if not body.messages:
        return await _load(request, body, {"message": {"role": "assistant", "content": ""}})
    return await answer(request, body, plan_ollama_chat, OllamaAnswer)


@router.post("/api/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Answer a text, or fill a gap, as Ollama; unless `stream` is false, as lines of JSON."""
    if not body.prompt and not body.suffix:
        return await _load(request, body, {"response": ""})
    return await answer(request, body, plan_generate, OllamaAnswer)


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version")
async def ollama_version() -> Any:
    """The version of Ollama's API that is followed."""
    return {"version": VERSION}


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags")
async def tags(request: Request) -> Any:
    """The models, under all their names."""
    models = models_of(request)
    return {"models": [_listed(models, name) for name in models.names]}


@router.get("/api/ps")
async def ps(request: Request) -> Any:
    """The models that are loaded."""
    models = models_of(request)
    never = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
    return {"models": [_listed(models, name) | never for name in models.first_names if models.loaded(name)]}


@router.post("/api/show")
async def show(body: ShowRequest, request: Request) -> Any:
    """Describe a model."""
    async with models_of(request).serving(body.model) as service:
        card, template = service.card, service.template
        able = {
            "completion": True,
            "tools": template is not None,
            "insert": service.infill is not None,
            "thinking": service.format.reasons,
        }
        info: Json = {}
        if card is not None:
            family = card.architecture
            info = {
                "general.architecture": family,
                "general.parameter_count": card.parameters,
                f"{family}.context_length": service.context_tokens,
            }
        return {
            "template": template.source if template else "",
            "details": _details(service),
            "model_info": info,
            "capabilities": [name for name, is_able in able.items() if is_able],
            "modified_at": datetime.fromtimestamp(service.started_unix_s, UTC).isoformat(),
        }


async def _load(request: Request, body: OllamaFields, nothing: Json) -> Response:
    async with models_of(request).serving(body.model) as service:
        head = {"model": body.model or service.name, "created_at": now()}
        return JSONResponse(head | nothing | {"done": True, "done_reason": "load"})


def _listed(models: Models, name: str) -> Json:
    service = models.loaded(name)
    card = service.card if service else None
    size = card.file_bytes if card else 0
    since_s = card.path.stat().st_mtime if card and card.path.exists() else models.started_unix_s
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(since_s, UTC).isoformat(),
        "size": size,
        "digest": sha256(f"{name} {size}".encode()).hexdigest(),
        "details": _details(service),
        **({"context_length": service.context_tokens} if service else {}),
    }


def _details(service: Service | None) -> Json:
    card = service.card if service else None
    family = card.architecture if card else ""
    return {
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{card.parameters / 1e9:.1f}B" if card else "",
        "quantization_level": card.quantization if card else "",
    }


# The plan

_NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
"""What the fields of the other requests are called here."""


@renamed_fields(_NAMES)
def plan_ollama_chat(service: Service, body: OllamaChatRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    return _plan(service, body, body.messages or (), namespace)


@renamed_fields(_NAMES)
def plan_generate(service: Service, body: GenerateRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    prompt = body.prompt or ""
    if body.suffix or body.raw or service.template is None:
        if body.system:
            raise invalid_field("system", "it needs the chat template. Leave it out, or raw and suffix.")
        fields = _shared(service, body) | {"prompt": prompt or " ", "suffix": body.suffix or None}
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        fields["max_tokens"] = fields["max_tokens"] or service.settings.default_max_tokens or -1
        return plan_completions(service, CompletionRequest.of(**fields), namespace)
    turns = [Message(role="system", content=body.system)] if body.system else []
    return _plan(service, body, [*turns, Message(role="user", content=prompt)], namespace)


def _plan(
    service: Service, body: OllamaFields, messages: Sequence[Message], namespace: str
) -> GenerationPlan:
    wanted = ("medium" if body.think else "none") if isinstance(body.think, bool) else body.think
    request = ChatRequest.of(
        **_shared(service, body),
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        tools=getattr(body, "tools", None) or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        reasoning_effort=fitting_effort(service, wanted, "think"),
    )
    return plan_chat(service, request, namespace)


def _shared(service: Service, body: OllamaFields) -> Json:
    options, form = body.options or Options(), body.format or None
    if options.num_ctx is not None and options.num_ctx > service.context_tokens:
        notify(f"options.num_ctx: the context here is {service.context_tokens} tokens")
    asked = options.num_predict
    found = {
        **body.sampling(),
        **options.sampling(),
        "model": body.model,
        "max_tokens": None if asked is None else -1 if asked < 0 else max(asked, 1),
    }
    if form == "json":
        found["response_format"] = {"type": "json_object"}
    elif form:
        found["response_format"] = shapes.json_schema_format(form, strict=False)
    return found


# The answer


class OllamaAnswer(Answer):
    """The answer to one request for a chat or a text."""

    media_type = LINES

    def __init__(self, service: Service, body: OllamaFields, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._body = body
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._began_s = perf_counter()
        [self._choice] = self.choices
        self._num_sent = 0
        """how many tool calls were sent; each is sent when it is complete"""

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        said = self._said(pieces)
        if any(piece.kind != "call" for piece in pieces) or "tool_calls" in said.get("message", ()):
            yield self._head | said | {"done": False}
        if choice.is_over:
            yield self._head | self._said(()) | self._end()

    def whole(self) -> Json:
        return self._head | self._said(self._choice.pieces) | self._end()

    @property
    def _head(self) -> Json:
        return {"model": self._body.model or self.service.name, "created_at": now()}

    def _complete_calls(self) -> list[ToolCall]:
        """The calls that were completed since this was last asked. One that is cut never is: its arguments
        would be no object."""
        calls = self._choice.calls[self._num_sent :]
        if calls and (not self._choice.is_over or parsed_arguments(calls[-1].arguments) is None):
            calls.pop()
        self._num_sent += len(calls)
        return calls

    def _said(self, pieces: Sequence[Piece]) -> Json:
        said: Json = {"role": "assistant"} if self._is_chat else {}
        said["content" if self._is_chat else "response"] = joined(pieces, "content")
        if thinking := joined(pieces, "reasoning"):
            said["thinking"] = thinking
        if self._is_chat and (calls := self._complete_calls()):
            functions = [{"name": one.name, "arguments": parsed_arguments(one.arguments)} for one in calls]
            said["tool_calls"] = [
                {"id": call.id, "function": function} for call, function in zip(calls, functions, strict=True)
            ]
        logprobs = logprobs_of(pieces, self.service)
        more = {"logprobs": logprobs} if logprobs else {}
        return ({"message": said} if self._is_chat else said) | more

    def _end(self) -> Json:
        choice, sums = self._choice, self.sums()
        times = sums["outrider"]["times"]
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": int((perf_counter() - self._began_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sums["usage"]["prompt_tokens"],
            "prompt_eval_duration": int(times["prefill_s"] * 1e9),
            "eval_count": sums["usage"]["completion_tokens"],
            "eval_duration": int(times["decode_s"] * 1e9),
            "outrider": sums["outrider"],
        }


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
