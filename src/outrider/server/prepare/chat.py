"""A chat request as requests of the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.core.data import Grammar, Request
from outrider.core.errors import InputError
from outrider.core.params import Drafting
from outrider.formats import Named, ToolChoice, ToolSpec
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
from outrider.server.shapes.chat import ChatRequest, Effort
from outrider.server.shapes.messages import Message
from outrider.server.shapes.tools import NamedTool

__all__ = ["choice_of", "plan_chat", "render", "tokens_of"]

_REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"})


def plan_chat(service: Service, asked: ChatRequest, scope: str) -> Plan:
    """The requests that a chat request asks for. Raises Problem."""
    service.check_model(asked.model)
    tools = [_spec(tool.function.model_dump()) for tool in asked.tools or ()]
    choice = choice_of(asked.tool_choice, tools)
    parallel = asked.parallel_tool_calls is not False
    variables, notices = _variables(service, asked)
    text = render(service, asked.messages, tools, choice, variables, parallel=parallel)
    unmarked = "".join(service.spelling.parts(text))
    grammar, grammar_notices = _grammar(service, asked, tools, choice, unmarked)
    drafting = drafting_of(asked.speculation, has_model=service.draft_name is not None)
    prediction, prediction_notices = prediction_of(service, asked.prediction)
    sampling = sampling_of(asked, service.defaults)
    request = Request(
        prompt=service.check_prompt(tokens_of(service, text), "messages"),
        sampling=sampling,
        max_tokens=service.limits.answer_tokens(*_asked_tokens(asked)),
        stop=stop_of(asked),
        ignore_end=bool(asked.ignore_eos),
        speculate=drafting is not None,
        verification=verification_of(asked, service.verification, sampling, bitwise=service.session.bitwise),
        logprobs=_logprobs(asked),
        grammar=grammar,
        drafting=drafting or Drafting(),
        prediction=prediction,
        scope=scope,
        visible=service.format.visible,
    )
    number = service.limits.check_choices(asked.n or 1, "n")
    return Plan(
        requests=choices_of(request, number),
        choices_per_prompt=number,
        policy=policy_of(service, request),
        bitwise=is_bitwise(service, request),
        notices=(*notices, *grammar_notices, *prediction_notices),
        reader=partial(
            service.format.reader, [] if choice == "none" else tools, reasoning=True, prompt=unmarked
        ),
        show_sources=bool(asked.speculation and asked.speculation.show_sources),
    )


def _spec(function: dict[str, Any]) -> ToolSpec:
    return ToolSpec(
        function["name"],
        function["description"] or "",
        function["parameters"] or {},
        bool(function["strict"]),
    )


def choice_of(asked: str | NamedTool | None, tools: list[ToolSpec]) -> ToolChoice:
    """Whether tools may or must be called. Raises Problem for a tool that is not there."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        why = f"two of them are called {twice}. Rename one."
        raise wrong("tools", why)
    if isinstance(asked, NamedTool):
        if asked.function.name not in names:
            why = f"there is no tool {asked.function.name}. Choose one of `tools`."
            raise wrong("tool_choice", why)
        return Named(asked.function.name)
    if asked == "required" and not tools:
        why = "there are no tools to choose from. Give some, or leave it out."
        raise wrong("tool_choice", why)
    return (asked or "auto") if tools else "none"  # type: ignore[return-value]


def render(
    service: Service,
    messages: list[Message],
    tools: list[ToolSpec],
    choice: ToolChoice,
    variables: dict[str, Any],
    *,
    parallel: bool = True,
) -> str:
    """A conversation under the model's template, with marks in what a client spells of control tokens
    (`tokens_of` reads them). Raises Problem."""
    if service.template is None:
        why = f"{service.name} has no chat template. Use /v1/completions."
        raise wrong("messages", why, code="invalid_prompt")
    try:
        marked = service.spelling.marked
        plain = [marked(message.plain()) for message in messages]
        described = [
            replace(tool, description=marked(tool.description), parameters=marked(tool.parameters))
            for tool in tools
        ]
        told, shown = service.format.conversation(plain, described, choice, parallel=parallel)
        return service.template.render(told, tools=shown, **marked(variables))
    except InputError as error:
        raise problem_of(error, "messages") from None


