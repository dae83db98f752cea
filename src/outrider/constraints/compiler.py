"""Grammars, compiled once for a vocabulary and cached, and what they allow and force after any draft."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from outrider.constraints.sources import KINDS, after, lark_source
from outrider.constraints.tokenizer import Tokenizer, dead_end, place, reason, tokenizer_for
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar, Mask
from outrider.core.errors import ConstraintError, GrammarError
from outrider.core.sequences import DraftPath

# A matcher that answers after any draft: it walks along it, and back, and keeps the masks along the last one,
# which target and draft model both ask for. llguidance's errors are final for a matcher, so one that failed
# is replaced by one that reads the final tokens again. Its limits count what all copies of a matcher have
# met: who runs into one goes on with one that was compiled again, and fails only if it comes to the same end.

_Answer = TypeVar("_Answer")

_MAX_FORCED = 128
"""tokens of forced text for one draft"""
_MAX_FORCING_S = 0.02
"""llguidance works forced text out to its end, however long. Where that took longer, it is not done again
while other requests wait."""


class SharedMatcher:
    """A compiled grammar, of whose matcher every request takes a copy.

    `make` compiles the matcher, again whenever a copy has met a limit. `forces`: it is asked for forced text,
    of which the `first`, at the grammar's start, is worked out here. `by_mask` looks every token up in the
    mask before it: a matcher with forcing takes other splits of the forced text than its mask allows.
    """

    def __init__(
        self, vocabulary: Vocabulary, make: Callable[..., LLMatcher], *, forces: bool, by_mask: bool
    ) -> None:
        self.vocabulary = vocabulary  # the tokenizer refers to it weakly
        self.tokenizer = tokenizer_for(vocabulary)
        self.make = partial(make, forces=forces)
        self.by_mask = by_mask
        self.matcher = self.make()
        self.is_slow = False
        """whether forced text takes long to work out"""
        self.first = self.forced(self.matcher.deep_copy()) if forces else []

    def forced(self, matcher: LLMatcher) -> list[int]:
        """The tokens that a copy forces next, to the end of the forced text."""
        began_s = perf_counter()
        tokens: list[int] = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        self.is_slow |= perf_counter() - began_s > _MAX_FORCING_S
        return tokens


class Walker:
    """One copy of a matcher and the drafted tokens that it is known to take. It must never see an end token:
    that matchers can be taken back over one is not to be relied on."""

    def __init__(self, shared: SharedMatcher) -> None:
        self.ends = frozenset(shared.tokenizer.ends)
        self._shared = shared
        self._is_renewed = False
        self._matcher = shared.matcher.deep_copy()
        self._final: list[int] = []
        self._path = DraftPath[Mask | None](None)
        """with the masks that were worked out"""
        self._at = 0
        """so many tokens of the path has the matcher read"""

    def reach(self, drafted: Sequence[int]) -> int:
        """How many of these tokens may follow the final ones in turn. Raises ConstraintError."""
        shared = self._path.shared(drafted)
        if shared == len(drafted):
            return shared
        self._go(shared)
        self._path.cut(shared)
        for i in range(shared, len(drafted)):
            if self._shared.by_mask and not self.mask(drafted[:i])[drafted[i]]:
                return i
            if not self._ask(partial(_takes, drafted[i])):
                return i
            self._path.append(drafted[i], None)
            self._at += 1
        return len(drafted)

    def mask(self, drafted: Sequence[int]) -> Mask:
        """What may follow these tokens, each of which has to be one that may. Raises ConstraintError
        when nothing may, or when a limit is reached."""
        self._walk(drafted)
        mask = self._path.known[len(drafted)]
        if mask is None:
            self._go(len(drafted))
            mask = self._path.known[len(drafted)] = self._work_out()
        return mask

    def forced(self, drafted: Sequence[int]) -> list[int]:
        """The tokens that the matcher would force after these, 128 at most; none if they may not follow, or
        where working them out again would take long."""
        if self._shared.is_slow:  # only what was worked out when the grammar was compiled
            first, place = self._shared.first, len(self._final) + len(drafted)
            return first[place : place + _MAX_FORCED] if first[:place] == [*self._final, *drafted] else []
        if self.reach(drafted) < len(drafted):
            return []
        self._go(len(drafted))
        return self._ask(self._shared.forced)[:_MAX_FORCED]

    def is_accepting(self, drafted: Sequence[int] = ()) -> bool:
        self._walk(drafted)
        self._go(len(drafted))
        return self._ask(LLMatcher.is_accepting)

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens, each of which has to be one that may follow, became final."""
        self._walk(tokens)
        self._go(max(self._at, len(tokens)))
        self._final += tokens
        self._at -= len(tokens)
        self._path.advance(len(tokens))

    def _walk(self, drafted: Sequence[int]) -> None:
        if (n := self.reach(drafted)) < len(drafted):
            raise ConstraintError("constrained output", f"token {drafted[n]} may not follow there")

    def _go(self, place: int) -> None:
        if place < self._at:
            back = self._at - place
            self._ask(lambda matcher: matcher.rollback(back))
        elif place > self._at:
            tokens = self._path.tokens[self._at : place]
            self._ask(lambda matcher: matcher.try_consume_tokens(tokens))
        self._at = place

    def _work_out(self) -> Mask:
        size = self._shared.tokenizer.size
        nothing = bytes(size // 8 + 1)
        bits = self._ask(lambda matcher: nothing if matcher.is_stopped() else matcher.compute_bitmask())
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(
            np.bool_
        )
        mask[list(self.ends)] = self._ask(LLMatcher.is_accepting)
        mask.flags.writeable = False
        return mask

    def _ask(self, question: Callable[[LLMatcher], _Answer]) -> _Answer:
        """The matcher's answer, or that of a new one at the same place if it fails."""
        answer = question(self._matcher)
        while self._matcher.is_error():
            why = dead_end(self._matcher.get_error())
            was_renewed, self._is_renewed = self._is_renewed, True
            self._shared.matcher = self._shared.make()
            self._matcher = self._shared.matcher.deep_copy()
            self._matcher.try_consume_tokens(self._final)
            if was_renewed:
                self._path, self._at = DraftPath(None), 0
                raise ConstraintError("constrained output", why, "Change the grammar.")
            self._matcher.try_consume_tokens(self._path.tokens[: self._at])
            answer = question(self._matcher)
        return answer


def _takes(token: int, matcher: LLMatcher) -> bool:
    return not matcher.is_stopped() and matcher.try_consume_tokens([token]) == 1


class GrammarConstraint:
    """Fulfils `core.contracts.Constraint` on llguidance: what one request's output may be, after any draft.

    The masks of `masks` are the truth; `guide`, possibly the same walker, says what is forced. End tokens are
    kept here, away from the matchers.
    """

    def __init__(self, masks: Walker, guide: Walker | None) -> None:
        self._ends = masks.ends
        self._walker = masks
        self._guide = guide
        self._ended = False

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return None if self._after_end(drafted) else self._walker.mask(drafted)

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        try:
            return self._permits(drafted, tokens)
        except ConstraintError:  # a limit: reported where the mask is asked for
            return 0

    def _permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        if self._after_end(drafted):
            return 0
        text = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        text_tokens = [*drafted, *tokens[:text]]
        n = self._walker.reach(text_tokens) - len(drafted)
        if n == text < len(tokens) and self._walker.is_accepting(text_tokens):
            n += 1
        return max(n, 0)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        if self._guide is None or self._after_end(drafted):
            return ()
        try:
            tokens = self._guide.forced(drafted)
        except ConstraintError:  # the guide is lost; what is allowed does not depend on it
            return ()
        return tuple(tokens[: self.permits(drafted, tokens)])

    def accept(self, tokens: Sequence[int]) -> None:
        if self._ended and tokens:
            raise ConstraintError("constrained output", "it has ended", "Accept nothing after an end token.")
        if (n := self._permits((), tokens)) < len(tokens):
            raise ConstraintError("constrained output", f"token {tokens[n]} may not follow there")
        self._ended = any(token in self._ends for token in tokens)
        text = tokens[: len(tokens) - self._ended]
        self._walker.advance(text)
        if self._guide not in (None, self._walker):
            try:
                self._guide.advance(text)
            except ConstraintError:
                self._guide = None

    @property
    def is_complete(self) -> bool:
        if self._ended or not self._walker.is_accepting():
            return self._ended
        mask = self._walker.mask(())
        return bool(np.count_nonzero(mask) == sum(mask[end] for end in self._ends))

    @property
    def is_accepted(self) -> bool:
        return self._ended or self._walker.is_accepting()

    def _after_end(self, drafted: Sequence[int]) -> bool:
        return self._ended or not self._ends.isdisjoint(drafted)


# Compiling

_CACHED_GRAMMARS = 64
_HEAVY_S = 0.25
_HEAVY = 8
"""What takes so long to compile may hold a hundred megabytes and more; it counts as so many grammars."""

_MAX_LEXER_STATES = 50_000
"""Of all requests that share a compiled grammar, until it is compiled again; each takes 1 to 2 kB."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that is ready to constrain requests; `notices` is what of it is not enforced, `masks` says
    what is allowed, `guide` (possibly the same) what is forced."""

    notices: tuple[str, ...]
    masks: SharedMatcher
    guide: SharedMatcher | None

    def start(self) -> GrammarConstraint:
        """A constraint for one request; takes microseconds."""
        masks = Walker(self.masks)
        guide = masks if self.guide is self.masks else Walker(self.guide) if self.guide else None
        return GrammarConstraint(masks, guide)


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last of them. May be used by several
    threads. The vocabulary is first read when something is compiled."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, ready to use. Raises GrammarError for one that is broken or cannot be enforced,
        SettingError for a vocabulary without a token that ends a text."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar][0]
        began_s = perf_counter()
        compiled = self._compile(grammar)  # may take seconds, and others must not wait for that
        weight = _HEAVY if perf_counter() - began_s > _HEAVY_S else 1
        with self._lock:
            self._cache[grammar] = compiled, weight
            while sum(weight for _, weight in self._cache.values()) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        tokenizer = tokenizer_for(self._vocabulary)
        body, notices = lark_source(grammar)
        sources = {"": body}
        if grammar.content is not None:
            # Compiled by itself, so that its errors are its own.
            notices = (*notices, *self.compile(grammar.content).notices)
            sources["content"], _ = lark_source(grammar.content)
        forces = grammar.fast_forward == "canonical"
        if grammar.after is not None:
            # A body that is wrong is so at once.
            _matcher(tokenizer, grammar, sources, forces=forces)
            head = after(grammar.after, self._vocabulary, tokenizer.controls)
            sources = {"": head, "body": body, **{name: text for name, text in sources.items() if name}}
        make = partial(_matcher, tokenizer, grammar, sources)
        masks = SharedMatcher(self._vocabulary, make, forces=forces, by_mask=forces)
        guide = masks if forces else None
        if grammar.fast_forward == "exact":
            guide = SharedMatcher(self._vocabulary, make, forces=True, by_mask=False)
        return Compiled((*notices, *masks.matcher.get_grammar_warnings()), masks, guide)


def _matcher(
    tokenizer: Tokenizer, grammar: Grammar, sources: Mapping[str, str], *, forces: bool
) -> LLMatcher:
    """A matcher that has worked out its first mask: copies of it need not. `sources` are Lark grammars by
    the names that others use them under; that without a name is the whole."""
    texts = {name: text if forces else text + _NO_FORCING for name, text in sources.items()}
    parts = [{"name": name or None, "lark_grammar": text} for name, text in texts.items()]
    source = json.dumps({"grammars": parts}) if len(parts) > 1 else texts[""]
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer.native, source, log_level=0, limits=limits)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    if matcher.is_error():
        why = reason(matcher.get_error())
        if grammar.kind in ("lark", "gbnf") and (found := place(matcher.get_error())):
            why = f"line {found[0]}, column {found[1]}: {why}"
        raise GrammarError(KINDS[grammar.kind].title, why, "Correct it.")
    return matcher
