"""llama-server's own API.

GET /slots shows one slot for each request that may run, without its text or settings. To save, restore and
erase, slots are the caller's own texts whose KV is stored, the last used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Body, Request
from pydantic import Field
from starlette.responses import Response

from outrider.core.data import Completion, Piece
from outrider.core.data import Request as EngineRequest
from outrider.core.errors import BackendError, InputError
from outrider.core.files import reason_of
from outrider.core.notices import notify
from outrider.core.saved import SavedState
from outrider.engine.tiers.disk import SavedText
from outrider.engine.tiers.folder import Folder, Unusable
from outrider.server.apis import shapes
from outrider.server.apis.answers import Answer, Choice, account_of, joined, logprobs_of
from outrider.server.apis.chat import ChatRequest, rendered
from outrider.server.apis.completions import infill_prompt, plan_texts, prompt_tokens, prompts_of
from outrider.server.apis.generation import EVENTS_TOO, answer
from outrider.server.apis.plan import GenerationPlan, answer_tokens
from outrider.server.apis.shapes import (
    MAX_INT,
    WHOLE,
    Json,
    Many,
    NumTokensOrOff,
    Shape,
    Text,
    TextRequest,
    Token,
)
from outrider.server.errors import Problem, invalid_field
from outrider.server.models import models_of
from outrider.server.service import Service, caller_of

router = APIRouter(tags=["llama-server"])

_TEXT_ALONE = "this server reads text only. Leave it out"
_Mixed = Annotated[Many[Token | Text], Field(min_length=1)]


class LlamaFields(TextRequest):
    """What both endpoints for text have in common. `n_predict` 0: the prompt is read, and kept. After
    `t_max_predict_ms` the answer ends, if it has begun a new line. `response_fields` are those that the
    answer is to have, those of objects as object/field."""

    renamed: ClassVar = {"max_tokens": "n_predict", "max_completion_tokens": "n_predict", "n_cmpl": "n"}
    refused: ClassVar = {name: why for name, why in shapes.REFUSED.items() if name != "n_probs"} | {
        "post_sampling_probs": "probabilities are the model's, before any sampler. Leave it out",
        "lora": "adapters are chosen when the server is started (--lora). Leave it out",
        "multimodal_data": _TEXT_ALONE,
        "image_data": _TEXT_ALONE,
    }

    # A prompt is read whole, filters keep a token at least, and a silent stream has a comment every 15 s.
    ignored: ClassVar = TextRequest.ignored | {"t_max_prompt_ms", "min_keep", "sse_ping_interval"}

    n_predict: NumTokensOrOff | None = None
    n_probs: shapes.NumLogprobs | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[Many[str], Field(max_length=64)] | None = None
    t_max_predict_ms: NumTokensOrOff | None = None
    n_indent: Annotated[int, Field(ge=0, le=MAX_INT), WHOLE] | None = None


class LlamaRequest(LlamaFields):
    """Texts to be continued as they stand: a text, tokens, both mixed, or a list of these."""

    prompt: Text | Annotated[Many[Token | Text | _Mixed], Field(min_length=1)]


class ExtraFile(Shape):
    """Text of another file."""

    ignored: ClassVar = frozenset({"time"})

    text: str
    filename: str | None = None


class InfillRequest(LlamaFields):
    """A gap to be filled, between `input_prefix` and `input_suffix`. `prompt` is how its text begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Many[ExtraFile], Field(max_length=1_000)] | None = None
    prompt: str | None = None


@router.post("/completion", responses=EVENTS_TOO)
@router.post("/completions", responses=EVENTS_TOO)
async def completion(body: LlamaRequest, request: Request) -> Response:
    """Continue texts as they stand, as llama-server; several prompts or choices give a list."""
    return await answer(request, body, plan_llama, LlamaAnswer)


@router.post("/infill", responses=EVENTS_TOO)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill a gap between two texts, with a model that can."""
    return await answer(request, body, plan_infill, LlamaAnswer)


@router.post("/apply-template")
async def apply_template(body: ChatRequest, request: Request) -> Any:
    """The prompt that a request for a chat completion becomes."""
    async with models_of(request).serving(body.model) as service:
        text = await service.prepared(lambda: rendered(service, body))
        return {"prompt": "".join(service.controls.split(text))}


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Any:
    """A model's settings, as far as clients need them."""
    async with models_of(request).serving(model) as service:
        return _props(service)


def _props(service: Service) -> Json:
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
    notify("n_indent: it is not enforced" if body.n_indent else None)
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
        """The text of pieces, their tokens, and the probabilities of these, if any were asked for."""
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
    """llama-server's timings of prompt and answer, and its counts of drafted and accepted tokens."""
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
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            picked[path] = value
    return picked


