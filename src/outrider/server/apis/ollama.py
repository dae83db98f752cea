"""Ollama's API, as far as its clients need it. Its requests become those for a chat or a completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from outrider.core.data import Piece
from outrider.core.notices import notify
from outrider.server.apis.answers import (
    LINES,
    Answer,
    Choice,
    ToolCall,
    joined,
    logprobs_of,
    parsed_arguments,
)
from outrider.server.apis.chat import ChatRequest, fitting_effort, plan_chat
from outrider.server.apis.completions import CompletionRequest, plan_completions
from outrider.server.apis.generation import LINES_TOO, answer
from outrider.server.apis.messages import Message, Tools
from outrider.server.apis.messages import ToolCall as EarlierCall
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import (
    CACHED,
    MAX_INT,
    REFUSED,
    WHOLE,
    Effort,
    GenerationRequest,
    Json,
    JsonObjectFormat,
    JsonSchemaFormat,
    Many,
    NamedSchema,
    NumLogprobs,
    SamplingFields,
    Shape,
    Text,
    Tokens,
    only,
    unsupported,
)
from outrider.server.errors import Problem, invalid_field, ollama_error, renamed_fields
from outrider.server.models import Models, models_of
from outrider.server.service import Service

router = APIRouter(tags=["Ollama"])


def _none_of(value: Any) -> Any:
    if value:
        raise unsupported("this server reads text only. Leave images out")
    return value


_NoImages = Annotated[Many[Any], AfterValidator(_none_of)]


class CalledFunction(Shape):
    """The function of an earlier call."""

    name: Text
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Shape):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction


class OllamaMessage(Shape):
    """One turn."""

    ignored: ClassVar = CACHED | {"id"}

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str | None = None
    thinking: str | None = None
    images: _NoImages | None = None
    tool_calls: Many[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(SamplingFields):
    """How the model is run and the next token chosen."""

    ignored: ClassVar = SamplingFields.ignored | {
        *("num_keep", "penalize_newline", "draft_num_predict"),
        # chosen when the server is started
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "numa", "use_mmap"),
        *("use_mlock", "vocab_only", "logits_all", "embedding_only"),
    }

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), WHOLE] | None = Field(
        None, description="Below 0: no limit but the server's."
    )
    num_ctx: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="The context is the server's; the answer's notices say where it is smaller."
    )
    tfs_z: Annotated[float, only(1, "it is not supported")] | None = None


class OllamaFields(GenerationRequest):
    """What both endpoints for text have in common. Without `stream` the answer is a stream."""

    ignored: ClassVar = GenerationRequest.ignored | {"truncate", "shift"}
    refused: ClassVar = REFUSED | {
        "template": "the model's own chat template is in force. Use raw, or leave it out",
        "_debug_render_only": "it is not supported. Use /apply-template",
    }

    stream: bool | None = True
    format: Literal["json", ""] | Json | None = Field(None, description='"json", or a JSON schema.')
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


class OllamaChatRequest(OllamaFields):
    """A conversation to be continued; without messages the model is loaded."""

    messages: Many[OllamaMessage] | None = None
    tools: Tools | None = None


class GenerateRequest(OllamaFields):
    """A text to be answered, under the chat template unless it is `raw`; without one the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _NoImages | None = None
    context: Tokens | Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="That of an earlier answer, which is continued."
    )


class ShowRequest(Shape):
    """A model to be described."""

    ignored: ClassVar = frozenset({"verbose", "system", "template", "options"})

    model: str | None = None
    name: str | None = Field(None, description="The older name of `model`.")


# The endpoints

VERSION = "0.12.6"
"""the version of Ollama's API that is followed; clients check whether it has tools and thinking"""

