"""One streamed chat completion, and when its parts arrived."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx

from harness import Row
from serve.questions import Question

BURST_S = 0.002
"""Chunks that come within so short a time were made by one step: they are one burst."""


def body_of(question: Question, max_tokens: int) -> dict[str, Any]:
    """The request: greedy, streamed, with usage at the end."""
    body: dict[str, Any] = {
        "messages": list(question.messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if question.schema is not None:
        schema = {"name": "answer", "strict": True, "schema": question.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if question.tools:
        body |= {"tools": list(question.tools), "tool_choice": "required"}
    return body


def client_of(address: str, patience_s: float) -> httpx.AsyncClient:
    """Connections to one server, whatever proxies the environment names."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=address, timeout=patience_s, trust_env=False, limits=limits)


async def ask(client: httpx.AsyncClient, question: Question, max_tokens: int, patience_s: float) -> Row:
    """Ask and time it. A failure is a row with an `error`; times are seconds, `start_s` is of any origin.

    `gaps_s` are the pauses between bursts; the tokens of a burst have none among them.
    """
    arrivals: list[tuple[float, str]] = []
    found: Row = {"id": question.id, "group": question.group, "start_s": perf_counter()}
    stream = client.stream("POST", "/v1/chat/completions", json=body_of(question, max_tokens))
    try:
        async with asyncio.timeout(patience_s), stream as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return found | {"error": f"{response.status_code}: {text[:300]}"}
            usage = await _read(events(response.aiter_lines()), arrivals, found)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:300]}
    if usage is None or not arrivals:
        return found | {"error": "no usage" if usage is None else "no text"}
    return found | _timed(arrivals, found["start_s"]) | _counted(usage)


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    async for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


async def _read(
    stream: AsyncIterator[dict[str, Any]], arrivals: list[tuple[float, str]], found: Row
) -> dict[str, Any] | None:
    """Note when text arrived; gives the usage."""
    usage = None
    async for event in stream:
        now = perf_counter()
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if text := _text_of(choice.get("delta", {})):
                arrivals.append((now, text))
            if reason := choice.get("finish_reason"):
                found["finish"] = reason
        if "timings" in event:  # llama-server's
            found["accepted"] = event["timings"].get("draft_n_accepted", 0)
    return usage


def _text_of(delta: dict[str, Any]) -> str:
    """All text of a chunk: of the answer, of reasoning, of calls."""
    calls = [call.get("function", {}) for call in delta.get("tool_calls") or ()]
    parts = [delta.get("content"), delta.get("reasoning_content")]
    parts += [call.get(key) for call in calls for key in ("name", "arguments")]
    return "".join(part for part in parts if part)


def _timed(arrivals: Sequence[tuple[float, str]], start_s: float) -> Row:
    bursts = list(burst_times(at_s for at_s, _ in arrivals))
    text = "".join(text for _, text in arrivals)
    return {
        "ttft_s": bursts[0] - start_s,
        "e2e_s": arrivals[-1][0] - start_s,
        "gaps_s": [round(later - earlier, 4) for earlier, later in pairwise(bursts)],
        "chunks": len(arrivals),
        "characters": len(text),
        "text": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _counted(usage: dict[str, Any]) -> Row:
    details = usage.get("completion_tokens_details") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    counts: Row = {
        "tokens": usage["completion_tokens"],
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": cached,
    }
    if "accepted_prediction_tokens" in details:
        counts["accepted"] = details["accepted_prediction_tokens"]
    return counts


def burst_times(arrivals: Iterable[float]) -> Iterable[float]:
    """When each burst began: a new one begins where nothing came for `BURST_S`."""
    last = float("-inf")
    for at_s in arrivals:
        if at_s - last > BURST_S:
            yield at_s
        last = at_s
