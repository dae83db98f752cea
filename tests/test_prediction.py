"""Following a predicted answer: from its first token on, and back to it after a departure."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import asked
from lookups import propose
from outrider.core.data import Draft
from outrider.drafters import prediction
from outrider.drafters.prediction import PredictionDrafter

PROMPT = (1, 2, 3)
ANSWER = tuple(range(100, 160))


def expecting(answer: Sequence[int] = ANSWER) -> PredictionDrafter:
    drafter = PredictionDrafter()
    drafter.begin(0, asked(PROMPT, prediction=tuple(answer)))
    return drafter


def share_offered(answer: Sequence[int], predicted: Sequence[int]) -> float:
    """The share of an answer's tokens that are offered, read one by one."""
    drafter, offered = expecting(predicted), 0
    for token in answer:
        offered += propose(drafter, max_tokens=1).tokens == (token,)
        drafter.observe(0, [token])
    return offered / len(answer)


def test_the_prediction_is_offered_before_anything_was_said() -> None:
    drafter = expecting()
    assert propose(drafter).tokens == ANSWER[:8]
    assert propose(drafter).items[0].acceptance > 0.75
    assert propose(drafter, max_tokens=1000).tokens == ANSWER
    assert share_offered(ANSWER, ANSWER) == 1
    drafter.observe(0, ANSWER)
    assert propose(drafter) == Draft()


def test_the_longer_it_was_right_the_surer_it_is() -> None:
    drafter = expecting()
    draft = propose(drafter)
    lengths = [token.evidence[0] for token in draft.items]
    assert lengths == sorted(set(lengths))
    assert all(token.evidence[1:] == (1, 1) for token in draft.items)
    drafter.observe(0, ANSWER[:20])
    assert propose(drafter).items[0].acceptance > draft.items[7].acceptance


@pytest.mark.parametrize(
    "before",
    [(7, 8, 9), (100,), (7, 8, 102, 9)],
    ids=["a fence in front", "the first token twice", "a token of it out of place"],
)
def test_something_in_front_is_survived(before: tuple[int, ...]) -> None:
    drafter = expecting()
    drafter.observe(0, [*before, *ANSWER[:4]])
    assert propose(drafter).tokens == ANSWER[4:12]
    drafter.observe(0, [*ANSWER[4:40], *ANSWER[20:24]])  # where the answer repeats a part it goes back
    assert propose(drafter).tokens == ANSWER[24:32]


@given(st.integers(0, 50), st.integers(0, 6), st.lists(st.integers(0, 99), max_size=6))
def test_it_finds_its_way_back_after_an_edit(at: int, cut: int, put: list[int]) -> None:
    edited = [*ANSWER[:at], *put, *ANSWER[at + cut :]]
    drafter = expecting()
    for end, token in enumerate(edited, start=1):
        drafter.observe(0, [token])
        after = end - at - len(put)
        if end <= at or after > 0:  # one token that agrees is enough where no token occurs twice
            assert propose(drafter, max_tokens=3).tokens[:1] == tuple(edited[end : end + 1]) or (
                end == at and (put or cut)
            )


def test_many_edits_cost_little_each() -> None:
    text = [100 + (7 * i) % 53 for i in range(400)]  # every token occurs several times
    edited = list(text)
    for place in range(390, 0, -40):
        edited[place : place + 2] = [5]
    assert share_offered(edited, text) > 0.9


def test_after_a_departure_little_agreement_is_little_trusted() -> None:
    drafter = expecting()
    drafter.observe(0, [*ANSWER[:30], 7, 8])
    assert propose(drafter) == Draft()
    drafter.observe(0, ANSWER[33:34])
    draft = propose(drafter)
    assert draft.tokens == ANSWER[34:42]
    assert draft.items[0].evidence == (1, 1, 1)
    assert draft.items[0].acceptance < 0.5 < draft.items[7].acceptance


def test_the_nearest_place_wins_and_longer_agreement_beats_it() -> None:
    # "1 2" is at three places, "9 1 2" at the farthest alone.
    predicted = [50, 51, 52, 53, 1, 2, 10, *range(60, 80), 1, 2, 11, *range(80, 90), 9, 1, 2, 12]
    drafter = expecting(predicted)
    drafter.observe(0, [50, 51, 52, 53, 40, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (10,)
    drafter = expecting(predicted)
    drafter.observe(0, [50, 51, 52, 53, 40, 9, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (12,)


def test_near_is_what_is_near_to_the_departure() -> None:
    # "1 2" is far before, and right after, the place where the answer departs.
    predicted = [1, 2, 10, *range(50, 90), 1, 2, 11, *range(90, 99)]
    drafter = expecting(predicted)
    drafter.observe(0, predicted[:43])
    assert propose(drafter, prefix=[7, 1, 2], max_tokens=1).tokens == (11,)
    drafter.observe(0, [7, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (11,)
    # In a draft, too, it is the answer's own departure that counts.
    drafter = expecting(predicted)
    drafter.observe(0, [*predicted[:43], 7])
    assert propose(drafter, prefix=[1, 2], max_tokens=1).tokens == (11,)


def test_a_prefix_is_read_and_forgotten() -> None:
    drafter = expecting()
    assert propose(drafter, prefix=ANSWER[:5]).tokens == ANSWER[5:13]
    assert propose(drafter, prefix=[7, *ANSWER[:4]], max_tokens=2).tokens == ANSWER[4:6]
    assert propose(drafter, prefix=[7]) == Draft()
    assert propose(drafter).tokens == ANSWER[:8]
    drafter.observe(0, ANSWER[:1])
    assert propose(drafter).tokens == ANSWER[1:9]


def test_a_common_token_does_not_make_it_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    agreement = prediction._Place._agreement

    def count(place: prediction._Place, end: int) -> int:
        nonlocal compared
        compared += 1
        return agreement(place, end)

    monkeypatch.setattr(prediction._Place, "_agreement", count)
    drafter = expecting([3] * 10_000)
    drafter.observe(0, [4, 3])
    assert 0 < compared <= 2 * prediction.MAX_PLACES


def test_only_the_request_that_expects_it_gets_it_and_it_ends_with_that() -> None:
    drafter = expecting()
    drafter.begin(1, asked(PROMPT))
    assert propose(drafter, sequence=1) == Draft()
    assert propose(drafter, sequence=2) == Draft()
    drafter.observe(1, [5])
    assert propose(drafter).tokens == ANSWER[:8]
    drafter.end(0)
    assert propose(drafter) == Draft()
    drafter.begin(0, asked(PROMPT, prediction=ANSWER))
    drafter.begin(0, asked(PROMPT))
    assert propose(drafter) == Draft()
    drafter.begin(0, asked(PROMPT, prediction=ANSWER))
    drafter.reset()
    assert propose(drafter) == Draft()
