"""Replays in simulated time: they do what the engine does."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from constrained import OneOf, Pieces
from engines import (
    PROMPT,
    VOCABULARY,
    model_drafter,
    other_vocabulary_drafter,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel, NextLogits, random_logits
from outrider.core.contracts import CHECKPOINTS, FREE, Drafter, Drafters, DraftRequest, Rewinding, RewindKind
from outrider.core.data import Draft, DraftWork, Grammar, Request, Row, StepRecord
from outrider.core.params import Drafting, SamplingParams
from outrider.costs import CallCosts
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.limits import PreferredConstraint, PreferredTokenization
from outrider.lab.recording import Offers, Recording, record_offers
from outrider.lab.replay import Replayed, replay
from outrider.models.vocab import align
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from recordings import FLAT, SMALL, STAIRS, STEEP, DraftKind, TextKind, curve, recording

GREEDY = SamplingParams(temperature=0)
END = VOCABULARY.size - 1


def endless(seed: int, scale: float = 5.0) -> NextLogits:
    """A rather sure language that never ends by itself."""
    language = random_logits(VOCABULARY.size, seed=seed, order=2, scale=scale)

    def logits(tokens: Sequence[int]) -> Row:
        row = language(tokens)
        row[END] = -50.0
        return row

    return logits


# Against the real engine


@pytest.mark.parametrize("most", [1, 3, 16])
def test_no_draft_is_longer_than_the_target_can_take_back(most: int) -> None:
    text = (1, 2, 3, 4, 5) * 8
    again = Recording("again", "chat", text, text, "length", {})
    rewinding = replace(CHECKPOINTS, max_rejected=most)
    played = replay(again, FixedPolicy(draft_max=16, p_min=0.0), CallCosts(), rewinding=rewinding)
    assert max(len(record.draft) for record in played.records) == most


@pytest.mark.parametrize("rewind", ["free", "checkpoints"])
@pytest.mark.parametrize("draft_max", [1, 3, 4])
@pytest.mark.parametrize("p_min", [0.5, 0.7])
@pytest.mark.parametrize("seeds", [(11, 11), (11, 12), (3, 5)])
def test_a_replay_makes_the_steps_of_the_engine(
    draft_max: int, p_min: float, seeds: tuple[int, int], rewind: RewindKind
) -> None:
    policy = FixedPolicy(draft_max=draft_max, p_min=p_min)
    target = FakeModel(VOCABULARY, endless(seeds[0]), rewind=rewind)
    engine = Engine(target, [SuffixDrafter(), model_drafter(endless(seeds[1]))], policy)
    answer = engine.generate(Request(PROMPT, GREEDY, max_tokens=60))
    draft = FakeModel(VOCABULARY, endless(seeds[1]))
    offers = record_offers(draft, same_vocabulary(), PROMPT, answer.tokens)
    made = Recording("1", "made up", PROMPT, answer.tokens, "length", {"draft": offers})
    again = replay(made, policy, curve(FLAT), {"draft": curve(SMALL)}, rewinding=target.rewinding).records
    real = [record for record in answer.records if record.kind == "decode"]
    assert [step(record) for record in again] == [step(record) for record in real]
    for one, other in zip(again, real, strict=True):
        assert one.draft.acceptance == pytest.approx(other.draft.acceptance, abs=1e-5)
    sources = {source for record in again for source in record.draft.sources}
    assert sources == {"lookup", "draft"} or seeds == (11, 11)


@pytest.mark.parametrize("draft_max", [8, 16])
def test_a_long_draft_goes_on_after_what_was_recorded(draft_max: int) -> None:
    """A flat model's drafts are recorded while they may be accepted; a fixed length pays for all of it."""
    policy = FixedPolicy(draft_max=draft_max, p_min=0.0)
    engine = Engine(FakeModel(VOCABULARY, endless(3)), [model_drafter(endless(5, 1.0))], policy)
    answer = engine.generate(Request(PROMPT, GREEDY, max_tokens=50))
    offers = record_offers(FakeModel(VOCABULARY, endless(5, 1.0)), same_vocabulary(), PROMPT, answer.tokens)
    made = Recording("1", "made up", PROMPT, answer.tokens, "length", {"draft": offers})
    again = replay(made, policy, curve(FLAT), {"draft": curve(SMALL)}, free=[]).records
    real = [record for record in answer.records if record.kind == "decode"]
    assert max(len(path) for path in offers.departures.values()) < draft_max - 1
    assert [len(record.draft) for record in again] == [len(record.draft) for record in real]
    assert [record.work.call_tokens for record in again] == [record.work.call_tokens for record in real]


