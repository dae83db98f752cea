"""Speculative and plain texts compared token by token, greedily and under a seed, every difference audited.

A model call over several tokens adds up in another order than a call over one, so its logits differ in
their last bits, and of two candidates that are all but equal either may win. The audit replays the committed
text in the call shapes of each run, without a drafter. Where that alone yields each run's token, no drafter
and no rule had a hand in the difference, which is a near-tie; otherwise something did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from outrider.core.contracts import Constraint, Model, Vocabulary
from outrider.core.data import Grammar, Request, Row, Span
from outrider.core.sequences import common_prefix
from outrider.engine import Engine
from outrider.engine.kv_slots import rewind
from outrider.lab.certify.faults import Constrain
from outrider.lab.certify.runs import ComparedRows, Run, compare_rows, run
from outrider.lab.comparison import PlainScores, plain_scores


@dataclass(frozen=True, slots=True)
class Counts:
    """What runs on the real models took: tokens generated, target calls (prefill included), tokens
    drafted and accepted."""

    tokens: int = 0
    target_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Counts:
        records = [record for found in runs for record in found.records]
        return cls(
            sum(len(found.tokens) for found in runs),
            len(records),
            sum(len(record.draft) for record in records),
            sum(record.num_accepted for record in records),
        )


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
    near_tie: bool
    speculative_margin: float | None = None
    plain_margin: float | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's outcome: how many tokens of the speculative text were compared, and every
    difference that was found. `rows` compares the bits of the logits, where texts must be bit-equal."""

    prompt: int
    temperature: float
    tokens: int
    differences: tuple[Difference, ...]
    counts: Counts
    rows: ComparedRows | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing differs but near-ties; nothing at all where texts must be bit-equal."""
        if self.rows is not None:
            return not self.differences and self.rows.holds
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
    is excused, and the bits of the logits are compared too. With `beside` the speculative text is generated
    while that request runs.
    """
    score = plain_scores(engine.target.vocabulary, request, constrain)
    speculative = run(engine, replace(request, speculate=True), beside)
    plain = run(engine, replace(request, speculate=False))
    rows = None
    if speculative.rows is not None and plain.rows is not None:
        rows = compare_rows(speculative.rows, plain.rows, len(plain.prompt))
    differences: list[Difference] = []
    runs, num_tokens = [speculative, plain], len(speculative.tokens)
    while (found := _first_difference(engine, speculative, plain, score)) is not None:
        differences.append(found)
        num_compared = found.position + 1
        if not (request.sampling.is_greedy and found.near_tie) or num_compared >= num_tokens:
            num_tokens = min(num_tokens, num_compared)
            break
        plain = _resume(engine, request, speculative.tokens[:num_compared], constrain)
        runs.append(plain)
    engine.reset()
    temperature = float(request.sampling.temperature)
    return Compared(prompt, temperature, num_tokens, tuple(differences), Counts.of(runs), rows)


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
    temperature = float(request.sampling.temperature)
    return Compared(prompt, temperature, num_tokens, () if found is None else (found,), Counts.of(runs))


def after(constrain: Constrain | None, tokens: Sequence[int]) -> Constrain | None:
    """Makes constraints that have read these tokens: for prompts that end with part of an answer."""
    if constrain is None or not tokens:
        return constrain
    make = constrain

    def advanced(grammar: Grammar) -> Constraint:
        constraint = make(grammar)
        constraint.accept(tokens)
        return constraint

    return advanced


def _resume(engine: Engine, request: Request, tokens: Sequence[int], constrain: Constrain | None) -> Run:
    """Plain decoding on the same target that goes on after these tokens of the answer."""
    engine.reset()
    limit = None if request.max_tokens is None else request.max_tokens - len(tokens)
    resumed = replace(request, prompt=(*request.prompt, *tokens), max_tokens=limit, speculate=False)
    plain = Engine(engine.target, constrain=after(constrain, tokens))
    found = run(plain, resumed)
    plain.reset()
    return found


def _difference(vocabulary: Vocabulary, speculative: Run, plain: Run) -> Difference | None:
    """The first difference of two texts, the end of the shorter included; None where they are equal."""
    runs = speculative.text, plain.text
    if runs[0] == runs[1]:
        return None
    at = common_prefix(*runs)
    ours, theirs = (text[at] if at < len(text) else None for text in runs)
    our_text, their_text = (_shown(vocabulary, token) for token in (ours, theirs))
    position = at - len(speculative.prompt)
    return Difference(position, ours, theirs, our_text, their_text, near_tie=False)


def _first_difference(engine: Engine, speculative: Run, plain: Run, score: PlainScores) -> Difference | None:
    """The first difference of the texts, audited."""
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


def _shown(vocabulary: Vocabulary, token: int | None) -> str:
    """A token's text for people; control tokens by their spelling."""
    if token is None:
        return "(end of the text)"
    piece = vocabulary.piece(token) or vocabulary.spelling(token)
    return piece.decode(errors="replace")


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
