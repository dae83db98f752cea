"""The one thread that owns the engine. Native thread pools belong to the thread that calls them, and the
engine must not be called from two threads. So this thread alone starts, steps and cancels requests, and hands
their updates to the event loop once a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.core.data import Completion, Request, Update
from outrider.core.errors import BackendError, OutriderError
from outrider.costs.other_programs import OtherPrograms
from outrider.engine.tiers import Reading, TierCounts
from outrider.server.errors import Problem

if TYPE_CHECKING:
    from outrider.session.session import Session

_log = logging.getLogger(__name__)

_MIN_RETRY_S = 1.0
_FIRST_REQUEST_S = 10.0
"""the assumed duration of a request before one has ended"""
_REQUEST_RATE = 0.1
"""weight of the last request in the moving average of durations"""
_JOIN_S = 30.0
_REST_S, _KEEP_ROUNDS = 3.0, 8
"""So long without a request, and so often, KV is written for a process that may be killed."""

Outcome = Update | Completion | OutriderError
"""The outcomes of a request: updates, then its completion or an error (which a completion may follow)."""


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way through the engine; `take` is called in the event loop with each outcome."""

    request: Request
    take: Callable[[Job, Outcome], None]
    loop: asyncio.AbstractEventLoop
    accepted: asyncio.Future[None]
    """done when the engine has it, or it waits for room"""
    arrived_s: float = field(default_factory=perf_counter)
    queued_s: float = 0.0
    """seconds between the submission and the first step"""
    turn: int = 0
    request_id: int = -1
    """the engine's, once it has begun"""
    readings: Sequence[Reading] = ()
    """its KV on the way from the disk, until it begins"""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How busy the worker is; used tokens are all whose KV is stored."""

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    draining: bool = False
    failed: bool = False
    """Nothing is served any more."""
    tiers: TierCounts | None = None
    """what became of KV that left the cache"""


class _Turns:
    """A fair lock: who waits for it gets it before who had it last."""

    def __init__(self) -> None:
        self._next, self._turn = Lock(), Lock()

    def __enter__(self) -> None:
        with self._next:
            self._turn.acquire()

    def __exit__(self, *error: object) -> None:
        self._turn.release()

    @property
    def is_wanted(self) -> bool:
        """Whether another one waits for it."""
        return self._next.locked()


_TURNS = _Turns()
"""Engines of a process compute one after another, step by step: their threads wait for each other by
spinning, so that two at once would be far slower than half as fast."""


class Worker:
    """Runs the engine of a session for many callers. `observe` is called with the updates of every step, in
    the worker's thread. After `idle_s` without a request, costs that were measured on a busy machine are
    measured again."""

    def __init__(
        self,
        session: Session,
        *,
        max_waiting: int = 64,
        observe: Callable[[Sequence[Update]], None] | None = None,
        idle_s: float = 20.0,
    ) -> None:
        self._session = session
        self._idle_s = idle_s
        self._engine = session.engine
        self._max_waiting = max_waiting
        self._observe = observe
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[Job] = []
        """by their turns"""
        self._turn = 0
        self._running: dict[int, Job] = {}
        self._request_s = _FIRST_REQUEST_S
        """moving average of a request's seconds, from its first step to its last"""
        self._used_tokens = 0
        self._has_step_failed = False
        self._num_open = 0
        """jobs that were submitted and have not ended; counted in the event loop"""
        self._is_draining = self._is_stopped = False
        self._is_ended = self._has_failed = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # In the event loop

    def start(self) -> None:
        self._thread.start()

    async def submit(self, request: Request, take: Callable[[Job, Outcome], None]) -> Job:
        """Submit a request; `take` is called with its outcomes. Raises Problem when too many wait or the
        server ends, and the engine's GrammarError, PromptError or SettingError."""
        if self._is_draining or self._is_stopped:
            message = "server: it is shutting down. Ask again when it is back."
            raise Problem(503, message, code="draining", retry_after_s=5)
        num_waiting = self._num_open - self._engine.max_running
        if num_waiting >= self._max_waiting:
            message = f"server: {num_waiting} requests are waiting already. Ask again a little later."
            retry_s = max(num_waiting / self._engine.max_running * self._request_s, _MIN_RETRY_S)
            raise Problem(429, message, code="queue_full", retry_after_s=retry_s)
        loop = asyncio.get_running_loop()
        job = Job(request, take, loop, loop.create_future())
        self._num_open += 1
        self._commands.put(lambda: self._enter(job))
        try:
            await job.accepted
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        return job

    def cancel(self, job: Job) -> None:
        """End a job's request after the step in progress; harmless when it has ended."""
        if not job.is_over:
            self._commands.put(lambda: self._cancel(job))

    def state(self) -> WorkerState:
        """How busy it is: a snapshot."""
        running = len(self._running)
        return WorkerState(
            running=running,
            waiting=max(self._num_open - running, 0),
            max_running=self._engine.max_running,
            kv_tokens_used=self._used_tokens,
            kv_tokens_capacity=self._engine.target.capacity_tokens,
            draining=self._is_draining,
            failed=self._has_failed,
            tiers=tiers.counts if (tiers := self._session.kv_tiers) else None,
        )

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the others, at most so long; then they are cancelled."""
        self._is_draining = True
        until_s = perf_counter() + timeout_s
        while self._num_open and perf_counter() < until_s:
            await asyncio.sleep(0.02)
        self._commands.put(self._cancel_all)
        while self._num_open and perf_counter() < until_s + _JOIN_S and self._thread.is_alive():
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """End the thread after the step in progress; what runs is cancelled. Stopping twice is harmless."""
        self._is_stopped = True
        self._commands.put(self._end)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # In the worker's thread

    def _run(self) -> None:
        while not self._is_ended:
            try:
                self._obey()
                if self._has_failed:
                    self._refuse_all()
                    continue
                self._admit()
                if self._running:
                    self._step()
                    self._admit()  # whoever waits though nothing runs waits for the disk
                self._used_tokens = self._engine.used_tokens
            except Exception:
                _log.exception("the engine's thread failed")
                self._has_failed = True
                self._session.kv_tiers = None  # nobody knows what the cache holds now
                self._refuse_all()

    def _refuse_all(self) -> None:
        """After an unexpected failure the engine's state is unknown: all get an error, now and later."""
        way_out = "Ask again. Restart the server if that fails."
        error = BackendError("engine", "it failed, and the server's log says how", way_out)
        for job in (*self._running.values(), *self._waiting):
            self._post(job, error)
        self._running.clear()
        self._waiting.clear()

    def _obey(self) -> None:
        """Carry out the event loop's commands; wait for one where nothing runs."""
        if not self._running:
            (self._commands.get if self._waiting else self._await)()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _await(self) -> Callable[[], None]:
        """The next command. Until it comes, KV is written that only the models hold, and costs that need it
        are measured; a new request ends that and waits for one model call, or copy, at most."""
        for _ in range(_KEEP_ROUNDS if self._session.writes_kv else 0):
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=_REST_S)
            if self._engine.keep():
                break
        while self._session.is_provisional and not self._has_failed:
            others = OtherPrograms()
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=self._idle_s)
            try:
                with _TURNS:
                    is_new = self._session.measure_again(others, self._stop_measuring)
                if is_new:
                    _log.info("what calls cost was measured: the machine is quiet now")
            except _Awaited:
                pass
            except OutriderError:
                _log.exception("what calls cost could not be measured")
        return self._commands.get()

    def _stop_measuring(self, _what: str, _part: float | None) -> None:
        if not self._commands.empty() or _TURNS.is_wanted:
            raise _Awaited

    def _enter(self, job: Job) -> None:
        """Queue a job: cache namespaces take turns; within one, first come, first served."""
        job.request = self._engine.slots.as_served(job.request)
        turns = [other.turn for other in self._waiting if other.request.scope == job.request.scope]
        job.turn = max(turns, default=self._turn) + 1
        insort(self._waiting, job, key=lambda waiting: waiting.turn)
        engine, request = self._engine, job.request
        if len(self._waiting) > 1 or not engine.has_room(request) or engine.should_wait(request):
            self._post(job)  # else it is started, or refused, at once

    def _admit(self) -> None:
        """Start waiting jobs in turn, as far as there is room; one whose KV is on its way from the disk, or
        is being computed for another, keeps its place."""
        held_back: list[Request] = []
        for job in list(self._waiting):
            if not self._engine.has_room(*held_back, job.request):
                break
            try:
                if self._is_reading(job) or self._engine.should_wait(job.request):
                    held_back.append(job.request)
                    continue
                job.request_id = self._engine.submit(job.request)
            except Exception as error:  # whatever it is, it is this request's alone
                self._post(job, _as_ours(error, "the request could not be started"))
            else:
                job.queued_s = perf_counter() - job.arrived_s
                self._running[job.request_id] = job
                self._post(job)
            self._turn = max(self._turn, job.turn)
            job.readings = []
            self._waiting.remove(job)

    def _is_reading(self, job: Job) -> bool:
        if not job.readings:
            job.readings = self._engine.read_ahead(job.request, lambda: self._commands.put(lambda: None))
        return not all(reading.done() for reading in job.readings)

    def _step(self) -> None:
        try:
            with _TURNS:
                updates = self._engine.step()
            self._has_step_failed = False
        except Exception:
            _log.exception("a step failed")
            updates = self._step_each() if self._has_step_failed else []
            self._has_step_failed = not self._has_step_failed
        if self._observe is not None:
            try:
                self._observe(updates)
            except Exception:
                _log.exception("the metrics missed a step")
        for update in updates:
            job = self._running[update.record.request]
            if update.completion is None:
                self._post(job, update)
                continue
            del self._running[update.record.request]
            self._request_s += _REQUEST_RATE * (update.record.end_s - self._request_s)
            self._post(job, update, update.completion)

    def _step_each(self) -> list[Update]:
        """After two failed steps, which leave every request as it was, step each alone: one that cannot go on
        takes no other with it."""
        updates: list[Update] = []
        for request_id, job in list(self._running.items()):
            try:
                with _TURNS:
                    updates += self._engine.step(only=request_id)
            except Exception as error:
                ended = self._engine.cancel(request_id)
                del self._running[request_id]
                completion = [replace(ended, finish_reason="error")] if ended else []
                self._post(job, _as_ours(error, "a step of it failed"), *completion)
        return updates

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.readings = []
            self._post(job, BackendError("request", "it was cancelled while it waited"))
        elif job.request_id in self._running and (completion := self._engine.cancel(job.request_id)):
            del self._running[job.request_id]
            self._post(job, completion)

    def _cancel_all(self) -> None:
        for job in (*self._running.values(), *self._waiting):
            self._cancel(job)

    def _end(self) -> None:
        self._is_ended = True
        self._cancel_all()

    def _post(self, job: Job, *outcomes: Outcome) -> None:
        ends = [outcome for outcome in outcomes if not isinstance(outcome, Update)]

        def take() -> None:
            if not job.accepted.done():
                if ends and isinstance(ends[0], OutriderError):
                    job.accepted.set_exception(ends[0])
                else:
                    job.accepted.set_result(None)
            if ends:
                self._num_open -= 1
                job.is_over = True
            for outcome in outcomes:
                job.take(job, outcome)

        with contextlib.suppress(RuntimeError):  # its event loop is closed: no client waits any more
            job.loop.call_soon_threadsafe(take)


def _as_ours(error: Exception, what: str) -> OutriderError:
    """The error for the caller; an unexpected one is logged with its traceback."""
    if isinstance(error, OutriderError):
        return error
    _log.error(what, exc_info=error)
    return BackendError("request", f"{what} ({type(error).__name__})", "The server's log says more.")


class _Awaited(Exception):
    """A command has come for the worker."""
