"""Speculation and plain decoding, token by token: greedy, and under a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from outrider.certify.audit import Choice, Decide, Difference, Run, audit, best_of, first_difference
from outrider.certify.masks import Constrain, behind
from outrider.certify.rows import ComparedRows, NotingModel, compare_rows
from outrider.certify.runs import generate
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request, Row
from outrider.engine import Engine
from outrider.sampling import RequestSampler
from outrider.verify import scores

__all__ = ["Compared", "Counts", "Repeated", "compare_greedy", "compare_stable", "repeat"]

_STEPS_AHEAD = 3
"""that a request which runs beside another one has made when that begins"""


@dataclass(frozen=True, slots=True)
class Counts:
    """What runs on the real models took: tokens generated, target calls (prefill included), tokens
    drafted and accepted."""

    tokens: int = 0
    target_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens + other.tokens,
            self.target_calls + other.target_calls,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


def _count(completion: Completion) -> Counts:
    records = completion.records
    return Counts(
        len(completion.tokens),
        len(records),
        sum(len(record.draft) for record in records),
        sum(record.num_accepted for record in records),
    )


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


@dataclass(frozen=True, slots=True)
class Repeated:
    """Two runs with the same seed: `position` is the first token that differs, None where none does."""

    prompt: int
    temperature: float
    rule: str
    position: int | None
    counts: Counts


def compare_greedy(
    engine: Engine,
    request: Request,
    prompt: int = 0,
    constrain: Constrain | None = None,
    beside: Request | None = None,
) -> Compared:
    """Compare the greedy text of `request` with plain decoding's; `constrain` makes the constraint of its
    grammar.

    Behind a near-tie plain decoding goes on from the speculative text, the flipped token included, so
    that every token is compared. A difference that is none ends the comparison. Where the engine's target
    notes its rows (`NotingModel`) no difference is excused, and the bits of the logits are compared too.
    With `beside` the speculative text is generated while that request runs.
    """
    decide = _likeliest(_sampler(engine, request, constrain))
    speculative = _run(engine, replace(request, speculate=True), beside)
    plain = _run(engine, replace(request, speculate=False))
    rows = _rows(speculative, plain)
    differences: list[Difference] = []
    counts = _count(speculative.completion) + _count(plain.completion)
    num_tokens = len(speculative.completion.tokens)
    while (found := _differ(engine, speculative, plain, decide)) is not None:
        differences.append(found)
        num_compared = found.position + 1
        if not found.near_tie or num_compared >= num_tokens:
            num_tokens = min(num_tokens, num_compared)
            break
        plain = _resume(engine, request, speculative.completion.tokens[:num_compared], constrain)
        counts += _count(plain.completion)
    engine.reset()
    return Compared(prompt, 0.0, num_tokens, tuple(differences), counts, rows)


def compare_stable(
    engine: Engine, request: Request, prompt: int = 0, constrain: Constrain | None = None
) -> Compared:
    """Compare the text that the seed-stable rule gives with speculation and without.

    The first difference is audited, with log probability plus noise in place of logits, and ends
    the comparison: the noise belongs to a place in the request, which cannot be entered midway.
    """
    speculative = _run(engine, replace(request, speculate=True))
    plain = _run(engine, replace(request, speculate=False))
    seed = request.sampling.seed or 0
    found = _differ(engine, speculative, plain, _noisy(_sampler(engine, request, constrain), seed))
    engine.reset()
    tokens = len(speculative.completion.tokens) if found is None else found.position + 1
    counts = _count(speculative.completion) + _count(plain.completion)
    differences = () if found is None else (found,)
    rows = _rows(speculative, plain)
    return Compared(prompt, request.sampling.temperature, tokens, differences, counts, rows)


def repeat(engine: Engine, request: Request, prompt: int = 0) -> Repeated:
    """Run a request twice from a cold start; its seed must be given."""
    first, second = (_run_cold(engine, request).completion for _ in range(2))
    engine.reset()
    position = first_difference(first.tokens, second.tokens)
    counts = _count(first) + _count(second)
    return Repeated(prompt, request.sampling.temperature, request.verification.rule, position, counts)


def _run(engine: Engine, request: Request, beside: Request | None = None) -> Run:
    """A run from a cold start; another request is in the middle of its own all the while, if given."""
    engine.reset()
    target = engine.target
    if isinstance(target, NotingModel):
        target.rows.clear()
    if beside is None:
        completion = generate(engine, request)
    else:
        with closing(engine.stream(beside)) as other:
            for _ in range(_STEPS_AHEAD):
                next(other, None)
            completion = generate(engine, request)
    return Run(request.prompt, completion, dict(target.rows) if isinstance(target, NotingModel) else None)


def _run_cold(engine: Engine, request: Request) -> Run:
    """A run whose drafts depend on no earlier one."""
    engine.preferred.forget()
    return _run(engine, request)


def _resume(engine: Engine, request: Request, tokens: Sequence[int], constrain: Constrain | None) -> Run:
    """Plain decoding on the same target that goes on behind these tokens of the answer."""
    engine.reset()
    limit = None if request.max_tokens is None else request.max_tokens - len(tokens)
    resumed = replace(request, prompt=(*request.prompt, *tokens), max_tokens=limit, speculate=False)
    plain = Engine(engine.target, constrain=behind(constrain, tokens))
    run = _run(plain, resumed)
    plain.reset()
    return run


def _sampler(engine: Engine, request: Request, constrain: Constrain | None) -> RequestSampler:
    """The request's sampler at the beginning of its answer."""
    constraint = None
    if request.grammar is not None and constrain is not None:
        constraint = constrain(request.grammar)
    return RequestSampler(request.sampling, engine.target.vocabulary, request.prompt, constraint)


