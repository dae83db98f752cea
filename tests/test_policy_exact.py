"""The automatic policy by exact enumeration: whatever it chooses, the text is distributed as the target's."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from exactness import Enumerated, Rng, Text, distance, texts_of
from outrider.backends.fake import FakeModel
from outrider.core.contracts import Constraint, Drafter, Drafters, DraftRequest, Policy
from outrider.core.data import Draft, DraftWork, Grammar, Request, StepRecord
from outrider.core.params import Rule
from outrider.drafters.lookup import SuffixDrafter
from outrider.engine import Engine
from outrider.policy import auto
from outrider.policy.auto import AutoPolicy
from outrider.policy.objective import StepCosts, allocate
from simulated import Offering, Simulated
from test_engine_exact import TARGET, TINY, model_drafter, plain, request

CHEAP = {1: 1.0, 64: 1.3}
EXPENSIVE = {1: 1.0, 2: 1.35, 3: 1.5, 4: 1.55, 64: 12.0}
"""Calls for which it matters how sure a draft is."""

STAIR = {1: 1.0, 2: 1.75, 3: 1.35, 64: 12.0}
"""One drafted token does not pay, two may."""


def cheap() -> AutoPolicy:
    return Simulated(CHEAP, 1e-4)


def expensive() -> AutoPolicy:
    return Simulated(EXPENSIVE, 0.003)


def stair() -> AutoPolicy:
    return Simulated(STAIR, 0.001)


def speculative(
    asked: Request,
    drafters: Sequence[Drafter],
    make: Callable[[], Policy],
    target: FakeModel | None = None,
    constrain: Callable[[Grammar], Constraint] | None = None,
) -> tuple[dict[Text, float], list[StepRecord]]:
    """The distribution of a request's texts and the steps of all runs; each starts with a fresh policy."""
    world: list[Rng] = []
    target = target or FakeModel(TINY, TARGET)
    records: list[StepRecord] = []

    def run(rng: Rng) -> Text:
        world.append(rng)
        for drafter in drafters:
            drafter.reset()
        target.truncate(0, 0)
        engine = Engine(
            target,
            drafters,
            make(),
            verifier=lambda each, _seed: Enumerated(each, world[-1]),
            constrain=constrain,
        )
        completion = engine.generate(asked)
        records.extend(completion.records)
        return completion.tokens

    return texts_of(run), records


def asked_for(rule: Rule, kind: str = "sampled", length: int = 3) -> Request:
    made = request(rule, "sampled" if kind == "sampled" else "auto", length=length)
    return Request((0, 1, 0, 1, 0), made.sampling, max_tokens=length, verification=made.verification)


def shapes(records: Sequence[StepRecord]) -> set[tuple[str, ...]]:
    """The sources of the drafts that were drawn from distributions, token by token."""
    return {record.draft.sources for record in records if record.draft.probs is not None}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["sampled", "auto"])
@pytest.mark.parametrize("make", [cheap, expensive, stair])
def test_a_draft_model_alone(rule: Rule, kind: str, make: Callable[[], AutoPolicy]) -> None:
    asked = asked_for(rule, kind)
    found, records = speculative(asked, [model_drafter()], make)
    assert distance(found, plain(asked)) <= 1e-12
    assert any(record.num_accepted for record in records)
    assert kind == "auto" or {len(shape) for shape in shapes(records)} == {1, 2}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_free_tokens_guess_drawn_ones_and_follow_them(rule: Rule) -> None:
    asked, met, num_spared = asked_for(rule), set(), 0
    for make in (cheap, expensive):
        for free in (SuffixDrafter(), Offering(1), Offering(1, only_after=True)):
            found, records = speculative(asked, [free, model_drafter()], make)
            assert distance(found, plain(asked)) <= 1e-12
            met |= shapes(records)
            num_spared += sum(r.work.calls < r.draft.sources.count("draft") for r in records)
    # Or it would prove less than it says.
    assert met == {("draft",), ("draft", "draft"), ("draft", "lookup")} and num_spared


class Cutting(Simulated):
    """Wrong on purpose: a drawn draft is cut before its first token that is not the most likely."""

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        drafts, work = super().propose(drafters, requests, others)
        return [self._shortened(draft) for draft in drafts], work

    def _shortened(self, draft: Draft) -> Draft:
        greedy = [int(q.tokens[np.argmax(q.probs)]) for q in draft.probs or ()]
        keep = next((i for i, t in enumerate(greedy) if t != draft.tokens[i]), len(draft))
        return draft.first(keep)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_cutting_for_what_was_drawn_would_be_noticed(rule: Rule) -> None:
    asked = asked_for(rule)
    found, _ = speculative(asked, [SuffixDrafter(), model_drafter()], lambda: Cutting(CHEAP, 1e-4))
    assert distance(found, plain(asked)) > 0.01


def beginning(rule: Rule) -> Request:
    """Nothing is read in the first call."""
    return replace(asked_for(rule), prompt=(0,))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drawn_tokens_stay_where_fewer_would_pay_better(rule: Rule) -> None:
    asked = beginning(rule)
    found, records = speculative(asked, [model_drafter()], stair)
    assert distance(found, plain(asked)) <= 1e-12
    assert any(record.num_accepted for record in records)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_taking_back_drawn_tokens_would_be_noticed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """What certain tokens allow: to take the best length of all that was found, when it was found."""

    def taking_back(candidates: Sequence[tuple[Sequence[float], int]], costs: StepCosts) -> list[int]:
        return allocate([(acceptance, 0) for acceptance, _ in candidates], costs)

    monkeypatch.setattr(auto, "allocate", taking_back)
    asked = beginning(rule)
    found, _ = speculative(asked, [model_drafter()], stair)
    assert distance(found, plain(asked)) > 1e-3
