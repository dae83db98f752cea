"""A draft model that offers what was recorded, at the price of a cost curve."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contracts import Extend, Wish
from outrider.core.data import Draft, DraftWork, Hint, Request
from outrider.costs import CallCosts
from outrider.replay.recording import Offers, Recording

__all__ = ["RecordedDrafter"]


class RecordedDrafter:
    """The Drafter of one recording. Its times are those of `costs`, its offers certain tokens.

    Behind a wrong token of another drafter's (a wish's prefix that departs from the answer) what the
    model would offer was not recorded: the confidence it has at that place of the answer stands for it.
    Such tokens are rejected in any case.
    """

    is_free = False

    def __init__(self, recording: Recording, name: str, costs: CallCosts) -> None:
        self.name = name
        self._prompt_tokens = len(recording.prompt)
        self._answer = recording.tokens
        self._offers: Offers = recording.offers[name]
        self._costs = costs
        self.reset()

    def reset(self) -> None:
        self._committed = 0
        self._seen = 0
        self._has_read = False
        self._path: tuple[int, ...] = ()

    def begin(self, sequence: int, request: Request) -> None:
        del sequence, request
        self.reset()

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tokens that it evaluated itself and that became final need not be read again."""
        del sequence
        right = 0
        for mine, final in zip(self._path, tokens, strict=False):
            if mine != final:
                break
            right += 1
        self._seen += right
        self._path = ()
        self._committed += len(tokens)

    def end(self, sequence: int) -> None:
        """Nothing is left to do."""

    def propose(self, wishes: Sequence[Wish], extend: Extend) -> tuple[list[Draft], DraftWork]:
        [wish] = wishes
        if not extend.wants(wish, ()):
            return [Draft()], DraftWork()
        work = DraftWork()
        if not self._has_read:
            work = DraftWork(prefill_calls=1, prefill_s=self._costs.prefill_s(self._prompt_tokens))
            self._has_read = True
        context = self._prompt_tokens + self._committed
        call_tokens = [max(1, 1 + self._committed - self._seen) + len(wish.prefix)]
        self._seen = self._committed + 1
        tokens: list[int] = []
        hints: list[Hint] = []
        for token, confidence in self._follow(wish.prefix):
            hint = Hint(confidence)
            if not extend.takes(wish, tokens, hint):
                break
            tokens.append(token)
            hints.append(hint)
            if len(tokens) >= wish.max_tokens or not extend.wants(wish, tokens):
                break
            call_tokens.append(1)
        self._path = (*wish.prefix, *tokens)[: len(wish.prefix) + max(len(call_tokens) - 1, 0)]
        seconds = sum(self._costs.call_s(n, context=context) for n in call_tokens)
        work += DraftWork(len(call_tokens), seconds, call_tokens=tuple(call_tokens))
        draft = Draft(
            tuple(tokens),
            acceptance=tuple(hint.acceptance for hint in hints),
            sources=(self.name,) * len(tokens),
            hints=tuple(hints),
        )
        return [draft], work

    def _follow(self, prefix: Sequence[int]) -> list[tuple[int, float]]:
        """What it would draft behind the committed tokens and a prefix."""
        position = self._committed + len(prefix)
        found: list[tuple[int, float]] = []
        while position < len(self._answer):
            token = self._offers.tokens[position]
            found.append((token, self._offers.confidence[position]))
            if token != self._answer[position]:
                return found + list(self._offers.departures.get(position, ()))
            position += 1
        return found
