"""llama-server's requests for text as requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.server.prepare.completions import plan_texts, prompt_tokens, prompts_of
from outrider.server.prepare.infill import infill_prompt
from outrider.server.prepare.parameters import answer_tokens
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.llama import InfillRequest, LlamaFields, LlamaRequest
from outrider.server.service import Service


def plan_llama(service: Service, body: LlamaRequest, namespace: str) -> GenerationPlan:
    """The requests that are asked for: the choices of the first prompt, then those of the second. Raises
    Problem."""
    prompts = [prompt_tokens(service, prompt) for prompt in prompts_of(body.prompt)]
    return _plan(service, body, prompts, namespace)


def plan_infill(service: Service, body: InfillRequest, namespace: str) -> GenerationPlan:
    """The request for what is in a gap. Raises Problem."""
    prompt = infill_prompt(
        service,
        body.input_prefix,
        body.input_suffix,
        field="input_prefix",
        begun=body.prompt or "",
        files=[(file.filename or "tmp", file.text) for file in body.input_extra or ()],
        max_tokens=_max_tokens(service, body),
    )
    return _plan(service, body, [prompt], namespace)


def _plan(
    service: Service, body: LlamaFields, prompts: Sequence[tuple[int, ...]], namespace: str
) -> GenerationPlan:
    plan = plan_texts(
        service,
        body,
        prompts,
        namespace,
        max_tokens=_max_tokens(service, body),
        logprobs=body.n_probs or None,
        notices=("n_indent: it is not enforced",) if body.n_indent else (),
    )
    limit_ms = body.t_max_predict_ms or 0
    return replace(plan, max_decode_s=limit_ms / 1000) if limit_ms > 0 else plan


def _max_tokens(service: Service, body: LlamaFields) -> int | None:
    """For a prompt that is only to be read it is a token, which is not shown."""
    asked = None if body.n_predict is None or body.n_predict < 0 else max(body.n_predict, 1)
    return answer_tokens(service.settings, asked, None, "n_predict")
