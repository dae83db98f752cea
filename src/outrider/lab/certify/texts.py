"""Speculative and plain texts compared token by token, greedily and under a seed, every difference audited.

A model call over several tokens adds up in another order than a call over one, so of two candidates that are
all but equal either may win. The audit replays the committed text in the call shapes of each run, without a
drafter. Where that alone yields each run's token, the difference is a near-tie; otherwise a drafter or a rule
had a hand in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from outrider.core.contracts import Constraint, Model, Vocabulary
from outrider.core.data import Grammar, Logits, Request, Row, Span, StepRecord
from outrider.core.errors import ConstraintError
from outrider.core.sequences import common_prefix
from outrider.engine import Engine
from outrider.engine.kv_slots import rewind
from outrider.lab.comparison import PlainScores, plain_scores

_STEPS_AHEAD = 3
"""made by a request that runs beside another one before that begins"""

Constrain = Callable[[Grammar], Constraint]
"""Makes a fresh constraint of a grammar."""


class Wrapped:
    """Does what `inner` does, but for what a subclass defines."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Followed(Wrapped):
    """A Model of which `stored` are the tokens that each sequence holds or, behind these, held before."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.stored: dict[int, tuple[int, ...]] = {}

    def copy(self, source: int, sequence: int, length: int) -> None:
        self.inner.copy(source, sequence, length)
        self.stored[sequence] = self.stored.get(source, ())[:length]


class RowRecorder(Followed):
    """A Model that records a digest of every row's bits in `rows`, by the prefix of the text before it."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.rows: dict[tuple[int, ...], bytes] = {}

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found: list[Logits] = self.inner.decode([span._replace(top=0) for span in spans])
        for span, logits in zip(spans, found, strict=True):
            stored = (*self.stored.get(span.sequence, ())[: span.start], *span.tokens)
            self.stored[span.sequence] = stored
            for i, row in enumerate(logits, len(stored) - len(logits) + 1):
                self.rows[stored[:i]] = blake2b(row.tobytes(), digest_size=16).digest()
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """A generation from `prompt`, which may hold generated tokens of an earlier run. `rows` are digests of
    its logits, where they were recorded."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    records: tuple[StepRecord, ...]
    rows: Mapping[tuple[int, ...], bytes] | None = None

    @property
    def text(self) -> tuple[int, ...]:
        return self.prompt + self.tokens


def run(engine: Engine, request: Request, beside: Request | None = None) -> Run:
    """Run a request on an empty KV cache; `beside` is in the middle of its own generation all the while."""
    engine.reset()
    target: object = engine.target
    if not isinstance(target, RowRecorder):
        return generate(engine, request)
    target.rows.clear()
    if beside is None:
        found = generate(engine, request)
    else:
        with closing(engine.stream(beside)) as other:
            for _ in range(_STEPS_AHEAD):
                next(other, None)
            found = generate(engine, request)
    return replace(found, rows=dict(target.rows))


def generate(engine: Engine, request: Request) -> Run:
    """Run one request to its end. A constrained output that cannot go on has ended there, which is to
    be compared like any other end."""
    records: list[StepRecord] = []
    stream = engine.stream(request)
    try:
        while True:
            records.append(next(stream).record)
    except StopIteration as end:
        return Run(request.prompt, end.value.tokens, end.value.records)
    except ConstraintError as error:
        return Run(request.prompt, error.tokens, tuple(records))


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """At how many positions two runs' logits were compared, at how many their bits differ, and the first
    of these, in generated tokens (None where none does)."""

    positions: int
    differing: int
    first: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that speculation and plain decoding disagree about.

    `position` counts generated tokens. A token of None: the text had ended. The margins are by how
    much the best score leads the second in each run's own call shapes: in logits where decoding is
    greedy, in scores (log probability plus noise) under the seed-stable rule. A difference is a
    near-tie only when the replays alone give each run's own token.
    """

    position: int
    speculative_token: int | None
    plain_token: int | None
    speculative_text: str
    plain_text: str
    near_tie: bool = False
    speculative_margin: float | None = None
    plain_margin: float | None = None

    @property
    def margin(self) -> float:
        return max(self.speculative_margin or 0.0, self.plain_margin or 0.0)


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's outcome: how many tokens of the speculative text were compared, every difference that was
    found, and the `counts` of the runs that it took. `rows` compares the bits of the logits, where texts must
    be bit-equal."""

    prompt: int
    temperature: float
    tokens: int
    differences: tuple[Difference, ...]
    counts: Mapping[str, int]
    rows: ComparedRows | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing differs but near-ties; nothing at all where texts must be bit-equal."""
        if self.rows is not None:
            return not self.differences and not self.rows.differing
        return all(difference.near_tie for difference in self.differences)


