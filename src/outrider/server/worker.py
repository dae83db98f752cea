"""The one thread that owns the engine: requests in from the event loop, updates out to it.

Native thread pools belong to the thread that calls them, and the engine is not to be called from two
threads, so everything about it happens here: requests are started, stepped and cancelled by this thread
alone, and what comes of them is handed to the event loop once a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from time import perf_counter
from typing import NoReturn

from outrider.core.data import Completion, Request, Update
from outrider.core.errors import BackendError, OutriderError
from outrider.costs.other_programs import OtherPrograms
from outrider.engine import Engine
from outrider.server.jobs import Draining, FairQueue, Job, QueueFull
from outrider.session import Session

_log = logging.getLogger(__name__)

StepView = Sequence[Update]
"""The updates of one step, of all sequences that took part."""

_MIN_RETRY_S = 1.0
_FIRST_REQUEST_S = 10.0
"""what a request is thought to take before one has ended"""
_REQUEST_RATE = 0.1
"""weight of the last request in the mean of what they take"""
_JOIN_S = 30.0
IDLE_S = 20.0
"""without a request, before costs are measured again: long enough that the next one is not expected soon"""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How busy the worker is; tokens are those whose KV is stored, for reuse too."""

    running: int
    waiting: int
    max_running: int
    kv_tokens_used: int
    kv_tokens_capacity: int
    draining: bool
    failed: bool = False
    """Nothing is served any more."""


