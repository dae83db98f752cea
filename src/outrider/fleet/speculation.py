"""The automatic policy over a batch that another engine runs: from each step's tokens to the next drafts. The
engine says nothing of times and acceptance. Both follow from what it does: from one step's proposals to the
next step's tokens is what a call takes with all that belongs to it, and the tokens that came back say how
much of a draft was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
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
    tokens: tuple[int, ...] = ()
    """what the step that ended gave"""
    is_new: bool = True
    """it was not in the step before that"""

    def note(self, row: Tokens, length: int, tokens: Sequence[int], *, is_new: bool) -> None:
        """Its text is now the first `length` tokens of `row`, these the last of it."""
        self.length, self.end = length, row[max(length - _COMPARED, 0) : length].copy()
        self.tokens, self.is_new = tuple(map(int, tokens)), is_new

    def goes_on_in(self, row: Tokens, length: int) -> bool:
        """Whether the first `length` tokens of `row` are its text."""
        end = row[self.length - len(self.end) : self.length]
        return self.length == length and bool(np.array_equal(self.end, end))

    @property
    def is_verified(self) -> bool:
        """Whether its tokens can be those of the draft that was proposed, and one of the target's own."""
        return not self.is_new and len(self.tokens) <= len(self.draft) + 1

    @property
    def verified(self) -> Draft:
        """The part of the draft that the engine verified. It may cut drafts (a grammar, a full batch): then
        all that came back agrees with the draft, and the last of it is the target's own."""
        is_cut = common_prefix(self.draft.tokens, self.tokens) == len(self.tokens)
        return self.draft.first(len(self.tokens) - 1) if is_cut else self.draft


class Rows:
    """The requests of the last step, by the row that each was in."""

    def __init__(self) -> None:
        self._last: dict[int, Running] = {}

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> tuple[list[Running | None], list[Running]]:
        """The request of each row, None while its prompt is being read, and the requests that are no longer
        among them. `sampled` are the tokens that each row got, none while a prompt is being read; `lengths`
        those of the texts, these tokens included.
        """
        found = self._find(sampled, lengths, texts)
        kept = set(found.values())
        gone = [request for i, request in self._last.items() if i not in kept]
        taken = {self._last[i].sequence for i in kept}
        unused = (number for number in count() if number not in taken)
        now = dict[int, Running]()
        for i, tokens in enumerate(sampled):
            if tokens:
                row, length = texts[i], int(lengths[i])
                known = self._last[found[i]] if i in found else None
                now[i] = known or Running(next(unused), length, row[:0], unread=row[:length].tolist())
                now[i].note(row, length, tokens, is_new=known is None)
        self._last = now
        return [now.get(i) for i in range(len(sampled))], gone

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
        running = [request for request in rows if request is not None]
        self._learn(running, began - self._proposed_at, len(rows))
        self._read(running)
        reading = sum(min(int(lengths[i]), self._chunk) for i, request in enumerate(rows) if request is None)
        self._draft(running, min(reading, self._chunk))
        self._proposed_at = self._clock()
        self._own_s = self._proposed_at - began
        return [list(request.draft.tokens) if request else [] for request in rows]

    def _learn(self, running: Sequence[Running], call_s: float, num_rows: int) -> None:
        """What became of the drafts, and what the call took where it decoded and did nothing else."""
        known = [request for request in running if request.is_verified]
        batch_drafted = sum(len(request.verified) for request in known)
        records = {r.sequence: self._record(r, call_s, num_rows, batch_drafted) for r in known}
        self._num_steps += 1
        # Where a row's part of the call is unknown, the policy takes no time from such a step.
        if records and len(known) < num_rows:
            records[-1] = replace(next(iter(records.values())), request=-1, kind="prefill")
        self.policy.observe(records)

    def _record(self, request: Running, call_s: float, num_sequences: int, batch_drafted: int) -> StepRecord:
        draft, tokens = request.verified, request.tokens
        return StepRecord(
            request=request.sequence,
            step=self._num_steps,
            kind="decode",
            position=request.length - len(tokens),
            num_evaluated=1 + len(draft),
            draft=draft,
            num_accepted=min(common_prefix(draft.tokens, tokens), len(tokens) - 1),
            tokens=tokens,
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

    def _read(self, running: Sequence[Running]) -> None:
        """Let drafters read what they have not: tokens that were sampled, and prompts in parts."""
        room = _READ_TOKENS
        for request in running:
            if request.is_new:
                self._begin(request)
            else:
                request.unread += request.tokens
            size = min(len(request.unread), max(room, len(request.tokens)))
            for drafter in self._drafters:
                drafter.observe(request.sequence, request.unread[:size])
            del request.unread[:size]
            room -= size

    def _begin(self, request: Running) -> None:
        first, request.unread = request.unread[:1], request.unread[1:]
        for drafter in self._drafters:
            drafter.begin(request.sequence, Request(tuple(first)))
        self.policy.begin(request.sequence, request.length, None)

    def _draft(self, running: Sequence[Running], reading: int) -> None:
        """Draft for the step to come, beside so many tokens of prompts."""
        asked = []
        for request in running:
            request.draft = Draft()
            room = self._max_length - request.length - 1
            if room > 0 and not request.unread:
                asked.append((request, DraftRequest(request.sequence, room, _NO_SAMPLER)))
        if asked:
            others = len(running) - len(asked) + reading
            drafters = Drafters.of(self._drafters)
            drafts, _ = self.policy.propose(drafters, [wanted for _, wanted in asked], others)
            for (request, _), draft in zip(asked, drafts, strict=True):
                request.draft = draft
