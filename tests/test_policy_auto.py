"""The policy that decides by itself: what it drafts, leaves, learns and says; then its parts."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from engines import (
    PROMPT,
    VOCABULARY,
    ScriptedDrafter,
    asked,
    greedy_continuation,
    language_model,
    model_drafter,
    oracle,
    sampler,
)
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Drafter, Drafters, DraftProgress, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, Request, StepRecord
from outrider.core.params import Drafting, DraftingPolicy, SamplingParams
from outrider.costs import CallCosts, CallPoint
from outrider.drafters.lookup import SuffixDrafter
from outrider.engine import Engine
from outrider.lab.distill.checkpoint import pretrained_calibration
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import Replayed, replay
from outrider.policy.auto import AutoPolicy
from outrider.policy.objective import (
    StepCosts,
    allocate,
    asking_value,
    best_length,
    continuation_values,
    expected_rewards,
    stopping_value,
)
from outrider.policy.state import Estimator, PolicyState, RequestBias, average_after, read_calibration
from recordings import FLAT, SMALL, STAIRS, STEEP, TEXT_KINDS, DraftKind, TextKind, curve, recording
from simulated import SURE, Offering, Simulated

LINEAR = {n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)}
"""Calls that cost as much as plain decoding would."""


def proposed(
    policy: AutoPolicy, *drafters: Drafter, sequences: int = 1, max_tokens: int = 100
) -> tuple[list[Draft], DraftWork]:
    """What a policy drafts at the beginning of texts that have nothing to read."""
    for sequence in range(sequences):
        policy.begin(sequence, 1, None)
    requests = [DraftRequest(sequence, max_tokens, sampler()) for sequence in range(sequences)]
    return policy.propose(Drafters.of(drafters), requests)


def costs(ratios: Mapping[int, float], step_s: float) -> tuple[CallCosts, CallCosts]:
    """Curves of a target and of a draft model, which nobody has learned from yet."""
    return curve(ratios), curve(SMALL, step_s)


def played_by(
    made: Recording, policy: AutoPolicy, target: CallCosts, draft: CallCosts | None = None, **options: Any
) -> Replayed:
    """What a policy makes of a recording at these costs."""
    return replay(made, policy, target, {} if draft is None else {"draft": draft}, **options)


# How far


CLIFF = {1: 1.0, 12: 1.2, 13: 40.0, 64: 60.0}
STAIR = {1: 1.0, 2: 2.6, 7: 7.3, 8: 2.0, 9: 9.0, 64: 60.0}
"""Two and three tokens more cost more than they bring, the eighth call is cheap again."""


@pytest.mark.parametrize(
    ("ratios", "offer", "max_tokens", "expected"),
    [
        (LINEAR, Offering(), 100, 0),
        (FLAT, Offering(evidence=(2.0, 1.0, 40.0)), 100, 0),
        (FLAT, Offering(0), 100, 0),
        (CLIFF, Offering(), 100, 11),
        (CLIFF, Offering(5), 100, 5),
        (STAIR, Offering(), 100, 7),
        (STAIR, Offering(6), 100, 0),
        (STAIR, Offering(), 6, 0),
    ],
)
def test_an_offer_is_taken_as_far_as_it_pays(
    ratios: dict[int, float], offer: Offering, max_tokens: int, expected: int
) -> None:
    [draft], work = proposed(AutoPolicy(curve(ratios)), offer, max_tokens=max_tokens)
    assert len(draft) == expected and work == DraftWork()


def gain_of(
    plan: Sequence[int],
    acceptance: Sequence[float],
    costs: Sequence[float],
    token_s: float,
    reread_s: Sequence[float],
) -> float:
    """The expected gain up to where a candidate breaks off or ends, if with k accepted tokens the next
    step drafts `plan[k]`: over all places where it may break off. A rejection after i tokens costs
    `reread_s[i + 1]` besides."""
    total, size = 0.0, len(acceptance)
    for right in range(size + 1):  # so many tokens of the candidate are correct
        ends = 1.0 if right == size else 1.0 - acceptance[right]
        probability, gain, k = ends * math.prod(acceptance[:right]), 0.0, 0
        while k <= right:
            kept = min(plan[k], right - k)
            gain += token_s * (kept + 1) - costs[plan[k]]
            gain -= reread_s[kept + 1] if kept < plan[k] else 0.0
            k = k + kept + 1 if kept == plan[k] else right + 1
            if k > size:
                break
        total += probability * gain
    return total


@given(
    acceptance=st.lists(st.floats(0.05, 1), min_size=1, max_size=4),
    rises=st.lists(st.floats(0, 2), min_size=4, max_size=4),
    token_s=st.floats(0.1, 1.5),
    rereads=st.none() | st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_the_best_length_is_the_first_of_the_best_plan(
    acceptance: list[float], rises: list[float], token_s: float, rereads: list[float] | None
) -> None:
    """Exactly: of every plan for every state of a candidate, none gains more."""
    calls_s = np.cumsum([1.0, *rises])
    costs = [float(cost) for cost in calls_s]
    size = len(acceptance)
    plans = list(product(*(range(size - k + 1) for k in range(size + 1))))
    reread_s = None if rereads is None else np.cumsum([0.0, *rereads])
    lost = [0.0] * 5 if reread_s is None else reread_s.tolist()
    gains = [gain_of(plan, acceptance, costs, token_s, lost) for plan in plans]
    length, gain = best_length(acceptance, StepCosts(token_s, calls_s, reread_s))
    assert gain == pytest.approx(max(gains))
    assert max(g for plan, g in zip(plans, gains, strict=True) if plan[0] == length) == pytest.approx(gain)


def test_a_long_offer_is_taken_in_parts_where_tokens_are_expensive() -> None:
    """One draft of 40 tokens would gain more than one of 8, but less than what may follow a shorter one."""
    expensive = curve({1: 1.0, 2: 2.0, 3: 2.4, 4: 2.7, 8: 4.3, 16: 7.8, 64: 30.0}).calls_s(64, context=0)
    at_once = np.cumsum(0.97 ** np.arange(41))
    assert (0.085 * at_once - expensive[:41]).argmax() > 15
    assert 4 <= best_length([0.97] * 40, StepCosts(0.085, expensive))[0] <= 12
    flat = curve({1: 1.0, 64: 1.2}).calls_s(64, context=0)
    assert best_length([0.97] * 40, StepCosts(0.085, flat))[0] == 40


@given(
    max_tokens=st.integers(1, 70),
    draft_max=st.integers(0, 70),
    length=st.integers(0, 80),
    match=st.integers(1, 40),
    steep=st.booleans(),
    asks=st.booleans(),
)
def test_a_draft_is_never_longer_than_wished_or_allowed(
    max_tokens: int, draft_max: int, length: int, match: int, steep: bool, asks: bool
) -> None:
    policy = AutoPolicy(curve(STEEP if steep else FLAT), curve(SMALL, 0.002), Drafting(draft_max=draft_max))
    drafters: list[Drafter] = [Offering(length, evidence=(float(match), 3.0, 3.0))]
    if asks:
        drafters.append(model_drafter(random_logits(VOCABULARY.size, seed=3, scale=5.0)))
        drafters[1].begin(0, asked([0]))
    [draft], work = proposed(policy, *drafters, max_tokens=max_tokens)
    assert len(draft) <= min(max_tokens, draft_max)
    assert work.calls <= min(max_tokens, draft_max, 16)


@pytest.mark.parametrize(
    ("who", "expected"),
    [("auto", {"lookup", "draft"}), ("model", {"draft"}), ("lookup", {"lookup"})],
)
def test_drafters_of_a_kind_can_be_switched_off(who: DraftingPolicy, expected: set[str]) -> None:
    made = recording("copying", "target", length=100)
    played = played_by(made, AutoPolicy(*costs(FLAT, 0.001), Drafting(who)), *costs(FLAT, 0.001))
    assert {source for r in played.records for source in r.draft.sources} == expected


def test_a_call_of_the_size_of_the_last_one_costs_less() -> None:
    """On a GPU, whose library makes its graph anew for another size."""

    def played(switch_s: float) -> tuple[float, int]:
        target, draft = CallCosts(curve(FLAT).points, switch_s=0.03), curve(SMALL, 0.02)
        policy = AutoPolicy(CallCosts(curve(FLAT).points, switch_s=switch_s), curve(SMALL, 0.02))
        found = [replay(recording(seed=seed), policy, target, {"draft": draft}) for seed in range(8)]
        sizes = [[r.num_evaluated for r in each.records] for each in found]
        return sum(r.seconds for r in found), sum(a != b for each in sizes for a, b in pairwise(each))

    (seconds, switches), (unaware_s, more) = played(0.03), played(0.0)
    assert switches < more and seconds < unaware_s


# From whom


def test_of_free_drafters_the_most_promising_one_is_taken() -> None:
    policy = AutoPolicy(curve({1: 1.0, 64: 1.1}))
    short, long = Offering(2, name="short"), Offering(3, name="long")
    [draft], _ = proposed(policy, short, long)
    assert draft.sources == ("long",) * 3


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_a_model_confirms_in_one_call_what_lookups_guess(num_right: int) -> None:
    language = random_logits(VOCABULARY.size, seed=3, scale=6.0)
    drafter = model_drafter(language)
    lookup = ScriptedDrafter(lambda known, n: oracle(language, num_right)(known, min(n, 4)))
    for each in (drafter, lookup):
        each.begin(0, asked(PROMPT))
    policy = AutoPolicy(curve({1: 1.0, 64: 1.2}), curve({1: 1.0, 64: 1.5}, 0.01))
    [draft], work = proposed(policy, lookup, drafter, max_tokens=20)
    own = draft.sources.count("draft")
    assert own > num_right and set(draft.sources[:own]) == {"draft"}
    assert list(draft.tokens[:own]) == greedy_continuation(language, PROMPT, own)
    assert work.call_tokens[0] == 1 + 4  # they are read with the last token of the text
    assert work.calls <= own - num_right


def test_lookup_tokens_follow_those_of_a_model() -> None:
    kinds = set()
    for seed, step_s in product(range(4), (0.02, 0.06)):
        known = costs(STAIRS, step_s), costs(STAIRS, step_s)
        played = played_by(recording("mixed", "target", seed=seed), AutoPolicy(*known[0]), *known[1])
        kinds |= {tuple(source for source, _ in groupby(r.draft.sources)) for r in played.records}
    assert {("lookup",), ("draft",), ("draft", "lookup")} <= kinds


def test_a_draft_model_that_cannot_pay_is_never_asked_and_that_is_said_once() -> None:
    drafter = model_drafter(random_logits(VOCABULARY.size, seed=11, order=3))
    policy = Simulated(FLAT, 0.13)
    engine = Engine(language_model(), [SuffixDrafter(), drafter], policy)
    for prompt in (PROMPT, (2, *PROMPT)):
        engine.generate(Request(prompt, SamplingParams(temperature=0), max_tokens=40, ignore_end=True))
    assert drafter.model.length(0) == 0
    [line] = policy.notices
    assert "one of its steps takes 1.30 of a target step here, too much to pay even if it were" in line


def test_a_draft_model_stays_out_at_the_lengths_at_which_it_loses_and_comes_back() -> None:
    """Its steps take longer with the text, the target's hardly do."""
    points = [CallPoint(1, 0.01), CallPoint(1, 0.3, 32_000)]
    target = CallCosts([*curve(FLAT).points, CallPoint(1, 0.11, 32_000)])
    policy, asked_at = AutoPolicy(target, CallCosts(points, prefill_token_s=1e-7)), list[bool]()
    for length in (50, 30_000, 50):
        made = recording("random", "target", length=60, prompt_tokens=length)
        played = played_by(made, policy, target, CallCosts(points, prefill_token_s=1e-7))
        asked_at.append(any(record.work.calls for record in played.records))
    assert asked_at == [True, False, True]
    [line] = policy.notices
    assert "not used: after 30,0" in line


