"""What was proposed in another engine and what became of it, counted, in a line for its log."""

from __future__ import annotations

from collections import Counter

from outrider.core.data import StepRecord
from outrider.costs import CallCosts


class Counts:
    """Counts since the start. A call is a step of the whole batch, a row one request's share of it."""

    def __init__(self) -> None:
        self.requests = 0
        self.calls = 0
        """those over decoding rows alone"""
        self.rows = 0
        self.drafted_rows = 0
        self.tokens = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        """tokens by drafter"""

    def add(self, record: StepRecord) -> None:
        self.rows += 1
        self.drafted_rows += bool(record.draft)
        self.tokens += len(record.tokens)
        self.drafted.update(record.draft.sources)
        self.accepted.update(record.draft.sources[: record.num_accepted])

    def line(self, costs: CallCosts) -> str:
        """All of it, and what calls cost."""
        drafted, accepted = self.drafted.total(), self.accepted.total()
        parts = ", ".join(
            f"{name} {self.accepted[name]}/{count}" for name, count in sorted(self.drafted.items())
        )
        shares = f" ({accepted / drafted:.0%}: {parts})" if drafted else ""
        alone_s = costs.call_s(1, context=0)
        ratios = " ".join(f"{n}:{costs.call_s(n, context=0) / alone_s:.2f}" for n in (2, 4, 8, 16))
        return (
            f"{self.requests} requests; {self.tokens / max(self.rows, 1):.2f} tokens per request and call "
            f"over {self.rows}; {self.drafted_rows} with a draft; {accepted} of {drafted} drafted tokens "
            f"accepted{shares}; a call over n tokens, against one: {ratios} ({costs.num_observed} observed)"
        )
