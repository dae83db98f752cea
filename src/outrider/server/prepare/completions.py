"""A request for completions as requests of the engine."""

from __future__ import annotations

from typing import cast

from outrider.core.errors import InputError
from outrider.server.errors import invalid_field, problem_of
from outrider.server.prepare.parameters import answer_tokens, check_choices, grammar_of
from outrider.server.prepare.plan import GenerationPlan, compile_grammar, plan_of
from outrider.server.protocol.requests import CompletionRequest
from outrider.server.service import Service

_OPENAI_MAX_TOKENS = 16


def plan_completions(service: Service, body: CompletionRequest, namespace: str) -> GenerationPlan:
    """The requests that are asked for: the choices of the first prompt, then those of the second. Raises
    Problem."""
    if body.echo and body.logprobs is not None:
        why = "the prompt has no log probabilities here. Leave echo or logprobs out."
        raise invalid_field("echo", why, code="unsupported")
    number = body.n or 1
    if body.best_of is not None and body.best_of != number:
        why = f"all answers are returned, so it can only be n, which is {number}. Leave it out."
        raise invalid_field("best_of", why, code="unsupported")
    prompts = _prompts(body)
    check_choices(service.settings, number * len(prompts), "n" if number > 1 else "prompt")
    grammar, field = grammar_of(body, service.settings)
    notices = compile_grammar(service, body, grammar, field) if grammar else ()
    return plan_of(
        service,
        body,
        [_tokens(service, prompt) for prompt in prompts],
        namespace,
        max_tokens=answer_tokens(service.settings, body.max_tokens, _OPENAI_MAX_TOKENS, "max_tokens"),
        grammar=grammar,
        notices=notices,
        logprobs=body.logprobs,
        echoes=tuple(
            _text(service, prompt) if body.echo else "" for prompt in prompts for _ in range(number)
        ),
    )


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _tokens(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return service.check_prompt(prompt, "prompt")
    service.check_length(prompt, "prompt")
    if service.controls.count(prompt) >= service.context_tokens:
        why = "it has too many control tokens to fit."
        raise invalid_field("prompt", why, code="context_length_exceeded")
    try:
        # The whole prompt is the client's, as that of a fill-in-the-middle editor, which spells them.
        tokens = service.vocabulary.tokenize(prompt, parse_special=True)
        return service.check_prompt(tokens, "prompt")
    except InputError as error:
        raise problem_of(error, "prompt") from None


def _text(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else service.text_of(prompt)
