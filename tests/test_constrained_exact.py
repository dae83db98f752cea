"""Constrained output by exact enumeration: with forced tokens, a masked draft model and lookups it is
distributed as plain constrained decoding, where a text has several spellings too."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import test_policy_exact
from constrained import OneOf, Pieces
from engines import ScriptedDrafter
from exactness import Text, distance
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Constraint, Drafter, Drafters, DraftRequest, Policy
from outrider.core.data import Distribution, Draft, DraftWork, Grammar, Mask, Request, Row, StepRecord
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import RequestSampler
from simulated import Simulated
from test_engine_exact import AS_IT_IS, cached

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
END = WORDS.size - 1
PROMPT = (0, 1)
TEXTS = {"abcab", "abcb", "cabc", "abc"}
TARGET = cached(random_logits(WORDS.size, seed=4, order=2, scale=1.0))
DRAFT = cached(random_logits(WORDS.size, seed=8, order=2, scale=1.0))


def one_of(**settings: bool) -> Callable[[Grammar], Constraint]:
    return lambda _grammar: OneOf(WORDS, TEXTS, **settings)


def asked(rule: Rule = "token", kind: DraftSampling = "auto", params: SamplingParams = AS_IT_IS) -> Request:
    return Request(PROMPT, params, 8, verification=Verification(rule, kind), grammar=Grammar("choice"))


def speculative(
    request: Request,
    drafters: Sequence[Drafter],
    make: Callable[[], Policy],
    constrain: Callable[[Grammar], Constraint] | None = None,
) -> tuple[dict[Text, float], list[StepRecord]]:
    """The distribution of a request's texts and the steps of all runs."""
    return test_policy_exact.speculative(
        request, drafters, make, FakeModel(WORDS, TARGET), constrain or one_of()
    )


def plain(request: Request, **settings: bool) -> dict[Text, float]:
    """Plain constrained decoding, worked out without an engine: mask, then filters, then draw."""
    texts: dict[Text, float] = {(): 1.0}
    done: dict[Text, float] = {}
    for _ in range(request.max_tokens or 0):
        grown: dict[Text, float] = {}
        for text, weight in texts.items():
            constraint = OneOf(WORDS, TEXTS, **settings)
            constraint.accept(text)
            allowed = constraint.allowed(())
            assert allowed is not None
            row = np.where(allowed, TARGET([*request.prompt, *text]), np.float32(-np.inf))
            sampler = RequestSampler(request.sampling, WORDS, request.prompt)
            sampler.accept(text)
            p = sampler.distribution(row, ())
            for token, share in zip(p.tokens.tolist(), p.probs.tolist(), strict=True):
                whole = (*text, token)
                constraint.final[len(text) :] = [token]
                ends = token == END or constraint.is_complete
                (done if ends else grown)[whole] = weight * share
        texts = grown
    assert not texts
    return done


def model_drafter() -> ModelDrafter:
    return ModelDrafter(FakeModel(WORDS, DRAFT), compare(WORDS, WORDS))


def fixed() -> Policy:
    return FixedPolicy(draft_max=2, p_min=0)


def automatic() -> Policy:
    return Simulated({1: 1.0, 64: 1.3}, 1e-4)


def sources(records: Sequence[StepRecord]) -> set[str]:
    return {source for record in records for source in record.draft.sources[: record.num_accepted]}


@pytest.mark.parametrize(
    ("make", "rule", "kind"),
    [
        *product((fixed,), ("token", "block"), ("greedy", "sampled")),
        (automatic, "token", "sampled"),
        (automatic, "block", "greedy"),
        pytest.param(automatic, "token", "greedy", marks=pytest.mark.slow),
        pytest.param(automatic, "block", "sampled", marks=pytest.mark.slow),
    ],
)
def test_forced_tokens_and_a_masked_draft_model(
    make: Callable[[], Policy], rule: Rule, kind: DraftSampling
) -> None:
    found, records = speculative(asked(rule, kind), [model_drafter()], make)
    assert distance(found, plain(asked())) <= 1e-12
    assert sources(records) == {"draft", "grammar"}
    joined = [record.draft.sources for record in records]
    assert any(s.index("grammar") > s.index("draft") for s in joined if {"draft", "grammar"} <= {*s})


