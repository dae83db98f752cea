"""Who drafts, and how far; and that no setting of it biases what is emitted."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engines import LANGUAGE, ScriptedDrafter, asked, model_drafter, nothing, sampler
from exactness import Rng, Rule, Text, distance, texts_of
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.core.contracts import Drafter, Drafters, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, Logits
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import draw
from outrider.verify.rules import verify_block, verify_tokens


def draft_request(sequence: int = 0, max_tokens: int = 100) -> DraftRequest:
    return DraftRequest(sequence, max_tokens, sampler())


def offering(
    name: str, tokens: Sequence[int], acceptance: float = 0.9, *, sequences: int = 3
) -> ScriptedDrafter:
    drafter = ScriptedDrafter(lambda _text, length: list(tokens)[:length], name, acceptance)
    for sequence in range(sequences):
        drafter.begin(sequence, asked([0]))
    return drafter


def lengths(policy: FixedPolicy, *drafters: Drafter, max_tokens: int = 100) -> tuple[int, str]:
    [draft], _ = policy.propose(Drafters.of(drafters), [draft_request(max_tokens=max_tokens)])
    return len(draft), draft.sources[0] if draft.sources else ""


def test_the_first_offer_is_taken_within_wish_and_setting() -> None:
    long, short = offering("long", [1] * 20), offering("short", [2])
    assert lengths(FixedPolicy(draft_max=5), long) == (5, "long")
    assert lengths(FixedPolicy(draft_max=5), long, max_tokens=3) == (3, "long")
    assert lengths(FixedPolicy(), short, long) == (1, "short")
    assert lengths(FixedPolicy(), long, short) == (8, "long")
    assert lengths(FixedPolicy(), offering("none", []), short) == (1, "short")
    assert lengths(FixedPolicy()) == (0, "")


class Forcing:
    """A Constraint that forces 3 and 4 after a 1, and allows everything."""

    is_complete = is_accepted = False

    def allowed(self, drafted: Sequence[int]) -> None:
        del drafted

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        del drafted
        return len(tokens)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return (3, 4) if drafted and drafted[-1] == 1 else ()

    def accept(self, tokens: Sequence[int]) -> None: ...


def test_fixed_lengths_draft_forced_text_after_an_offer() -> None:
    request = DraftRequest(0, 100, sampler(), constraint=Forcing())
    [draft], _ = FixedPolicy().propose(Drafters.of([offering("one", [2, 1])]), [request])
    assert draft.tokens == (2, 1, 3, 4) and draft.sources == ("one", "one", "grammar", "grammar")


def test_nobody_is_asked_when_all_have_an_offer_or_drafting_is_off() -> None:
    class Silent(ScriptedDrafter):
        def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
            raise AssertionError(f"asked for nothing: {sequence}, {prefix}")

    assert lengths(FixedPolicy(), offering("one", [1]), Silent(nothing)) == (1, "one")
    assert lengths(FixedPolicy(draft_max=0), Silent(nothing)) == (0, "")


def test_each_sequence_is_asked_until_it_has_an_offer() -> None:
    first = ScriptedDrafter(lambda text, _n: [1] if text[0] == 1 else [], "first")
    second = ScriptedDrafter(lambda text, _n: [2, 2] if text[0] < 2 else [], "second")
    third = model_drafter(LANGUAGE)
    for drafter in (first, second, third):
        for sequence in range(3):
            drafter.begin(sequence, asked([sequence]))
    drafters = Drafters.of([first, second, third])
    drafts, work = FixedPolicy(2, p_min=0).propose(drafters, [draft_request(i) for i in range(3)])
    assert [draft.sources for draft in drafts] == [("second",) * 2, ("first",), ("draft",) * 2]
    assert work.call_tokens == (1, 1)  # for the last of them alone


def test_p_min_holds_for_the_last_drafter_and_hand_over_before_it() -> None:
    doubtful, sure = offering("doubtful", [1] * 3, 0.4), model_drafter(LANGUAGE)
    sure.begin(0, asked([0]))
    assert lengths(FixedPolicy(3, p_min=0.3, hand_over=0.5), doubtful) == (3, "doubtful")
    assert lengths(FixedPolicy(3, p_min=0, hand_over=0.5), doubtful, sure) == (3, "draft")
    assert lengths(FixedPolicy(3, p_min=0.4, hand_over=0.4), doubtful, sure) == (3, "doubtful")
    assert lengths(FixedPolicy(3, p_min=0.41), doubtful) == (0, "")


@pytest.mark.parametrize(("name", "value"), [("draft_max", -1), ("p_min", 1.1), ("hand_over", -0.1)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(SettingError):
        FixedPolicy(**{name: value})  # type: ignore[arg-type]


# Sampled drafts: the length may depend on distributions, never on the tokens drawn

AB = FakeVocabulary("ab")
EVERYTHING = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


class Dropping(FixedPolicy):
    """Wrong on purpose: sampled drafts that turned out short are dropped too."""

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        drafts, work = FixedPolicy.propose(self, drafters, requests, others)
        return [draft if len(draft) > 1 else Draft() for draft in drafts], work


def first_token_bias(policy: FixedPolicy, rule: Rule) -> float:
    """The total variation between the first emitted token and the target's distribution.

    The draft goes on after one of its tokens and stops, unsure, after the other, so its length
    tells which was drawn.
    """
    target = random_logits(AB.size, seed=4, scale=1.0)

    def draft_logits(tokens: Sequence[int]) -> Logits:
        after = (4.0, 0.0, -9.0) if tokens[-1] == 0 else (0.0, 0.0, -9.0)
        return np.array((0.5, 0.1, -9.0) if len(tokens) == 2 else after, dtype=np.float32)

    drafter = ModelDrafter(FakeModel(AB, draft_logits), align(AB, AB))
    everything = sampler(EVERYTHING, AB)
    first = everything.distribution(target([0, 1]), ())

    def run(rng: Rng) -> Text:
        drafter.begin(0, asked([0, 1]))
        request = DraftRequest(0, 2, everything, lambda q, _i: draw(q, rng))
        [draft], _work = policy.propose(Drafters.of([drafter]), [request])
        drafted = [draft.tokens[: i + 1] for i in range(len(draft))]
        rows = [first, *(everything.distribution(target([0, 1, *tokens]), ()) for tokens in drafted)]
        verdict = rule(rows, draft, rng)
        assert verdict.token is not None
        return (*draft.tokens[: verdict.num_accepted], verdict.token)[:1]

    plain: dict[Text, float] = {(token,): float(share) for token, share in enumerate(first.probs)}
    return distance(texts_of(run), plain)


@pytest.mark.parametrize("rule", [verify_tokens, verify_block])
def test_p_min_does_not_bias_what_sampled_drafts_lead_to_and_dropping_short_ones_would(rule: Rule) -> None:
    assert first_token_bias(FixedPolicy(draft_max=2, p_min=0.55), rule) <= 1e-12
    assert first_token_bias(Dropping(draft_max=2, p_min=0.55), rule) > 0.01