def test_a_draft_model_that_has_read_a_conversation_is_asked_for_a_short_answer_too() -> None:
    def opened() -> Engine:
        drafter = model_drafter(random_logits(VOCABULARY.size, seed=11, order=3), context_length=2000)
        return Engine(language_model(context_length=2000), [drafter], Simulated(FLAT, 0.005, prefill_s=0.01))

    def is_asked(engine: Engine, prompt: Sequence[int], max_tokens: int) -> tuple[bool, tuple[int, ...]]:
        greedy = SamplingParams(temperature=0)
        completion = engine.generate(Request(tuple(prompt), greedy, max_tokens=max_tokens, ignore_end=True))
        return any(record.work.calls for record in completion.records), completion.tokens

    engine, prompt = opened(), PROMPT * 60
    was_asked, answer = is_asked(engine, prompt, 300)
    assert was_asked
    turn = (*prompt, *answer, 1, 2)
    assert is_asked(engine, turn, 8)[0] and not is_asked(opened(), turn, 8)[0]


def test_a_draft_model_of_unknown_cost_is_not_asked_and_that_is_said_once() -> None:
    """One that can pay is not given up: neither where a lookup is better at one place, nor where the text has
    room for one token only."""
    policy = AutoPolicy(curve(FLAT))
    for seed in range(2):
        played = played_by(recording("random", "target", seed=seed), policy, curve(FLAT), curve(SMALL))
        assert not any(record.work.calls for record in played.records)
    assert policy.notices == ["the draft model is not used: what its calls take was not measured here"]
    policy = AutoPolicy(*costs(STAIRS, 0.02))
    for kind in TEXT_KINDS:
        played_by(recording(kind, "wrong"), policy, *costs(STAIRS, 0.02))
    assert policy.notices == []