@pytest.mark.parametrize(("confidence", "unknown"), [(0.5, ()), (0.1, (-1,) * 5)])
def test_a_departure_ends_as_the_model_ended_it(confidence: float, unknown: tuple[int, ...]) -> None:
    """Of a draft that was cut for its small probability the rest is unknown; one that ended has no rest."""
    offers = Offers((1, 9, 3, 4), (confidence,) * 4, {1: ((7, confidence),)})
    made = Recording("1", "made up", PROMPT, (1, 2, 3, 4), "stop", {"draft": offers})
    policy = FixedPolicy(draft_max=8, p_min=0.0)
    first, *_ = replay(made, policy, curve(FLAT), {"draft": curve(SMALL)}, free=[]).records
    assert first.draft.tokens == (1, 9, 7, *unknown)


def step(record: StepRecord) -> tuple[object, ...]:
    """What a record says, but for its times."""
    draft, work = record.draft, record.work
    return (
        record.position,
        record.num_evaluated,
        draft.tokens,
        draft.sources,
        record.num_accepted,
        record.tokens,
        work.calls,
        work.call_tokens,
        work.prefill_calls,
    )


def test_plain_decoding_is_the_measure() -> None:
    made = recording(length=40)
    costs = curve(STAIRS)
    played = replay(made, FixedPolicy(draft_max=0), costs, {"draft": curve(SMALL)}, own_s=0.01)
    assert played.speedup == pytest.approx(1.0)
    assert played.seconds == pytest.approx(sum(costs.call_s(1, context=150 + i) + 0.01 for i in range(40)))
    assert [record.tokens for record in played.records] == [(token,) for token in made.tokens]


def test_the_prompt_is_read_by_a_draft_model_once_and_only_if_it_is_asked() -> None:
    made = recording("random", "target", length=20)
    asked = replay(made, FixedPolicy(draft_max=3, p_min=0), curve(FLAT), {"draft": curve(SMALL, 0.01)})
    assert [r.work.prefill_calls for r in asked.records] == [1] + [0] * (len(asked.records) - 1)
    assert asked.records[0].work.prefill_s == pytest.approx(150 * 0.01 * 0.09, rel=0.02)
    plain = replay(made, FixedPolicy(draft_max=0), curve(FLAT), {"draft": curve(SMALL, 0.01)})
    assert not any(r.work.prefill_s for r in plain.records)


def test_where_an_answer_ends_by_itself_is_not_known_before() -> None:
    limits: list[int | None] = []
    rooms: list[int] = []

    class Watching(FixedPolicy):
        def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
            FixedPolicy.begin(self, sequence, prompt_tokens, max_tokens)
            limits.append(max_tokens)

        def propose(
            self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
        ) -> tuple[list[Draft], DraftWork]:
            rooms.append(requests[0].max_tokens)
            return FixedPolicy.propose(self, drafters, requests, others)

    made = recording("copying", "target", length=30)
    replay(made, Watching(), curve(FLAT), {"draft": curve(SMALL)})
    assert limits == [30] and rooms[-1] <= 8
    limits, rooms = [], []
    played = replay(replace(made, finish_reason="stop"), Watching(), curve(FLAT), {"draft": curve(SMALL)})
    assert limits == [None] and min(rooms) > 64
    assert sum(len(record.tokens) for record in played.records) == 30
    assert all(record.num_accepted <= len(record.tokens) for record in played.records)


# Recording


@pytest.mark.parametrize("max_rows", [3, 64])
@pytest.mark.parametrize("rewind", ["free", "checkpoints"])
def test_what_is_recorded_is_what_the_draft_model_would_say(max_rows: int, rewind: RewindKind) -> None:
    language = endless(5)
    model = FakeModel(VOCABULARY, language, max_rows=max_rows, rewind=rewind)
    answer = [1, 2, 3, 0, 0, 1, 2, 3, 1, 2]
    found = record_offers(model, same_vocabulary(), PROMPT, answer)
    assert model.length(0) == 0
    for i, token in enumerate(answer):
        row = language([*PROMPT, *answer[:i]])
        assert found.tokens[i] == int(row.argmax())
        assert 0 < found.confidence[i] < 1
        assert (i in found.departures) == (found.tokens[i] != token)
    assert found.departures
    for i, path in found.departures.items():
        text = [*PROMPT, *answer[:i], found.tokens[i]]
        for token, _ in path:
            assert token == int(language(text).argmax())
            text.append(token)


