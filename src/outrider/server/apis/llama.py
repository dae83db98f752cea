"""llama-server's own API, as far as its clients need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from outrider.core.data import Completion, Piece
from outrider.core.data import Request as EngineRequest
from outrider.server.apis import shapes
from outrider.server.apis.answers import Answer, Choice, account_of, answer, joined, logprobs_of
from outrider.server.apis.chat import ChatRequest, rendered
from outrider.server.apis.completions import infill_prompt, plan_texts, prompt_tokens, prompts_of
from outrider.server.apis.plan import GenerationPlan, answer_tokens
from outrider.server.apis.shapes import Json, Many, NumTokensOrOff, Shape, TextRequest
from outrider.server.models import models_of
from outrider.server.service import Service

router = APIRouter(tags=["llama-server"])


class LlamaFields(TextRequest):
    """What both endpoints for text have in common. `n_predict` 0: the prompt is read, and kept. After
    `t_max_predict_ms` the answer ends, if it has begun a new line. `response_fields` are those that the
    answer is to have, those of objects as object/field."""

    renamed: ClassVar = {"max_tokens": "n_predict", "max_completion_tokens": "n_predict", "n_cmpl": "n"}

    n_predict: NumTokensOrOff | None = None
    n_probs: shapes.NumLogprobs | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[Many[str], Field(max_length=64)] | None = None
    t_max_predict_ms: NumTokensOrOff | None = None


class LlamaRequest(LlamaFields):
    """Texts to be continued as they stand."""

    prompt: shapes.Prompts


class ExtraFile(Shape):
    """Text of another file."""

    text: str
    filename: str | None = None


class InfillRequest(LlamaFields):
    """A gap to be filled, between `input_prefix` and `input_suffix`. `prompt` is how its text begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Many[ExtraFile], Field(max_length=1_000)] | None = None
    prompt: str | None = None


@router.post("/completion")
@router.post("/completions")
async def completion(body: LlamaRequest, request: Request) -> Response:
    """Continue texts as they stand, as llama-server; several prompts or choices give a list."""
    return await answer(request, body, plan_llama, LlamaAnswer)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill a gap between two texts, with a model that can."""
    return await answer(request, body, plan_infill, LlamaAnswer)


@router.post("/apply-template")
async def apply_template(body: ChatRequest, request: Request) -> Any:
    """The prompt that a request for a chat completion becomes."""
    async with models_of(request).serving(body.model) as service:
        text, _ = await service.prepared(lambda: rendered(service, body))
        return {"prompt": "".join(service.controls.split(text))}


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Any:
    """A model's settings, as far as clients need them."""
    async with models_of(request).serving(model) as service:
        template, sampling = service.template, service.defaults
        params = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {
            "default_generation_settings": {"n_ctx": service.context_tokens, "params": params},
            "total_slots": service.worker.state().max_running,
            "model_alias": service.name,
            "model_path": service.session.target.name,
            "chat_template": template.source if template else "",
            "bos_token": template.bos if template else "",
            "eos_token": template.eos if template else "",
            "modalities": {"vision": False, "audio": False},
            "build_info": service.fingerprint,
            "is_sleeping": False,
        }


# The plan


def plan_llama(service: Service, body: LlamaRequest, namespace: str) -> GenerationPlan:
    """The engine requests: the choices of the first prompt, then those of the second. Raises Problem."""
    given = prompts_of(body.prompt)
    is_text = all(isinstance(prompt, str) for prompt in given)
    return _plan(service, body, [prompt_tokens(service, prompt) for prompt in given], namespace, is_text)


def plan_infill(service: Service, body: InfillRequest, namespace: str) -> GenerationPlan:
    """The engine request for the text of a gap. Raises Problem."""
    prompt = infill_prompt(
        service,
        body.input_prefix,
        body.input_suffix,
        field="input_prefix",
        begun=body.prompt or "",
        files=[(file.filename or "tmp", file.text) for file in body.input_extra or ()],
        max_tokens=_max_tokens(service, body),
    )
    return _plan(service, body, [prompt], namespace, True)