def test_a_long_prompt_is_read_at_once_where_the_draft_model_gained_in_earlier_answers() -> None:
    text, policy = (
        recording("random", "target", length=400, prompt_tokens=800),
        AutoPolicy(*costs(FLAT, 0.02)),
    )
    asked = []
    for _ in range(3):
        played = played_by(text, policy, *costs(FLAT, 0.02))
        asked.append(next(record.position for record in played.records if record.work.calls) - 800)
    assert asked[0] > 20 and asked[-1] == 0


# Several sequences


def test_sequences_share_the_steps_of_a_call() -> None:
    """Up to 8 tokens cost little: alone a sequence takes them all, two take them together."""
    cliff = {1: 1.0, 8: 1.2, 9: 30.0, 64: 60.0}
    for sequences, expected in ((1, 7), (2, 6)):
        drafts, _ = proposed(AutoPolicy(curve(cliff)), Offering(), sequences=sequences)
        assert sum(map(len, drafts)) == expected


def test_a_sequence_without_offers_stands_beside_one_that_has_some() -> None:
    lookup = SuffixDrafter()
    lookup.begin(0, Request((1, 2, 3, 4, 5, 6) * 6))
    lookup.begin(1, Request((1, 2, 3)))
    drafts, _ = proposed(AutoPolicy(curve(FLAT)), lookup, sequences=2)
    assert len(drafts[0]) > 0 and len(drafts[1]) == 0


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_sequences_share_the_cost_of_a_draft_model(num_sequences: int) -> None:
    """Where calls cost the same for four sequences as for one, four draft as one would."""
    flat = {1: 1.0, 64: 1.01}
    drafter = model_drafter(random_logits(VOCABULARY.size, seed=1, scale=1.0))
    policy = AutoPolicy(curve(flat), curve(flat, 0.05))
    for sequence in range(num_sequences):
        drafter.begin(sequence, asked((sequence, *PROMPT)))
    _, work = proposed(policy, drafter, sequences=num_sequences, max_tokens=8)
    assert work.calls > 0


