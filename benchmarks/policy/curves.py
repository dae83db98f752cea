"""Cost curves of a run: read, fitted to what its calls took in fact, and made wrong on purpose."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import read_rows
from outrider.core.data import StepRecord
from outrider.core.errors import SettingError
from outrider.costs import MAX_TOKENS, CallCosts, CallPoint
from outrider.costs.store import PairCosts, import_costs

ENOUGH_CALLS = 5
"""Of a size: then it is known by itself; else it follows the curve."""


def read_costs(path: Path) -> PairCosts:
    """The curves of `outrider costs --costs FILE`, or the last ones that live.py measured (.jsonl).

    Ends the program where there are none.
    """
    try:
        if path.suffix != ".jsonl":
            return import_costs(path)
        found = [row for row in read_rows(path) if row.get("kind") == "costs"]
        if not found:
            sys.exit(f"{path} holds no costs: name a file of live.py or of `outrider costs --costs FILE`")
        return from_row(found[-1])
    except SettingError as error:
        sys.exit(str(error))


def as_row(pair: PairCosts) -> dict[str, Any]:
    """Measured curves as a row of results."""
    draft = pair.draft.as_json() if pair.draft else None
    return {"kind": "costs", "target": pair.target.as_json(), "draft": draft}


def from_row(row: Mapping[str, Any]) -> PairCosts:
    """The curves that `as_row` made a row of."""
    draft = CallCosts.from_json(row["draft"], "draft") if row["draft"] else None
    return PairCosts(CallCosts.from_json(row["target"], "target"), draft)


# What calls took in fact


@dataclass(slots=True)
class CallTimes:
    """Real calls of a model against the curve that was measured before: ratios, by tokens of the call."""

    curve: CallCosts
    ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    prefill_token_s: list[float] = field(default_factory=list)

    def note(self, num_tokens: int, seconds: float, context: int) -> None:
        """A call took so long."""
        if seconds > 0:
            self.ratios[num_tokens].append(seconds / self.curve.call_s(num_tokens, context=context))
            self.seconds[num_tokens].append(seconds)

    @property
    def scale(self) -> float:
        """Real times over measured ones, over all calls; 1 without any."""
        return median([r for ratios in self.ratios.values() for r in ratios] or [1.0])

    def known(self) -> dict[int, float]:
        """The median ratio of each size of which there were enough calls, the scale left out of it."""
        scale = self.scale
        return {n: median(r) / scale for n, r in self.ratios.items() if len(r) >= ENOUGH_CALLS}

    def join(self, other: CallTimes) -> None:
        """Take over the shape of another text's times: its scale was that of its own moment."""
        scale = other.scale
        for n, ratios in other.ratios.items():
            self.ratios[n] += [ratio / scale for ratio in ratios]
        self.prefill_token_s += [seconds / scale for seconds in other.prefill_token_s]

    def fitted(self, run: CallTimes, scale: float | None = None) -> CallCosts:
        """The curve at this moment: sizes with enough calls by their own median, or by that of the whole
        `run` brought to the moment's scale; all others as they were measured, at that scale. `scale` is
        that of these calls if none is given."""
        shape = {n: ratio for n, ratio in (run.known() | self.known()).items() if n <= MAX_TOKENS}
        scale = self.scale if scale is None else scale
        points = list(self.curve.points)
        new = set(shape) - {p.num_tokens for p in points}
        points += [CallPoint(n, self.curve.call_s(n, context=0)) for n in sorted(new)]
        return CallCosts(
            [replace(p, seconds=p.seconds * scale * shape.get(p.num_tokens, 1.0)) for p in points],
            prefill_token_s=self._prefill(run, scale),
            window=self.curve.window,
        )

    def _prefill(self, run: CallTimes, scale: float) -> float | None:
        if self.prefill_token_s:
            return median(self.prefill_token_s)
        if run.prefill_token_s:
            return median(run.prefill_token_s) * scale
        return self.curve.prefill_token_s and self.curve.prefill_token_s * scale

    def as_json(self) -> list[dict[str, float]]:
        """For each size of a call: how many there were, their median, and that over the measured curve."""
        return [
            {
                "tokens": n,
                "calls": len(self.seconds[n]),
                "seconds": median(self.seconds[n]),
                "ratio": median(self.ratios[n]),
            }
            for n in sorted(self.seconds)
        ]


def time_calls(records: Iterable[StepRecord], target: CallTimes, draft: CallTimes | None) -> None:
    """Note the calls of decoding steps of single sequences. Of one that read
    of the prompt too they are the draft's alone."""
    records = [record for record in records if record.kind == "decode"]
    for record in records:
        if not record.read_tokens:
            target.note(record.batch_tokens, record.verify_s, record.position)
        if draft and record.work.prefill_calls:
            draft.prefill_token_s.append(record.work.prefill_s / record.work.prefill_tokens)
    if draft is None:
        return
    rounds = [(r.work.call_tokens, r.work.model_s, r.position) for r in records if r.work.call_tokens]
    for call_tokens, model_s, position in rounds:
        if set(call_tokens) == {1}:
            draft.note(1, model_s / len(call_tokens), position)
    step_ratio = median(draft.ratios.get(1) or [1.0])
    for call_tokens, model_s, position in rounds:
        if call_tokens[0] > 1:  # it first reads what it has not seen; then it goes on one by one
            steps_s = (len(call_tokens) - 1) * draft.curve.call_s(1, context=position) * step_ratio
            draft.note(call_tokens[0], model_s - steps_s, position)


# Wrong on purpose


def _distort(costs: CallCosts, factor: Callable[[int, float], float]) -> CallCosts:
    """Each point's seconds, given its tokens, put through `factor`."""
    points = [replace(p, seconds=factor(p.num_tokens, p.seconds)) for p in costs.points]
    return CallCosts(points, prefill_token_s=costs.prefill_token_s, window=costs.window)


def _longer(costs: CallCosts, by: float) -> CallCosts:
    """Calls over several tokens `by` times as expensive as they are, but never below a call over one."""
    one_s = costs.call_s(1, context=0)
    return _distort(costs, lambda n, s: s if n == 1 else max(s * by, one_s))


def _draft(pair: PairCosts, by: float) -> PairCosts:
    return replace(pair, draft=pair.draft and _distort(pair.draft, lambda _, s: s * by))


WRONG: Mapping[str, Callable[[PairCosts], PairCosts]] = {
    "long calls 2x": lambda pair: replace(pair, target=_longer(pair.target, 2.0)),
    "long calls 0.5x": lambda pair: replace(pair, target=_longer(pair.target, 0.5)),
    "draft 2x": lambda pair: _draft(pair, 2.0),
    "draft 0.5x": lambda pair: _draft(pair, 0.5),
}
"""Wrong costs that a policy may be given. All calls alike wrong would change no choice."""
