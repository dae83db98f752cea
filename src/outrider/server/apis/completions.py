"""OpenAI's completions: texts to be continued as they stand, or with a gap to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.core.data import Piece, TokenLogprob
from outrider.core.data import Request as EngineRequest
from outrider.core.errors import InputError
from outrider.models.infill import Infill
from outrider.server.apis import plan, shapes
from outrider.server.apis.answers import MIN_LOGPROB, Choice, ChunkedAnswer, answer, joined
from outrider.server.apis.shapes import Json
from outrider.server.errors import invalid_field, problem_of
from outrider.server.service import Service

router = APIRouter(tags=["text"])

_OPENAI_MAX_TOKENS = 16
_MAX_PROMPTS = 128

Prompt = str | list[int]


class CompletionRequest(shapes.TextRequest):
    """Texts to be continued as they stand, without a chat template."""

    renamed: ClassVar = dict.fromkeys(("max_completion_tokens", "n_predict", "num_predict"), "max_tokens")

    prompt: shapes.Prompts
    suffix: str | None = None
    """what follows the text that is asked for, with a model that can fill in a middle"""
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    max_tokens: shapes.MaxTokens | None = None
    """16 unless the server is set otherwise, as OpenAI's; -1: no limit"""
    logprobs: shapes.NumLogprobs | None = None


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue texts as they stand; with `stream`, as server-sent events."""
    return await answer(request, body, plan_completions, CompletionAnswer)


# The plan


def plan_completions(service: Service, body: CompletionRequest, namespace: str) -> plan.GenerationPlan:
    """The engine requests: the choices of the first prompt, then those of the second. Raises Problem."""
    given = prompts_of(body.prompt)
    max_tokens = plan.answer_tokens(service.settings, body.max_tokens, _OPENAI_MAX_TOKENS, "max_tokens")
    prompts = [_with_suffix(service, prompt, body.suffix, max_tokens) for prompt in given]
    asked = EngineRequest(
        prompts[0],
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        scope=namespace,
        from_text=all(isinstance(prompt, str) for prompt in given),
    )
    return plan_texts(service, body, asked, prompts)


def plan_texts(
    service: Service,
    body: shapes.TextRequest,
    asked: EngineRequest,
    prompts: Sequence[tuple[int, ...]],
) -> plan.GenerationPlan:
    """The engine requests for texts after these prompts, in order. Raises Problem."""
    grammar, field = plan.grammar_of(body)
    if grammar is not None:
        plan.compile_grammar(service, body, grammar, field)
    return plan.plan_of(service, body, replace(asked, grammar=grammar), prompts)


def prompts_of(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """The prompts of a request. Raises Problem for too many."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    if len(given) > _MAX_PROMPTS:
        raise invalid_field("prompt", f"it has more than {_MAX_PROMPTS} prompts. Send them in parts.")
    return cast("list[Prompt]", given)


def prompt_tokens(service: Service, prompt: Prompt) -> tuple[int, ...]:
    """The tokens of a prompt; control tokens that it spells are read as such. Raises Problem for one that
    does not fit."""
    if not isinstance(prompt, str):
        return service.check_prompt(prompt, "prompt")
    service.check_length(prompt, "prompt")
    if service.controls.count(prompt) >= service.context_tokens:
        why = "it has too many control tokens to fit."
        raise invalid_field("prompt", why, code="context_length_exceeded")
    try:
        return service.check_prompt(service.vocabulary.tokenize(prompt, parse_special=True), "prompt")
    except InputError as error:
        raise problem_of(error, "prompt") from None


def _with_suffix(
    service: Service, prompt: Prompt, suffix: str | None, max_tokens: int | None
) -> tuple[int, ...]:
    if not suffix:
        return prompt_tokens(service, prompt)
    if not isinstance(prompt, str):
        raise invalid_field("suffix", "it needs a prompt of text. Give one, or leave it out.")
    return infill_prompt(service, prompt, suffix, field="suffix", max_tokens=max_tokens)


# Prompts of a model that fills in the middle, as long as the context has room for

