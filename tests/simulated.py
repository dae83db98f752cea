"""What the tests of the automatic policy share: a clock of its own, so that its choices in a real engine can
be repeated, and a free drafter that can be relied on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from outrider.core.data import DraftToken, Request, StepRecord
from outrider.costs import CallCosts
from outrider.policy.auto import AutoPolicy
from recordings import SMALL, curve

SURE = (20.0, 30.0, 30.0)
"""evidence of a long match that always went on so"""


class Offering:
    """A free drafter that always offers so many tokens, in so good a match; or that does so only after
    tokens of others."""

    is_free = True

    def __init__(
        self,
        length: int = 100,
        evidence: tuple[float, ...] = SURE,
        name: str = "lookup",
        *,
        only_after: bool = False,
    ) -> None:
        self.name = name
        self._only_after = only_after
        self._length = length
        self._evidence = evidence

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        del sequence
        if prefix or not self._only_after:
            yield from [DraftToken(1, self.name, 0.5, self._evidence)] * self._length

    def begin(self, sequence: int, request: Request) -> None:
        """It looks at no text."""

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nor at what became of it."""

    def end(self, sequence: int) -> None:
        """And remembers none."""

    def reset(self) -> None:
        """There is nothing to forget."""


class Simulated(AutoPolicy):
    """Its clock is that of the curves: what really happens takes what they say."""

    def __init__(
        self,
        ratios: Mapping[int, float],
        step_s: float | None = None,
        prefill_s: float | None = None,
    ) -> None:
        self._costs = curve(ratios)
        self._draft = None if step_s is None else curve(SMALL, step_s)
        draft = None
        if self._draft is not None:
            draft = CallCosts(self._draft.points, prefill_token_s=prefill_s or 0.001)
        super().__init__(curve(ratios), draft)

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        super().observe({sequence: self._timed(record) for sequence, record in records.items()})

    def _timed(self, record: StepRecord) -> StepRecord:
        model_s = 0.0
        if self._draft is not None:
            model_s = sum(self._draft.call_s(n, context=0) for n in record.work.call_tokens)
        return replace(
            record,
            work=replace(record.work, model_s=model_s, prefill_s=0.0),
            draft_s=model_s,
            verify_s=self._costs.call_s(record.batch_tokens, context=0),
            sampling_s=0.0,
            other_s=0.0,
        )
