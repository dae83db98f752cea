"""Answers as Ollama has them: the whole object, and the lines of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from outrider.core.data import Completion, Update
from outrider.formats import ContentDelta, ReasoningDelta
from outrider.server.answers.choice import LINES, Answer, Choice, ToolCall, parsed_arguments
from outrider.server.errors import ollama_error
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.ollama import GenerateRequest, OllamaFields
from outrider.server.service import Service


class OllamaAnswer(Answer):
    """The answer to one request for a chat or a text."""

    media_type = LINES

    def __init__(self, service: Service, body: OllamaFields, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._body = body
        self._began_s = perf_counter()
        [self._choice] = self.choices
        self._num_sent = 0
        """calls that were sent: each is sent when it is whole"""

    def next(self, choice: Choice, outcome: Update | Completion) -> Iterator[dict[str, Any]]:
        content = thinking = ""
        for event in choice.take(outcome):
            content += event.text if isinstance(event, ContentDelta) else ""
            thinking += event.text if isinstance(event, ReasoningDelta) else ""
        num_whole = len(choice.calls) - (not isinstance(outcome, Completion))
        whole = choice.calls[self._num_sent : max(num_whole, self._num_sent)]
        self._num_sent += len(whole)
        if content or thinking or whole:
            yield self._head | self._said(content, thinking, whole) | {"done": False}
        if isinstance(outcome, Completion):
            yield self._head | self._said("", "", []) | self._end()

    def whole(self) -> dict[str, Any]:
        choice = self._choice
        return self._head | self._said(choice.content, choice.reasoning, choice.calls) | self._end()

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        return ollama_error(500, body)

    @property
    def _head(self) -> dict[str, Any]:
        return {"model": self._body.model or self.service.name, "created_at": now()}

    def _said(self, content: str, thinking: str, calls: list[ToolCall]) -> dict[str, Any]:
        logprobs = self._choice.take_logprobs() if self.plan.has_logprobs else []
        more: dict[str, Any] = {"logprobs": logprobs} if logprobs else {}
        thought = {"thinking": thinking} if thinking else {}
        if isinstance(self._body, GenerateRequest):
            return {"response": content} | thought | more
        message: dict[str, Any] = {"role": "assistant", "content": content} | thought
        if calls:
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
