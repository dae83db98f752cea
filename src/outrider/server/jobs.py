"""A request on its way through the worker, why there may be none, and the queue in which they wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from outrider.core.data import Completion, Request, Update
from outrider.core.errors import BackendError, OutriderError


class QueueFull(OutriderError):
    """As many requests wait as may; `retry_after_s` says when it is worth asking again."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__("server", f"{num_waiting} requests are waiting already", "Ask again a little later.")


class Draining(OutriderError):
    """The server is about to stop and takes no new requests."""

    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("server", "it is shutting down", "Ask again when it is back.")


class Job:
    """One request on its way through the engine: iterate over it for its updates.

    The iteration ends with the generation, and raises BackendError when the engine failed. Leaving it
    early cancels the request, through `cancel`. `completion` is there afterwards. `ended` is called with it
    in any case, in the event loop, also where nobody iterates any more.
    """

    def __init__(
        self,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[Job], None],
        ended: Callable[[Job, Completion], None] | None = None,
    ) -> None:
        self.request = request
        self.loop = loop
        """the event loop that waits for it"""
        self.queued_s = 0.0
        """seconds between the submission and the first step"""
        self._cancel = cancel
        self._ended = ended
        self._updates: asyncio.Queue[Update | Completion | OutriderError] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._completion: Completion | None = None
        self._is_cancelled = False

    @property
    def completion(self) -> Completion:
        """The finished generation. Raises BackendError before the iteration has ended."""
        if self._completion is None:
            raise BackendError("generation", "it has not ended")
        return self._completion

    async def __aiter__(self) -> AsyncIterator[Update]:
        try:
            while self._completion is None:
                item = await self._updates.get()
                if isinstance(item, Update):
                    yield item
                elif isinstance(item, Completion):
                    self._completion = item
                else:
                    raise item
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End it after the step in progress; harmless when it has ended."""
        if self._completion is None and not self._is_cancelled:
            self._is_cancelled = True
            self._cancel(self)

    # Called by the worker, in the event loop

    def take(self, item: Update | Completion | OutriderError) -> None:
        """What has come of it since."""
        self._updates.put_nowait(item)
        if isinstance(item, Completion):
            self.note_end(item)

    def note_end(self, completion: Completion) -> None:
        """It has ended with this; apart from `take` where its caller gets an error instead."""
        if self._ended is not None:
            self._ended(self, completion)

    def settle(self, error: OutriderError | None = None) -> None:
        """It was accepted (the engine has it, or it waits for room), or refused."""
        if not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)

    async def accepted(self) -> None:
        """Wait until the worker has looked at it. Raises what the worker refused it with."""
        await self._accepted


class FairQueue:
    """Jobs that wait, one queue for each cache namespace (`Request.scope`): namespaces take turns, within
    one the first comes first."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, job: Job) -> None:
        """At the end of its namespace's queue."""
        self._queues.setdefault(job.request.scope, deque()).append(job)

    def remove(self, job: Job) -> bool:
        """Take a job out; whether it was there."""
        namespace = job.request.scope
        waiting = self._queues.get(namespace, deque())
        if job not in waiting:
            return False
        waiting.remove(job)
        if not waiting:
            del self._queues[namespace]
        return True

    def first(self) -> Job:
        """The job that is next."""
        return next(iter(self._queues.values()))[0]

    def pop(self) -> Job:
        """The job that is next; its namespace goes to the end of the queue."""
        namespace, waiting = self._queues.popitem(last=False)
        job = waiting.popleft()
        if waiting:
            self._queues[namespace] = waiting
        return job
