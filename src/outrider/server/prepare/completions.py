"""Requests for completions as requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.errors import InputError
from outrider.server.errors import invalid_field, problem_of
from outrider.server.prepare.infill import infill_prompt
from outrider.server.prepare.parameters import answer_tokens, check_choices, grammar_of
from outrider.server.prepare.plan import GenerationPlan, compile_grammar, plan_of
from outrider.server.protocol.requests import CompletionRequest, TextRequest
from outrider.server.service import Service

_OPENAI_MAX_TOKENS = 16

Prompt = str | list[int | str]
"""text, or tokens; llama-server's may have text among the tokens"""


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
    prompts = prompts_of(body.prompt)
    max_tokens = answer_tokens(service.settings, body.max_tokens, _OPENAI_MAX_TOKENS, "max_tokens")
    return plan_texts(
        service,
        body,
        [_with_suffix(service, prompt, body.suffix, max_tokens) for prompt in prompts],
        namespace,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        echoes=tuple(
            _echo(service, prompt) if body.echo else "" for prompt in prompts for _ in range(number)
        ),
    )


def plan_texts(
    service: Service,
    body: TextRequest,
    prompts: Sequence[tuple[int, ...]],
    namespace: str,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    notices: Sequence[str] = (),
    echoes: tuple[str, ...] = (),
) -> GenerationPlan:
    """The requests for texts after these prompts, in their order. Raises Problem."""
    number = body.n or 1
    check_choices(service.settings, number * len(prompts), "n" if number > 1 else "prompt")
    grammar, field = grammar_of(body, service.settings)
    compiled = compile_grammar(service, body, grammar, field) if grammar else ()
    return plan_of(
        service,
        body,
        prompts,
        namespace,
        max_tokens=max_tokens,
        grammar=grammar,
        notices=(*notices, *compiled),
        logprobs=logprobs,
        echoes=echoes,
    )


def prompts_of(given: str | Sequence[int | str | list[int] | list[int | str]]) -> list[Prompt]:
    """The prompts of a request: a list with a number in it is one, any other is several. Raises Problem."""
    if isinstance(given, str):
        return [given]
    if any(isinstance(part, int) for part in given):
        if any(isinstance(part, list) for part in given):
            raise invalid_field("prompt", "tokens and lists are mixed in it. Give a list of lists, or one.")
        return [[part for part in given if not isinstance(part, list)]]
    return [part if isinstance(part, str) else list(part) for part in given if not isinstance(part, int)]


def prompt_tokens(service: Service, prompt: Prompt) -> tuple[int, ...]:
    """The tokens of a prompt, which is the client's own: control tokens that it spells are read as such.
    Raises Problem for one that does not fit."""
    tokens: list[int] = []
    for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        tokens += [part] if isinstance(part, int) else _text_tokens(service, part, begins=i == 0)
    return service.check_prompt(tokens, "prompt")


def _text_tokens(service: Service, text: str, *, begins: bool) -> list[int]:
    service.check_length(text, "prompt")
    if service.controls.count(text) >= service.context_tokens:
        why = "it has too many control tokens to fit."
        raise invalid_field("prompt", why, code="context_length_exceeded")
    try:
        return service.vocabulary.tokenize(text, add_special=begins, parse_special=True)
    except InputError as error:
        raise problem_of(error, "prompt") from None


def _with_suffix(
    service: Service, prompt: Prompt, suffix: str | None, max_tokens: int | None
) -> tuple[int, ...]:
    if not suffix:
        return prompt_tokens(service, prompt)
    if not isinstance(prompt, str):
        raise invalid_field("suffix", "it goes with a prompt that is text. Give text, or leave it out.")
    return infill_prompt(service, prompt, suffix, field="suffix", max_tokens=max_tokens)


def _echo(service: Service, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(part if isinstance(part, str) else service.text_of([part]) for part in prompt)
