"""The automatic policy over a batch that another engine runs: from each step's tokens to the next drafts. The
engine says nothing of times and acceptance. Both follow from what it does: from one step's proposals to the
next step's tokens is what a call takes with all that belongs to it, and the tokens that came back say how
much of a draft was accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import cast

from outrider.core.contracts import Drafter, Drafters, DraftRequest, Sampler
from outrider.core.data import Draft, DraftWork, Request, StepRecord
from outrider.core.sequences import common_prefix
from outrider.costs import CallCosts
from outrider.drafters.earlier import EarlierDrafter, Memory
from outrider.drafters.suffix import SuffixDrafter
from outrider.fleet.rows import Row, Rows, Running, Tokens
from outrider.policy.auto import AutoPolicy

_READ_TOKENS = 1024
"""Prompt tokens that drafters read in a step, over all requests: the whole batch waits while they do."""
_MEMORY_TOKENS = 64_000
"""What is kept of earlier texts: sorting them again holds up the batch, too."""
_NO_SAMPLER = cast(Sampler, None)
"""Lookups draft point masses: they look at no logits."""


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


class Speculation:
    """Drafts for the rows of a batch, as `policy` chooses them. `max_length` is the longest text that a row
    can hold, `chunk` the most prompt tokens of a call. `earlier` looks up in the texts of requests that
    ended, too. `clock` gives seconds."""

    def __init__(
        self,
        policy: AutoPolicy,
        *,
        max_length: int,
        chunk: int,
        earlier: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.policy = policy
        self.counts = Counts()
        self._drafters: list[Drafter] = [SuffixDrafter()]
        if earlier:
            self._drafters.append(EarlierDrafter(Memory(_MEMORY_TOKENS)))
        self._max_length, self._chunk = max_length, chunk
        self._clock = clock
        self._rows = Rows()
        self._proposed_at = clock()
        self._own_s = 0.0

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> list[list[int]]:
        """One draft per row, possibly empty, for the step to come. The arguments are those of `Rows.update`:
        what the step that ended made of the batch."""
        began = self._clock()
        rows, gone = self._rows.update(sampled, lengths, texts)
        for request in gone:
            for drafter in self._drafters:
                drafter.end(request.sequence)
        self._learn(rows, began - self._proposed_at)
        self._read(rows)
        drafts = self._drafts(rows)
        self._proposed_at = self._clock()
        self._own_s = self._proposed_at - began
        return [list(draft.tokens) for draft in drafts]

    def _learn(self, rows: Sequence[Row], call_s: float) -> None:
        """What became of the drafts, and what the call took where it decoded and did nothing else."""
        records: dict[int, StepRecord] = {}
        known = [row for row in rows if row.request and not row.is_new and _is_verified(row)]
        batch_drafted = sum(len(_verified(row)) for row in known)
        for row in known:
            record = self._record(row, call_s, len(rows), batch_drafted)
            records[record.request] = record
            self.counts.add(record)
        if len(known) == len(rows):
            self.counts.calls += 1
        elif records:  # a row whose part of the call is unknown: the policy takes no time from such a step
            records[-1] = replace(next(iter(records.values())), request=-1, kind="prefill")
        self.policy.observe(records)
        for row in known:
            assert row.request is not None
            row.request.unread += row.tokens

    def _record(self, row: Row, call_s: float, num_sequences: int, batch_drafted: int) -> StepRecord:
        draft = _verified(row)
        return StepRecord(
            request=row.request.sequence if row.request else 0,
            step=self.counts.calls,
            kind="decode",
            position=row.length - len(row.tokens),
            num_evaluated=1 + len(draft),
            draft=draft,
            num_accepted=min(common_prefix(draft.tokens, row.tokens), len(row.tokens) - 1),
            tokens=row.tokens,
            work=DraftWork(),
            draft_s=self._own_s,
            verify_s=call_s,
            sampling_s=0.0,
            other_s=0.0,
            end_s=0.0,
            num_sequences=num_sequences,
            batch_tokens=num_sequences + batch_drafted,
            batch_drafted=batch_drafted,
        )

    def _read(self, rows: Sequence[Row]) -> None:
        """Let drafters read what they have not: tokens that were sampled, and prompts in parts."""
        room = _READ_TOKENS
        for row in rows:
            if row.request is None:
                continue
            request = row.request
            if row.is_new:
                self._begin(request)
            elif not _is_verified(row):  # tokens of a draft that was not proposed here
                request.unread += row.tokens
            size = min(len(request.unread), max(room, len(row.tokens)))
            for drafter in self._drafters:
                drafter.observe(request.sequence, request.unread[:size])
            del request.unread[:size]
            room -= size

    def _begin(self, request: Running) -> None:
        first, request.unread = request.unread[:1], request.unread[1:]
        self.counts.requests += 1
        for drafter in self._drafters:
            drafter.begin(request.sequence, Request(tuple(first)))
        self.policy.begin(request.sequence, request.length, None)

    def _drafts(self, rows: Sequence[Row]) -> list[Draft]:
        requests = []
        for row in rows:
            room = self._max_length - row.length - 1
            if row.request is not None:
                row.request.draft = Draft()
                if room > 0 and not row.request.unread:
                    requests.append(DraftRequest(row.request.sequence, room, _NO_SAMPLER))
        drafts: dict[int, Draft] = {}
        if requests:
            reading = sum(min(row.length, self._chunk) for row in rows if row.request is None)
            others = sum(row.request is not None for row in rows) - len(requests) + min(reading, self._chunk)
            offers, _ = self.policy.propose(Drafters.of(self._drafters), requests, others)
            drafts = {request.sequence: draft for request, draft in zip(requests, offers, strict=True)}
        for row in rows:
            if row.request is not None:
                row.request.draft = drafts.get(row.request.sequence, Draft())
        return [row.request.draft if row.request else Draft() for row in rows]


def _is_verified(row: Row) -> bool:
    """Whether the tokens can be those of the draft that was proposed, and one of the target's own."""
    return row.request is not None and len(row.tokens) <= len(row.request.draft) + 1


def _verified(row: Row) -> Draft:
    """The part of a draft that the engine verified. It may cut drafts (a grammar, a full batch): then all
    that came back agrees with the draft, and the last of it is the target's own."""
    draft = row.request.draft if row.request else Draft()
    is_cut = common_prefix(draft.tokens, row.tokens) == len(row.tokens)
    return draft.first(len(row.tokens) - 1) if is_cut else draft