def _plan(
    service: Service, body: LlamaFields, prompts: list[tuple[int, ...]], namespace: str, from_text: bool
) -> GenerationPlan:
    asked = EngineRequest(
        prompts[0],
        max_tokens=_max_tokens(service, body),
        logprobs=body.n_probs or None,
        scope=namespace,
        from_text=from_text,
    )
    plan = plan_texts(service, body, asked, prompts)
    limit_ms = body.t_max_predict_ms or 0
    return replace(plan, max_decode_s=limit_ms / 1000) if limit_ms > 0 else plan


def _max_tokens(service: Service, body: LlamaFields) -> int | None:
    """A prompt that is only to be read (0) gets one token, which is not shown."""
    asked = 1 if body.n_predict == 0 else body.n_predict
    return answer_tokens(service.settings, asked, None, "n_predict")


# The answer


class LlamaAnswer(Answer):
    """The answer to one request of llama-server's; of several prompts or choices a list."""

    def __init__(self, service: Service, body: LlamaFields, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._body = body
        self._reads_only = body.n_predict == 0
        self._with_tokens = bool(body.return_tokens or body.stream)

    def whole(self) -> Json | list[Json]:
        found = [self._whole(choice, choice.pieces) for choice in self.choices]
        return found if len(found) > 1 else found[0]

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        if choice.is_over:
            yield self._whole(choice, pieces)
        elif pieces and not self._reads_only:
            yield {
                "index": choice.index,
                **self._shown(pieces),
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": choice.counts["generated_tokens"],
                "tokens_evaluated": len(choice.request.prompt),
            }

    def _shown(self, pieces: Sequence[Piece]) -> Json:
        scored = logprobs_of(pieces, self.service, with_ids=True)
        return {
            "content": joined(pieces, "content"),
            "tokens": [token for piece in pieces for token in piece.tokens] if self._with_tokens else [],
            **({"completion_probabilities": scored} if self._body.n_probs else {}),
        }

    def _whole(self, choice: Choice, pieces: Sequence[Piece]) -> Json:
        completion, account = choice.completion, account_of(choice, self.service.policy)
        is_limited = choice.finish_reason == "length"
        sampling: Json = asdict(choice.request.sampling)
        settings = {name: value for name, value in sampling.items() if not isinstance(value, tuple)}
        settings |= {"n_predict": -1 if self._body.n_predict is None else self._body.n_predict}
        found = {
            "index": choice.index,
            **self._shown(() if self._reads_only else pieces),
            "id_slot": -1,
            "stop": True,
            "model": self.service.name,
            "tokens_predicted": 0 if self._reads_only else account["generated_tokens"],
            "tokens_evaluated": completion.prompt_tokens,
            "generation_settings": settings | {"n_ctx": self.service.context_tokens, "seed": completion.seed},
            "prompt": self.service.text_of(choice.request.prompt),
            "has_new_line": "\n" in choice.content,
            "truncated": completion.finish_reason == "context",
            "stop_type": "limit" if is_limited else "word" if completion.stop is not None else "eos",
            "stopping_word": completion.stop or "",
            "tokens_cached": completion.reused_tokens,
            "timings": _timings(completion, account),
            "outrider": account | {"notices": self.notices},
        }
        wanted = self._body.response_fields
        return found if wanted is None else _picked(found, wanted)


def _timings(completion: Completion, account: Json) -> Json:
    times, found = account["times"], Json()
    for name, number, seconds in (
        ("prompt", completion.prompt_tokens - completion.reused_tokens, times["prefill_s"]),
        ("predicted", account["generated_tokens"], times["decode_s"]),
    ):
        found |= {
            f"{name}_n": number,
            f"{name}_ms": seconds * 1000,
            f"{name}_per_token_ms": seconds * 1000 / max(number, 1),
            f"{name}_per_second": number / seconds if seconds else 0.0,
        }
    drafted = {"draft_n": account["drafted_tokens"], "draft_n_accepted": account["accepted_tokens"]}
    return {"cache_n": completion.reused_tokens} | found | drafted


def _picked(found: Json, wanted: Sequence[str]) -> Json:
    """The wanted fields; `a/b` is field b of object a, under that name. Missing ones are left out."""
    picked: Json = {}
    for path in wanted:
        value: Any = found
        with suppress(KeyError, TypeError):
            for name in path.split("/"):
                value = value[name]
            picked[path] = value
    return picked
