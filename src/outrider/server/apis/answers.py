"""From a plan to a response: generations that run together give one answer, whole or as a stream. OpenAI's
come in chunks, those of typed events in parts."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.core.data import Completion, Kind, Piece, Request, Update
from outrider.core.errors import OutriderError
from outrider.policy.auto import AutoPolicy
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import GenerationRequest, Json, TextRequest
from outrider.server.errors import Problem, internal_error, problem_of
from outrider.server.keys import Caller, TokenUsage
from outrider.server.models import models_of
from outrider.server.service import Service, caller_of
from outrider.server.worker import Job, Outcome
from outrider.session.readout import estimate_speedup, read_out

EVENTS, LINES = "text/event-stream", "application/x-ndjson"

MIN_LOGPROB = -9_999.0
"""OpenAI's value for a token that is next to impossible; JSON has no infinity."""
_KINDS: tuple[Kind, ...] = ("reasoning", "content", "call")
_OF_DRAFTERS = ("drafted_tokens", "accepted_tokens", "calls_saved")
_QUIET_S = 15.0
"""After this silence a comment is sent, so that no proxy closes the connection."""
_COUNTS = ("target_calls", "draft_calls", "generated_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one generation has given so far."""

    index: int
    request: Request
    pieces: list[Piece] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTS, 0)))
    job: Job = field(init=False)
    began_s: float = 0.0
    """loop time of the first tokens"""
    is_cut: bool = False
    """whether the server ended it because of the request's time limit"""
    is_over: bool = False
    completion: Completion = field(init=False)
    """set when the generation is over"""

    def take(self, outcome: Update | Completion) -> Sequence[Piece]:
        """Add the outcome of a step, or the end; returns the pieces that it gives."""
        if isinstance(outcome, Completion):
            self.completion, self.is_over, pieces = outcome, True, merged(outcome.rest)
        else:
            record, pieces = outcome.record, merged(outcome.pieces)
            if record.kind == "decode":
                spent = (1, record.work.calls, len(record.tokens), len(record.draft), record.num_accepted)
                self.counts.update(dict(zip(_COUNTS, spent, strict=True)))
        for piece in pieces:
            if piece.name:
                self.calls.append(ToolCall(f"call_{uuid4().hex[:24]}", piece.name))
            elif piece.kind == "call":
                self.calls[piece.call].arguments += piece.text
        self.pieces += pieces
        return pieces

    @property
    def content(self) -> str:
        return joined(self.pieces, "content")

    @property
    def reasoning(self) -> str:
        return joined(self.pieces, "reasoning")

    def progress(self, pieces: Iterable[Piece]) -> Json:
        """The `outrider` object of a chunk: the sources of its content, and the counts so far."""
        shown = [[piece.text, piece.source] for piece in pieces if piece.kind == "content"]
        return {"pieces": shown, **self.counts}

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the choice ended, in OpenAI's terms."""
        if self.completion.finish_reason in ("length", "context", "cancelled"):
            return "length"
        return "tool_calls" if self.calls else "stop"


class Answer(ABC):
    """An answer that can be given whole or as the events of a stream. `id` has no prefix; `notices` say what
    of the request was not enforced, not read, not used."""

    media_type = EVENTS
    """of the stream: server-sent events, or lines of JSON"""
    done = ""
    """what follows the last event of a complete stream"""

    def __init__(self, service: Service, plan: GenerationPlan) -> None:
        self.service = service
        self.plan = plan
        self.id = uuid4().hex
        self.notices: list[str] = []
        self.choices = [Choice(i, request) for i, request in enumerate(plan.requests)]

    @abstractmethod
    def whole(self) -> Any:
        """The complete answer as JSON data, when every choice has ended."""

    def first(self) -> Iterator[Json]:
        """The events before any text."""
        yield from ()

    @abstractmethod
    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        """The events for what a choice has taken: more pieces, and its end where it is over."""

    def failed(self, problem: Problem, path: str) -> Json:
        """The event that ends a stream with an error, at the path of this API."""
        return problem.body_at(path)

    def sums(self) -> Json:
        """`usage` in OpenAI's terms, and the `outrider` object (docs/api.md): what speculation did. Of
        several choices its counts are sums, and `choices` has those of each."""
        each = [account_of(choice, self.service.policy) for choice in self.choices]
        completion = self.choices[0].completion
        account = {
            "policy": self.plan.policy,
            "rule": completion.rule,
            "bitwise": self.plan.bitwise,
            **(each[0] if len(each) == 1 else _together(each)),
            "notices": self.notices,
        }
        first_choices = self.choices[:: self.plan.choices_per_prompt]  # those of one prompt share it
        prompts = [choice.completion for choice in first_choices]
        prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": account["generated_tokens"],
            "total_tokens": prompt_tokens + account["generated_tokens"],
            "prompt_tokens_details": {
                "cached_tokens": sum(completion.reused_tokens for completion in prompts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": account["reasoning_tokens"],
                "audio_tokens": 0,
                "accepted_prediction_tokens": account["accepted_tokens"],
                "rejected_prediction_tokens": account["drafted_tokens"] - account["accepted_tokens"],
            },
        }
        return {"usage": usage, "outrider": account}