def _rows(speculative: Run, plain: Run) -> ComparedRows | None:
    """How the bits of two runs' logits compare; None where they were not noted."""
    if speculative.rows is None or plain.rows is None:
        return None
    return compare_rows(speculative.rows, plain.rows, len(plain.prompt))


def _differ(engine: Engine, speculative: Run, plain: Run, decide: Decide) -> Difference | None:
    """The first difference behind the plain run's prompt, audited."""
    num_prompt, start = len(speculative.prompt), len(plain.prompt)
    ours, theirs = speculative.text[start:], plain.text[start:]
    at = first_difference(ours, theirs)
    if at is None:
        return None
    position = start + at - num_prompt
    our_token = ours[at] if at < len(ours) else None
    their_token = theirs[at] if at < len(theirs) else None
    vocabulary = engine.target.vocabulary
    difference = Difference(
        position,
        our_token,
        their_token,
        _shown(vocabulary, our_token),
        _shown(vocabulary, their_token),
        near_tie=False,
    )
    if speculative.rows is not None:  # texts must be bit-equal: rounding is no excuse
        return difference
    if our_token is None or their_token is None:  # no rounding ends a text early
        return difference
    spoken, said = audit(engine.target, speculative, plain, start + at, decide)
    return replace(
        difference,
        near_tie=spoken.token == our_token and said.token == their_token,
        speculative_margin=_finite(spoken.margin),
        plain_margin=_finite(said.margin),
    )


def _finite(margin: float) -> float | None:
    """None where nothing else was allowed, so that there is no margin."""
    return margin if math.isfinite(margin) else None


def _likeliest(sampler: RequestSampler) -> Decide:
    """What greedy decoding picks."""
    return lambda row, generated: best_of(sampler.adjust(row, generated))


def _noisy(sampler: RequestSampler, seed: int) -> Decide:
    """What the seed-stable rule picks: the greatest log probability plus noise."""

    def decide(row: Row, generated: Sequence[int]) -> Choice:
        distribution = sampler.distribution(row, generated)
        return best_of(scores(distribution, seed, len(generated)), distribution.tokens)

    return decide


def _shown(vocabulary: Vocabulary, token: int | None) -> str:
    """A token's text for people; control tokens by their spelling."""
    if token is None:
        return "(end of the text)"
    piece = vocabulary.piece(token) or vocabulary.spelling(token)
    return piece.decode(errors="replace")