def tokens_of(service: Service, text: str) -> list[int]:
    """The tokens of a rendered conversation: the template's control tokens, and text. Raises Problem for
    one that cannot fit."""
    assert service.template is not None
    service.check_length(text, "messages")
    first, *others = service.spelling.parts(text)
    tokens = service.template.tokenize(first, service.vocabulary)
    for part in others:
        tokens += service.vocabulary.tokenize(part, add_special=False, parse_special=True)
    return tokens


def _variables(service: Service, asked: ChatRequest) -> tuple[dict[str, Any], list[str]]:
    """What the template is told besides, and what of it the template does not read."""
    variables = dict(asked.chat_template_kwargs or {})
    if taken := sorted(_RESERVED & variables.keys()):
        why = "the server sets it. Leave it out."
        raise wrong(f"chat_template_kwargs.{taken[0]}", why)
    source = service.template.source if service.template else ""
    if asked.reasoning_effort is not None:
        variables |= _effort(asked.reasoning_effort, source)
    unread = [name[:100] for name in variables if name not in source]
    return variables, [f"chat_template_kwargs: this model's template does not read {name}" for name in unread]


def _effort(effort: Effort, source: str) -> dict[str, Any]:
    """How much a model is to think, in its template's words."""
    if "reasoning_effort" in source and effort != "none":
        return {"reasoning_effort": effort}
    if "enable_thinking" in source:
        return {"enable_thinking": effort != "none"}
    why = f"this model's template knows no {effort}. Leave it out."
    raise wrong("reasoning_effort", why, code="unsupported")


def _grammar(
    service: Service, asked: ChatRequest, tools: list[ToolSpec], choice: ToolChoice, prompt: str
) -> tuple[Grammar | None, tuple[str, ...]]:
    """What limits the answer, compiled, and what of it is not enforced."""
    forward = fast_forward_of(asked.speculation)
    grammar, field = grammar_of(asked, forward, service.limits)
    if choice != "none":
        if grammar is not None:
            why = "an answer that may call tools cannot be limited by it. Leave it out, or the tools."
            raise wrong(field, why, code="unsupported")
        return _calls(service, asked, tools, choice, prompt)
    if grammar is None:
        return None, ()
    if asked.ignore_eos:
        why = f"{field} says where the answer ends. Leave one of the two out."
        raise wrong("ignore_eos", why)
    grammar = replace(grammar, after=_reasoning_end(prompt))
    return grammar, service.compile(grammar, field)


def _calls(
    service: Service, asked: ChatRequest, tools: list[ToolSpec], choice: ToolChoice, prompt: str
) -> tuple[Grammar | None, tuple[str, ...]]:
    """How tools are called, compiled, and what of their schemas is not enforced."""
    if asked.ignore_eos:
        why = "an answer that may call tools ends by itself. Leave one of the two out."
        raise wrong("ignore_eos", why)
    size = sum(len(json.dumps(tool.parameters)) for tool in tools)
    service.limits.check_schema(size, "tools")
    try:
        grammar = service.format.grammar(
            tools,
            choice,
            parallel=asked.parallel_tool_calls is not False,
            fast_forward=fast_forward_of(asked.speculation),
            prompt=prompt,
        )
        notices = service.format.notices(tools)
    except InputError as error:
        raise problem_of(error, "tools") from None
    if grammar is None:
        return None, notices
    return grammar, (*notices, *service.compile(grammar, "tools"))


def _reasoning_end(prompt: str) -> str | None:
    """What a limited answer has to wait for: the end of reasoning that the prompt has opened."""
    return next((end for start, end in _REASONING.items() if prompt.rstrip().endswith(start)), None)


def _asked_tokens(asked: ChatRequest) -> tuple[int | None, int | None, str]:
    """How many tokens were asked for, what holds without that, and the field that says so."""
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        why = f"{older} is not max_completion_tokens, {newer}. Leave one of them out."
        raise wrong("max_tokens", why)
    return (newer, None, "max_completion_tokens") if newer is not None else (older, None, "max_tokens")


def _logprobs(asked: ChatRequest) -> int | None:
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs:
        why = "logprobs is not true. Say it, or leave top_logprobs out."
        raise wrong("top_logprobs", why)
    return None
