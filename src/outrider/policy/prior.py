"""What to expect of a draft model before it was ever asked: learned while it was made, kept in its file.

How sure a model is says something else of every model: the estimates that are built in were fitted to drafts
of half a billion parameters. A distilled draft's predictions along held-out answers are known, so its own
estimates can come with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from outrider.core.data import TokenEstimate
from outrider.costs import CallCosts
from outrider.policy.knowledge import Knowledge

__all__ = ["PRIOR", "Prior", "prior_of", "read_prior"]

PRIOR = "outrider.draft.acceptance"
"""string: what is known of a draft's acceptance, in JSON (`Knowledge.as_json`)"""

Prior = Mapping[str, Any]
_DIGITS = 4


def prior_of(name: str, answers: Iterable[Sequence[tuple[float, bool]]]) -> Prior:
    """What the predictions of the draft model `name` along some answers teach: for each position, how sure
    it was of its most likely token, and whether that was right."""
    knowledge = Knowledge(CallCosts(), {})
    chances: list[float] = []
    for answer in answers:
        text = knowledge.new_text(1, None)
        for confidence, right in answer:
            estimate, state = TokenEstimate(confidence), text.state(name)
            estimator = knowledge.estimator(name)
            chance = estimator.probability(estimate, state)
            knowledge.outlook.learn(text.phase, chance)
            text.phase = knowledge.outlook.advance(text.phase, chance)
            estimator.learn(estimate, state, right)
            chances.append(chance)
    if chances:  # not what the last answers happened to be like
        knowledge.outlook.usual = fmean(chances)
    data = knowledge.as_json()
    # In constrained text, which held-out answers seldom are, it is as sure of its words as elsewhere.
    data["estimators"][f"{name} (constrained)"] = knowledge.estimator(name).as_json()
    rounded: Prior = _rounded(data)
    return rounded


def read_prior(text: str) -> Prior:
    """What a file says. Raises ValueError where it is damaged."""
    data: Prior = json.loads(text)
    Knowledge(CallCosts(), {}).recall(data)
    return data


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return round(data, _DIGITS) if isinstance(data, float) else data