_Body = TypeVar("_Body", bound=OllamaFields)
_REFUSED = dict.fromkeys(
    (
        *("/api/embed", "/api/embeddings", "/v1/embeddings", "/embedding", "/embeddings"),
        *("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    ),
    "embeddings and ranking are not served. Use another server for them.",
) | dict.fromkeys(
    ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
    "models are named when the server is started. /api/tags lists them.",
)
"""Endpoints of other servers, and why they are not served."""


@router.post("/api/chat", responses=LINES_TOO)
async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
    """Continue a conversation, as Ollama; unless `stream` is false, as lines of JSON."""
    body = _renamed(request, body)
    if not body.messages:
        return await _load(request, body, {"message": {"role": "assistant", "content": ""}})
    return await answer(request, body, plan_ollama_chat, OllamaAnswer)


@router.post("/api/generate", responses=LINES_TOO)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Answer a text, or fill a gap, as Ollama; unless `stream` is false, as lines of JSON."""
    body = _renamed(request, body)
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
    loaded = [name for name in models.first_names if models.loaded(name)]
    never = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
    return {"models": [_listed(models, name) | never for name in loaded]}


@router.post("/api/show")
async def show(body: ShowRequest, request: Request) -> Any:
    """Describe a model."""
    models = models_of(request)
    async with models.serving(_own_name(models, body.model or body.name)) as service:
        return _shown(service)


async def _refuse(request: Request) -> Response:
    """Refuse an endpoint that other servers have and this one does not."""
    raise Problem(400, f"{request.url.path}: {_REFUSED[request.url.path]}", code="unsupported")


for _path in _REFUSED:
    router.add_api_route(_path, _refuse, methods=["POST", "DELETE"], include_in_schema=False)


def _own_name(models: Models, name: str | None) -> str | None:
    """The name without the tag that Ollama's clients add to names."""
    return name if name is None or name in models.names else name.removesuffix(":latest")


def _renamed(request: Request, body: _Body) -> _Body:
    return body.model_copy(update={"model": _own_name(models_of(request), body.model)})


async def _load(request: Request, body: OllamaFields, nothing: dict[str, Any]) -> Response:
    """A request for no text: the model is loaded."""
    async with models_of(request).serving(body.model) as service:
        head = {"model": body.model or service.name, "created_at": now()}
        return JSONResponse(head | nothing | {"done": True, "done_reason": "load"})


def _listed(models: Models, name: str) -> dict[str, Any]:
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


def _details(service: Service | None) -> dict[str, Any]:
    card = service.card if service else None
    family = card.architecture if card else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{card.parameters / 1e9:.1f}B" if card else "",
        "quantization_level": card.quantization if card else "",
    }


def _shown(service: Service) -> dict[str, Any]:
    card, template = service.card, service.template
    able = {
        "completion": True,
        "tools": template is not None,
        "insert": service.infill is not None,
        "thinking": service.format.reasons,
    }
    info: dict[str, Any] = {}
    if card is not None:
        family = card.architecture
        info = {
            "general.architecture": family,
            "general.basename": card.name,
            "general.parameter_count": card.parameters,
            f"{family}.context_length": service.context_tokens,
            f"{family}.block_count": card.block_count,
            f"{family}.embedding_length": card.embedding_length,
        }
    return {
        "modelfile": f"FROM {service.name}\n",
        "parameters": "",
        "template": template.source if template else "",
        "details": _details(service),
        "model_info": info,
        "capabilities": [name for name, is_able in able.items() if is_able],
        "modified_at": datetime.fromtimestamp(service.started_unix_s, UTC).isoformat(),
    }


# The plan

_NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
"""What the fields of the other requests are called here."""


def plan_ollama_chat(service: Service, body: OllamaChatRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    return _plan(service, body, [_message(message) for message in body.messages or ()], namespace)


def plan_generate(service: Service, body: GenerateRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    prompt = body.prompt or ""
    if body.suffix or body.raw or service.template is None:
        if body.system:
            raise invalid_field("system", "it needs the chat template. Leave it out, or raw and suffix.")
        fields = _shared(body) | {"prompt": prompt or " ", "suffix": body.suffix or None}
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        fields["max_tokens"] = fields["max_tokens"] or service.settings.default_max_tokens or -1
        _check_context(service, body)
        with renamed_fields(_NAMES):
            plan = plan_completions(service, CompletionRequest(**fields), namespace)
        return _continued(service, body, plan)
    system = [Message(role="system", content=body.system)] if body.system else []
    plan = _plan(service, body, [*system, Message(role="user", content=prompt)], namespace)
    return _continued(service, body, plan)


def _plan(service: Service, body: OllamaFields, messages: list[Message], namespace: str) -> GenerationPlan:
    _check_context(service, body)
    request = ChatRequest(
        **_shared(body),
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        tools=getattr(body, "tools", None) or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        reasoning_effort=fitting_effort(service, _effort(body.think), "think"),
    )
    with renamed_fields(_NAMES):
        return plan_chat(service, request, namespace)


def _continued(service: Service, body: GenerateRequest, plan: GenerationPlan) -> GenerationPlan:
    """The plan after the tokens of an earlier answer's `context`."""
    if not body.context:
        return plan
    service.check_tokens(body.context, "context")
    [request], start = plan.requests, service.vocabulary.tokenize("", add_special=True)[:1]
    new = request.prompt[1:] if list(request.prompt[:1]) == start else request.prompt
    prompt = service.check_prompt([*body.context, *new], "context")
    return replace(plan, requests=(replace(request, prompt=prompt, from_text=False),))


def _shared(body: OllamaFields) -> dict[str, Any]:
    options = body.options
    asked = options.num_predict if options else None
    return {
        **body.sampling(),
        **(options.sampling() if options else {}),
        "model": body.model,
        "max_tokens": None if asked is None else -1 if asked < 0 else max(asked, 1),
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


def _check_context(service: Service, body: OllamaFields) -> None:
    """Say so where the context is smaller than was asked for."""
    asked = body.options.num_ctx if body.options else None
    if asked is not None and asked > service.context_tokens:
        notify(f"options.num_ctx: the context here is {service.context_tokens} tokens")


def _message(message: OllamaMessage) -> Message:
    calls = [
        EarlierCall.of(call.id or f"call_{i}", call.function.name, call.function.arguments)
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


# The answer


class OllamaAnswer(Answer):
    """The answer to one request for a chat or a text."""

    media_type = LINES

    def __init__(self, service: Service, body: OllamaFields, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._body = body
        self._began_s = perf_counter()
        [self._choice] = self.choices
        self._num_sent = 0
        """how many tool calls were sent; each is sent when it is complete"""

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        said = self._said(pieces)
        if any(piece.kind != "call" for piece in pieces) or "tool_calls" in said.get("message", ()):
            yield self._head | said | {"done": False}
        if choice.is_over:
            yield self._head | self._said(()) | self._end()

    def whole(self) -> dict[str, Any]:
        return self._head | self._said(self._choice.pieces) | self._end()

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        return ollama_error(500, body)

    @property
    def _head(self) -> dict[str, Any]:
        return {"model": self._body.model or self.service.name, "created_at": now()}

    def _complete_calls(self) -> list[ToolCall]:
        """The calls that were completed since this was last asked. One that is cut never is: its arguments
        would be no object."""
        calls = self._choice.calls[self._num_sent :]
        if calls and (not self._choice.is_over or parsed_arguments(calls[-1].arguments) is None):
            calls.pop()
        self._num_sent += len(calls)
        return calls

    def _said(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content, thinking = joined(pieces, "content"), joined(pieces, "reasoning")
        logprobs = logprobs_of(pieces, self.service)
        more: dict[str, Any] = {"logprobs": logprobs} if logprobs else {}
        thought = {"thinking": thinking} if thinking else {}
        if isinstance(self._body, GenerateRequest):
            return {"response": content} | thought | more
        message: dict[str, Any] = {"role": "assistant", "content": content} | thought
        if calls := self._complete_calls():
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
                }
                for call in calls
            ]
        return {"message": message} | more

    def _end(self) -> dict[str, Any]:
        """Why the answer ended, and what it took, in nanoseconds."""
        choice, sums = self._choice, self.sums()
        times = sums["outrider"]["times"]
        end: dict[str, Any] = {
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
        if isinstance(self._body, GenerateRequest) and not self._body.raw:
            end["context"] = [*choice.request.prompt, *choice.completion.tokens]
        return end


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
