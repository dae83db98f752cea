"""Replicas of a server as a Ray Serve deployment: the same application, and the way to the right replica.

This process accepts the connections: keys, limits, sizes and times are checked once, here. Each request then
goes to a replica, which runs the application of a server on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from outrider.core.errors import BackendError, SettingError
from outrider.fleet.ray.affinity import routing_key
from outrider.fleet.ray.merging import merged
from outrider.server.assembly import create_app
from outrider.server.errors import Problem
from outrider.server.keys import ApiKey, Caller, RateLimiter
from outrider.server.models import Models
from outrider.server.settings import ServeSettings

LOG = logging.getLogger("outrider.server")
APPLICATION = "outrider"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_TELL_S = 1.0
"""between a replica's metrics"""
_STALE_S = 30.0
_MAX_TRIES = 3
_NO_DIGEST = "0" * 64

Open = Callable[[], Models]
"""Loads what a replica serves."""


class Asked(NamedTuple):
    """A request as it goes to a replica. `caller` is the name of its key."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    caller: str


class Board:
    """What replicas tell the ingress: their metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[float, str]] = {}

    def tell(self, replica: str, text: str) -> None:
        self._metrics[replica] = time.time(), text

    def leave(self, replica: str) -> None:
        self._metrics.pop(replica, None)

    def metrics(self) -> dict[str, str]:
        now = time.time()
        return {name: text for name, (at, text) in self._metrics.items() if now - at < _STALE_S}


class Replica:
    """A server's application over models of its own."""

    def __init__(self, open_models: Open, settings: ServeSettings, board: Any) -> None:
        self._board = board
        self._name = serve.get_replica_context().replica_id.unique_id
        self._models = open_models()
        self._app = create_app(self._models, page=settings.page)
        self._telling: asyncio.Task[None] | None = None

    async def answer(self, asked: Asked) -> AsyncIterator[list[Message]]:
        """The application's messages as they come, each time with what the request used so far. What a
        stream says before the first token is held until it is there, or until a comment keeps the connection
        open: so long another replica can answer instead. Only its head goes ahead.
        """
        if self._telling is None:
            self._telling = asyncio.ensure_future(self._tell_often())
        caller = Caller(RateLimiter(ApiKey(name=asked.caller, sha256=_NO_DIGEST)) if asked.caller else None)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": asked.method, "path": asked.path, "raw_path": asked.path.encode(), "root_path": "",
            "query_string": asked.query, "headers": asked.headers, "state": {"caller": caller},
            "server": ("replica", 0), "client": ("ingress", 0),
        }  # fmt: skip
        unread: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        sent: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                await sent.put(None)

        running = asyncio.ensure_future(run())
        held: list[Message] = []
        try:
            while (message := await sent.get()) is not None:
                held.append(message)
                is_head = message.get("status") == 200
                says = caller.used.completion_tokens or message.get("body", b"").startswith(b":")
                if (is_head or says) and sent.empty():
                    yield [*held, _used(caller, scope)]
                    held = []
            yield [*held, _used(caller, scope)]
            await running
        finally:
            running.cancel()

    async def _tell_often(self) -> None:
        while True:
            self._board.tell.remote(self._name, self._models.metrics.render("")[0].decode())
            await asyncio.sleep(_TELL_S)

    async def check_health(self) -> None:
        """Raises where the engine has failed: the replica is then replaced."""
        if any(service.worker.state().failed for service in self._models.services()):
            raise RuntimeError("the engine has failed")

    def __del__(self) -> None:
        if hasattr(self, "_models"):
            self._models.close()
            with contextlib.suppress(Exception):  # the cluster may be ending
                ray.get(self._board.leave.remote(self._name), timeout=2)


