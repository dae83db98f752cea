"""Other engines with OpenAI's API, asked and timed like our own settings."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx

from outrider.core.data import Grammar
from outrider.core.params import SamplingParams
from outrider.lab.bench.servers import START_PATIENCE_S, ContestantError, RefusedError, Server
from outrider.lab.bench.streams import Answer, Engine, StreamError, body_of, read_answer

if TYPE_CHECKING:
    from outrider.lab.bench.plan import ContestantSpec
    from outrider.lab.record import Case
    from outrider.lab.rows import AnswerRow

__all__ = ["Answer", "Contestant", "ContestantError", "RefusedError", "headers_of"]

ANSWER_PATIENCE_S = 1800.0
_CONNECT_PATIENCE_S = 10.0
_REFUSED = (400, 413, 422)
"""Statuses that are about the request, not about the engine."""
_OWNERS: Mapping[str, Engine] = {"llamacpp": "llama-server", "outrider": "outrider", "vllm": "vllm"}


class Contestant(ExitStack):
    """Another engine that is ready to be asked; a context manager that ends the connection, and what was
    started for it. Its command is started, or its URL reached. Raises ContestantError where that fails.

    One request at a time: engines are compared for one user.
    """

    def __init__(
        self,
        spec: ContestantSpec,
        target: Path,
        draft: Path | None,
        *,
        context: int,
        threads: int,
        start_patience_s: float = START_PATIENCE_S,
        answer_patience_s: float = ANSWER_PATIENCE_S,
    ) -> None:
        super().__init__()
        self.name = spec.name
        self._server: Server | None = None
        headers, address = headers_of(spec), spec.url or ""
        timeout = httpx.Timeout(answer_patience_s, connect=_CONNECT_PATIENCE_S)
        try:
            if spec.command is not None:
                if "{draft}" in spec.command and draft is None:
                    why = "its command wants a draft model"
                    raise ContestantError(spec.name, why, "Name one in the plan.")
                values = {"target": target, "draft": draft or "", "context": context, "threads": threads}
                server = Server(spec.name, spec.command, values, patience_s=start_patience_s)
                self._server, address = self.enter_context(server), server.address
            base = address.rstrip("/").removesuffix("/v1")
            client = httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
            self._client = self.enter_context(client)
            listed, self.engine = _listed(spec.name, client)
            self.model = spec.model or listed
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        prompt: Sequence[Mapping[str, Any]] | str,
        *,
        sampling: SamplingParams,
        max_tokens: int,
        grammar: Grammar | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Answer:
        """The answer to a conversation, or the continuation of a text, timed from here.

        Raises RefusedError when it cannot be asked the same or refuses this request, ContestantError when it
        breaks off, fails, or does not say how many tokens it wrote.
        """
        is_raw, salt = isinstance(prompt, str), uuid.uuid4().hex
        body: dict[str, Any] = {"max_tokens": max_tokens, "prompt" if is_raw else "messages": prompt}
        body |= {"model": self.model} if self.model is not None else {}
        body |= {"tools": tools} if tools else {}
        body |= body_of(self.name, self.engine, sampling=sampling, grammar=grammar, is_raw=is_raw, salt=salt)
        path = "/v1/completions" if is_raw else "/v1/chat/completions"
        started_s = perf_counter()
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    why = f"it answers {response.status_code}: {_said(response.read())}"
                    if response.status_code in _REFUSED:
                        raise RefusedError(self.name, why, self._way_out())
                    raise StreamError(why)
                return read_answer(response.iter_lines(), started_s)
        except (StreamError, httpx.HTTPError) as error:
            raise ContestantError(self.name, _reason(error), self._way_out()) from error

    def answer(self, case: Case, answered: Mapping[str, AnswerRow], seed: int) -> Answer:
        """The answer to a case whose earlier turns were answered so; raises as `ask` does."""
        return self.ask(
            case.prompt.after([answered[earlier].text for earlier in case.earlier]),
            sampling=replace(case.workload.sampling, seed=seed),
            max_tokens=case.prompt.max_tokens or case.workload.max_tokens,
            grammar=case.prompt.grammar,
            tools=case.prompt.tools,
        )

    def _way_out(self) -> str:
        if self._server is None:
            return "Look into its log."
        return f"The end of its log:\n{self._server.end_of_log()}"


def headers_of(spec: ContestantSpec) -> dict[str, str]:
    """What requests say of who asks. Raises ContestantError where the plan's key is not there."""
    if spec.api_key_env is None:
        return {}
    key = os.environ.get(spec.api_key_env)
    if not key:
        why = f"the variable {spec.api_key_env} holds no key"
        raise ContestantError(spec.name, why, f"Set {spec.api_key_env}, or leave api_key_env out.")
    return {"Authorization": f"Bearer {key}"}


def _listed(name: str, client: httpx.Client) -> tuple[str | None, Engine]:
    """The first model that an endpoint lists, and who it is. One that has no list may answer all the same."""
    try:
        answer = client.get("/v1/models", timeout=_CONNECT_PATIENCE_S)
    except httpx.HTTPError as error:
        way_out = "Start it, or correct its URL."
        raise ContestantError(name, f"it cannot be reached ({_reason(error)})", way_out) from error
    if answer.status_code in (401, 403):
        why = f"it refuses: {answer.status_code}, {_said(answer.content)}"
        raise ContestantError(name, why, "Name the variable that holds its key as api_key_env.")
    try:
        first = answer.json()["data"][0]
        return str(first["id"]), _OWNERS.get(str(first.get("owned_by")), "other")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None, "other"


def _said(body: bytes) -> str:
    """What an error's body says, in short."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)["error"]
        text = str(found.get("message", found)) if isinstance(found, dict) else str(found)
    except (ValueError, LookupError, TypeError):
        pass
    return text[:300] or "nothing more"


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "it takes too long"
    if isinstance(error, httpx.HTTPError):
        return f"the connection broke off: {error or type(error).__name__}"
    return str(error)
