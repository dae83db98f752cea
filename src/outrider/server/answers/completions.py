"""Completions: the whole answer, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from outrider.core.data import Update
from outrider.formats import ContentDelta
from outrider.server.answers.account import account_of, usage_of
from outrider.server.answers.choice import Choice
from outrider.server.answers.logprobs import Offsets, shown
from outrider.server.prepare.plan import Plan
from outrider.server.service import Service

__all__ = ["CompletionAnswer"]

Chunk = dict[str, Any]


class CompletionAnswer:
    """The answer to one request for completions, whole or in chunks."""

    def __init__(
        self, service: Service, plan: Plan, choices: Sequence[Choice], *, with_usage: bool = False
    ) -> None:
        self.service = service
        self.plan = plan
        self.choices = choices
        self._with_usage = with_usage
        self._offsets = [
            Offsets(service.vocabulary, len(lead)) if request.logprobs is not None else None
            for request, lead in zip(plan.requests, plan.lead, strict=True)
        ]
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The answer when every choice has ended."""
        entries = [
            self._entry(choice, self.plan.lead[choice.index] + choice.content, choice.finish_reason)
            for choice in self.choices
        ]
        return {**self._head, "choices": entries, **self._sums()}

    def first(self) -> Iterator[Chunk]:
        """A chunk for each prompt that is echoed."""
        for choice, lead in zip(self.choices, self.plan.lead, strict=True):
            if lead:
                yield self._chunk(choice, lead)

    def next(self, choice: Choice, update: Update | None) -> Iterator[Chunk]:
        """The chunks that an update of a choice gives; None: it has ended."""
        events = [event for event in choice.take(update) if isinstance(event, ContentDelta)]
        if events:
            chunk = self._chunk(choice, "".join(event.text for event in events))
            if self.plan.show_sources:
                chunk["outrider"] = choice.told(events)
            yield chunk
        if update is None:
            yield self._chunk(choice, "", choice.finish_reason)

    def last(self, chunk: Chunk) -> Iterator[Chunk]:
        """The chunks at the end of the stream, where `chunk` would have been the last one."""
        if not self._with_usage:
            yield chunk | {"outrider": chunk.get("outrider", {}) | self._sums()["outrider"]}
            return
        yield chunk
        yield {**self._head, "choices": [], **self._sums()}

    def _entry(self, choice: Choice, text: str, finish_reason: str | None) -> dict[str, Any]:
        offsets, logprobs = self._offsets[choice.index], None
        if offsets is not None:
            scored = shown(choice.take_scored(), self.service.vocabulary)
            logprobs = offsets.entries(scored) if scored else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choice: Choice, text: str, finish_reason: str | None = None) -> Chunk:
        chunk = {**self._head, "choices": [self._entry(choice, text, finish_reason)]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def _sums(self) -> dict[str, Any]:
        jobs = [choice.job for choice in self.choices]
        return {
            "usage": usage_of(self.plan, jobs),
            "outrider": account_of(self.plan, jobs, self.service.policy),
        }