def compare_texts(
    engine: Engine,
    request: Request,
    prompt: int = 0,
    constrain: Constrain | None = None,
    beside: Request | None = None,
) -> Compared:
    """Compare the text of `request`, greedy or under the seed-stable rule, with plain decoding's; `constrain`
    makes the constraint of its grammar.

    After a near-tie of a greedy text plain decoding goes on from the speculative text, the flipped token
    included, so that every token is compared. Under the seed-stable rule the first difference ends the
    comparison: the noise belongs to a place in the request, which cannot be entered midway. So does a
    difference that is no near-tie. Where the engine's target records its rows (`RowRecorder`) no difference
    is excused, the bits of the logits are compared too, and with `beside` the speculative text is generated
    while that request runs.
    """
    score = plain_scores(engine.target.vocabulary, request, constrain)
    speculative = run(engine, replace(request, speculate=True), beside)
    plain = run(engine, replace(request, speculate=False))
    rows = _compare_rows(speculative, plain)
    differences: list[Difference] = []
    runs, num_tokens = [speculative, plain], len(speculative.tokens)
    while (found := _audited(engine, speculative, plain, score)) is not None:
        differences.append(found)
        num_compared = found.position + 1
        if not (request.sampling.is_greedy and found.near_tie) or num_compared >= num_tokens:
            num_tokens = min(num_tokens, num_compared)
            break
        plain = _resume(engine, request, speculative.tokens[:num_compared], constrain)
        runs.append(plain)
    engine.reset()
    return _compared(request, prompt, num_tokens, differences, runs, rows)


def repeat(engine: Engine, request: Request, prompt: int = 0) -> Compared:
    """Run a request twice from a cold start and compare the texts; its seed must be given. No difference is a
    near-tie."""
    runs = []
    for _ in range(2):
        engine.preferred.forget()
        runs.append(run(engine, request))
    engine.reset()
    found = _difference(engine.target.vocabulary, *runs)
    num_tokens = len(runs[0].tokens) if found is None else found.position + 1
    return _compared(request, prompt, num_tokens, [] if found is None else [found], runs)


def _compared(
    request: Request,
    prompt: int,
    num_tokens: int,
    differences: Sequence[Difference],
    runs: Sequence[Run],
    rows: ComparedRows | None = None,
) -> Compared:
    records = [record for found in runs for record in found.records]
    counts = {
        "tokens": sum(len(found.tokens) for found in runs),
        "target_calls": len(records),
        "drafted_tokens": sum(len(record.draft) for record in records),
        "accepted_tokens": sum(record.num_accepted for record in records),
    }
    temperature = float(request.sampling.temperature)
    return Compared(prompt, temperature, num_tokens, tuple(differences), counts, rows)


def after(constrain: Constrain | None, tokens: Sequence[int]) -> Constrain | None:
    """Makes constraints that have read these tokens: for prompts that end with part of an answer."""
    if constrain is None or not tokens:
        return constrain

    def advanced(grammar: Grammar) -> Constraint:
        constraint = constrain(grammar)
        constraint.accept(tokens)
        return constraint

    return advanced