class Replicas:
    """The deployment, and the application that hands every request to one of its replicas."""

    def __init__(self, open_models: Open, settings: ServeSettings, least: int, most: int) -> None:
        """Raises SettingError where the cluster has no room, BackendError where no replica can be started."""
        if (cpus := int(ray.cluster_resources().get("CPU", 0))) < least:
            why = f"each takes a CPU of the cluster, and it has {cpus}"
            raise SettingError(f"replicas {least}", why, "Ask for fewer, or add machines.")
        self._draining = False
        self._board = ray.remote(num_cpus=0)(Board).remote()
        quiet = settings.model_copy(update={"api_key": [], "api_keys": None})
        scaling = AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=settings.max_running,
            upscale_delay_s=_UP_S, downscale_delay_s=_DOWN_S,
        )  # fmt: skip
        deployed = serve.deployment(Replica).options(
            name="replica",
            autoscaling_config=scaling,
            max_ongoing_requests=settings.max_running + min(settings.max_running, settings.max_waiting),
            max_queued_requests=max(settings.max_waiting, 1),
            graceful_shutdown_timeout_s=settings.drain_timeout,
            ray_actor_options={"num_cpus": 1},
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER, request_router_kwargs={"num_fallback_replicas": most - 1}
            ),
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        try:
            application = deployed.bind(open_models, quiet, self._board)
            self._handle = serve.run(application, name=APPLICATION, route_prefix=None)
        except Exception as error:  # what a replica raised, within Ray's own
            said = serve.status().applications.get(APPLICATION)
            texts = [each.message for each in said.deployments.values()] if said else []
            lines = [line.strip() for line in "\n".join([str(error), *texts]).splitlines() if line.strip()]
            self.close()
            why = lines[-1].removeprefix("outrider.core.errors.").rstrip(".")
            raise BackendError("the replicas", f"none could be started ({why})") from None

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those that run are waited for by the server."""
        del timeout_s
        self._draining = True

    def close(self) -> None:
        serve.delete(APPLICATION)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, by a replica that it belongs to. One that ends before it has said a word of the
        answer is replaced by another."""
        if scope["type"] != "http":
            return
        if self._draining:
            why = "the server is shutting down. Try another one."
            raise Problem(503, why, code="draining", retry_after_s=5)
        if scope["path"] == "/metrics":
            text = merged(await self._board.metrics.remote())
            kind = "text/plain; version=0.0.4; charset=utf-8"
            await Response(text, headers={"content-type": kind})(scope, receive, send)
            return
        if scope["path"] == "/health":  # however full the replicas are
            if not await asyncio.to_thread(_num_running):
                raise Problem(503, "no replica is running.", code="replica_lost", retry_after_s=5)
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        caller = scope.get("state", {}).get("caller") or Caller()
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        sent_on = scope["method"], scope["path"], scope["query_string"], scope["headers"]
        asked = Asked(*sent_on, body, caller.name)
        key = routing_key(Headers(raw=scope["headers"]), asked.body, asked.caller)
        with caller.reserved(*_estimate(asked)) as used:
            async for sent in self._messages(asked, key, receive):
                if sent["type"] == "used":
                    used.prompt_tokens, used.completion_tokens = sent["tokens"]
                    scope["route"] = SimpleNamespace(path=sent["route"])  # for the log
                else:
                    await send(sent)

    async def _messages(self, asked: Asked, key: str, receive: Receive) -> AsyncIterator[Message]:
        leaving = asyncio.ensure_future(receive())
        kind: str | None = None
        try:
            async for message in self._tries(asked, key, leaving):
                if message["type"] == "http.response.start":
                    if kind is not None and message["status"] == 200:
                        continue  # the client has the head already
                    if kind is not None:
                        raise Problem(503, "the replica ended. Try again.", code="replica_lost")
                    kind = Headers(raw=message["headers"]).get("content-type", "")
                yield message
        except Problem as problem:
            if kind is None:
                raise
            if end := problem.in_stream(kind, asked.path):
                yield end
        finally:
            leaving.cancel()

    async def _tries(
        self, asked: Asked, key: str, leaving: asyncio.Future[Message]
    ) -> AsyncIterator[Message]:
        """The messages of replica after replica, until one has said a part of the answer. Raises Problem."""
        for attempt in range(_MAX_TRIES):
            begun = False
            try:
                async for message in self._of_one(asked, key, leaving):
                    begun = begun or message["type"] == "http.response.body"
                    yield message
                return
            except BackPressureError as error:
                why = "all replicas are full, and others wait for them. Ask again a little later."
                raise Problem(429, why, code="queue_full", retry_after_s=2) from error
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise
                LOG.warning("replica lost", extra={"fields": {"answer_begun": begun}})
                if begun:
                    why = "the replica ended in the middle of the answer."
                    raise Problem(503, why, code="replica_lost") from error
                await asyncio.sleep(0.2 * attempt)
        raise Problem(503, "the replica ended. Try again.", code="replica_lost", retry_after_s=2)

    async def _of_one(
        self, asked: Asked, key: str, leaving: asyncio.Future[Message]
    ) -> AsyncIterator[Message]:
        """The messages of one replica."""
        answers = self._handle.options(stream=True, session_id=key).answer.remote(asked)
        steps, is_sent = aiter(answers), False
        try:
            while True:
                step: asyncio.Future[Any] = asyncio.ensure_future(anext(steps, None))
                if not is_sent:  # afterwards the client's leaving is no news
                    await asyncio.wait([step, leaving], return_when=asyncio.FIRST_COMPLETED)
                    if not step.done():
                        answers.cancel()
                        step.cancel()
                        await asyncio.gather(step, return_exceptions=True)
                        return
                if (messages := await step) is None:
                    return
                for message in messages:
                    is_body = message["type"] == "http.response.body"
                    is_sent = is_sent or (is_body and not message.get("more_body"))
                    yield message
        except asyncio.CancelledError:
            answers.cancel()
            raise


def _used(caller: Caller, scope: Scope) -> Message:
    used, route = caller.used, getattr(scope.get("route"), "path", None)
    return {"type": "used", "tokens": (used.prompt_tokens, used.completion_tokens), "route": route}


def _num_running() -> int:
    """The replicas that can answer."""
    [replicas] = serve.status().applications[APPLICATION].deployments.values()
    return int(replicas.replica_states.get("RUNNING", 0))


_UP_S, _DOWN_S = 5.0, 60.0
"""how long requests must want another number of replicas before it changes"""


def _estimate(asked: Asked) -> tuple[int, int]:
    """About the tokens of a prompt, and the most of its answer, to be reserved of what a key may use; what it
    used in fact is counted in the end."""
    if asked.method != "POST":
        return 0, 0
    try:
        said = json.loads(asked.body)
    except (ValueError, RecursionError):
        return 0, 0
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
    limits = [said[name] for name in names if isinstance(said, dict) and isinstance(said.get(name), int)]
    return len(asked.body) // 8, max(limits[0], 0) if limits else 0
