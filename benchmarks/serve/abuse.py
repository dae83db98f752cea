"""What the clients of a soak do, one request at a time, and what each answer has to be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from serve.client import ask, body_of, events
from serve.questions import Question

KINDS = ("stream", "stream", "json", "whole", "choices", "leave", "leave early", "leave", "refused")
"""What is done, the frequent more often."""

CHAT = "/v1/chat/completions"
HELLO: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
REFUSED: tuple[tuple[str, bytes], ...] = (
    (CHAT, b"{"),
    (CHAT, b"[]"),
    (CHAT, b"\xff\xfe\x00"),
    (CHAT, b"{}"),
    (CHAT, json.dumps({"messages": "hello"}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "nobody"}]}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "n": -1}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "response_format": {"type": "no such type"}}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": "word " * 50_000}]}).encode()),
    ("/v1/no/such/path", b"{}"),
)
"""Paths and bodies that no server may take, nor fail on."""


class Visitor:
    """One client: each visit is a request of a kind, and a complaint where it did not end as it should. Where
    there are `models`, each request goes to one of them."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        questions: Sequence[Question],
        rng: random.Random,
        max_tokens: int,
        patience_s: float,
        models: Sequence[str] = (),
    ) -> None:
        self._client = client
        self._questions = questions
        self._rng = rng
        self._max_tokens = max_tokens
        self._patience_s = patience_s
        self._models: Sequence[str | None] = models or [None]

    async def visit(self, kind: str) -> str | None:
        """None where all went well."""
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._visit(kind)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"[:300]

    async def _visit(self, kind: str) -> str | None:
        match kind:
            case "stream" | "json":
                return await self._stream(self._question(limited=kind == "json"))
            case "whole" | "choices":
                return await self._whole(num_choices=2 if kind == "choices" else 1)
            case "leave" | "leave early":
                return await self._leave(0 if kind == "leave early" else self._rng.randrange(1, 20))
            case _:
                return await self._refused()

    def _question(self, *, limited: bool = False) -> Question:
        return self._rng.choice([q for q in self._questions if (q.schema is not None) == limited])

    async def _stream(self, question: Question) -> str | None:
        model = self._rng.choice(self._models)
        row = await ask(self._client, question, self._max_tokens, self._patience_s, model)
        return row.get("error")

    async def _whole(self, num_choices: int) -> str | None:
        """An answer in one piece, limited by a schema; a finished text has to be JSON."""
        question = self._question(limited=True)
        body = body_of(question, self._max_tokens, self._rng.choice(self._models)) | {
            "stream": False,
            "n": num_choices,
        }
        del body["stream_options"]
        answer = await self._client.post(CHAT, json=body)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:300]}"
        choices: list[dict[str, Any]] = answer.json()["choices"]
        for choice in choices:
            if choice["finish_reason"] == "stop":
                json.loads(choice["message"]["content"])
        return None if len(choices) == num_choices else f"{len(choices)} choices instead of {num_choices}"

    async def _leave(self, after_events: int) -> str | None:
        """Close the connection after so many events, or before anything can have come."""
        body = body_of(self._question(), self._max_tokens, self._rng.choice(self._models))
        if not after_events:
            try:
                await asyncio.wait_for(self._client.post(CHAT, json=body), self._rng.uniform(0.001, 0.05))
            except TimeoutError:
                return None
        async with self._client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code}: {(await response.aread()).decode()[:300]}"
            async for _ in events(response.aiter_lines()):
                after_events -= 1
                if after_events <= 0:
                    break
        return None

    async def _refused(self) -> str | None:
        path, body = self._rng.choice(REFUSED)
        answer = await self._client.post(path, content=body, headers={"content-type": "application/json"})
        fine = 400 <= answer.status_code < 500
        return None if fine else f"{body[:60]!r} is answered {answer.status_code}: {answer.text[:200]}"
