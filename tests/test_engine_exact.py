"""The whole engine by exact enumeration: every way that its random numbers can fall, on a fake model,
for every rule and kind of drafter, with bans, penalties and filters, either policy, and constraints."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import cast

import numpy as np
import pytest

from constrained import OneOf, Pieces
from engines import ScriptedDrafter
from exactness import Enumerated, Rng, Text, distance, texts_of
from exactness import plain as plain_texts
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.contracts import Constraint, Drafter, Drafters, DraftRequest, Policy
from outrider.core.data import (
    Distribution,
    Draft,
    DraftWork,
    Grammar,
    Mask,
    Request,
    Row,
    StepRecord,
    Verdict,
)
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare
from outrider.policy import auto
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.policy.objective import StepCosts, allocate
from outrider.sampling import LazyDistributions, RequestSampler
from outrider.verify import Verifier
from simulated import Offering, Simulated
from vocabularies import ReducedVocabulary

TINY = FakeVocabulary("ab")
END = TINY.size - 1
PROMPT = (0, 1)
AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def cached(next_logits: NextLogits) -> NextLogits:
    known = cache(next_logits)

    def logits(tokens: Sequence[int]) -> Row:
        return known(tuple(tokens[-4:]))

    return logits


TARGET = cached(random_logits(TINY.size, seed=2, order=2, scale=1.0))


MakeVerifier = Callable[[Request, Rng], Verifier]


def speculative(
    asked: Request,
    drafters: Sequence[Drafter],
    make: Callable[[], Policy],
    judge: MakeVerifier = Enumerated,
    *,
    target: FakeModel | None = None,
    constrain: Callable[[Grammar], Constraint] | None = None,
) -> tuple[dict[Text, float], list[StepRecord]]:
    """The distribution of a request's texts and the steps of all runs; each starts with a fresh policy, and
    nothing that an earlier one left."""
    target, records = target or FakeModel(TINY, TARGET), list[StepRecord]()

    def run(rng: Rng) -> Text:
        for drafter in drafters:
            drafter.reset()
        target.truncate(0, 0)
        engine = Engine(
            target, drafters, make(), verifier=lambda each, _seed: judge(each, rng), constrain=constrain
        )
        completion = engine.generate(asked)
        records.extend(completion.records)
        return completion.tokens

    return texts_of(run), records


def accepted(records: Sequence[StepRecord]) -> int:
    return sum(record.num_accepted for record in records)


def two(**settings: float) -> Callable[[], Policy]:
    """Two tokens a draft, however sure it is."""
    return lambda: FixedPolicy(**{"draft_max": 2, "p_min": 0, **settings})  # type: ignore[arg-type]


def plain(request: Request) -> dict[Text, float]:
    """The distribution of plain decoding."""
    return plain_texts(request, TARGET, TINY)


def model_drafter(
    vocabulary: FakeVocabulary = TINY, target: FakeVocabulary = TINY, seed: int = 9
) -> ModelDrafter:
    logits = cached(random_logits(vocabulary.size, seed=seed, order=2, scale=1.0))
    return ModelDrafter(FakeModel(vocabulary, logits), compare(target, vocabulary))


def request(rule: Rule, kind: DraftSampling, params: SamplingParams = AS_IT_IS, length: int = 3) -> Request:
    return Request(PROMPT, params, max_tokens=length, verification=Verification(rule, kind))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
@pytest.mark.parametrize("p_min", [0.0, 0.45])
def test_a_draft_model_leaves_the_text_as_it_is(rule: Rule, kind: DraftSampling, p_min: float) -> None:
    asked = request(rule, kind)
    found, records = speculative(asked, [model_drafter()], two(p_min=p_min))
    assert distance(found, plain(asked)) <= 1e-12 and accepted(records) > 0


SETTINGS = {
    "bans": replace(AS_IT_IS, banned=(1,), min_tokens=2),
    "bias": replace(AS_IT_IS, logit_bias=((0, 1.5), (1, -1.0))),
    "penalties": replace(AS_IT_IS, repeat_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4),
    "filters": replace(AS_IT_IS, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    "cold": replace(AS_IT_IS, temperature=0.4, min_tokens=3, frequency_penalty=1.0, repeat_last_n=2),
    "repeats": replace(AS_IT_IS, dry_multiplier=1.0, dry_allowed_length=1, dry_sequence_breakers=()),
    "chance": replace(AS_IT_IS, xtc_probability=0.5, xtc_threshold=0.1),
    "dynamic": replace(AS_IT_IS, temperature=1.0, dynatemp_range=0.6, typical_p=0.9),
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_bans_penalties_and_filters_apply_to_both(rule: Rule, kind: DraftSampling, settings: str) -> None:
    asked = request(rule, kind, SETTINGS[settings])
    found, _ = speculative(asked, [model_drafter()], two())
    exact = plain(asked)
    assert distance(found, exact) <= 1e-12
    assert distance(exact, plain(request(rule, kind))) > 0.01, "the setting changes nothing here"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
def test_a_draft_of_another_vocabulary_leaves_the_text_as_it_is(rule: Rule, kind: DraftSampling) -> None:
    for characters in ("xb", "ba", "xyb"):
        asked = request(rule, kind, replace(AS_IT_IS, banned=(1,)) if characters == "xyb" else AS_IT_IS)
        drafter = model_drafter(FakeVocabulary(characters))
        found, _ = speculative(asked, [drafter], two())
        assert distance(found, plain(asked)) <= 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
@pytest.mark.parametrize("settings", ["as it is", "bans", "penalties", "filters", "chance"])
def test_a_draft_of_a_reduced_vocabulary_leaves_the_text_as_it_is(
    rule: Rule, kind: DraftSampling, settings: str
) -> None:
    asked = request(rule, kind, SETTINGS.get(settings, AS_IT_IS))
    exact, num_accepted = plain(asked), 0
    for characters in ("a", "b", "ab"):
        drafter = model_drafter(ReducedVocabulary(TINY, characters))
        found, records = speculative(asked, [drafter], two())
        assert distance(found, exact) <= 1e-12
        num_accepted += accepted(records)
    assert num_accepted > 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_lookup_and_a_draft_model_together(rule: Rule) -> None:
    asked = replace(request(rule, "auto"), prompt=(0, 1, 0, 1, 0))
    drafters: list[Drafter] = [SuffixDrafter(1), model_drafter()]
    found, records = speculative(asked, drafters, two(hand_over=0.3))
    assert distance(found, plain(asked)) <= 1e-12 and accepted(records) > 0


@pytest.mark.parametrize("guess", [(0, 0), (1, 1), (0, END), (END, 0)])
def test_any_certain_draft(guess: tuple[int, int]) -> None:
    asked = request("block", "auto")
    found, records = speculative(asked, [ScriptedDrafter(lambda _text, n: guess[:n])], two())
    assert distance(found, plain(asked)) <= 1e-12 and accepted(records) > 0


def test_auto_offers_both_kinds() -> None:
    """Or the enumeration of "auto" would be that of one of them."""
    kinds = set()

    class Watching(Enumerated):
        def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
            if draft.tokens:
                kinds.add(draft.probs is not None)
            return super().verify(target, draft, position)

    asked = request("block", "auto", length=4)
    found, _ = speculative(asked, [model_drafter()], two(draft_max=1), Watching)
    assert kinds == {False, True}
    assert distance(found, plain(asked)) <= 1e-12


def test_a_choice_that_looks_at_the_drawn_tokens_is_noticed() -> None:
    """What "auto" must not do: to offer a drawn token only where it is also the most likely one."""

    class Peeking(Enumerated):
        def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
            if draft.probs and draft.tokens[0] != int(np.argmax(draft.probs[0].probs)):
                draft = Draft()
            return super().verify(target, draft, position)

    asked = request("block", "sampled")
    found, _ = speculative(asked, [model_drafter()], two(draft_max=1), Peeking)
    assert distance(found, plain(asked)) > 0.01


def test_penalties_that_do_not_see_the_drafted_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = RequestSampler.distribution

    def blind(self: RequestSampler, row: Row, drafted: Sequence[int]) -> Distribution:
        del drafted
        return seeing(self, row, ())

    monkeypatch.setattr(RequestSampler, "distribution", blind)
    asked = request("block", "sampled", replace(SETTINGS["penalties"], min_tokens=3))
    found, _ = speculative(asked, [model_drafter()], two())
    assert distance(found, plain(asked)) > 0.01


# Many requests with real random numbers

KINDS: tuple[DraftSampling, ...] = ("greedy", "sampled", "auto")
MANY = [
    ("block", ["auto"], True, 700),
    ("stable", ["sampled"], True, 700),
    *(
        pytest.param(rule, KINDS, lookup, 200_000, marks=pytest.mark.slow)
        for rule in ("token", "block", "stable")
        for lookup in (False, True)
    ),
]


@pytest.mark.parametrize(("rule", "kinds", "lookup", "num_samples"), MANY)
def test_sampled_output_follows_the_model(
    rule: Rule, kinds: Sequence[DraftSampling], lookup: bool, num_samples: int
) -> None:
    """Chi-square is no more standard deviations above what chance leads to."""
    target, drafter = FakeModel(TINY, TARGET), model_drafter()
    drafters: list[Drafter] = [*([SuffixDrafter(1)] if lookup else []), drafter]
    engine = Engine(target, drafters, two(hand_over=0.3)())
    counts, num_accepted = Counter[Text](), 0
    for seed in range(num_samples):
        made = request(rule, kinds[seed % len(kinds)], replace(AS_IT_IS, seed=seed))
        completion = engine.generate(replace(made, prompt=(0, 1, 0, 1)))
        counts[completion.tokens] += 1
        num_accepted += accepted(completion.records)
        for model in (target, cast(FakeModel, drafter.model)):
            model.calls.clear()
    exact = plain(replace(made, prompt=(0, 1, 0, 1)))
    assert set(counts) <= set(exact) and num_accepted > num_samples / 7
    assert min(exact.values()) * num_samples >= 5, "too few samples for the test"
    statistic = sum((counts[text] - p * num_samples) ** 2 / (p * num_samples) for text, p in exact.items())
    freedom = len(exact) - 1
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 4


# The automatic policy: whatever it chooses

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


# Constrained output, where a text has several spellings: with forced tokens, a masked draft model and lookups

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
TEXTS = {"abcab", "abcb", "cabc", "abc"}
OF_WORDS = cached(random_logits(WORDS.size, seed=4, order=2, scale=1.0))


def one_of(**settings: bool) -> Callable[[Grammar], Constraint]:
    return lambda _grammar: OneOf(WORDS, TEXTS, **settings)


def of_words(
    rule: Rule = "token", kind: DraftSampling = "auto", params: SamplingParams = AS_IT_IS
) -> Request:
    return Request(PROMPT, params, 8, verification=Verification(rule, kind), grammar=Grammar("choice"))


def constrained(
    request: Request,
    drafters: Sequence[Drafter],
    make: Callable[[], Policy],
    constrain: Callable[[Grammar], Constraint] | None = None,
) -> tuple[dict[Text, float], list[StepRecord]]:
    return speculative(
        request, drafters, make, target=FakeModel(WORDS, OF_WORDS), constrain=constrain or one_of()
    )


def plain_words(request: Request, **settings: bool) -> dict[Text, float]:
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
            row = np.where(allowed, OF_WORDS([*request.prompt, *text]), np.float32(-np.inf))
            sampler = RequestSampler(request.sampling, WORDS, request.prompt)
            sampler.accept(text)
            p = sampler.distribution(row, ())
            for token, share in zip(p.tokens.tolist(), p.probs.tolist(), strict=True):
                whole = (*text, token)
                constraint.final[len(text) :] = [token]
                ends = token == WORDS.size - 1 or constraint.is_complete
                (done if ends else grown)[whole] = weight * share
        texts = grown
    assert not texts
    return done


FIXED = two()


def automatic() -> Policy:
    return Simulated({1: 1.0, 64: 1.3}, 1e-4)


def sources(records: Sequence[StepRecord]) -> set[str]:
    return {source for record in records for source in record.draft.sources[: record.num_accepted]}


@pytest.mark.parametrize(
    ("make", "rule", "kind"),
    [
        *product((FIXED,), ("token", "block"), ("greedy", "sampled")),
        (automatic, "block", "greedy"),
        *(
            pytest.param(automatic, rule, kind, marks=pytest.mark.slow)
            for rule, kind in (("token", "greedy"), ("token", "sampled"), ("block", "sampled"))
        ),
    ],
)
def test_forced_tokens_and_a_masked_draft_model(
    make: Callable[[], Policy], rule: Rule, kind: DraftSampling
) -> None:
    found, records = constrained(of_words(rule, kind), [model_drafter(WORDS, WORDS, 8)], make)
    assert distance(found, plain_words(of_words())) <= 1e-12
    assert sources(records) == {"draft", "grammar"}
    joined = [record.draft.sources for record in records]
    assert any(s.index("grammar") > s.index("draft") for s in joined if {"draft", "grammar"} <= {*s})


@pytest.mark.parametrize("make", [FIXED, automatic])
def test_forced_tokens_alone(make: Callable[[], Policy]) -> None:
    found, records = constrained(of_words(), [], make)
    assert distance(found, plain_words(of_words())) <= 1e-12
    assert sources(records) == {"grammar"}


@pytest.mark.parametrize("make", [FIXED, automatic])
def test_a_lookup_that_leaves_the_grammar_is_cut(make: Callable[[], Policy]) -> None:
    guess = ScriptedDrafter(lambda text, n: [(0, 2, 2), (2, 1, 5)][len(text) % 2][:n], "lookup")
    found, records = constrained(of_words("block"), [guess], make)
    assert distance(found, plain_words(of_words())) <= 1e-12
    assert "lookup" in sources(records)


OF_GRAMMAR = {
    "filters": replace(AS_IT_IS, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    "bans": replace(AS_IT_IS, banned=(3,), logit_bias=((2, 1.5),)),
    "penalties": replace(AS_IT_IS, repeat_penalty=1.7, presence_penalty=0.6),
    "greedy": replace(AS_IT_IS, temperature=0),
}


@pytest.mark.parametrize("settings", OF_GRAMMAR)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_masks_come_before_the_filters(settings: str, kind: DraftSampling) -> None:
    request = of_words("block", kind, OF_GRAMMAR[settings])
    found, _ = constrained(request, [model_drafter(WORDS, WORDS, 8)], two())
    assert distance(found, plain_words(request)) <= 1e-12


def test_canonical_is_exact_relative_to_its_own_mask() -> None:
    found, records = constrained(of_words(), [], two(), one_of(canonical=True))
    assert distance(found, plain_words(of_words(), canonical=True)) <= 1e-12
    assert distance(found, plain_words(of_words())) > 0.01, "the spelling is free here"
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
    found, _ = constrained(
        of_words(), [model_drafter(WORDS, WORDS, 8)], two(), lambda _grammar: Unverified(WORDS, TEXTS)
    )
    assert distance(found, plain_words(of_words())) > 0.01


def test_a_mask_behind_the_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = of_words("token", "greedy", OF_GRAMMAR["filters"])
    masked = RequestSampler.distribution

    def late(self: RequestSampler, row: Row, drafted: Sequence[int]) -> Distribution:
        allowed = None if self._constraint is None else self._constraint.allowed(drafted)
        best = np.argsort(-row)[: self.params.top_k]
        kept = np.full_like(row, -np.inf)
        kept[best] = row[best]
        if allowed is None or not allowed[best].any():
            return masked(self, row, drafted)
        return masked(self, kept, drafted)

    exact = plain_words(request)
    monkeypatch.setattr(RequestSampler, "distribution", late)
    found, _ = constrained(request, [], two())
    assert distance(found, exact) > 0.01


def test_the_constraint_hears_of_final_tokens_only() -> None:
    made: list[OneOf] = []

    def constrain(_grammar: Grammar) -> Constraint:
        made.append(OneOf(WORDS, TEXTS))
        return made[-1]

    target = FakeModel(WORDS, OF_WORDS)
    completion = Engine(target, [model_drafter(WORDS, WORDS, 8)], two()(), constrain=constrain).generate(
        replace(of_words(), sampling=SamplingParams(seed=3))
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

    Engine(FakeModel(WORDS, OF_WORDS), [], Watching(), constrain=one_of()).generate(of_words())
    assert seen and all(request.constraint is not None for request in seen)