def test_a_prompt_is_not_taken_for_read_because_another_was() -> None:
    """Of two sequences one has a short prompt. The other's is read only if it is short too."""
    greedy = SamplingParams(temperature=0)
    read = []
    for prompt in (PROMPT, PROMPT * 36):
        drafter = model_drafter(random_logits(VOCABULARY.size, seed=11, order=3))
        engine = Engine(language_model(), [drafter], Simulated(FLAT, 0.005, prefill_s=0.01))
        engine.submit(Request(PROMPT, greedy, max_tokens=60, ignore_end=True))
        engine.submit(Request((3, *prompt), greedy, max_tokens=24, ignore_end=True))
        while engine.step():
            pass
        assert drafter.model.length(0) > 20
        read.append(drafter.model.length(1) > 0)
    assert read == [True, False]


# What is learned


def test_what_goes_along_with_asking_is_no_part_of_every_step() -> None:
    target, models = costs(FLAT, 0.01)
    made = recording("random", "target", length=40)
    records = played_by(made, AutoPolicy(target, models), target, models, free=[]).records
    asked = next(record for record in records if record.work.calls > 1)
    plain = replace(asked, draft=Draft(), work=DraftWork(), draft_s=0.0, other_s=0.001)
    knowledge = PolicyState(*costs(FLAT, 0.01))
    for _ in range(60):
        knowledge.learn_own_time([plain])
        knowledge.learn_own_time([replace(asked, other_s=0.001 + 0.002 * asked.work.calls)])
    assert knowledge.own_step_s == pytest.approx(0.001, rel=0.05)
    assert knowledge.own_call_s == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("evidence", "name"),
    [((0.95,), "draft"), ((0.3,), "draft"), (SURE, "lookup")],
)
def test_estimates_come_true(right: float, evidence: tuple[float, ...], name: str) -> None:
    """Whatever a drafter says of itself, and over several texts."""
    rng = np.random.default_rng(1)
    estimator, estimates = Estimator(name), []
    for _ in range(6):
        state = RequestBias()
        for _ in range(100):
            estimates.append(estimator.probability(evidence, state))
            estimator.learn(evidence, state, bool(rng.random() < right))
    assert np.mean(estimates[-300:]) == pytest.approx(right, abs=0.13)
    assert all(0 < estimate < 1 for estimate in estimates)
    assert name == "lookup" or 0.999 < Estimator(name).probability((1.0,), RequestBias()) < 1


