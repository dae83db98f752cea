"""Replays in simulated time: they do what the engine does, and the hindsight bound is one."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from constrained import OneOf, Pieces
from engines import (
    PROMPT,
    VOCABULARY,
    ScriptedDrafter,
    model_drafter,
    other_vocabulary_drafter,
    same_vocabulary,
)
from examples import examples
from outrider.backends.fake import FakeModel, NextLogits, random_logits
from outrider.core.contracts import CHECKPOINTS, Drafter, Drafters, DraftRequest, Policy, RewindKind
from outrider.core.data import Draft, DraftWork, Grammar, Request, Row, StepRecord
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts, CallPoint
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.limits import PreferredConstraint, PreferredTokenization
from outrider.lab.recording import Offers, Recording, record_offers
from outrider.lab.replay import replay
from outrider.models.vocab import align
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from policy.bound import hindsight_bound
from policy.recorded import as_json, read_recordings
from recordings import FLAT, SMALL, STAIRS, TEXT_KINDS, DraftKind, TextKind, curve, recording

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


# Files


def test_recordings_survive_a_file(tmp_path: Path) -> None:
    made = [recording(kind, draft) for kind in TEXT_KINDS for draft in ("calibrated", None)]
    path = tmp_path / "recordings.jsonl"
    lines = [as_json(recording) for recording in made] + [{"kind": "machine"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_recordings(path) == made


# The hindsight bound


def test_the_bound_of_simple_cases() -> None:
    costs = CallCosts([CallPoint(1, 1.0), CallPoint(2, 1.5), CallPoint(8, 4.5)])
    draft = CallCosts([CallPoint(1, 0.1), CallPoint(2, 0.15)], prefill_token_s=0.01)
    none = Recording("1", "", (9, 8, 7), (1, 2, 3, 4), "length", {})
    assert hindsight_bound(none, costs, free=[]) == pytest.approx(4, rel=0.01)
    right = replace(none, offers={"draft": Offers((1, 2, 3, 4), (0.5,) * 4, {})})
    # Three drafted tokens in one step; or twice one; reading the prompt counts.
    found = hindsight_bound(right, costs, {"draft": draft}, free=[])
    assert found == pytest.approx(0.03 + 0.3 + 2.5, rel=0.01)
    assert hindsight_bound(right, costs, {"draft": curve(SMALL, 5.0)}, free=[]) == pytest.approx(4, rel=0.01)
    oracle = ScriptedDrafter(lambda text, n: [1, 2, 3, 4][len(text) - 3 :][:n])
    assert hindsight_bound(none, costs, free=[oracle]) == pytest.approx(2.5, rel=0.01)
    assert hindsight_bound(none, costs, free=[oracle], own_s=0.5) == pytest.approx(3.0, rel=0.01)
    # The model knows the first token, the lookup what follows it.
    first = replace(none, offers={"draft": Offers((1, 9, 9, 9), (0.5,) * 4, {})})
    late = ScriptedDrafter(lambda text, n: [9, 2, 3, 4][len(text) - 3 :][:n])
    found = hindsight_bound(first, costs, {"draft": draft}, free=[late])
    assert found == pytest.approx(0.03 + 0.1 + 2.5, rel=0.01)


POINTS = st.dictionaries(st.integers(1, 64), st.floats(0.5, 8.0), min_size=1, max_size=6)


@given(
    kind=st.sampled_from(TEXT_KINDS),
    draft=st.sampled_from(["calibrated", "coin", "target", "wrong but sure"]),
    seed=st.integers(0, 10**6),
    length=st.integers(1, 40),
    target=POINTS,
    small=POINTS,
    unit_s=st.floats(0.01, 0.8),
    policy=st.one_of(
        st.just(None), st.tuples(st.integers(0, 20), st.floats(0, 1), st.integers(0, 3), st.booleans())
    ),
    ends=st.booleans(),
)
@settings(max_examples=examples(100))
def test_no_policy_beats_the_bound(
    kind: TextKind,
    draft: DraftKind,
    seed: int,
    length: int,
    target: dict[int, float],
    small: dict[int, float],
    unit_s: float,
    policy: tuple[int, float, int, bool] | None,
    ends: bool,
) -> None:
    """Whatever the curves (stairs, cliffs, calls that cost less the longer they are)."""
    made = recording(kind, draft, seed=seed, length=length, prompt_tokens=60)
    made = replace(made, finish_reason="stop" if ends else "length")

    def costs() -> tuple[CallCosts, dict[str, CallCosts]]:
        return curve({1: 1.0} | target, 1.0), {"draft": curve({1: 1.0} | small, unit_s)}

    chosen: Policy = AutoPolicy(costs()[0], costs()[1]["draft"])
    if policy is not None:
        most, p_min, least, sure = policy
        chosen = FixedPolicy(most, min(least, most), p_min, hand_over=0.9 if sure else 0.0)
    played = replay(made, chosen, *costs())
    assert hindsight_bound(made, *costs()) <= played.seconds * (1 + 1e-9)


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
        made, FixedPolicy(16, 0, 0.0), curve(FLAT), {"draft": curve(SMALL)}, free=[], constraint=constraint
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
