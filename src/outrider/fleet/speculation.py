"""The automatic policy over a batch that another engine runs: from each step's tokens to the next drafts. The
engine says nothing of times and acceptance. Both follow from what it does: from one step's proposals to the
next step's tokens is what a call takes with all that belongs to it, and the tokens that came back say how
much of a draft was accepted."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import cast

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Drafter, Drafters, DraftRequest, Sampler
from outrider.core.data import Draft, DraftWork, Request, StepRecord
from outrider.core.sequences import common_prefix
from outrider.drafters.earlier import EarlierDrafter, Memory
from outrider.drafters.lookup import SuffixDrafter
from outrider.policy.auto import AutoPolicy

_READ_TOKENS = 1024
"""Prompt tokens that drafters read in a step, over all requests: the whole batch waits while they do."""
_MEMORY_TOKENS = 64_000
"""What is kept of earlier texts: sorting them again holds up the batch, too."""
_NO_SAMPLER = cast(Sampler, None)
"""Lookups draft point masses: they look at no logits."""
Tokens = npt.NDArray[np.integer]
"""Token ids, shape (batch, tokens) or (tokens,); what lies after a row's length is not looked at."""

_COMPARED = 1024
"""Tokens at the end of a text by which it is recognized, with its length. Texts that agree so far are one to
any lookup; to compare whole ones would take a noticeable part of a step where texts are long."""


# Which request is in which row. The engine shows its batch as rows of tokens, without ids, and moves rows
# when requests come and go. A request goes on in a row whose text is its own followed by what was just
# sampled; any other row holds a new request, or one that was away (preempted): it is read as a new one.


@dataclass(slots=True)
class Running:
    """A request as far as it has come. `sequence` is its number among those that are running: numbers are
    used again, the lowest first. `end` are the last tokens of its text, `length` is the whole text's."""

    sequence: int
    length: int
    end: Tokens
    draft: Draft = field(default_factory=Draft)
    """what was proposed for the step that is running"""
    unread: list[int] = field(default_factory=list)
    """tokens of its text that drafters have not read yet"""

    def note(self, row: Tokens, length: int) -> None:
        """Its text is now the first `length` tokens of `row`."""
        self.length, self.end = length, row[max(length - _COMPARED, 0) : length].copy()

    def goes_on_in(self, row: Tokens, length: int) -> bool:
        """Whether the first `length` tokens of `row` are its text."""
        end = row[self.length - len(self.end) : self.length]
        return self.length == length and bool(np.array_equal(self.end, end))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: `tokens` were sampled for `request`; None while its prompt is being read, of which
    `length` tokens are known. `is_new`: the request was not in the step before."""

    request: Running | None
    tokens: tuple[int, ...]
    is_new: bool
    length: int


class Rows:
    """The requests of the last step, by the row that each was in."""

    def __init__(self) -> None:
        self._last: dict[int, Running] = {}
        self._free: list[int] = []
        self._num_taken = 0

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> tuple[list[Row], list[Running]]:
        """The rows of a step, and the requests that are no longer among them. `sampled` are the tokens that
        each row got, none while a prompt is being read; `lengths` those of the texts, these tokens included.
        """
        found = self._find(sampled, lengths, texts)
        kept = set(found.values())
        gone = [request for i, request in self._last.items() if i not in kept]
        for request in gone:
            heapq.heappush(self._free, request.sequence)
        rows, now = [], dict[int, Running]()
        for i, tokens in enumerate(sampled):
            length = int(lengths[i])
            if not tokens:
                rows.append(Row(None, (), True, length))
                continue
            request = self._last[found[i]] if i in found else self._new(texts[i], length)
            now[i] = request
            request.note(texts[i], length)
            rows.append(Row(request, tuple(map(int, tokens)), i not in found, length))
        self._last = now
        return rows, gone

    def _find(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> dict[int, int]:
        found, left = dict[int, int](), dict(self._last)
        for i, tokens in enumerate(sampled):
            before = int(lengths[i]) - len(tokens)
            here = (j for j in chain((i,), left) if j in left and left[j].goes_on_in(texts[i], before))
            if tokens and (j := next(here, None)) is not None:
                found[i] = j
                del left[j]
        return found

    def _new(self, row: Tokens, length: int) -> Running:
        if self._free:
            sequence = heapq.heappop(self._free)
        else:
            sequence, self._num_taken = self._num_taken, self._num_taken + 1
        return Running(sequence, length, row[:0], unread=row[:length].tolist())


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
        self._num_steps = 0
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
        self._num_steps += 1
        # Where a row's part of the call is unknown, the policy takes no time from such a step.
        if records and len(known) < len(rows):
            records[-1] = replace(next(iter(records.values())), request=-1, kind="prefill")
        self.policy.observe(records)
        for row in known:
            assert row.request is not None
            row.request.unread += row.tokens

    def _record(self, row: Row, call_s: float, num_sequences: int, batch_drafted: int) -> StepRecord:
        draft = _verified(row)
        return StepRecord(
            request=row.request.sequence if row.request else 0,
            step=self._num_steps,
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
