"""The losses of a draft's training, and what a draft is worth at the prices of calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from exactness import dense
from outrider.costs.expected_speed import StepCosts
from outrider.lab.distill.evaluation import Predictions, expected_speedup
from outrider.lab.distill.losses import Labels, acceptance, loss_of
from outrider.verify.rules import accept_probability

Probs = npt.NDArray[np.float64]

VOCABULARY = 7


def distributions(seed: int, rows: int = 12, sharpness: float = 2.0) -> Probs:
    logits = np.random.default_rng(seed).standard_normal((rows, VOCABULARY)) * sharpness
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: Probs = powers / powers.sum(-1, keepdims=True)
    return found


def labels_of(p: Probs, top: int) -> Labels:
    """The `top` most likely tokens of each row, and what is left."""
    ids = np.argsort(-p, axis=-1)[:, :top]
    probs = np.take_along_axis(p, ids, -1)
    rest = np.clip(1 - probs.sum(-1), 0, None)
    return Labels(torch.tensor(ids), torch.tensor(probs).float(), torch.tensor(rest).float())


def logits_of(q: Probs) -> Any:
    """Logits of a draft's distribution; what is added to a row of logits changes nothing."""
    return (torch.tensor(q).log() + 3.0).float().requires_grad_()


def merged(p: Probs, q: Probs, top: int) -> tuple[Probs, Probs]:
    """Both distributions over the target's `top` most likely tokens and one for the rest."""
    ids = np.argsort(-p, axis=-1)
    p, q = np.take_along_axis(p, ids, -1), np.take_along_axis(q, ids, -1)
    if top == VOCABULARY:
        return p, q
    return tuple(np.column_stack([x[:, :top], x[:, top:].sum(-1)]) for x in (p, q))  # type: ignore[return-value]


def expected(p: Probs, q: Probs) -> tuple[Probs, Probs]:
    """The loss and the acceptance, worked out from their definitions."""
    kl = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q)), 0).sum(-1)
    tv = np.abs(p - q).sum(-1) / 2
    weight = np.exp(-3 * (1 - tv))
    return weight * kl + (1 - weight) * tv, 1 - tv


@pytest.mark.parametrize("top", [1, 3, VOCABULARY])
def test_the_loss_is_what_its_definition_says(top: int) -> None:
    p, q = distributions(1), distributions(2)
    loss, alpha = expected(*merged(p, q, top))
    assert loss_of(logits_of(q), labels_of(p, top)).detach().numpy() == pytest.approx(loss, abs=2e-6)
    assert acceptance(logits_of(q), labels_of(p, top)).detach().numpy() == pytest.approx(alpha, abs=2e-6)


def test_the_weight_takes_no_gradient() -> None:
    """KL's gradient is q - p; that of the acceptance is worked out by small differences."""
    p, q = distributions(3), distributions(4)
    logits = logits_of(q)
    loss_of(logits, labels_of(p, VOCABULARY)).sum().backward()
    other = logits_of(q)
    (1 - acceptance(other, labels_of(p, VOCABULARY))).sum().backward()
    assert logits.grad is not None and other.grad is not None
    weight = np.exp(-3 * expected(p, q)[1])[:, None]
    found = weight * (q - p) + (1 - weight) * other.grad.numpy()
    assert logits.grad.numpy() == pytest.approx(found, abs=1e-5)


CORNERS: dict[str, tuple[Sequence[float], Sequence[float], float]] = {
    "a draft that excludes what the target says": ([-200.0, 0, 0, 200, 0, 0, 0], [0.9, 0.05], 0.05),
    "a draft that leaves nothing for the rest": ([300.0, 290, 0, 0, 0, 0, 0], [0.3, 0.2], 0.5),
    "a target without a rest": ([0.0] * VOCABULARY, [0.6, 0.4], 0.0),
    "a target that is certain": ([1.0, 2, 3, 4, 5, 6, 7], [1.0, 0.0], 0.0),
    "a target of which nothing is listed": ([0.0] * VOCABULARY, [0.0, 0.0], 1.0),
    "both certain, of different tokens": ([0.0, 0, 90, 0, 0, 0, 0], [1.0, 0.0], 0.0),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_losses_and_gradients_are_finite_in_every_corner(corner: str) -> None:
    row, probs, rest = CORNERS[corner]
    logits = torch.tensor([row], requires_grad=True)
    labels = Labels(torch.tensor([[0, 1]]), torch.tensor([probs]), torch.tensor([rest]))
    loss = loss_of(logits, labels)
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()
    assert logits.grad.abs().max() <= 20, "no position may outweigh all others"


def test_a_draft_that_left_nothing_for_the_rest_still_learns_to() -> None:
    """1 - Σ q is 0 in 32 bits here; the pull towards the rest must not be lost with it."""
    logits = torch.tensor([[20.0, 20, 0, 0, 0, 0, 0]], requires_grad=True)
    labels = Labels(torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.25]]), torch.tensor([0.5]))
    loss_of(logits, labels).sum().backward()
    assert logits.grad is not None and (logits.grad[0, 2:] < 0).all()


