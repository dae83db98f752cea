"""The whole engine by exact enumeration: every way that its random numbers can fall, on a fake model,
for every rule and kind of drafter, with bans, penalties and filters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engines import ScriptedDrafter
from exactness import Enumerated, Rng, Text, distance, texts_of
from exactness import plain as plain_texts
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Distribution, Draft, Request, Row, Verdict
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import LazyDistributions, RequestSampler
from outrider.verify import Verifier
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
DRAFT = cached(random_logits(TINY.size, seed=9, order=2, scale=1.0))


MakeVerifier = Callable[[Request, Rng], Verifier]


def speculative(
    request: Request, drafters: Sequence[Drafter], policy: FixedPolicy, judge: MakeVerifier = Enumerated
) -> tuple[dict[Text, float], int]:
    """The distribution of the texts of a request, and the tokens accepted in all runs together."""
    world: list[Rng] = []
    engine = Engine(
        FakeModel(TINY, TARGET), drafters, policy, verifier=lambda request, _seed: judge(request, world[-1])
    )
    num_accepted = 0

    def run(rng: Rng) -> Text:
        nonlocal num_accepted
        world.append(rng)
        engine.reset()  # or what an earlier run left would be drafted from
        completion = engine.generate(request)
        num_accepted += sum(record.num_accepted for record in completion.records)
        return completion.tokens

    return texts_of(run), num_accepted


def plain(request: Request) -> dict[Text, float]:
    """The distribution of plain decoding."""
    return plain_texts(request, TARGET, TINY)


def model_drafter(vocabulary: FakeVocabulary = TINY) -> ModelDrafter:
    logits = (
        DRAFT if vocabulary is TINY else cached(random_logits(vocabulary.size, seed=9, order=2, scale=1.0))
    )
    return ModelDrafter(FakeModel(vocabulary, logits), compare(TINY, vocabulary))


def request(rule: Rule, kind: DraftSampling, params: SamplingParams = AS_IT_IS, length: int = 3) -> Request:
    return Request(PROMPT, params, max_tokens=length, verification=Verification(rule, kind))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
@pytest.mark.parametrize("p_min", [0.0, 0.45])
def test_a_draft_model_leaves_the_text_as_it_is(rule: Rule, kind: DraftSampling, p_min: float) -> None:
    asked = request(rule, kind)
    found, accepted = speculative(asked, [model_drafter()], FixedPolicy(draft_max=2, p_min=p_min))
    assert distance(found, plain(asked)) <= 1e-12 and accepted > 0


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
    found, _ = speculative(asked, [model_drafter()], FixedPolicy(draft_max=2, p_min=0))
    exact = plain(asked)
    assert distance(found, exact) <= 1e-12
    assert distance(exact, plain(request(rule, kind))) > 0.01, "the setting changes nothing here"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
def test_a_draft_of_another_vocabulary_leaves_the_text_as_it_is(rule: Rule, kind: DraftSampling) -> None:
    for characters in ("xb", "ba", "xyb"):
        asked = request(rule, kind, replace(AS_IT_IS, banned=(1,)) if characters == "xyb" else AS_IT_IS)
        drafter = model_drafter(FakeVocabulary(characters))
        found, _ = speculative(asked, [drafter], FixedPolicy(draft_max=2, p_min=0))
        assert distance(found, plain(asked)) <= 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "auto"])
@pytest.mark.parametrize("settings", ["as it is", "bans", "penalties", "filters", "chance"])
def test_a_draft_of_a_reduced_vocabulary_leaves_the_text_as_it_is(
    rule: Rule, kind: DraftSampling, settings: str
) -> None:
    asked = request(rule, kind, SETTINGS.get(settings, AS_IT_IS))
    exact, accepted = plain(asked), 0
    for characters in ("a", "b", "ab"):
        drafter = model_drafter(ReducedVocabulary(TINY, characters))
        found, stood = speculative(asked, [drafter], FixedPolicy(draft_max=2, p_min=0))
        assert distance(found, exact) <= 1e-12
        accepted += stood
    assert accepted > 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_lookup_and_a_draft_model_together(rule: Rule) -> None:
    asked = replace(request(rule, "auto"), prompt=(0, 1, 0, 1, 0))
    drafters: list[Drafter] = [SuffixDrafter(1), model_drafter()]
    found, accepted = speculative(asked, drafters, FixedPolicy(draft_max=2, p_min=0, hand_over=0.3))
    assert distance(found, plain(asked)) <= 1e-12 and accepted > 0


@pytest.mark.parametrize("guess", [(0, 0), (1, 1), (0, END), (END, 0)])
def test_any_certain_draft(guess: tuple[int, int]) -> None:
    asked = request("block", "auto")
    found, accepted = speculative(
        asked, [ScriptedDrafter(lambda _text, n: guess[:n])], FixedPolicy(draft_max=2, p_min=0)
    )
    assert distance(found, plain(asked)) <= 1e-12 and accepted > 0


def test_auto_offers_both_kinds() -> None:
    """Or the enumeration of "auto" would be that of one of them."""
    kinds = set()

    class Watching(Enumerated):
        def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
            if draft.tokens:
                kinds.add(draft.probs is not None)
            return super().verify(target, draft, position)

    asked = request("block", "auto", length=4)
    found, _ = speculative(asked, [model_drafter()], FixedPolicy(draft_max=1, p_min=0), Watching)
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
    found, _ = speculative(asked, [model_drafter()], FixedPolicy(draft_max=1, p_min=0), Peeking)
    assert distance(found, plain(asked)) > 0.01


def test_penalties_that_do_not_see_the_drafted_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = RequestSampler.distribution

    def blind(self: RequestSampler, row: Row, drafted: Sequence[int]) -> Distribution:
        del drafted
        return seeing(self, row, ())

    monkeypatch.setattr(RequestSampler, "distribution", blind)
    asked = request("block", "sampled", replace(SETTINGS["penalties"], min_tokens=3))
    found, _ = speculative(asked, [model_drafter()], FixedPolicy(draft_max=2, p_min=0))
    assert distance(found, plain(asked)) > 0.01