@pytest.mark.parametrize(
    ("draft", "right"), [("coin", 0.5), ("wrong", 0.0), ("wrong but sure", 0.0), ("target", 1.0)]
)
def test_tokens_that_were_seen_teach_although_they_were_not_drafted(draft: Any, right: float) -> None:
    """A free draft model on a machine where no draft pays much: most of what it says is cut off."""
    costs = {1: 1.0, 2: 1.7, 64: 44.0}
    policy = AutoPolicy(curve(costs), curve(SMALL, 1e-5), Drafting("model"))
    for seed in range(4):
        played_by(recording("random", draft, seed=seed), policy, curve(costs), curve(SMALL, 1e-5))
    made = recording("random", draft, seed=9)
    estimates = [(p,) for p in made.offers["draft"].confidence]
    estimator = policy.state.estimator("draft")
    found = [estimator.probability(estimate, RequestBias()) for estimate in estimates]
    assert np.mean(found) == pytest.approx(right, abs=0.25)


def acceptance(knowledge: PolicyState) -> list[float]:
    estimates = [("lookup", (4.0, 1.0, 2.0)), ("draft", (0.9,)), ("draft", (0.2,))]
    return [knowledge.estimator(name).probability(evidence, RequestBias()) for name, evidence in estimates]


def test_what_was_learned_survives_as_plain_data() -> None:
    first, second = (AutoPolicy(curve(FLAT), curve(SMALL, 0.01)) for _ in range(2))
    for seed in range(3):
        played_by(recording("mixed", "wrong but sure", seed=seed), first, curve(FLAT), curve(SMALL, 0.01))
    assert acceptance(second.state) != pytest.approx(acceptance(first.state), abs=0.02)
    data = json.loads(json.dumps(first.state.as_json()))
    second.state.recall(data)
    assert acceptance(second.state) == pytest.approx(acceptance(first.state))
    asked = [0, 0]
    for seed in range(7, 11):
        made = recording("mixed", "wrong but sure", seed=seed)
        third = AutoPolicy(curve(FLAT), curve(SMALL, 0.01))
        third.state.recall(data)
        for i, policy in enumerate((third, AutoPolicy(curve(FLAT), curve(SMALL, 0.01)))):
            played = played_by(made, policy, curve(FLAT), curve(SMALL, 0.01))
            asked[i] += sum(record.work.calls for record in played.records)
    assert asked[0] < asked[1] * 0.9


def test_a_draft_is_expected_to_fare_as_it_did_while_it_was_made() -> None:
    """One that is right in half of the cases in which it is all but sure."""
    rng = np.random.default_rng(0)
    answers = [
        [(sure, bool(rng.random() < sure / 2)) for sure in rng.uniform(0.3, 0.99, 60)] for _ in range(40)
    ]
    prior = json.loads(json.dumps(pretrained_calibration("draft", answers)))
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.01))
    policy.state.recall(prior)
    for constrained in (False, True):
        estimator = policy.state.estimator("draft", constrained=constrained)
        chance = estimator.probability((0.9,), RequestBias())
        assert chance == pytest.approx(0.45, abs=0.08)
    assert policy.state.mean_confidence == pytest.approx(0.32, abs=0.08)
    unknown = AutoPolicy(curve(FLAT), curve(SMALL, 0.01)).state
    assert acceptance(unknown)[1] > 0.9 > unknown.mean_confidence > 0.7
    assert acceptance(policy.state)[0] == acceptance(unknown)[0]  # of lookup it says nothing
    # A text is expected to be like all answers, not like the last.
    hard, easy = [(0.3, False)] * 100, [(0.95, True)] * 100
    usual = [
        pretrained_calibration("draft", answers)["mean_confidence"]
        for answers in ([hard, easy], [easy, hard])
    ]
    assert usual == pytest.approx([0.5, 0.5], abs=0.12)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "outrider.acceptance/2", "estimators": 3}'])