class Worker:
    """Runs the engine of a session for many callers.

    `max_waiting` requests may wait for room besides those that the engine runs at once. `observe` gets
    the updates of every step, in the worker's thread. Costs that were measured on a busy machine are measured
    again when nobody has asked for anything for `idle_s`.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_waiting: int = 64,
        observe: Callable[[StepView], None] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._session = session
        self._idle_s = idle_s
        self._engine: Engine = session.engine
        self._max_waiting = max_waiting
        self._observe = observe
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting = FairQueue()
        self._running: dict[int, Job] = {}
        self._arrived_s: dict[Job, float] = {}
        self._request_s = _FIRST_REQUEST_S
        """what a request took lately, from its first step to its last"""
        self._used_tokens = 0
        self._failures = 0
        self._num_open = 0
        """jobs that were submitted and have not ended; counted in the event loop"""
        self._is_draining = False
        self._is_stopped = False
        self._has_failed = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # In the event loop

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def submit(self, request: Request, ended: Callable[[Job, Completion], None] | None = None) -> Job:
        """Hand a request in; `ended` gets its completion, however it ends.

        Raises QueueFull or Draining at once, and what the engine refuses the request with (GrammarError,
        PromptError, SettingError) when it has looked at it.
        """
        if self._is_draining or self._is_stopped:
            raise Draining
        if self._num_open >= self._max_waiting + self._engine.max_running:
            waiting = self._num_open - self._engine.max_running
            raise QueueFull(waiting, self._retry_after_s(waiting))
        job = Job(request, asyncio.get_running_loop(), self.cancel, ended)
        self._num_open += 1
        arrived_s = perf_counter()
        self._commands.put(lambda: self._enter(job, arrived_s))
        try:
            await job.accepted()
        except asyncio.CancelledError:
            job.cancel()
            raise
        return job

    def _retry_after_s(self, num_waiting: int) -> float:
        return max(num_waiting / self._engine.max_running * self._request_s, _MIN_RETRY_S)

    def cancel(self, job: Job) -> None:
        """End a job's request after the step in progress; callable from any thread."""
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
        if not self._is_stopped:
            self._is_stopped = True
            self._commands.put(self._end)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # In the worker's thread

    def _run(self) -> None:
        with contextlib.suppress(_Ended):
            try:
                self._serve()
            except _Ended:
                raise
            except Exception:
                _log.exception("the engine's thread failed")
                self._has_failed = True
                self._refuse_all()

    def _serve(self) -> None:
        while True:
            self._obey(wait=not self._running and not self._waiting)
            self._admit()
            if self._running:
                self._step()
            self._used_tokens = self._engine.used_tokens

    def _refuse_all(self) -> None:
        """After an unexpected failure the engine's state is unknown: requests that wait, and those to come,
        get an error instead of waiting forever."""
        error = BackendError("engine", "it failed, and the server's log says how", "Restart the server.")
        while True:
            for job in self._running.values():
                self._refuse(job, error)
            self._running.clear()
            while self._waiting:
                self._refuse(self._waiting.pop(), error)
            self._arrived_s.clear()
            try:
                self._obey(wait=True)
            except _Ended:
                raise
            except Exception:
                _log.exception("the engine's thread failed again")

    def _obey(self, *, wait: bool) -> None:
        """Carry out what the event loop has asked for; `wait` until there is something."""
        while True:
            try:
                command = self._await() if wait else self._commands.get_nowait()
            except queue.Empty:
                return
            command()
            wait = False

    def _await(self) -> Callable[[], None]:
        """The next command. While there is none, costs that want it are measured again: a request that comes
        meanwhile ends that, and waits for one call of a model at most."""
        while self._session.measured_busy and not self._has_failed:
            others = OtherPrograms()
            try:
                return self._commands.get(timeout=self._idle_s)
            except queue.Empty:
                self._measure_again(others)
        return self._commands.get()

    def _measure_again(self, others: OtherPrograms) -> None:
        try:
            if self._session.measure_again(others, self._stop_measuring):
                _log.info("what calls cost was measured again: the machine is quiet now")
        except _Awaited:
            pass
        except OutriderError:
            _log.exception("what calls cost could not be measured again")

    def _stop_measuring(self, _part: float) -> None:
        if not self._commands.empty():
            raise _Awaited

    def _enter(self, job: Job, arrived_s: float) -> None:
        self._arrived_s[job] = arrived_s
        self._waiting.append(job)
        if len(self._waiting) > 1 or not self._engine.has_room(job.request):
            self._post(job, job.settle)  # else it is started, or refused, at once

    def _admit(self) -> None:
        """Start those that wait, as far as there is room: in turn, so that a long one is not passed by."""
        while self._waiting and self._engine.has_room(self._waiting.first().request):
            job = self._waiting.pop()
            arrived_s = self._arrived_s.pop(job)
            try:
                request_id = self._engine.submit(job.request)
            except Exception as error:  # whatever it is, it is this request's alone
                self._refuse(job, _as_ours(error, "the request could not be started"))
                continue
            job.queued_s = perf_counter() - arrived_s
            self._running[request_id] = job
            self._post(job, job.settle)

    def _step(self) -> None:
        try:
            updates = self._engine.step()
            self._failures = 0
        except Exception:
            _log.exception("a step failed")
            updates = self._recover()
        self._deliver(updates)

    def _recover(self) -> list[Update]:
        """After a failed step, which leaves every request as it was: try again, then each request by
        itself, so that one that cannot be stepped takes no other with it."""
        self._failures += 1
        updates: list[Update] = []
        if self._failures > 1:
            for request_id, job in list(self._running.items()):
                try:
                    updates += self._engine.step(only=request_id)
                except Exception as error:
                    completion = self._engine.cancel(request_id)
                    del self._running[request_id]
                    self._refuse(job, _as_ours(error, "a step of it failed"), completion)
            self._failures = 0
        return updates

    def _deliver(self, updates: StepView) -> None:
        """Hand the updates to those who wait for them."""
        if self._observe is not None:
            try:
                self._observe(updates)
            except Exception:
                _log.exception("the metrics missed a step")
        for update in updates:
            job = self._running[update.record.request]
            if update.completion is not None:
                del self._running[update.record.request]
                self._request_s += _REQUEST_RATE * (update.record.end_s - self._request_s)
            self._hand_over(job, update, update.completion)

    def _cancel(self, job: Job) -> None:
        if self._waiting.remove(job):
            del self._arrived_s[job]
            self._refuse(job, BackendError("request", "it was cancelled while it waited"))
        for request_id, running in list(self._running.items()):
            if running is job:
                completion = self._engine.cancel(request_id)
                del self._running[request_id]
                self._hand_over(job, completion)

    def _cancel_all(self) -> None:
        for job in list(self._running.values()):
            self._cancel(job)
        while self._waiting:
            self._cancel(self._waiting.first())

    def _end(self) -> NoReturn:
        self._cancel_all()
        raise _Ended

    # From there back to the event loop

    def _refuse(self, job: Job, error: OutriderError, completion: Completion | None = None) -> None:
        def refuse() -> None:
            self._num_open -= 1
            job.settle(error)
            job.take(error)
            if completion is not None:
                job.note_end(replace(completion, finish_reason="error"))

        self._post(job, refuse)

    def _hand_over(self, job: Job, *items: Update | Completion | None) -> None:
        def take() -> None:
            for item in items:
                self._num_open -= isinstance(item, Completion)
                if item is not None:
                    job.take(item)

        self._post(job, take)

    def _post(self, job: Job, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed: no client waits any more
            job.loop.call_soon_threadsafe(action)


def _as_ours(error: Exception, what: str) -> OutriderError:
    """An error for the request's caller; an unexpected one is logged with its traceback."""
    if isinstance(error, OutriderError):
        return error
    _log.error(what, exc_info=error)
    return BackendError("request", f"{what} ({type(error).__name__})", "The server's log says more.")


class _Awaited(Exception):
    """Somebody waits for the worker."""


class _Ended(Exception):
    """The worker is to end."""