_REPOSITORY = "repository\n"
_FILE = "filename\n"
"""clients give no name of the repository or of the file"""
_MIN_ANSWER = 16
"""Tokens that are kept for an answer without a limit: this many at least, else an eighth of the context."""


def infill_prompt(
    service: Service,
    before: str,
    after: str,
    *,
    field: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> tuple[int, ...]:
    """The tokens of a prompt for the text between two others, which begins with `begun`. What does not fit is
    cut far from the gap; of `files` (names and texts) the last ones that fit are taken whole. Raises Problem
    about `field` where the model cannot do it, or nothing has room."""
    tokens = service.infill
    if tokens is None:
        why = f"{service.name} has no tokens for filling in a middle. Load a model that has, or leave it out."
        raise invalid_field(field, why, code="unsupported")
    start = service.vocabulary.tokenize("", add_special=True)[:1]
    middle = _tokens(service, begun)
    answer = max_tokens or max(service.context_tokens // 8, _MIN_ANSWER)
    room = service.context_tokens - answer - len(start) - len(middle) - 3
    if room < 1:
        return service.check_prompt([0] * (service.context_tokens + max(1 - room, 0)), field)
    suffix = _tokens(service, after[: service.max_characters])
    prefix = _tokens(service, before[-service.max_characters :] if before else "")
    suffix = suffix[: max(room // 4, room - len(prefix))]
    prefix = prefix[len(prefix) - min(len(prefix), room - len(suffix)) :]
    extra = _extra(service, tokens, files, room - len(prefix) - len(suffix))
    prompt = tokens.prompt(prefix, suffix, suffix_first=service.settings.spm_infill)
    return service.check_prompt([*start, *extra, *prompt, *middle], field)


def _extra(service: Service, tokens: Infill, files: Sequence[tuple[str, str]], room: int) -> list[int]:
    """The last files that fit, each whole, and the name of the file that is written."""
    if not files:
        return []
    head = [] if tokens.repository is None else [tokens.repository, *_tokens(service, _REPOSITORY)]
    last = [] if tokens.file is None else [tokens.file, *_tokens(service, _FILE)]
    kept: list[list[int]] = []
    room -= len(head) + len(last)
    for name, text in reversed(files):
        mark = [] if tokens.file is None else [tokens.file, *_tokens(service, f"{name}\n")]
        part = [*mark, *_tokens(service, text[: service.max_characters])]
        room -= len(part)
        if room < 0:
            break
        kept.insert(0, part)
    return [*head, *(token for part in kept for token in part), *last] if kept else []


def _tokens(service: Service, text: str) -> list[int]:
    """The tokens of a client's text; control tokens that it spells are text."""
    return service.vocabulary.tokenize(text, add_special=False) if text else []


# The answer


class CompletionAnswer(ChunkedAnswer):
    """The answer to one request for completions."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    nothing = ""

    def _whole(self, choice: Choice) -> Json:
        return self._entry(choice, choice.content, choice.pieces, choice.finish_reason)

    def _deltas(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[tuple[Any, Sequence[Piece]]]:
        del choice
        if pieces:
            yield joined(pieces, "content"), pieces

    def _entry(self, choice: Choice, delta: Any, pieces: Sequence[Piece], finish_reason: str | None) -> Json:
        scored = [one for piece in pieces for one in piece.logprobs]
        logprobs = _logprobs(self.service, scored) if scored else None
        return {"index": choice.index, "text": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(service: Service, scored: Sequence[TokenLogprob]) -> Json:
    def name(token: int) -> str:
        spelled = service.spelled(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # as OpenAI spells a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def top(one: TokenLogprob) -> dict[str, float]:
        """Of two tokens with one name the likelier."""
        names = {name(token): max(logprob, MIN_LOGPROB) for token, logprob in reversed(one.top)}
        return dict(reversed(names.items()))

    return {
        "tokens": [name(one.token) for one in scored],
        "token_logprobs": [max(one.logprob, MIN_LOGPROB) for one in scored],
        "top_logprobs": [top(one) for one in scored],
    }
