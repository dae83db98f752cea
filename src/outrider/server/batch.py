"""The generations of one HTTP request: started together, read together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

from outrider.core.data import Completion, Update
from outrider.core.errors import OutriderError
from outrider.server.answers.account import estimate_of
from outrider.server.jobs import Job
from outrider.server.limits import Bill, Caller
from outrider.server.prepare.plan import Plan
from outrider.server.problems import Problem, problem_of
from outrider.server.service import Service

__all__ = ["Batch"]


class Batch:
    """Running generations, one for each choice of a plan. `close` ends those that still run, whatever
    happened: whoever started a batch closes it. The caller pays for what was generated until then."""

    def __init__(self, service: Service, plan: Plan, caller: Caller) -> None:
        self.service = service
        self.plan = plan
        self.jobs: list[Job] = []
        self._caller = caller
        self._reserved = ExitStack()
        self._bills: list[Bill] = []

    @classmethod
    async def start(cls, service: Service, plan: Plan, caller: Caller) -> Batch:
        """Hand all requests to the worker, or none. Raises Problem."""
        batch = cls(service, plan, caller)
        try:
            for request in plan.requests:
                room = service.context_tokens - len(request.prompt)
                longest = room if request.max_tokens is None else min(request.max_tokens, room)
                bill = batch._reserved.enter_context(caller.reserved(len(request.prompt), longest))
                batch._bills.append(bill)
                batch.jobs.append(await service.worker.submit(request, batch._ended))
                bill.prompt_tokens = len(request.prompt)
        except OutriderError as error:
            batch.close()
            raise problem_of(error) from None
        except BaseException:
            batch.close()
            raise
        return batch

    async def updates(self) -> AsyncIterator[tuple[int, Update | None]]:
        """What each step adds to a choice, by its index, as it comes; None when that choice has ended.

        Raises Problem for a generation that failed, or that the server broke off.
        """
        iterators = [aiter(job) for job in self.jobs]
        pending = {asyncio.ensure_future(anext(it, None)): i for i, it in enumerate(iterators)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    update = self._result(task)
                    if update is None:
                        self._check(self.jobs[index])
                    else:
                        self._bills[index].completion_tokens += len(update.record.tokens)
                        pending[asyncio.ensure_future(anext(iterators[index], None))] = index
                    yield index, update
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _ended(self, job: Job, completion: Completion) -> None:
        """Count a generation, also one whose client has left."""
        if self.service.meter is not None:
            estimate, _ = estimate_of([completion], self.service.policy)
            self.service.meter.observe_request(
                completion,
                queued_s=job.queued_s,
                key=self._caller.name,
                speedup=estimate.speedup if estimate else None,
            )

    def _check(self, job: Job) -> None:
        if job.completion.finish_reason == "cancelled":
            raise self._broken_off()

    def close(self) -> None:
        """End what still runs, and let the caller pay. Closing twice is harmless."""
        for job in self.jobs:
            job.cancel()
        self._reserved.close()

    def _result(self, task: asyncio.Future[Update | None]) -> Update | None:
        try:
            update = task.result()
        except OutriderError as error:
            if self.service.worker.state().draining:
                raise self._broken_off() from None
            raise problem_of(error) from None
        if update is not None and update.error is not None:
            raise problem_of(update.error)
        return update

    @staticmethod
    def _broken_off() -> Problem:
        message = "the server is ending and broke the generation off. Try again later."
        return Problem(503, message, code="cancelled", headers={"Retry-After": "5"})