def test_offers_of_another_vocabulary_are_recorded_in_the_targets_ids() -> None:
    drafter = other_vocabulary_drafter()
    answer = VOCABULARY.tokenize("abcdabcd")
    found = record_offers(drafter.model, drafter.alignment, VOCABULARY.tokenize("ab c"), answer)
    assert len(found.tokens) == len(answer)
    assert all(-1 <= token < VOCABULARY.size for token in found.tokens)


# Under a constraint

PIECES = Pieces("a", "b", "c", "ab", "bc", "abc", "-", "--")
TEXTS = ("abc--abcabc-a-abcabcabc", "abc--abcab--b-bcbcab", "ab-cc--abcabcabcabc--a")


@pytest.mark.parametrize(
    "setting", [FixedPolicy(draft_max=n, p_min=p) for n in (1, 3, 8) for p in (0.0, 0.5)]
)
@pytest.mark.parametrize("seeds", [(4, 4), (4, 9), (21, 5)])
@pytest.mark.parametrize("canonical", [True, False])
def test_a_constrained_replay_makes_the_steps_of_the_engine(
    setting: FixedPolicy, seeds: tuple[int, int], canonical: bool
) -> None:
    def constrain() -> OneOf:
        return OneOf(PIECES, TEXTS, canonical=canonical)

    ours, theirs = (random_logits(PIECES.size, seed=seed, order=2, scale=3.0) for seed in seeds)
    drafters: list[Drafter] = [
        SuffixDrafter(),
        ModelDrafter(FakeModel(PIECES, theirs), align(PIECES, PIECES)),
    ]
    engine = Engine(FakeModel(PIECES, ours), drafters, setting, constrain=lambda _grammar: constrain())
    answer = engine.generate(Request((0, 3, 6), GREEDY, grammar=Grammar("json")))
    offers = record_offers(
        FakeModel(PIECES, theirs), align(PIECES, PIECES), (0, 3, 6), answer.tokens, constrain=constrain
    )
    made = Recording("1", "made up", (0, 3, 6), answer.tokens, answer.finish_reason, {"draft": offers})
    constraint = PreferredConstraint(constrain(), PreferredTokenization())
    again = replay(made, setting, curve(FLAT), {"draft": curve(SMALL)}, constraint=constraint).records
    real = [record for record in answer.records if record.kind == "decode"]
    assert [outcome(record) for record in again] == [outcome(record) for record in real]
    if canonical:  # after forced text that the model spells otherwise, offers were not recorded
        assert [step(record) for record in again[:-1]] == [step(record) for record in real[:-1]]
    assert any("grammar" in record.draft.sources for record in again)


def outcome(record: StepRecord) -> tuple[object, ...]:
    """What became of a step."""
    return record.position, record.num_accepted, record.tokens