def test_a_prior_that_is_damaged_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_calibration(text)


BROKEN: dict[str, tuple[Any, ...]] = {
    "schema": ("outrider.acceptance/0", None),
    "estimators": ([], {"draft": 7}, *({"draft": {"weights": w}} for w in (7, [float("nan")], [10**400]))),
    "mean_confidence": ("much", None, float("nan"), 1.5),
}


@pytest.mark.parametrize("damage", [None, [], {}, *({k: v} for k, found in BROKEN.items() for v in found)])
def test_damaged_knowledge_is_refused_whole(damage: Any) -> None:
    fresh = AutoPolicy(curve(FLAT)).state
    before = acceptance(fresh)
    with pytest.raises(ValueError):
        fresh.recall(fresh.as_json() | damage if damage else damage)
    assert acceptance(fresh) == before


def test_a_text_leaves_nothing_of_its_own_to_the_next() -> None:
    """What is learned of all texts stays, what was particular to one goes: its bias, its speed, its phase,
    what it lost, and that its prompt was read."""
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.01))
    before = recording("mixed", "calibrated", seed=3)
    assert played_by(before, policy, curve(FLAT), curve(SMALL, 0.01)).speedup > 1
    fresh = deepcopy(policy)
    fresh._texts.clear()  # as if the last text had been another sequence's
    made = recording("mixed", "calibrated", seed=11, prompt_tokens=30, length=400)
    one, other = (played_by(made, p, curve(FLAT), curve(SMALL, 0.01)) for p in (policy, fresh))
    assert one.records == other.records
    assert any(record.work.calls for record in one.records)


# It never looks ahead


@pytest.mark.parametrize(
    ("kind", "draft"), [("mixed", "calibrated"), ("copying", "coin"), ("random", "calibrated")]
)
def test_what_comes_later_changes_nothing_now(kind: TextKind, draft: DraftKind) -> None:
    """The answer breaks off, or goes on in another way: until then the same is drafted."""
    made = replace(recording(kind, draft, seed=4, length=240), finish_reason="stop")
    offers = made.offers["draft"]
    early_departures = {place: path for place, path in offers.departures.items() if place < 200}
    shorter = Offers(offers.tokens[:200], offers.confidence[:200], early_departures)
    cut = replace(made, tokens=made.tokens[:200], offers={"draft": shorter})
    other = replace(made, tokens=made.tokens[:200] + tuple(t + 5 for t in made.tokens[200:]))
    runs = [
        played_by(each, AutoPolicy(*costs(STAIRS, 0.01)), *costs(STAIRS, 0.01)) for each in (made, cut, other)
    ]
    early = [[r for r in run.records if r.position < 150 + 200 - 64] for run in runs]
    assert len(early[0]) > 10
    assert early[0] == early[1] == early[2]


def test_its_steps_cost_what_was_said_and_no_token_is_lost() -> None:
    """The engine with everything: the same text as plain decoding, whatever is chosen."""
    request = Request(PROMPT, SamplingParams(temperature=0), max_tokens=60, ignore_end=True)
    plain = Engine(language_model()).generate(request).tokens
    for drafter in (
        model_drafter(random_logits(VOCABULARY.size, seed=11, order=3)),
        model_drafter(random_logits(VOCABULARY.size, seed=12, order=3)),
        ScriptedDrafter(oracle(random_logits(VOCABULARY.size, seed=11, order=3), num_right=3)),
    ):
        policy = Simulated(FLAT, 0.001)
        engine = Engine(language_model(), [SuffixDrafter(), drafter], policy)
        assert engine.generate(request).tokens == plain
        assert engine.generate(replace(request, speculate=False)).tokens == plain


def test_without_measured_costs_the_first_call_is_plain() -> None:
    """And then it drafts from lookups, cautiously; without knowing what a second costs it asks no model."""
    policy = AutoPolicy(CallCosts())
    made = recording("copying", None, length=100)
    played = played_by(made, policy, curve(FLAT))
    assert len(played.records[0].draft) == 0
    assert played.speedup > 1.2