_MISSING = object()


# Slots

_Result = TypeVar("_Result")


class SlotRequest(Shape):
    """Which file of the server's folder a slot is saved to, or restored from."""

    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")] | None = None
    model: str | None = None


@router.get("/slots")
async def slots(request: Request, model: str | None = None, fail_on_no_slot: str | None = None) -> Any:
    """The slots of a loaded model; with `fail_on_no_slot` an error (503) where none is free."""
    service = models_of(request).loaded(model)
    if service is None:
        return []
    state = service.worker.state()
    if fail_on_no_slot and state.running >= state.max_running:
        raise Problem(503, "no slot is free. Ask again a little later.", code="no_slot", retry_after_s=1)
    return [
        {
            "id": i,
            "id_task": -1,
            "n_ctx": service.context_tokens,
            "speculative": bool(service.session.engine.drafters),
            "is_processing": i < state.running,
        }
        for i in range(state.max_running)
    ]


@router.post("/slots/{slot}")
async def act(
    request: Request,
    slot: int,
    action: Literal["save", "restore", "erase"],
    body: Annotated[SlotRequest, Body(default_factory=SlotRequest)],
) -> Any:
    """Save a text's KV to a file, restore it, or forget it. Slot 0 is the caller's last text."""
    async with models_of(request).serving(body.model) as service:
        scope, slots = caller_of(request).namespace, service.session.engine.slots
        if action == "erase":
            return {"id_slot": slot, "n_erased": await _on_slot(service, slot, scope, slots.erase)}
        if service.slot_folder is None:
            message = "slots are not saved here. Start the server with --slot-save-path."
            raise Problem(501, message, code="not_supported", type="not_supported_error")
        if body.filename is None:
            raise invalid_field("filename", "it is missing. Name a file.")
        own = f".{service.slot_folder.digest(scope)[:16]}" if scope else ""  # callers have their own files
        path = service.slot_folder.path / f"{body.filename}{own}.slot"
        before, done = perf_counter(), _save if action == "save" else _restore
        counts = await done(service, service.slot_folder, path, slot, scope)
        timings = {f"{action}_ms": 1000 * (perf_counter() - before)}
        return {"id_slot": slot, "filename": body.filename, **counts, "timings": timings}


async def _save(service: Service, folder: Folder, path: Path, slot: int, scope: str) -> dict[str, int]:
    tokens, state = await _on_slot(service, slot, scope, service.session.engine.slots.saved)
    text = SavedText(folder.digest(scope), np.array(tokens, np.int32), state.extent)
    try:
        size = await service.prepared(lambda: folder.write(path, text.head(), state.parts))
    except OSError as error:
        message = f"slot: it could not be written ({reason_of(error)}). The server needs more room."
        raise Problem(507, message, code="not_written") from None
    return {"n_saved": len(tokens), "n_written": size}


async def _restore(service: Service, folder: Folder, path: Path, _slot: int, scope: str) -> dict[str, int]:
    try:
        head, parts = await service.prepared(lambda: folder.read(path))
        text = SavedText.of(head)
        if text.scope != folder.digest(scope):
            raise Unusable("it is another key's")
        state, tokens = SavedState(text.extent, tuple(parts)), text.tokens.tolist()
        await service.worker.call(lambda: service.session.engine.slots.put(scope, tokens, state))
    except FileNotFoundError:
        raise invalid_field("filename", "there is no such file. Save one first.") from None
    except (OSError, Unusable) as error:
        why = str(error) if isinstance(error, Unusable) else reason_of(error)
        raise invalid_field("filename", f"the file is not used: {why}. Save it again.") from None
    except (InputError, BackendError) as error:
        raise Problem(503, str(error), code="slot_busy", retry_after_s=1) from None
    return {"n_restored": len(tokens), "n_read": sum(part.nbytes for part in parts)}


async def _on_slot(service: Service, slot: int, scope: str, function: Callable[[int], _Result]) -> _Result:
    """Call a function with the sequence of a caller's text, in the engine's thread."""

    def called() -> _Result:
        texts = service.session.engine.slots.texts(scope)
        if not 0 <= slot < len(texts):
            raise invalid_field("slot", f"{len(texts)} of your texts are stored. Slot 0 is the last of them.")
        return function(texts[slot])

    try:
        return await service.worker.call(called)
    except (InputError, BackendError) as error:
        raise Problem(503, str(error), code="slot_busy", retry_after_s=1) from None
