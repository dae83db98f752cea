"""A request for completions as requests of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from outrider.core.data import Request
from outrider.core.errors import InputError
from outrider.core.params import Drafting
from outrider.server.prepare.grammars import grammar_of
from outrider.server.prepare.plan import Plan, choices_of, is_bitwise, policy_of, prediction_of
from outrider.server.prepare.settings import (
    drafting_of,
    fast_forward_of,
    sampling_of,
    stop_of,
    verification_of,
)
from outrider.server.problems import problem_of, wrong
from outrider.server.service import Service
from outrider.server.shapes.completions import CompletionRequest

__all__ = ["plan_completions"]

_OPENAI_MAX_TOKENS = 16


def plan_completions(service: Service, asked: CompletionRequest, scope: str) -> Plan:
    """The requests that are asked for: the choices of the first prompt, then those of the second. Raises
    Problem."""
    service.check_model(asked.model)
    if asked.echo and asked.logprobs is not None:
        why = "the prompt has no log probabilities here. Leave echo or logprobs out."
        raise wrong("echo", why, code="unsupported")
    number = asked.n or 1
    if asked.best_of is not None and asked.best_of != number:
        why = f"all answers are returned, so it can only be n, which is {number}. Leave it out."
        raise wrong("best_of", why, code="unsupported")
    prompts = _prompts(asked)
    service.limits.check_choices(number * len(prompts), "n" if number > 1 else "prompt")
    model, notices = _request(service, asked, scope)
    requests: list[Request] = []
    lead: list[str] = []
    for prompt in prompts:
        tokens = _tokens(service, prompt)
        requests += choices_of(replace(model, prompt=tokens), number)
        lead += [_text(service, prompt) if asked.echo else ""] * number
    return Plan(
        requests=tuple(requests),
        policy=policy_of(service, model),
        bitwise=is_bitwise(service, model),
        notices=notices,
        lead=tuple(lead),
        choices_per_prompt=number,
        show_sources=bool(asked.speculation and asked.speculation.show_sources),
    )


def _prompts(asked: CompletionRequest) -> list[str | list[int]]:
    prompt = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _tokens(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return service.check_prompt(prompt, "prompt")
    service.check_length(prompt, "prompt")
    if service.spelling.num_controls(prompt) >= service.context_tokens:
        raise wrong("prompt", "it has too many control tokens to fit.", code="context_length_exceeded")
    try:
        # The whole prompt is the client's, as that of a fill-in-the-middle editor, which spells them.
        tokens = service.vocabulary.tokenize(prompt, parse_special=True)
        return service.check_prompt(tokens, "prompt")
    except InputError as error:
        raise problem_of(error, "prompt") from None


def _text(service: Service, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(service.vocabulary.piece, prompt)).decode("utf-8", errors="replace")


def _request(service: Service, asked: CompletionRequest, scope: str) -> tuple[Request, tuple[str, ...]]:
    """What the requests of all prompts have in common, and what of the grammar is not enforced."""
    forward = fast_forward_of(asked.speculation)
    grammar, field = grammar_of(asked, forward, service.limits)
    notices: tuple[str, ...] = ()
    if grammar is not None:
        if asked.ignore_eos:
            why = f"{field} says where the answer ends. Leave one of the two out."
            raise wrong("ignore_eos", why)
        notices = service.compile(grammar, field)
    drafting = drafting_of(asked.speculation, has_model=service.draft_name is not None)
    prediction, prediction_notices = prediction_of(service, asked.prediction)
    sampling = sampling_of(asked, service.defaults)
    request = Request(
        prompt=(0,),  # each prompt takes its place
        sampling=sampling,
        max_tokens=service.limits.answer_tokens(asked.max_tokens, _OPENAI_MAX_TOKENS, "max_tokens"),
        stop=stop_of(asked),
        ignore_end=bool(asked.ignore_eos),
        speculate=drafting is not None,
        verification=verification_of(asked, service.verification, sampling, bitwise=service.session.bitwise),
        logprobs=asked.logprobs,
        grammar=grammar,
        drafting=drafting or Drafting(),
        prediction=prediction,
        scope=scope,
    )
    return request, (*notices, *prediction_notices)