@pytest.mark.parametrize("make", [fixed, automatic])
def test_forced_tokens_alone(make: Callable[[], Policy]) -> None:
    found, records = speculative(asked(), [], make)
    assert distance(found, plain(asked())) <= 1e-12
    assert sources(records) == {"grammar"}


@pytest.mark.parametrize("make", [fixed, automatic])
def test_a_lookup_that_leaves_the_grammar_is_cut(make: Callable[[], Policy]) -> None:
    guess = ScriptedDrafter(lambda text, n: [(0, 2, 2), (2, 1, 5)][len(text) % 2][:n], "lookup")
    found, records = speculative(asked("block"), [guess], make)
    assert distance(found, plain(asked())) <= 1e-12
    assert "lookup" in sources(records)


SETTINGS = {
    "filters": replace(AS_IT_IS, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    "bans": replace(AS_IT_IS, banned=(3,), logit_bias=((2, 1.5),)),
    "penalties": replace(AS_IT_IS, repeat_penalty=1.7, presence_penalty=0.6),
    "greedy": replace(AS_IT_IS, temperature=0),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_masks_come_before_the_filters(settings: str, kind: DraftSampling) -> None:
    request = asked("block", kind, SETTINGS[settings])
    found, _ = speculative(request, [model_drafter()], fixed)
    assert distance(found, plain(request)) <= 1e-12


def test_canonical_is_exact_relative_to_its_own_mask() -> None:
    found, records = speculative(asked(), [], fixed, one_of(canonical=True))
    assert distance(found, plain(asked(), canonical=True)) <= 1e-12
    assert distance(found, plain(asked())) > 0.01, "the spelling is free here"
    assert all(record.num_accepted == len(record.draft) for record in records)


# Broken variants, which the enumeration must notice


class Unverified(OneOf):
    """Takes what must follow for the only spelling of it, but only where a draft asks."""

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        mask = super().allowed(drafted)
        if drafted and mask is not None and (ways := self.forced(drafted)):
            mask[:] = False
            mask[ways[0]] = True
        return mask


def test_forced_tokens_that_are_not_verified_are_noticed() -> None:
    found, _ = speculative(asked(), [model_drafter()], fixed, lambda _grammar: Unverified(WORDS, TEXTS))
    assert distance(found, plain(asked())) > 0.01


def test_a_mask_behind_the_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked("token", "greedy", SETTINGS["filters"])
    masked = RequestSampler.distribution

    def late(self: RequestSampler, row: Row, drafted: Sequence[int]) -> Distribution:
        allowed = None if self._constraint is None else self._constraint.allowed(drafted)
        best = np.argsort(-row)[: self.params.top_k]
        kept = np.full_like(row, -np.inf)
        kept[best] = row[best]
        if allowed is None or not allowed[best].any():
            return masked(self, row, drafted)
        return masked(self, kept, drafted)

    exact = plain(request)
    monkeypatch.setattr(RequestSampler, "distribution", late)
    found, _ = speculative(request, [], fixed)
    assert distance(found, exact) > 0.01


def test_the_constraint_hears_of_final_tokens_only() -> None:
    made: list[OneOf] = []

    def constrain(_grammar: Grammar) -> Constraint:
        made.append(OneOf(WORDS, TEXTS))
        return made[-1]

    target = FakeModel(WORDS, TARGET)
    completion = Engine(target, [model_drafter()], fixed(), constrain=constrain).generate(
        replace(asked(), sampling=SamplingParams(seed=3))
    )
    assert tuple(made[0].final) == completion.tokens
    assert WORDS.text(completion.tokens) in TEXTS and completion.finish_reason == "stop"
    assert any(record.draft.tokens for record in completion.records)


def test_a_policy_is_told_of_the_constraint_of_each_sequence() -> None:
    seen: list[DraftRequest] = []

    class Watching(FixedPolicy):
        def propose(
            self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
        ) -> tuple[list[Draft], DraftWork]:
            seen.extend(requests)
            return super().propose(drafters, requests, others)

    Engine(FakeModel(WORDS, TARGET), [], Watching(), constrain=one_of()).generate(asked())
    assert seen and all(request.constraint is not None for request in seen)