def test_a_request_that_does_not_speculate_is_only_learned_from() -> None:
    policy = Simulated(FLAT)
    target = FakeModel(VOCABULARY, random_logits(VOCABULARY.size, seed=11, order=3))
    completion = Engine(target, [SuffixDrafter()], policy).generate(
        Request(PROMPT, SamplingParams(temperature=0), max_tokens=30, speculate=False, ignore_end=True)
    )
    assert not any(len(record.draft) for record in completion.records)
    assert 16 <= policy.state.costs.num_observed < 30, "the first plain calls all, of later ones some"


def test_constrained_text_has_estimates_of_its_own() -> None:
    knowledge = PolicyState(CallCosts())
    estimate, state = (4.0, 3.0, 3.0), RequestBias()
    free = knowledge.estimator("lookup").probability(estimate, state)
    constrained = knowledge.estimator("lookup", constrained=True)
    assert constrained.probability(estimate, state) < free
    assert knowledge.estimator("corpus", constrained=True).probability(estimate, state) < free
    for _ in range(200):
        constrained.learn(estimate, RequestBias(), correct=True)
    assert constrained.probability(estimate, state) > free
    assert knowledge.estimator("lookup").probability(estimate, state) == free
    again = PolicyState(CallCosts())
    again.recall(knowledge.as_json())
    assert again.estimator("lookup", constrained=True).probability(estimate, state) > free


# Its parts


def test_a_token_is_accepted_only_if_all_before_it_are() -> None:
    costs = StepCosts(2.0, np.ones(3))
    assert expected_rewards([0.5, 0.5], costs) == [2 * 1, 2 * (1 + 0.5), 2 * (1 + 0.5 + 0.25)]


def test_one_token_moves_the_average_confidence_by_less_than_half_of_the_way() -> None:
    assert 0.5 < average_after(0.5, 1.0) < 0.75


def test_what_a_draft_model_has_not_read_is_part_of_its_first_call() -> None:
    draft = curve(SMALL, 0.02)
    state = PolicyState(curve(FLAT), draft)
    text = state.new_request(0, None)
    text.draft = DraftProgress(8, 8)
    found = state.with_model(StepCosts(0.1, np.ones(9)), text, 0, 8)
    assert found.first_draft_s[0] == pytest.approx(draft.call_s(8, context=0))
    assert found.draft_step_s == pytest.approx(draft.call_s(1, context=0))


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.floats(0.2, 2.0), st.integers(0, 3))
def test_the_value_of_a_draft_counts_what_a_rejection_has_evaluated_again(
    acceptance: list[float], reward_s: float, before: int
) -> None:
    """Against all outcomes, one by one."""
    calls_s = np.array([1.0, 1.3, 1.7, 1.6, 2.2, 2.9, 3.1])
    reread_s = calls_s - 1.0 + 0.1 * before
    values = []
    for n in range(len(acceptance) + 1):
        value, reached = 0.0, 1.0
        for accepted, p in enumerate(acceptance[:n]):
            value += reached * (1 - p) * (reward_s * (accepted + 1) - reread_s[accepted + 1])
            reached *= p
        values.append(value + reached * reward_s * (n + 1) - calls_s[n])
    costs = StepCosts(reward_s, calls_s, recompute_s=reread_s)
    assert stopping_value(acceptance, costs) == pytest.approx(max(values))
    twice = allocate([(acceptance, 0), ([], 0)], costs)[0]
    assert values[twice] == pytest.approx(max(values))


@given(st.floats(0.05, 0.98), st.floats(0.05, 1.0), st.integers(0, 3))
def test_going_on_is_worth_the_best_number_of_further_tokens(
    average: float, prefix_prob: float, n: int
) -> None:
    calls_s = np.array([1.0, 1.2, 2.6, 2.2, 2.3, 4.0, 4.1])
    costs = StepCosts(0.8, calls_s, draft_step_s=0.2)
    values = []
    for k in range(1, 6 - n):
        earned = sum(prefix_prob * average**i for i in range(1, k + 1))
        values.append(0.8 * earned - calls_s[n + k] - 0.2 * k)
    assert continuation_values(n, average, prefix_prob, costs, 5) == pytest.approx([max(values)])
    assert continuation_values(0, average, prefix_prob, costs, 5, n)[n] == pytest.approx(max(values))


