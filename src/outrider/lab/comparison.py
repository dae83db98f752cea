"""Speculation against plain decoding: how much faster, and is the output the same?

Both ways run in turn, each from a cold KV cache, so that a machine that slows down or warms up
does so for both. Where two greedy outputs part, the target is asked once more, plainly, how
close its two candidates were at that token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Constraint, Model, Vocabulary
from outrider.core.data import Completion, Grammar, Logits, Request, Row, Span
from outrider.core.errors import SettingError
from outrider.core.sequences import common_prefix
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.sampling import RequestSampler
from outrider.session.readout import Readout, read_out
from outrider.verify.rules import scores


@dataclass(frozen=True, slots=True)
class Speedup:
    """Wall-clock ratios of plain to speculative decoding over the repetitions, per token: from prompt to last
    token, and of decoding alone."""

    median: float
    low: float
    high: float
    decode_median: float
    decode_low: float
    decode_high: float
    repetitions: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two outputs part: the index of the generated token, the token that each has there,
    and by how much the plain one leads in plain decoding: by logit, or under the seed-stable rule by
    log probability plus the seed's noise. None where the other one is not in question there."""

    position: int
    plain_token: int
    speculative_token: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of `compare`. `plain` and `speculative` are the runs of median decode time."""

    plain: Readout
    speculative: Readout
    speculative_completion: Completion
    speedup: Speedup
    equal: bool
    divergence: Divergence | None


def compare(
    engine: Engine,
    request: Request,
    first: Completion | None = None,
    *,
    repetitions: int = 3,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Comparison:
    """Run `request` with and without speculation, `repetitions` times each, in turn.

    `first` may be a speculative run that was already made from a cold cache. All runs share one
    seed. `progress` is called with how many of the runs are done. No other request may be running.

    Raises SettingError for less than one repetition.
    """
    if repetitions < 1:
        raise SettingError("repetitions", f"{repetitions} is too few", "Give 1 or more.")
    speculative = [first] if first else []
    plain: list[Completion] = []

    def run(runs: list[Completion], speculate: bool) -> None:
        engine.reset()
        runs.append(engine.generate(replace(request, speculate=speculate)))
        progress(len(speculative) + len(plain), 2 * repetitions)

    for _ in range(repetitions):
        if len(speculative) == len(plain):
            run(speculative, True)
        request = replace(request, sampling=replace(request.sampling, seed=speculative[0].seed))
        run(plain, False)
    engine.reset()
    chosen = _median_run(speculative)
    # What is called unequal is shown: where the chosen run agrees, another one may not.
    other = next((run for run in (chosen, *speculative, *plain) if run.tokens != plain[0].tokens), chosen)
    return Comparison(
        plain=read_out(_median_run(plain)),
        speculative=read_out(chosen),
        speculative_completion=chosen,
        speedup=_speedup([read_out(run) for run in plain], [read_out(run) for run in speculative]),
        equal=other.tokens == plain[0].tokens,
        divergence=find_divergence(engine.target, request, plain[0], other, engine.constrain),
    )


def _median_run(runs: Sequence[Completion]) -> Completion:
    by_time = sorted(runs, key=lambda run: read_out(run).tokens_per_s)
    return by_time[len(by_time) // 2]


def _speedup(plain: Sequence[Readout], speculative: Sequence[Readout]) -> Speedup:
    """Ratios of the repetitions' times per token: the texts may differ in length when sampled."""
    total, decode = [], []
    for p, s in zip(plain, speculative, strict=True):
        total.append((p.prefill_s + p.decode_s) / p.generated_tokens)
        total[-1] /= (s.prefill_s + s.decode_s) / s.generated_tokens
        decode.append((p.decode_s / p.generated_tokens) / (s.decode_s / s.generated_tokens))
    return Speedup(
        median(total), min(total), max(total), median(decode), min(decode), max(decode), len(total)
    )


_CHUNK_TOKENS = 64
"""whose logits are held at once"""


def teacher_forced(
    model: Model, tokens: Sequence[int], first: int, *, sequence: int = 0, chunk: int = _CHUNK_TOKENS
) -> Iterator[Logits]:
    """Evaluate what a sequence does not hold of `tokens` yet, and give the logits after `tokens[first]`
    and each later token, a row each: an array for every call, empty for those that only read what is before.

    The rows are valid until the next array is asked for. `tokens[first]` is read with the last chunk of
    what is before, as the engine does with a prompt; later calls have up to `chunk` tokens.
    Raises BackendError when a call fails or the text does not fit.
    """
    at = model.length(sequence)
    while at < len(tokens):
        if at < first:
            end = min(at + min(PREFILL_CHUNK_TOKENS, model.max_batch_tokens), first)
            num_rows = int(end == first < len(tokens) and end - at < model.max_batch_tokens)
            end += num_rows
        else:
            end = min(at + min(chunk, model.max_rows, model.max_batch_tokens), len(tokens))
            num_rows = end - at
        [rows] = model.decode([Span(sequence, tuple(tokens[at:end]), at, num_rows)])
        yield rows
        at = end


def find_divergence(
    target: Model,
    request: Request,
    plain: Completion,
    speculative: Completion,
    constrain: Callable[[Grammar], Constraint] | None = None,
) -> Divergence | None:
    """The first difference between two outputs of a request; None where they are equal. `constrain` makes the
    constraint of the request's grammar. Uses sequence 0 of the target, whose KV it forgets."""
    position = common_prefix(plain.tokens, speculative.tokens)
    if position == min(len(plain.tokens), len(speculative.tokens)):
        return None
    generated = plain.tokens[:position]
    # The shapes of plain decoding: the prompt in chunks, and everything generated one by one.
    target.truncate(0, 0)
    known = (*request.prompt, *generated)
    *_, last = teacher_forced(target, known, len(request.prompt) - 1, chunk=1)
    row: npt.NDArray[np.float32] = last[0].copy()
    target.truncate(0, 0)
    ours, theirs = plain.tokens[position], speculative.tokens[position]
    seeded = replace(request, sampling=replace(request.sampling, seed=plain.seed))
    tokens, values = plain_scores(target.vocabulary, seeded, constrain)(row, generated)
    by_token = {token: float(values[tokens == token].max(initial=-math.inf)) for token in (ours, theirs)}
    margin = by_token[ours] - by_token[theirs]
    return Divergence(position, ours, theirs, margin if math.isfinite(margin) else None)


PlainScores = Callable[[Row, Sequence[int]], tuple[npt.NDArray[np.int64], npt.NDArray[np.floating]]]
"""What plain decoding chooses the highest of, by a row of logits and the generated tokens before it: the
tokens that may follow, and the score of each."""


def plain_scores(
    vocabulary: Vocabulary, request: Request, constrain: Callable[[Grammar], Constraint] | None
) -> PlainScores:
    """The scores of a request: its logits after penalties and masks or, under the seed-stable rule, log
    probabilities plus the seed's noise. `constrain` makes the constraint of its grammar."""
    grammar, sampling = request.grammar, request.sampling
    constraint = None if grammar is None or constrain is None else constrain(grammar)
    sampler = RequestSampler(sampling, vocabulary, request.prompt, constraint)
    is_seeded = request.verification.rule == "stable" and not sampling.is_greedy

    def score(row: Row, generated: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating]]:
        if not is_seeded:
            return np.arange(len(row)), sampler.adjust(row, generated)
        drawn = sampler.distribution(row, generated)
        return drawn.tokens, scores(drawn, sampling.seed or 0, len(generated))

    return score