@dataclass(slots=True)
class AnswerPart:
    """A block or an item of an answer: pieces of one kind, of a call its arguments."""

    kind: Kind
    index: int
    call: ToolCall | None
    id: str = field(default_factory=lambda: uuid4().hex)
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)


class PartedAnswer(Answer):
    """An answer of one choice in parts, whole or as events. Each part is complete when the next begins."""

    def __init__(self, service: Service, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        [self._choice] = self.choices
        self._parts: list[AnswerPart] = []

    def whole(self) -> Json:
        for _ in self.next(self._choice, self._choice.pieces):
            pass
        return self._whole()

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        for piece in pieces:
            part = self._parts[-1] if self._parts else None
            if part is None or part.kind != piece.kind or piece.name:
                call = choice.calls[piece.call] if piece.name else None
                self._parts.append(AnswerPart(piece.kind, len(self._parts), call))
                if part is not None:
                    yield from self._closed(part)
                part = self._parts[-1]
                yield from self._opened(part)
            if not piece.name:
                part.text += piece.text
                yield self._grown(part, piece)
        if choice.is_over:
            if self._parts:
                yield from self._closed(self._parts[-1])
            yield from self._end()

    # The whole answer, when its parts are complete, and the events for a part that begins, has grown by a
    # piece or is complete, and for the end of the answer.

    @abstractmethod
    def _whole(self) -> Json: ...
    @abstractmethod
    def _opened(self, part: AnswerPart) -> Iterator[Json]: ...
    @abstractmethod
    def _grown(self, part: AnswerPart, piece: Piece) -> Json: ...
    @abstractmethod
    def _closed(self, part: AnswerPart) -> Iterator[Json]: ...
    @abstractmethod
    def _end(self) -> Iterator[Json]: ...


class ChunkedAnswer(Answer):
    """An answer of OpenAI's: choices, which a stream gives in chunks."""

    done = "[DONE]"
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    nothing: ClassVar[Any]
    """what a choice's last chunk adds"""

    def __init__(self, service: Service, body: TextRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._num_open = len(self.choices)
        self._head = {
            "id": f"{self.id_prefix}{self.id}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint if plan.repeats else None,
        }

    def whole(self) -> Json:
        choices = [self._whole(choice) for choice in self.choices]
        return {**self._head, "object": self.object, "choices": choices, **self.sums()}

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        for delta, shown in self._deltas(choice, pieces):
            chunk = self._chunk(choice, delta, shown)
            if self.plan.show_sources:
                chunk["outrider"] = choice.progress(shown)
            yield chunk
        if choice.is_over:
            self._num_open -= 1
            chunk = self._chunk(choice, self.nothing, finish_reason=choice.finish_reason)
            sums: Json = {} if self._num_open else self.sums()
            if self._with_usage:
                yield chunk
                if sums:
                    yield {**self._head, "choices": [], **sums}
            else:
                yield chunk | {name: sums[name] for name in sums if name != "usage"}

    def _chunk(
        self, choice: Choice, delta: Any, pieces: Sequence[Piece] = (), finish_reason: str | None = None
    ) -> Json:
        chunk = {**self._head, "choices": [self._entry(choice, delta, pieces, finish_reason)]}
        return chunk | {"usage": None} if self._with_usage else chunk

    # The entries of `choices` in the whole answer and in a chunk that has these pieces; and the deltas for
    # pieces, as few as possible, with the pieces of each.

    @abstractmethod
    def _whole(self, choice: Choice) -> Json: ...
    @abstractmethod
    def _entry(
        self, choice: Choice, delta: Any, pieces: Sequence[Piece], finish_reason: str | None
    ) -> Json: ...
    @abstractmethod
    def _deltas(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[tuple[Any, Sequence[Piece]]]: ...


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind, call and source as one: those of a step make few chunks."""
    found: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (piece.kind, piece.call, piece.name, piece.source)):
        first, *others = group
        for other in others:
            tokens, logprobs = first.tokens + other.tokens, first.logprobs + other.logprobs
            first = first._replace(text=first.text + other.text, tokens=tokens, logprobs=logprobs)
        found.append(first)
    return found


def joined(pieces: Iterable[Piece], kind: Kind) -> str:
    """The text of the pieces of one kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def logprobs_of(
    pieces: Iterable[Piece], service: Service, kind: Kind = "content", *, with_ids: bool = False
) -> list[Json]:
    """The log probabilities of the tokens of pieces of one kind, in the shape of a chat's `logprobs.content`.
    A token that is part of a character has U+FFFD as its text and its true bytes."""

    def entry(token: int, logprob: float) -> Json:
        spelled = service.spelled(token)
        text = spelled.decode("utf-8", errors="replace")
        found = {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(spelled)}
        return {"id": token, **found} if with_ids else found

    return [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for piece in pieces
        for one in piece.logprobs
        if piece.kind == kind
    ]


def parsed_arguments(text: str) -> Json | None:
    """The arguments of a tool call; None for one that was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def account_of(choice: Choice, policy: AutoPolicy | None) -> Json:
    """What speculation did for one choice."""
    readout = read_out(choice.completion)
    forced, time = readout.drafters.get("grammar"), readout.time_s
    estimate, why = estimate_speedup(choice.completion.records, policy)
    kinds = Counter(choice.completion.kinds)
    return {
        **{name: getattr(readout, name) for name in _COUNTS},
        **{f"{kind}_tokens": kinds[kind] for kind in _KINDS},
        "forced_tokens": forced.accepted_tokens if forced else 0,
        "tokens_per_target_call": readout.tokens_per_target_call,
        "drafters": {
            name: {kind: getattr(counts, kind) for kind in _OF_DRAFTERS}
            for name, counts in readout.drafters.items()
        },
        "reused_prompt_tokens": readout.reused_tokens,
        "respelled_prompt_tokens": choice.completion.respelled_tokens,
        "times": {
            "queued_s": choice.job.queued_s,
            "prefill_s": readout.prefill_s,
            "decode_s": readout.decode_s,
            "target_s": time.verify,
            "draft_s": time.draft,
            "sampling_s": time.sampling,
            "constraint_s": time.constraint,
            "other_s": time.other,
        },
        "estimated_speedup": asdict(estimate) if estimate else None,
        "estimated_speedup_unknown": why,
    }


def _together(each: Sequence[Json]) -> Json:
    """Several choices as one: counts are sums, times the longest, for the choices ran side by side."""
    first, drafters = each[0], dict[str, Counter[str]]()
    for name, counts in (item for one in each for item in one["drafters"].items()):
        drafters.setdefault(name, Counter()).update(counts)
    whole: Json = {
        key: sum(one[key] for one in each) for key, value in first.items() if isinstance(value, int)
    }
    return whole | {
        "tokens_per_target_call": whole["generated_tokens"] / max(whole["target_calls"], 1),
        "drafters": drafters,
        "times": {key: max(one["times"][key] for one in each) for key in first["times"]},
        "estimated_speedup": None,
        "estimated_speedup_unknown": "the choices were generated side by side",
        "choices": list(each),
    }


# Generations and responses

_Body = TypeVar("_Body", bound=GenerationRequest)


@dataclass(slots=True)
class Generations:
    """The running generations of one answer. Closing `stack` cancels them; what they generated counts against
    the caller's limits. After `max_decode_s` a choice ends once it has begun a new line."""

    service: Service
    caller: Caller
    stack: ExitStack
    max_decode_s: float | None
    outcomes: asyncio.Queue[tuple[Choice, Outcome]] = field(default_factory=asyncio.Queue)
    num_open: int = 0

    async def start(self, choice: Choice) -> None:
        """Submit a choice's request. Raises Problem, and the engine's errors."""
        request = choice.request
        room = self.service.context_tokens - len(request.prompt)
        longest = room if request.max_tokens is None else min(request.max_tokens, room)
        used = self.stack.enter_context(self.caller.reserved(len(request.prompt), longest))
        job = await self.service.worker.submit(request, partial(self._take, choice, used))
        self.stack.callback(self.service.worker.cancel, job)
        choice.job, choice.request = job, job.request
        used.prompt_tokens = len(job.request.prompt)
        self.num_open += 1

    def _take(self, choice: Choice, used: TokenUsage, job: Job, outcome: Outcome) -> None:
        """Count the tokens of a generation, also after its client has left."""
        if isinstance(outcome, Update):
            used.completion_tokens += len(outcome.record.tokens)
        elif isinstance(outcome, Completion):
            estimate, _ = estimate_speedup(outcome.records, self.service.policy)
            speedup, key = estimate.speedup if estimate else None, self.caller.name
            self.service.metrics.observe_request(outcome, queued_s=job.queued_s, key=key, speedup=speedup)
        self.outcomes.put_nowait((choice, outcome))

    async def next(self) -> tuple[Choice, Update | Completion]:
        """The next update or completion of a choice. Raises Problem for a generation that failed or was
        broken off."""
        choice, outcome = await self.outcomes.get()
        if isinstance(outcome, Update):
            if outcome.error is not None:
                raise problem_of(outcome.error)
            now_s = asyncio.get_running_loop().time()
            choice.began_s = choice.began_s or now_s
            is_late = self.max_decode_s is not None and now_s - choice.began_s > self.max_decode_s
            if is_late and "\n" in choice.content and not choice.is_cut:
                choice.is_cut = True
                self.service.worker.cancel(choice.job)
            return choice, outcome
        broken_off = self.service.worker.state().draining
        if isinstance(outcome, Completion):
            broken_off = outcome.finish_reason == "cancelled" and not choice.is_cut
        if broken_off:
            message = "the server is shutting down and stopped this answer. Try again later."
            raise Problem(503, message, code="cancelled", retry_after_s=5)
        if isinstance(outcome, OutriderError):
            raise problem_of(outcome)
        self.num_open -= 1
        return choice, outcome


async def answer(
    request: HttpRequest,
    body: _Body,
    plan: Callable[[Service, _Body, str], GenerationPlan],
    make: Callable[[Service, _Body, GenerationPlan], Answer],
) -> Response:
    """The response to a request: a JSON object, or a stream. `plan` gets the caller's cache namespace, `make`
    makes the answer. Raises Problem and OutriderError."""
    caller = caller_of(request)
    async with models_of(request).serving(body.model) as service:
        planned, notices = await service.prepared(partial(plan, service, body, caller.namespace))
        result = make(service, body, planned)
        result.notices = notices
        with ExitStack() as stack:
            running = Generations(service, caller, stack, planned.max_decode_s)
            for choice in result.choices:
                await running.start(choice)
            if body.stream:
                return EventStream(
                    _events(service, running, result, request.url.path),
                    result.media_type,
                    stack.pop_all().close,
                )
            leaving = asyncio.create_task(_end_when_left(request, stack))
            try:
                while running.num_open:
                    choice, outcome = await running.next()
                    choice.take(outcome)
                return JSONResponse(result.whole())
            except Problem:
                if not leaving.done():
                    raise
                return Response(status_code=499)
            finally:
                leaving.cancel()


async def _end_when_left(request: HttpRequest, stack: ExitStack) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stack.close()


async def _events(service: Service, running: Generations, result: Answer, path: str) -> AsyncIterator[bytes]:
    frame = _event if result.media_type == EVENTS else _line
    for data in result.first():
        yield frame(data)
    clock = asyncio.get_running_loop().time
    sent_s = clock()
    try:
        while running.num_open:
            try:
                async with asyncio.timeout_at(sent_s + _QUIET_S):
                    choice, outcome = await running.next()
            except TimeoutError:
                if frame is _event:
                    yield b": waiting\n\n"
                sent_s = clock()
                continue
            for data in result.next(choice, choice.take(outcome)):
                yield frame(data)
                sent_s = clock()
    except Exception as error:
        problem = error if isinstance(error, Problem) else internal_error("the server failed.")
        service.metrics.observe_error(problem.status, problem.code)
        yield frame(result.failed(problem, path))
        if problem is not error:
            raise
        return
    if result.done:
        yield f"data: {result.done}\n\n".encode()


def _event(data: dict[str, Any]) -> bytes:
    """One server-sent event; a typed one has its type as its name."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return name.encode() + b"data: " + _line(data) + b"\n"


def _line(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode(errors="replace")


class EventStream(StreamingResponse):
    """A stream; `close` is called when it has ended, for whatever reason."""

    def __init__(self, events: AsyncIterator[bytes], media_type: str, close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
