"""A draft model's KV that has to leave it: kept and given back as the target's is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.core.data import DraftWork, Request
from outrider.engine.tiers.store import KvTiers, Reading

if TYPE_CHECKING:
    from outrider.drafters.model import ModelDrafter


class DraftKv:
    """Gives the store what a draft model gives up, and the model what the store has of a prompt."""

    def __init__(self, drafter: ModelDrafter, store: KvTiers) -> None:
        self._drafter = drafter
        self._store = store
        drafter.on_evict = self._put_away

    def _put_away(self, sequence: int) -> bool:
        scope, tokens = self._drafter.text(sequence)
        return not tokens or self._store.keep(sequence, scope, tokens)

    def keep(self) -> bool:
        """The store gets copies of what the model holds; as `KvTiers.keep`."""
        return all([self._put_away(sequence) for sequence in range(self._drafter.model.max_sequences)])

    def begin(self, sequence: int, request: Request) -> None:
        """A request has begun on a sequence: what the store has of its prompt comes back, where that is more
        than the model holds and faster than reading it."""
        if request.cache_prompt and (found := self._store.find(*self._sought(request))) is not None:
            tokens = found.entry.text.tokens.tolist()
            self._drafter.take(sequence, tokens, lambda: self._store.restore(found, sequence))

    def read_ahead(self, request: Request, when_done: Callable[[], None]) -> Reading | None:
        """As `KvTiers.read_ahead`."""
        return self._store.read_ahead(*self._sought(request), when_done) if request.cache_prompt else None

    def _sought(self, request: Request) -> tuple[str, Sequence[int], int, int]:
        tokens = self._drafter.alignment.read(request.prompt)[:-1]
        held = self._drafter.num_shared(request.scope, tokens)
        return request.scope, tokens, held, self._drafter.model.context_length

    def note(self, work: DraftWork) -> None:
        """The draft model's work in a step."""
        if work.prefill_calls:
            self._store.note_read(work.prefill_tokens, work.prefill_s)

    def reset(self, *, texts: bool) -> None:
        """The model forgets all; with `texts` the store, too, else that gets it."""
        if texts:
            self._store.forget()
        else:
            self.keep()