def test_no_unknown_token_is_put_to_a_constraint() -> None:
    """After a long draft nothing was recorded, and at some places the draft model had nothing to offer."""

    class Strict(OneOf):
        def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
            assert min((*drafted, *tokens), default=0) >= 0
            return super().permits(drafted, tokens)

    answer = tuple(PIECES.tokenize(TEXTS[2]))
    [wrong] = PIECES.tokenize("a")
    path = tuple((wrong, 0.5) for _ in range(12))
    unsure = Offers((wrong, -1) * (len(answer) // 2), (0.5,) * (len(answer) // 2 * 2), {0: path})
    made = Recording("1", "made up", (0, 3, 6), answer[: len(unsure.tokens)], "stop", {"draft": unsure})
    constraint = Strict(PIECES, TEXTS, forcing=False)
    played = replay(
        made, FixedPolicy(16, 0.0), curve(FLAT), {"draft": curve(SMALL)}, free=[], constraint=constraint
    )
    assert sum(len(record.tokens) for record in played.records) == len(made.tokens)


def test_offers_are_made_under_the_masks() -> None:
    language = random_logits(PIECES.size, seed=3, order=2, scale=3.0)
    answer = PIECES.tokenize(TEXTS[1])
    found = record_offers(
        FakeModel(PIECES, language),
        align(PIECES, PIECES),
        (0,),
        answer,
        constrain=lambda: OneOf(PIECES, TEXTS),
    )
    for i, token in enumerate(found.tokens):
        allowed = OneOf(PIECES, TEXTS).allowed(answer[:i])
        assert allowed is not None and allowed[token]
        best = np.where(allowed, language([0, *answer[:i]]), -np.inf).argmax()
        assert token == int(best)
        text = [*answer[:i], token]
        for after, _ in found.departures.get(i, ()):
            text += OneOf(PIECES, TEXTS).forced(text)
            mask = OneOf(PIECES, TEXTS).allowed(text)
            assert mask is None or mask[after]
            text.append(after)
    assert found.departures


# The automatic policy in simulated time: near plain decoding at worst, near the best fixed choice mostly

MACHINES = {"stairs": (STAIRS, 0.01), "steep": (STEEP, 0.05), "flat": (FLAT, 0.02)}
"""target calls, and a draft model's step where a target's takes 0.1 s"""


def play(
    texts: Sequence[Recording],
    machine: str,
    *,
    believed: float = 1.0,
    draft_believed: float = 1.0,
    rewinding: Rewinding = FREE,
) -> list[Replayed]:
    """Decode the texts one after another with one policy, which may have wrong ideas of what calls take."""
    ratios, step_s = MACHINES[machine]
    thought = curve(ratios, 0.1 * believed), curve(SMALL, step_s * draft_believed)
    policy = AutoPolicy(*thought)
    drafts = {"draft": curve(SMALL, step_s)}
    return [replay(each, policy, curve(ratios), drafts, rewinding=rewinding) for each in texts]


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(float(np.mean(np.log(values))))


def texts_of(kind: TextKind, draft: DraftKind, count: int = 3) -> list[Recording]:
    return [recording(kind, draft, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("wrong", "random"),
        ("wrong but sure", "random"),
        ("coin", "random"),
        ("wrong but sure", "mixed"),
        ("wrong", "copying"),
        ("target", "mixed"),
    ],
)
@pytest.mark.parametrize("rewinding", [FREE, CHECKPOINTS], ids=["free", "checkpoints"])
def test_never_slower_than_plain_decoding(
    machine: str, draft: DraftKind, kind: TextKind, rewinding: Rewinding
) -> None:
    speeds = [played.speedup for played in play(texts_of(kind, draft, 6), machine, rewinding=rewinding)]
    assert mean(speeds[:3]) > 0.92, "texts on which the draft model had to be found out"
    assert mean(speeds[3:]) > 0.93
    assert min(speeds) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(2.0, 2.0), (0.5, 0.5), (0.5, 2.0), (2.0, 0.5)])
@pytest.mark.parametrize("draft", ["wrong but sure", "calibrated"])
@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_wrong_costs_are_seen_through(machine: str, draft: DraftKind, wrong: tuple[float, float]) -> None:
    """By a factor of two: the target's and the draft model's, in the same direction and in opposite ones."""
    texts = [*texts_of("random", draft, 2), *texts_of("mixed", draft, 2)]
    misled = [p.speedup for p in play(texts, machine, believed=wrong[0], draft_believed=wrong[1])]
    assert mean(misled) > 0.97 and min(misled) > 0.92
    informed = [p.speedup for p in play(texts, machine)]
    assert mean(misled) > 0.85 * mean(informed)


def test_the_draft_that_is_the_target_is_made_use_of() -> None:
    for machine, least in (("stairs", 2.5), ("flat", 2.2)):
        for kind in ("random", "mixed"):
            assert mean([p.speedup for p in play(texts_of(kind, "target"), machine)]) > least


def test_finding_out_takes_little_of_the_time_and_pays_when_things_change() -> None:
    """A draft model that was always wrong is asked now and then all the same."""
    costs, draft = curve(FLAT), {"draft": curve(SMALL, 0.01)}
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.01), Drafting("model"))
    for made in texts_of("random", "wrong", 6):
        replay(made, policy, costs, draft)
    wrong = replay(recording("random", "wrong", seed=7, length=1000, prompt_tokens=40), policy, costs, draft)
    assert sum(record.work.calls for record in wrong.records) > 0
    assert 1 - 0.03 < wrong.speedup < 1
    right = replay(recording("random", "target", seed=8, length=1000, prompt_tokens=40), policy, costs, draft)
    assert right.speedup > 2


def test_a_bad_draft_model_is_hardly_asked() -> None:
    played = play(texts_of("random", "wrong", 8), "flat")
    asked = [sum(record.work.calls for record in each.records) for each in played]
    assert 0 < sum(asked[:4]) <= 10 * 4
    assert sum(asked[6:]) <= sum(asked[:2]) / 2


@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_a_draft_model_reads_no_prompt_of_a_short_answer(machine: str) -> None:
    """It would cost more than it can bring; a longer answer repays it, as soon as it is longer."""
    for length, reads in ((16, 0), (300, 1)):
        [played] = play([recording("random", "target", length=length, prompt_tokens=600)], machine)
        assert sum(record.work.prefill_calls for record in played.records) == reads
        assert played.speedup == pytest.approx(1.0) if not reads else played.speedup > 1.5
