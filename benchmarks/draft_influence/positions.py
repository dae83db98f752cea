"""How far one step moves the target's distribution, exactly, at every position of the target's own texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from draft_influence.onestep import BLOCK, TOKEN, Rule, Step, greedy_step, mass, one_step, total_variation
from draft_influence.parts import Cell
from draft_influence.subjects import FILTERS, Candidate, Sizes, Tokens, engine_of
from outrider.core.contracts import DraftRequest, Model
from outrider.core.data import Distribution, Request, Row, point_mass
from outrider.core.params import SamplingParams
from outrider.drafters.model import Rows
from outrider.lab.certify.exact_distribution import LogitsCache
from outrider.sampling import RequestSampler


@dataclass(frozen=True, slots=True)
class Position:
    """One place in a text: the target's logits, the draft's (in its own ids), and the request's sampler."""

    row: Row
    offered: Row
    sampler: RequestSampler


@dataclass(frozen=True, slots=True)
class Moved:
    """What a step did to a position. `logprob`, `plain_logprob`: the expected log probability of the token
    that comes out, by the target's own softmax; `favourite`, `plain_favourite`: the chance that it is the one
    the draft held most likely."""

    tv: float
    acceptance: float
    logprob: float
    plain_logprob: float
    favourite: float
    plain_favourite: float


def texts_of(target: Model, prompts: Sequence[Tokens], sizes: Sizes) -> list[Tokens]:
    """A text of the target's own after each prompt, sampled."""
    engine = engine_of(target, None, 0)
    params = replace(FILTERS["default"], seed=sizes.seed)
    found = [engine.generate(Request(prompt, params, sizes.tokens)).tokens for prompt in prompts]
    engine.reset()
    return found


def positions(
    target: Model, candidate: Candidate, prompts: Sequence[Tokens], said: Sequence[Tokens], sizes: Sizes
) -> Iterator[Cell]:
    """For every prompt, filter, kind of draft, rule and lenience the means over a text."""
    ours, theirs = LogitsCache(target), LogitsCache(candidate.model)
    for number, (prompt, text) in enumerate(zip(prompts, said, strict=True)):
        pairs = [
            (ours.after(before, 1)[0], theirs.after(candidate.alignment.read(before), 1)[0])
            for before in ((*prompt, *text[:i]) for i in range(len(text)))
        ]
        for filters, params in (("greedy", SamplingParams(temperature=0)), *FILTERS.items()):
            sampler = RequestSampler(params, target.vocabulary, prompt)
            places = [Position(row, offered, sampler) for row, offered in pairs]
            for cell in _under(places, candidate, sizes, filters):
                yield {"prompt": number, "filters": filters} | cell
        ours.forget()
        theirs.forget()


def _under(places: Sequence[Position], candidate: Candidate, sizes: Sizes, filters: str) -> Iterator[Cell]:
    kinds = ("likeliest",) if filters == "greedy" else ("likeliest", "drawn")
    rules = [(TOKEN, lenience) for lenience in (1.0, *sizes.leniences)]
    if filters != "greedy":
        rules.append((BLOCK, 1.0))
    for kind in kinds:
        for rule, lenience in rules:
            moves = [moved(place, candidate, kind, rule, lenience) for place in places]
            yield {"kind": kind, "rule": rule.name, "lenience": lenience, **means(moves)}


def moved(place: Position, candidate: Candidate, kind: str, rule: Rule, lenience: float) -> Moved:
    """One position under a rule. Where the draft has nothing to offer, nothing moves."""
    request = DraftRequest(0, 1, place.sampler)
    rows = Rows(candidate.alignment)
    found = rows.argmax(place.offered, request, ())
    target = place.sampler.distribution(place.row, ())
    step = Step(target, 0.0)
    if kind == "drawn":
        step = one_step(target, rows.distribution(place.offered, request, ()), lenience, rule)
    elif found is not None and place.sampler.params.is_greedy:
        step = greedy_step(place.row, found[0], lenience)
    elif found is not None:
        step = one_step(target, point_mass(found[0]), lenience, rule)
    scores = _log_softmax(place.row)
    favourite = -1 if found is None else found[0]
    return Moved(
        tv=total_variation(step.emitted, target),
        acceptance=step.acceptance,
        logprob=_expected(step.emitted, scores),
        plain_logprob=_expected(target, scores),
        favourite=mass(step.emitted, favourite),
        plain_favourite=mass(target, favourite),
    )


def _log_softmax(row: Row) -> npt.NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    scores: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return scores


def _expected(drawn: Distribution, scores: npt.NDArray[np.float64]) -> float:
    """Σ p(x) log p_target(x) over the support; tokens that never come out count for nothing."""
    held = drawn.probs > 0
    return float(drawn.probs[held] @ scores[drawn.tokens[held]])


def means(moves: Sequence[Moved]) -> Cell:
    """Over the positions of a text; of the total variation the greatest too."""
    names = ("tv", "acceptance", "logprob", "plain_logprob", "favourite", "plain_favourite")
    found = {name: float(np.mean([getattr(move, name) for move in moves])) for name in names}
    return {"positions": len(moves), "max_tv": max(move.tv for move in moves), **found}