def test_a_block_is_paid_for_once() -> None:
    """With one call for four tokens the second token comes free; no token is drafted after them."""
    calls_s = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    one, four = StepCosts(0.8, calls_s, draft_step_s=0.2), StepCosts(0.8, calls_s, draft_step_s=0.2, block=4)
    assert asking_value(0, 0.5, 1.0, one, 1) == asking_value(0, 0.5, 1.0, four, 1)
    assert asking_value(0, 0.9, 1.0, four, 4) == pytest.approx(asking_value(0, 0.9, 1.0, one, 4) + 3 * 0.2)
    assert (one.longest(16), four.longest(16), four.longest(2)) == (5, 4, 2)
    assert four.limited(1.45).max_length == 4 and one.limited(1.45).max_length == 2


# The tokens of one call go to the drafts where they are most likely to be accepted.

Candidate = tuple[list[float], int]
"""the acceptance of its tokens, and how many of them are drafted in any case"""

ACCEPTANCE = st.lists(st.floats(0.01, 1.0), max_size=4)
CANDIDATES = st.lists(
    st.builds(lambda found, fixed: (found, min(fixed, len(found))), ACCEPTANCE, st.integers(0, 2)),
    min_size=2,  # one that has the call to itself looks further ahead
    max_size=3,
)


def gain_of_shares(
    candidates: list[Candidate], lengths: tuple[int, ...], calls_s: list[float], reward_s: float
) -> float:
    expected = sum(np.cumprod(found)[:n].sum() for (found, _), n in zip(candidates, lengths, strict=True))
    extra_s = calls_s[sum(lengths)] - calls_s[sum(fixed for _, fixed in candidates)]
    return float(expected * reward_s - extra_s)


@given(CANDIDATES, st.lists(st.floats(0.1, 3.0), min_size=13, max_size=13), st.floats(0.1, 2.0))
def test_no_other_shares_gain_more(
    candidates: list[Candidate], calls_s: list[float], reward_s: float
) -> None:
    lengths = tuple(allocate(candidates, StepCosts(reward_s, np.array(calls_s))))
    all_lengths = product(*(range(fixed, len(found) + 1) for found, fixed in candidates))
    best = max(gain_of_shares(candidates, each, calls_s, reward_s) for each in all_lengths)
    assert gain_of_shares(candidates, lengths, calls_s, reward_s) == pytest.approx(best, abs=1e-9)
    assert all(n >= fixed for n, (_, fixed) in zip(lengths, candidates, strict=True))


def test_as_the_call_fills_the_doubtful_drafts_go_first() -> None:
    sure, doubtful = ([0.95] * 6, 0), ([0.5] * 6, 0)
    for reward_s, last, expected in ((1.0, 1.3, [6, 5]), (0.3, 4.0, [3, 0]), (0.3, 20.0, [0, 0])):
        assert allocate([sure, doubtful], StepCosts(reward_s, np.linspace(1, last, 13))) == expected


# Offers


def test_offers_after_a_wrong_token_teach_nothing() -> None:
    """Another drafter's tokens were accepted, with which the rest of the offer agrees by chance."""
    learned = []
    draft = Draft(tuple(DraftToken(token, "other", 0.9) for token in (2, 1, 1)))
    tokens, none = (*draft.tokens, 0), DraftWork()
    record = StepRecord(0, 0, "decode", 5, 4, draft, 3, tokens, none, 0.0, 0.1, 0.0, 0.0, 0.1, batch_tokens=4)
    for length in (1, 6):
        policy = Simulated(FLAT)
        policy.begin(0, 5, None)
        policy.propose(Drafters.of([Offering(length)]), [DraftRequest(0, 20, sampler())])
        policy.observe({0: record})
        learned.append(policy.state.estimator("lookup").weights)
    assert learned[0] == learned[1]


def test_what_a_constraint_bars_is_not_drafted() -> None:
    words = Pieces("a", "b", "c")
    constraint = OneOf(words, ["aabca", "aacba"], forcing=False)
    request = DraftRequest(0, 20, sampler(), constraint=constraint)
    policy = AutoPolicy(curve(FLAT))
    policy.begin(0, 1, None)
    [draft], _ = policy.propose(Drafters.of([Offering()]), [request])
    assert draft.tokens == (), "the offer is of tokens 1, and the text begins with token 0"
