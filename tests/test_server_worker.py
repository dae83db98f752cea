"""Many callers, one engine: what each gets, who is next, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from engines import GREEDY, LANGUAGE, PROMPT, VOCABULARY, language_model, plain
from outrider import Session
from outrider.backends.fake import FakeModel
from outrider.core.data import Completion, Logits, Request, Span, Update
from outrider.core.errors import BackendError
from outrider.costs.other_programs import OtherPrograms
from outrider.costs.store import BUSY
from outrider.drafters.lookup import SuffixDrafter
from outrider.policy.fixed import FixedPolicy
from outrider.server.errors import Problem
from outrider.server.worker import Worker
from serving import Running, SlowModel

if TYPE_CHECKING:
    from outrider.session.learned import Learned
    from outrider.session.options import Progress

pytestmark = pytest.mark.anyio

REQUEST = Request(PROMPT, GREEDY, max_tokens=30, ignore_end=True)
GUARD_S = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def working(target: FakeModel | None = None, **options: Any) -> AsyncIterator[Worker]:
    target = target or language_model()
    running = options.pop("max_running", None)
    session = Session(target, [SuffixDrafter()], FixedPolicy(p_min=0), max_running=running)
    worker = Worker(session, **options)
    worker.start()
    try:
        async with asyncio.timeout(GUARD_S):
            yield worker
    finally:
        worker.stop()


async def finish(job: Running) -> tuple[list[Update], Completion]:
    updates = [update async for update in job]
    return updates, job.completion


async def nobody_left(worker: Worker) -> None:
    while worker.state().running or worker.state().waiting:
        await asyncio.sleep(0.001)


def endless(max_tokens: int = 200) -> Request:
    return replace(REQUEST, max_tokens=max_tokens)


def slow_model(**options: Any) -> FakeModel:
    """One whose calls take a moment, so that requests overlap."""

    model = SlowModel(VOCABULARY, LANGUAGE, **options)
    model.call_s = 0.002
    return model


async def test_every_caller_gets_what_a_request_alone_would_get() -> None:
    prompts = [(*PROMPT, i % 5, i % 3) for i in range(12)]
    async with working(max_running=3) as worker:
        jobs = [await Running.submit(worker, replace(REQUEST, prompt=prompt)) for prompt in prompts]
        results = await asyncio.gather(*map(finish, jobs))
    for prompt, (updates, completion) in zip(prompts, results, strict=True):
        expected = plain(language_model(), replace(REQUEST, prompt=prompt))
        assert (completion.tokens, completion.text, completion.finish_reason) == expected
        assert "".join(update.text for update in updates) == completion.text
        assert updates[-1].completion == completion
        assert completion.records == tuple(update.record for update in updates)


async def test_requests_share_their_calls() -> None:
    seen: list[int] = []

    def observe(updates: Sequence[Update]) -> None:
        seen.append(len(updates))

    async with working(slow_model(), max_running=4, observe=observe) as worker:
        jobs = [await Running.submit(worker, replace(REQUEST, prompt=(*PROMPT, i))) for i in range(4)]
        await asyncio.gather(*map(finish, jobs))
    assert max(seen) == 4


async def test_two_engines_take_turns() -> None:
    steps: list[int] = []

    class Alone(FakeModel):
        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            steps.append(id(self))
            found = super().decode(spans)
            time.sleep(0.001)
            assert steps[-1] == id(self), "another engine computed beside it"
            return found

    targets = [Alone(VOCABULARY, LANGUAGE) for _ in range(2)]
    async with working(targets[0]) as one, working(targets[1]) as other:
        first = await Running.submit(one, endless(60))
        second = await Running.submit(other, endless(60))
        await asyncio.gather(finish(first), finish(second))
    both = steps[steps.index(next(step for step in steps if step != steps[0])) :]
    longest = max(len(list(same)) for _, same in groupby(both[: len(both) // 2]))
    assert longest < len(both) // 4, "one kept the other waiting"


async def test_a_cancelled_job_ends_with_what_it_has() -> None:
    async with working(slow_model()) as worker:
        job = await Running.submit(worker, endless())
        seen = 0
        async for _ in job:
            seen += 1
            if seen == 4:
                job.cancel()
    assert job.completion.finish_reason == "cancelled"
    tokens = job.completion.tokens
    assert 0 < len(tokens) < 200 and plain(language_model(), endless())[0][: len(tokens)] == tokens


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with working(slow_model(), max_running=1, max_waiting=2) as worker:
        jobs = [await Running.submit(worker, endless()) for _ in range(3)]
        with pytest.raises(Problem, match="2 requests are waiting") as caught:
            await Running.submit(worker, REQUEST)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert int(caught.value.headers["Retry-After"]) >= 1
        for job in jobs:
            job.cancel()
        await nobody_left(worker)
        await finish(await Running.submit(worker, REQUEST))


async def test_scopes_take_turns() -> None:
    order: list[str] = []

    async def follow(job: Running, name: str) -> None:
        async for _ in job:
            pass
        order.append(name)

    async with working(slow_model(), max_running=1) as worker:
        first = await Running.submit(worker, replace(REQUEST, max_tokens=20))
        crowd = [await Running.submit(worker, replace(REQUEST, max_tokens=2, scope="many")) for _ in range(4)]
        one = await Running.submit(worker, replace(REQUEST, max_tokens=2, scope="one"))
        names = [(first, "first"), *((job, f"many {i}") for i, job in enumerate(crowd)), (one, "one")]
        await asyncio.gather(*(follow(job, name) for job, name in names))
    assert order == ["first", "many 0", "one", "many 1", "many 2", "many 3"]


async def test_a_call_that_fails_once_costs_nobody_anything() -> None:
    target = slow_model()
    target.fail_at_call = 9
    async with working(target) as worker:
        jobs = [await Running.submit(worker, replace(REQUEST, prompt=(*PROMPT, i))) for i in range(3)]
        for i, (_, completion) in enumerate(await asyncio.gather(*map(finish, jobs))):
            expected = plain(language_model(), replace(REQUEST, prompt=(*PROMPT, i)))
            assert completion.tokens == expected[0]


async def test_one_sequence_that_cannot_be_stepped_takes_no_other_with_it() -> None:
    class Poisoned(FakeModel):
        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            if any(3 in span.tokens and span.start == 0 for span in spans):
                raise BackendError("fake model", "this one cannot be read")
            return super().decode(spans)

    async with working(Poisoned(VOCABULARY, LANGUAGE)) as worker:
        good = await Running.submit(worker, endless())
        bad = await Running.submit(worker, replace(REQUEST, prompt=(3, 3, 3, 3)))
        results = await asyncio.gather(finish(good), finish(bad), return_exceptions=True)
        assert isinstance(results[1], BackendError)
        assert not isinstance(results[0], BaseException)
        assert results[0][1].tokens == plain(language_model(), endless())[0]
        assert (good.endings, bad.endings) == (["length"], ["error"])


async def test_logits_that_are_no_numbers_end_one_request_with_an_error() -> None:
    def logits(tokens: Sequence[int]) -> Logits:
        row = LANGUAGE(tokens)
        return np.full_like(row, np.nan) if tokens[0] == 3 and len(tokens) > 8 else row

    async with working(FakeModel(VOCABULARY, logits)) as worker:
        good = await Running.submit(worker, endless())
        bad = await Running.submit(worker, replace(REQUEST, prompt=(3, *PROMPT)))
        (_, fine), (updates, broken) = await asyncio.gather(finish(good), finish(bad))
        assert fine.tokens == plain(language_model(), endless())[0]
        assert broken.finish_reason == "error"
        assert isinstance(updates[-1].error, BackendError)


async def test_an_observer_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def observe(updates: Sequence[Update]) -> None:
        raise ValueError(f"{len(updates)} updates are too many")

    async with working(observe=observe) as worker:
        await finish(await Running.submit(worker, REQUEST))
    assert "metrics missed a step" in caplog.text


async def test_what_outlasts_the_draining_is_cancelled() -> None:
    async with working(slow_model(), max_running=1) as worker:
        running = asyncio.create_task(finish(await Running.submit(worker, endless())))
        waiting = asyncio.create_task(finish(await Running.submit(worker, endless())))
        await worker.drain(0.01)
        _, completion = await running
        assert completion.finish_reason == "cancelled"
        with pytest.raises(BackendError):
            await waiting


async def test_a_thousand_callers_who_leave_at_once_leave_nothing_behind() -> None:
    async def leave(worker: Worker, number: int) -> None:
        with contextlib.suppress(Problem):
            task = asyncio.create_task(Running.submit(worker, replace(REQUEST, prompt=(*PROMPT, number % 5))))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            if number % 2:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                job = await task
                async for _ in job:
                    if number % 3:
                        break

    async with working(max_waiting=2000) as worker:
        await asyncio.gather(*(leave(worker, number) for number in range(1000)))
        await nobody_left(worker)
        _, completion = await finish(await Running.submit(worker, REQUEST))
        assert completion.tokens == plain(language_model(), REQUEST)[0]


class BusyCosts:
    """What is learned of a pair, by a stand-in: costs from a busy machine. The first time they are measured
    again goes on until somebody waits."""

    def __init__(self, *, fails: bool = False) -> None:
        self.is_provisional = True
        self.begun, self.done = threading.Event(), threading.Event()
        self.interrupted = 0
        self._fails = fails

    def is_disturbed(self, _others: OtherPrograms) -> bool:
        return False

    def measure_again(self, progress: Progress) -> None:
        if not self.begun.is_set():
            self.begun.set()
            if self._fails:
                raise BackendError("call", "it failed")
            try:
                while True:
                    progress("target", 0.5)
            except BaseException:
                self.interrupted += 1
                raise
        self.is_provisional = False
        self.done.set()

    def keep(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
async def test_an_idle_server_measures_again_what_it_measured_on_a_busy_machine(fails: bool) -> None:
    costs = BusyCosts(fails=fails)
    learned = cast("Learned", costs)
    session = Session(language_model(), [SuffixDrafter()], FixedPolicy(p_min=0), learned=learned)
    session.notices = [BUSY]
    worker = Worker(session, idle_s=0.001)
    worker.start()
    try:
        async with asyncio.timeout(GUARD_S):
            await asyncio.to_thread(costs.begun.wait)
            for _ in range(2):
                _, completion = await finish(await Running.submit(worker, REQUEST))
                assert completion.tokens == plain(language_model(), REQUEST)[0]
            await asyncio.to_thread(costs.done.wait)
            while session.is_provisional or session.notices:
                await asyncio.sleep(0.001)
    finally:
        worker.stop()
    assert costs.interrupted == (not fails)
