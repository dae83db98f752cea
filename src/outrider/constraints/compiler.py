"""Grammars, compiled once for a vocabulary and cached."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from llguidance import LLMatcher, LLParserLimits

from outrider.constraints.sources import KINDS, after, lark_source
from outrider.constraints.tokenizer import Tokenizer, place, reason, tokenizer_for
from outrider.constraints.walker import GrammarConstraint, SharedMatcher, Walker
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError

_CACHED_GRAMMARS = 64
_HEAVY_S = 0.25
_HEAVY = 8
"""What takes so long to compile may hold a hundred megabytes and more; it counts as so many grammars."""

_MAX_LEXER_STATES = 50_000
"""Of all requests that share a compiled grammar, until it is compiled again; each takes 1 to 2 kB."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that is ready to constrain requests; `notices` is what of it is not enforced.

    `masks` says what is allowed, `guide` (possibly the same) what is forced.
    """

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
