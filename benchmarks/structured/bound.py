"""The hindsight bound of a constrained answer: lookups and forced text, whose outcome is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from outrider.core.contracts import Constraint, Drafter, DraftRequest, StoppingRule
from outrider.core.data import Completion, Draft, DraftWork, Request
from outrider.costs import CallCosts
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.recording import Recording
from outrider.lab.replay import hindsight_bound
from outrider.policy.forced import FORCED, forced
from policy.curves import CallTimes, time_calls


class ForcedDrafter:
    """What a constraint forces, as the Drafter of one answer."""

    name = FORCED
    is_free = True

    def __init__(self, make: Callable[[], Constraint]) -> None:
        self._make = make
        self._constraint = make()

    def begin(self, sequence: int, request: Request) -> None:
        del sequence, request
        self.reset()

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        del sequence
        self._constraint.accept(tokens)

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        del stopping
        return [forced(replace(request, constraint=self._constraint)) for request in requests], DraftWork()

    def end(self, sequence: int) -> None:
        del sequence

    def reset(self) -> None:
        self._constraint = self._make()


def bound_token_s(
    prompt: Sequence[int],
    answer: Completion,
    plain: Completion,
    curve: CallCosts,
    make: Callable[[], Constraint],
) -> float:
    """Seconds per token of the fastest choices that lookup and forced text allowed for this answer, at what
    the calls of these two runs took. A draft model has no part in it."""
    times = CallTimes(curve)
    for run in (answer, plain):
        time_calls(run.records, times, None)
    own_s = median(r.total_s - r.read_s - r.verify_s for r in plain.records if r.kind == "decode")
    recording = Recording("0", "structured", tuple(prompt), answer.tokens, answer.finish_reason, {})
    free: list[Drafter] = [SuffixDrafter(), ForcedDrafter(make)]
    bound_s = hindsight_bound(recording, times.fitted(times), free=free, own_s=own_s)
    return bound_s / len(answer.tokens)