def test_a_listed_token_without_probability_belongs_to_the_rest() -> None:
    """Tokens that a draft does not know share an id with the one that stands for them, at no probability."""
    logits = torch.tensor([[1.0, 2, 3, 0, 0, 0, 0]])
    plain = Labels(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.2]]), torch.tensor([0.3]))
    ids, probs = torch.tensor([[0, 1, 6, 6, 6]]), torch.tensor([[0.5, 0.2, 0.0, 0.0, 0.0]])
    found = loss_of(logits, Labels(ids, probs, plain.rest))
    assert found == pytest.approx(loss_of(logits, plain))


@settings(max_examples=examples(50))
@given(st.integers(0, 10_000), st.integers(1, VOCABULARY), st.floats(0, 12), st.floats(0, 12))
def test_bounds_hold_whatever_the_distributions(seed: int, top: int, sharp_p: float, sharp_q: float) -> None:
    p, q = distributions(seed, sharpness=sharp_p), distributions(seed + 1, sharpness=sharp_q)
    loss = loss_of(logits_of(q), labels_of(p, top)).detach().numpy()
    alpha = acceptance(logits_of(q), labels_of(p, top)).detach().numpy()
    assert (alpha >= -1e-5).all() and (alpha <= 1 + 1e-5).all()
    assert (loss >= (1 - alpha) * (1 - np.exp(-3 * alpha)) - 1e-5).all(), "of which KL adds to the rest"


def test_acceptance_is_the_share_of_drawn_drafts_that_the_verifier_accepts() -> None:
    p, q = distributions(7), distributions(8)
    found = acceptance(logits_of(q), labels_of(p, VOCABULARY)).detach().numpy()
    for row in range(len(p)):
        target, draft = dense(p[row]), dense(q[row])
        share = sum(q[row, x] * accept_probability(target, draft, x) for x in range(VOCABULARY))
        assert found[row] == pytest.approx(share, abs=1e-6)


# What a draft is worth


def predictions(confidences: Sequence[float], matches: Sequence[bool]) -> Predictions:
    return Predictions(np.array(confidences, dtype=np.float32), np.array(matches, dtype=np.bool_))


def random_answers(seed: int, count: int = 5) -> list[Predictions]:
    """Confidences that say something about whether the token is right."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        confidences = random.random(int(random.integers(1, 40)))
        matches = random.random(confidences.shape) < confidences
        found.append(Predictions(confidences.astype(np.float32), matches))
    return found


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_a_draft_is_worth_the_best_length_of_drafts_from_everywhere(seed: int, most: int) -> None:
    answers, random = random_answers(seed), np.random.default_rng(seed + 1)
    costs = StepCosts(tuple(np.cumsum(random.random(most + 1) ** 3 + 0.05)), float(random.random() * 0.1))
    speeds = [1.0]
    for length in range(1, most + 1):
        tokens = [
            1 + [*answer.matches[at : at + length].tolist(), False].index(False)
            for answer in answers
            for at in range(len(answer.matches))
        ]
        speeds.append(float(np.mean(tokens)) / costs.ratio(length))
    assert expected_speedup(answers, costs) == pytest.approx(max(speeds))


def test_drafts_that_are_never_right_and_no_answers_are_worth_plain_decoding() -> None:
    costs = StepCosts((1.0, 1.1, 1.2), 0.01)
    assert expected_speedup([predictions([0.99] * 30, [False] * 30)], costs) == 1.0
    assert expected_speedup([], costs) == expected_speedup([predictions([], [])], costs) == 1.0
    assert expected_speedup([predictions([1.0] * 9, [True] * 9)], StepCosts((1.0,), 0.1)) == 1.0
