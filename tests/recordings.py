"""Made-up recordings: texts of several kinds, drafts of several qualities, costs of several machines."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from outrider.costs import CallCosts, CallPoint
from outrider.lab.recording import Offers, Recording

TextKind = Literal["copying", "random", "mixed"]
DraftKind = Literal["calibrated", "coin", "target", "wrong", "wrong but sure"]
TEXT_KINDS: tuple[TextKind, ...] = ("copying", "random", "mixed")

STAIRS = {
    1: 1.0,
    2: 1.5,
    3: 1.9,
    4: 1.5,
    5: 2.1,
    6: 2.4,
    8: 3.2,
    10: 3.7,
    16: 3.3,
    24: 5.6,
    32: 6.7,
    64: 12.0,
}
"""What calls take in single-token calls on a machine where 4 tokens cost less than 3."""
STEEP = {1: 1.0, 2: 1.85, 3: 2.4, 4: 3.1, 6: 4.4, 8: 4.9, 12: 6.6, 16: 6.4, 24: 9.5, 32: 10.0, 64: 18.0}
FLAT = {1: 1.0, 2: 1.2, 4: 1.4, 6: 1.6, 8: 2.0, 12: 2.3, 16: 2.7, 24: 3.5, 32: 4.4, 64: 8.0}
SMALL = {1: 1.0, 2: 1.8, 4: 2.4, 8: 3.6, 16: 5.0, 32: 7.0, 64: 12.0}
"""of a draft model"""

_VOCABULARY = 3000
_WORDS = 200


def curve(ratios: Mapping[int, float], unit_s: float = 0.1) -> CallCosts:
    """A cost curve of calls over so many tokens, in calls of one."""
    points = [CallPoint(n, unit_s * ratio) for n, ratio in ratios.items()]
    return CallCosts(points, prefill_token_s=unit_s * 0.09)


def text(
    kind: TextKind, rng: np.random.Generator, prompt_tokens: int, length: int
) -> tuple[list[int], list[int]]:
    """A prompt and an answer, which copies from the prompt always, never or now and then."""
    prompt = _fresh(rng, prompt_tokens)
    answer: list[int] = []
    while len(answer) < length:
        copies = kind == "copying" or (kind == "mixed" and rng.random() < 0.5)
        if copies:
            start = int(rng.integers(0, max(1, prompt_tokens - 20)))
            answer += prompt[start : start + int(rng.integers(12, 40))]
        answer += _fresh(rng, int(rng.integers(1, 4)) if copies else int(rng.integers(8, 24)))
    return prompt, answer[:length]


def _fresh(rng: np.random.Generator, length: int) -> list[int]:
    """Tokens of which some come often, as words do."""
    return [int(t) for t in np.minimum(rng.zipf(1.3, length), _VOCABULARY) + rng.integers(0, _WORDS, length)]


def offers(kind: DraftKind, answer: Sequence[int], rng: np.random.Generator) -> Offers:
    """What a draft model of this quality offers for an answer."""
    tokens: list[int] = []
    confidence: list[float] = []
    departures: dict[int, tuple[tuple[int, float], ...]] = {}
    phase = 0.8
    for i, right in enumerate(answer):
        phase = min(max(phase + 0.15 * float(rng.standard_normal()), 0.0), 1.0)
        sure = {
            "calibrated": float(np.clip(rng.beta(0.3 + 6 * phase, 1.2), 0.05, 0.999)),
            "coin": 0.5,
            "target": 0.98,
            "wrong": float(rng.uniform(0.1, 0.6)),
            "wrong but sure": 0.98,
        }[kind]
        chance = {"target": 1.0, "wrong": 0.0, "wrong but sure": 0.0}.get(kind, sure)
        is_right = rng.random() < chance
        tokens.append(right if is_right else right + 1)
        confidence.append(sure)
        if not is_right:
            departures[i] = tuple((right + 2, float(rng.uniform(0.2, 0.99))) for _ in range(12))
    return Offers(tuple(tokens), tuple(confidence), departures)


def recording(
    kind: TextKind = "mixed",
    draft: DraftKind | None = "calibrated",
    *,
    seed: int = 0,
    length: int = 128,
    prompt_tokens: int = 150,
) -> Recording:
    """A recorded answer of one kind, cut off at its length."""
    rng = np.random.default_rng((seed, TEXT_KINDS.index(kind)))
    prompt, answer = text(kind, rng, prompt_tokens, length)
    known = {} if draft is None else {"draft": offers(draft, answer, rng)}
    return Recording(f"{kind} {seed}", kind, tuple(prompt), tuple(answer), "length", known)
