"""Sampling at temperature 1 with heads and with targets that are taken back by checkpoints, on
real models of a dozen tokens: the most likely ways that the engine's random numbers can fall, each followed
to the end, against the chain rule over plain decoding's logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import MAINLINE
from exactness import Enumerated, Rng, Text, explore, plain
from head_files import OPTIONS, Files, write_files
from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.model import Weights
from outrider.core.contracts import Model
from outrider.core.data import Distribution, Request, Row, Span
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.certify.faults import break_calls
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import draw

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

DOZEN: dict[str, Any] = {"letters": "abcdefghi", "merges": ("a b",), "confidence": 6.0}
"""with the two control tokens; so confident that few ways make up most of the probability of four tokens"""
UNSURE: dict[str, Any] = {"left_out": ("token_embd.weight",), "confidence": 3.0}
"""with an output of its own, which finds several tokens likely: some are accepted"""
PROMPT = (1, 7, 0, 9, 3)
TWO = FixedPolicy(draft_max=2, p_min=0.0, hand_over=0.0)
MOST, MANY = 0.98, 0.8
"""of all ways: the total variation is at most what is left, and what is found"""
ROUNDING = 1e-5
"""of a text's probability, in calls of other sizes"""


BLOCKS = ("dflash llama", "dflash2 llama", "dspark llama", "dspark-v4 llama")
KINDS = (
    *("eagle3 llama", "eagle3 qwen35", "mtp glm4moe", "own glm4moe", "own qwen35", "chain hy_v3"),
    *BLOCKS,
    "assistant gemma4",
)
"""Qwen3.5 is taken back by checkpoints."""


def write(folder: Path, kind: str) -> Files:
    made = DOZEN | (UNSURE if kind.startswith("dflash") else {}) | {"drafted": ()}
    return write_files(folder, kind, agrees=False, target=DOZEN | {"repeating": False}, **made)


@dataclass(frozen=True)
class Drafting:
    """A session whose head drafts, and the logits of plain decoding after any tokens."""

    session: Session
    logits: Callable[[Sequence[int]], Row]
    share: float
    """of the ways in which a fault is looked for"""

    def unlike(self, request: Request, share: float, *, judge: type[Enumerated], target: Model) -> float:
        """By how much texts come oftener than in plain decoding, in the most likely ways of `share` together.
        Draft tokens were accepted in some of them, and rejected in others."""
        worlds: list[Rng] = []
        engine = Engine(
            target, self.session.engine.drafters, TWO, verifier=lambda request, _: judge(request, worlds[-1])
        )
        outcomes: set[tuple[int, int]] = set()

        def run(rng: Rng) -> Text:
            worlds.append(rng)
            engine.reset()
            completion = engine.generate(request)
            outcomes.update((len(r.draft), r.num_accepted) for r in completion.records)
            return completion.tokens

        found: dict[Text, float] = {}
        for text, weight in explore(run, share):
            found[text] = found.get(text, 0.0) + weight
        assert {(2, 0), (2, 2)} <= outcomes
        assert sum(found.values()) >= share
        expected = plain(request, self.logits, target.vocabulary)
        return sum(max(weight - expected.get(text, 0.0), 0.0) for text, weight in found.items())


@pytest.fixture(scope="module")
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    kind, files = request.param, write(tmp_path_factory.mktemp("dozen"), request.param)
    weights = Weights(files.target, replace(OPTIONS, heads=False))
    model = weights.open(64)

    @cache
    def row(tokens: Text) -> Row:
        model.truncate(0, 0)
        return np.array(model.decode([Span(0, tokens, 0, 1)])[0][0])

    with (
        closing(weights),
        closing(Pair.load(files.target, files.head, options=OPTIONS)) as pair,
        Session.open(pair, SessionOptions(64, policy=TWO, lookup=False)) as session,
    ):
        assert (session.target.rewinding.kind == "checkpoints") == kind.endswith("qwen35")
        assert session.target.vocabulary.size == 12
        yield Drafting(session, lambda tokens: row(tuple(tokens)), MOST if kind in BLOCKS else MANY)


def asked(rule: Rule, drafts: DraftSampling) -> Request:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
    return Request(PROMPT, sampling, max_tokens=4, verification=Verification(rule, drafts))


SETTINGS = [
    ("block", "greedy"),
    *(pytest.param(rule, "sampled", marks=pytest.mark.slow) for rule in ("token", "block")),
]
QUICK = ("eagle3 qwen35", "mtp glm4moe", "own qwen35", "dflash2 llama", "assistant gemma4")
"""Each way to take back and each head once."""
ALL = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


class Unlike(Enumerated):
    """Its drafts are drawn from other distributions than they are said to be drawn from."""

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        del position

        def drawn(offered: Distribution, _index: int) -> int:
            sharper = offered.probs**2
            return draw(Distribution(offered.tokens, sharper / sharper.sum()), self._rng)

        return drawn


class Misplaced(Enumerated):
    """Its drafts are drawn from the distribution of the place before."""

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        del position
        places: list[Distribution] = []

        def drawn(offered: Distribution, index: int) -> int:
            places.append(offered)
            return draw(places[max(index - 1, 0)], self._rng)

        return drawn


@pytest.mark.parametrize("drafting", ALL, indirect=True)
@pytest.mark.parametrize(("rule", "drafts"), SETTINGS)
def test_the_distribution_is_that_of_plain_decoding(
    drafting: Drafting, rule: Rule, drafts: DraftSampling
) -> None:
    target = drafting.session.target
    assert drafting.unlike(asked(rule, drafts), MOST, judge=Enumerated, target=target) < ROUNDING


WRONG = [
    *((kind, Unlike) for kind in KINDS if kind != "chain hy_v3"),  # whose drafts are all but certain
    *((kind, Misplaced) for kind in BLOCKS if kind != "dflash llama"),  # whose places say nearly the same
]


@pytest.mark.slow
@pytest.mark.parametrize(("drafting", "judge"), WRONG, indirect=["drafting"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_of_another_distribution_are_noticed(
    drafting: Drafting, judge: type[Enumerated], rule: Rule
) -> None:
    target = drafting.session.target
    assert drafting.unlike(asked(rule, "sampled"), drafting.share, judge=judge, target=target) > 10 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("drafting", KINDS, indirect=True)
def test_a_target_that_goes_back_too_little_is_noticed(drafting: Drafting) -> None:
    target = break_calls("short-rewind", drafting.session.target)
    found = drafting.unlike(asked("block", "sampled"), drafting.share, judge=Enumerated, target=target)
    assert found > 10 * ROUNDING
