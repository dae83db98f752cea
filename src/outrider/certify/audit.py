"""Is a difference between two runs rounding? Replay each run's target calls without a drafter.

A model call over several tokens adds up in another order than a call over one, so its logits differ
in their last bits, and where two candidates are all but level either may win. A replay evaluates the
committed text in the very call shapes of a run. When that alone brings forth each run's token, no
drafter and no rule had a hand in the difference; else something did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model
from outrider.core.data import Completion, Row, Span, StepRecord
from outrider.core.errors import RewindUnsupported

__all__ = ["Choice", "Decide", "Difference", "Run", "audit", "best_of", "first_difference"]


@dataclass(frozen=True, slots=True)
class Run:
    """A generation from `prompt`, which may hold generated tokens of an earlier run. `rows` are digests of
    its logits (`outrider.certify.rows`), where they were noted."""

    prompt: tuple[int, ...]
    completion: Completion
    rows: Mapping[tuple[int, ...], bytes] | None = None

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens, the prompt's included."""
        return self.prompt + self.completion.tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """What a replayed row decides: its best token, and by how much that leads the second best."""

    token: int
    margin: float


Decide = Callable[[Row, Sequence[int]], Choice]
"""What plain decoding makes of a row of logits, given the generated tokens before it."""


def best_of(scores: npt.NDArray[np.floating], tokens: npt.NDArray[np.int64] | None = None) -> Choice:
    """The token of the greatest score, the lowest id on a tie; `tokens` are the ids behind the
    scores, ascending (None: all)."""
    best = int(np.argmax(scores))
    rest = np.delete(scores, best)
    margin = float(scores[best] - rest.max()) if len(rest) else math.inf
    return Choice(best if tokens is None else int(tokens[best]), margin)


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that speculation and plain decoding disagree about.

    `position` counts generated tokens. None stands for a text that had ended. `margin` is by how
    much the best score leads the second in each run's own call shapes: in logits where decoding is
    greedy, in scores (log probability plus noise) under the seed-stable rule. A difference is a
    near-tie only when the replays alone give each run's own token.
    """

    position: int
    speculative_token: int | None
    plain_token: int | None
    speculative_text: str
    plain_text: str
    near_tie: bool
    speculative_margin: float | None = None
    plain_margin: float | None = None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two token sequences part, the end of the shorter included; None where they are equal."""
    pairs = zip(a, b, strict=False)
    found = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if found is None and len(a) != len(b):
        return min(len(a), len(b))
    return found


def audit(
    target: Model, speculative: Run, plain: Run, position: int, decide: Decide
) -> tuple[Choice, Choice]:
    """Replay both runs up to the token at `position` of the whole text, prompt included: what the
    target alone decides there in the call shapes of each.

    `decide` is given the tokens behind the speculative run's prompt. Uses sequence 0 of the target,
    whose KV it forgets.
    """
    num_prompt = len(speculative.prompt)
    ours, theirs = (
        decide(_replay(target, run, position), run.text[num_prompt:position]) for run in (speculative, plain)
    )
    return ours, theirs


def _replay(target: Model, run: Run, position: int) -> Row:
    """The logits that decide the token at `position`, in the call shapes of `run`.

    Tokens that a run evaluated beyond its text (rejected drafts) are filled in from the text behind
    them, or with its last token: causal attention keeps them out of every row that is read.
    """
    text = run.text
    target.truncate(0, 0)
    for record in run.completion.records:
        start = target.length(0)
        tokens = tuple(text[min(i, len(text) - 1)] for i in range(start, start + record.num_evaluated))
        if record.kind == "prefill":
            target.decode([Span(0, tokens, start, 0)])
            continue
        logits = target.decode([Span(0, tokens, start, len(tokens))])[0]
        if record.position <= position < record.position + len(record.tokens):
            row: Row = logits[position - record.position].copy()
            target.truncate(0, 0)
            return row
        _keep(target, record)
    raise ValueError(f"the run has no token at {position}")


def _keep(target: Model, record: StepRecord) -> None:
    """Rewind to what the step committed, as the engine does."""
    try:
        target.truncate(0, record.position + len(record.tokens) - 1)
    except RewindUnsupported:  # the engine then evaluates everything anew, and its records say so
        target.truncate(0, 0)
