"""Who drafts, and how far; and that no setting of it biases what is emitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines import GREEDY, ScriptedDrafter, nothing
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.core.contracts import Drafter, Extend, Wish
from outrider.core.data import Draft, DraftWork, Logits, SamplingParams
from outrider.core.errors import SettingError
from outrider.drafters.model import ModelDrafter
from outrider.policy import FixedPolicy
from outrider.sampling import distribution
from outrider.verify import verify
from outrider.vocab import align


def wish(sequence: int = 0, max_tokens: int = 100) -> Wish:
    return Wish(sequence, max_tokens, GREEDY, np.random.default_rng(0))


def offering(
    name: str, tokens: Sequence[int], acceptance: float = 0.9, *, sequences: int = 3
) -> ScriptedDrafter:
    drafter = ScriptedDrafter(lambda _text, length: list(tokens)[:length], name, acceptance)
    for sequence in range(sequences):
        drafter.begin(sequence, [0])
    return drafter


def lengths(policy: FixedPolicy, *drafters: Drafter, max_tokens: int = 100) -> tuple[int, str]:
    [draft], _ = policy.propose(drafters, [wish(max_tokens=max_tokens)])
    return len(draft), draft.sources[0] if draft.sources else ""


def test_the_first_offer_is_taken() -> None:
    long, short = offering("long", [1] * 20), offering("short", [2])
    assert lengths(FixedPolicy(), short, long) == (1, "short")
    assert lengths(FixedPolicy(), long, short) == (8, "long")
    assert lengths(FixedPolicy(), offering("none", []), short) == (1, "short")
    assert lengths(FixedPolicy()) == (0, "")


def test_each_sequence_is_asked_until_it_has_an_offer() -> None:
    asked: list[tuple[str, list[int]]] = []

    class Choosy(ScriptedDrafter):
        def propose(self, wishes: Sequence[Wish], extend: Extend) -> tuple[list[Draft], DraftWork]:
            asked.append((self.name, [w.sequence for w in wishes]))
            return super().propose(wishes, extend)[0], DraftWork(calls=1, model_s=0.5)

    first = Choosy(lambda text, _n: [1] if text[0] == 1 else [], "first")
    second = Choosy(lambda _text, _n: [2, 2], "second")
    for drafter in (first, second):
        for sequence in range(3):
            drafter.begin(sequence, [sequence])
    drafts, work = FixedPolicy().propose([first, second], [wish(i) for i in range(3)])
    assert [draft.sources for draft in drafts] == [("second",) * 2, ("first",), ("second",) * 2]
    assert asked == [("first", [0, 1, 2]), ("second", [0, 2])]
    assert work == DraftWork(calls=2, model_s=1.0)


def test_nobody_is_asked_when_all_have_an_offer_or_drafting_is_off() -> None:
    class Silent(ScriptedDrafter):
        def propose(self, wishes: Sequence[Wish], extend: Extend) -> tuple[list[Draft], DraftWork]:
            raise AssertionError(f"asked in vain: {wishes}, {extend}")

    assert lengths(FixedPolicy(), offering("one", [1]), Silent(nothing)) == (1, "one")
    assert lengths(FixedPolicy(draft_max=0), Silent(nothing)) == (0, "")


def test_the_longest_draft_is_the_smaller_of_wish_and_setting() -> None:
    drafter = offering("all", [1] * 50)
    assert lengths(FixedPolicy(draft_max=5), drafter) == (5, "all")
    assert lengths(FixedPolicy(draft_max=5), drafter, max_tokens=3) == (3, "all")


def test_p_min_holds_for_the_last_drafter_and_hand_over_before_it() -> None:
    doubtful, sure = offering("doubtful", [1] * 3, 0.4), offering("sure", [2] * 3, 0.9)
    policy = FixedPolicy(p_min=0.3, hand_over=0.5)
    assert lengths(policy, doubtful) == (3, "doubtful")
    assert lengths(policy, doubtful, sure) == (3, "sure")
    assert lengths(policy, sure, doubtful) == (3, "sure")
    assert lengths(FixedPolicy(p_min=0.4, hand_over=0.4), doubtful, sure) == (3, "doubtful")
    assert lengths(FixedPolicy(p_min=0.41, hand_over=0), doubtful, sure) == (3, "sure")
    assert lengths(FixedPolicy(p_min=0.41), doubtful) == (0, "")


def test_a_certain_draft_that_is_too_short_is_dropped() -> None:
    assert lengths(FixedPolicy(draft_min=3), offering("two", [1, 1])) == (0, "")
    assert lengths(FixedPolicy(draft_min=3), offering("two", [1, 1]), offering("four", [2] * 4)) == (
        4,
        "four",
    )
    assert lengths(FixedPolicy(draft_min=2), offering("two", [1, 1])) == (2, "two")


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_max": -1},
        {"draft_min": -1},
        {"draft_min": 9},
        {"p_min": 1.1},
        {"p_min": -0.1},
        {"hand_over": 2},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SettingError):
        FixedPolicy(**settings)


# Sampled drafts: the length may depend on distributions, never on the tokens drawn

AB = FakeVocabulary("ab")
EVERYTHING = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


class Dropping(FixedPolicy):
    """Wrong on purpose: sampled drafts that turned out short are dropped too."""

    def propose(self, drafters: Sequence[Drafter], wishes: Sequence[Wish]) -> tuple[list[Draft], DraftWork]:
        drafts, work = FixedPolicy.propose(self, drafters, wishes)
        return [draft if len(draft) >= self.draft_min else Draft() for draft in drafts], work


def first_token_distance(policy: FixedPolicy, num_samples: int = 6000) -> float:
    """How far the first emitted token is from the target's distribution, in standard errors.

    The draft goes on after one of its tokens and stops, unsure, after the other, so its length
    tells which was drawn.
    """
    target = random_logits(AB.size, seed=4, scale=1.0)

    def draft_logits(tokens: Sequence[int]) -> Logits:
        behind = (4.0, 0.0, -9.0) if tokens[-1] == 0 else (0.0, 0.0, -9.0)
        return np.array((0.5, 0.1, -9.0) if len(tokens) == 2 else behind, dtype=np.float32)

    drafter = ModelDrafter(FakeModel(AB, draft_logits), align(AB, AB), sampled=True)
    rng = np.random.default_rng(6)
    counts = np.zeros(AB.size)
    row = [distribution(target([0, 1]), EVERYTHING)]
    for _ in range(num_samples):
        drafter.begin(0, [0, 1])
        [draft], _work = policy.propose([drafter], [Wish(0, 2, EVERYTHING, rng)])
        rows = row + [
            distribution(target([0, 1, *draft.tokens[: i + 1]]), EVERYTHING) for i in range(len(draft))
        ]
        verdict = verify(rows, draft, rng)
        counts[(*draft.tokens[: verdict.num_accepted], verdict.token)[0]] += 1
    p = row[0].probs
    return float(np.max(np.abs(counts / num_samples - p) / np.sqrt(p * (1 - p) / num_samples)))


@pytest.mark.parametrize("draft_min", [0, 2])
def test_no_limit_biases_what_sampled_drafts_lead_to(draft_min: int) -> None:
    assert first_token_distance(FixedPolicy(draft_max=2, draft_min=draft_min, p_min=0.55)) < 4


def test_dropping_short_sampled_drafts_would_bias_it() -> None:
    assert first_token_distance(Dropping(draft_max=2, draft_min=2, p_min=0.55)) > 8