def _resume(engine: Engine, request: Request, tokens: Sequence[int], constrain: Constrain | None) -> Run:
    engine.reset()
    limit = None if request.max_tokens is None else request.max_tokens - len(tokens)
    resumed = replace(request, prompt=(*request.prompt, *tokens), max_tokens=limit, speculate=False)
    plain = Engine(engine.target, constrain=after(constrain, tokens))
    found = run(plain, resumed)
    plain.reset()
    return found


def _compare_rows(speculative: Run, plain: Run) -> ComparedRows | None:
    """After every prefix that both runs evaluated, from the end of the prompt on."""
    ours, theirs, num_prompt = speculative.rows, plain.rows, len(plain.prompt)
    if ours is None or theirs is None:
        return None
    shared = [prefix for prefix in theirs if prefix in ours and len(prefix) >= num_prompt]
    differing = sorted(len(prefix) - num_prompt for prefix in shared if ours[prefix] != theirs[prefix])
    return ComparedRows(len(shared), len(differing), differing[0] if differing else None)


def _difference(vocabulary: Vocabulary, speculative: Run, plain: Run) -> Difference | None:
    runs = speculative.text, plain.text
    if runs[0] == runs[1]:
        return None
    at = common_prefix(*runs)
    ours, theirs = (text[at] if at < len(text) else None for text in runs)
    our_text, their_text = (_shown(vocabulary, token) for token in (ours, theirs))
    return Difference(at - len(speculative.prompt), ours, theirs, our_text, their_text)


def _shown(vocabulary: Vocabulary, token: int | None) -> str:
    if token is None:
        return "(end of the text)"
    piece = vocabulary.piece(token) or vocabulary.spelling(token)
    return piece.decode(errors="replace")


def _audited(engine: Engine, speculative: Run, plain: Run, score: PlainScores) -> Difference | None:
    difference = _difference(engine.target.vocabulary, speculative, plain)
    if difference is None:
        return None
    ours, theirs = difference.speculative_token, difference.plain_token
    # Where texts must be bit-equal rounding is no excuse, and none ends a text early.
    if speculative.rows is not None or ours is None or theirs is None:
        return difference
    num_prompt = len(speculative.prompt)
    at = num_prompt + difference.position
    choices, margins = [], []
    for found in (speculative, plain):
        tokens, values = score(_replay(engine.target, found, at), found.text[num_prompt:at])
        best = int(np.argmax(values))  # of equals the lowest id
        choices.append(int(tokens[best]))
        margin = float(values[best] - np.delete(values, best).max(initial=-math.inf))
        margins.append(margin if math.isfinite(margin) else None)  # None where nothing else was allowed
    return replace(
        difference, near_tie=choices == [ours, theirs], speculative_margin=margins[0], plain_margin=margins[1]
    )


def _replay(target: Model, replayed: Run, position: int) -> Row:
    """The logits that decide the token at `position` of the whole text, in the call shapes of a run. Uses
    sequence 0 of the target, whose KV it forgets.

    Tokens that a run evaluated beyond its text (rejected drafts) are filled in from the text after
    them, or with its last token: causal attention keeps them out of every row that is read.
    """
    text = replayed.text
    target.truncate(0, 0)
    for record in replayed.records:
        start = target.length(0)
        end = start + record.read_tokens + record.num_evaluated
        tokens = tuple(text[min(i, len(text) - 1)] for i in range(start, end))
        if record.kind == "prefill":
            target.decode([Span(0, tokens, start, 0)])
            continue
        num_rows = 1 + len(record.draft)
        logits = target.decode([Span(0, tokens, start, num_rows, checkpoint=num_rows > 1)])[0]
        if record.position <= position < record.position + len(record.tokens):
            row: Row = logits[position - record.position].copy()
            target.truncate(0, 0)
            return row
        rewind(target, 0, record.position + len(record.tokens) - 1)  # as in the engine, which reads again too
    raise ValueError(f"the run has no token at {position}")
