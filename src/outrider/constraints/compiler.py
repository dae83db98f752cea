"""Grammars, compiled once for a vocabulary and cached."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits

from outrider.constraints.constraint import GrammarConstraint
from outrider.constraints.sources import lark_source
from outrider.constraints.tokenizer import end_tokens, tokenizer_for
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError

_CACHED_GRAMMARS = 64


class Compiled:
    """A grammar that is ready to constrain requests; `notices` is what of it is not enforced."""

    def __init__(
        self, vocabulary: Vocabulary, grammar: Grammar, mask: LLMatcher, guide: LLMatcher | None,
        ends: list[int], notices: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.grammar = grammar
        self.notices = notices
        self._vocabulary = vocabulary  # the tokenizer refers to it weakly
        self._mask = mask
        self._guide = guide
        self._ends = ends

    def start(self) -> GrammarConstraint:
        """A constraint for one request; takes microseconds."""
        forcing = self.grammar.fast_forward == "canonical"
        return GrammarConstraint(self._mask, self._guide, self._vocabulary.size, self._ends, forcing=forcing)


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last of them. May be used by several
    threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ends = end_tokens(vocabulary)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, ready to use. Raises GrammarError."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            else:
                self._cache[grammar] = self._compile(grammar)
                while len(self._cache) > _CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            return self._cache[grammar]

    def _compile(self, grammar: Grammar) -> Compiled:
        source, notices = lark_source(grammar)
        plain = grammar.fast_forward != "canonical"
        mask = self._matcher(source, forcing=not plain)
        guide = self._matcher(source, forcing=True) if grammar.fast_forward == "exact" else None
        return Compiled(self._vocabulary, grammar, mask, guide, self._ends, notices)

    def _matcher(self, source: str, *, forcing: bool) -> LLMatcher:
        options = "" if forcing else '%llguidance {"no_forcing": true}\n'
        matcher = LLMatcher(
            tokenizer_for(self._vocabulary),
            options + source,
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        if matcher.is_error():
            raise GrammarError("grammar", matcher.get_error())
        return matcher
