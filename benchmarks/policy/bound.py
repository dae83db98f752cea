"""The hindsight bound: the fastest sequence of choices that the drafters' offers allowed.

It knows what will be accepted, so no policy that draws on these drafters can be faster at these
costs; what separates a policy from it is luck and the quality of its estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Lookup
from outrider.core.data import DraftToken, Request
from outrider.core.sequences import common_prefix
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.drafters.lookup import SuffixDrafter
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import is_limited

_Seconds = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]


def num_right(offers: Offers, answer: Sequence[int]) -> list[int]:
    """How many tokens in a row are the answer's in a draft that begins at each position of it."""
    right = [0] * (len(answer) + 1)
    for i in range(len(answer) - 1, -1, -1):
        if offers.tokens[i] != answer[i]:
            continue
        path = offers.departures.get(i)
        drafted = None if path is None else [token for token, _ in path]
        right[i] = 1 + (right[i + 1] if drafted is None else common_prefix(drafted, answer[i + 1 :]))
    return right[:-1]


def hindsight_bound(
    recording: Recording,
    costs: CallCosts,
    draft_costs: Mapping[str, CallCosts] | None = None,
    *,
    free: Sequence[Lookup] | None = None,
    own_s: float = 0.0,
) -> float:
    """The least seconds in which the recorded answer could be decoded; see `replay` for the parameters.

    Choices at each step: nothing; lookup tokens, of which one drafter may go on after another; a draft
    model's calls, of which each reads some tokens that it or lookups drafted and offers the one after them;
    of all that, as much as is correct. A draft model may be called beyond what is used of it. Where a longer
    call costs less, it can be had. Draft models are not mixed within an answer.
    """
    runs = {name: [*num_right(recording.offers[name], recording.tokens), 0] for name in draft_costs or {}}
    free = [SuffixDrafter()] if free is None else free
    reach = _lookup_reach(recording, free, np.array(list(runs.values())).max(axis=0) if runs else None)
    best_s = _least_s(recording, reach, costs, own_s)
    for name, draft in (draft_costs or {}).items():
        is_block = recording.offers[name].block > 1
        model_s = _least_s(recording, reach, costs, own_s, draft, runs[name], is_block=is_block)
        best_s = min(best_s, draft.prefill_s(len(recording.prompt)) + model_s)
    return best_s


def _lookup_reach(recording: Recording, free: Sequence[Lookup], runs: _Counts | None) -> list[_Counts]:
    """At each position of the answer, how far the model-free drafters are correct, by the number of correct
    tokens that were drafted before them: so many tokens in all, those included. As far as these and the
    `runs` of correct tokens of draft models come."""
    answer, found = recording.tokens, []
    for drafter in free:
        drafter.begin(0, Request(recording.prompt))
    for position in range(len(answer)):
        remaining = answer[position:]
        ends = [_chain(free, remaining, 0)]
        farthest = ends[0]
        while runs is not None:
            others = len(ends)
            farthest = max(farthest, others if runs[position + others - 1] else 0, ends[-1])
            if others > farthest:
                break
            ends.append(ends[-1] if ends[-1] > others else _chain(free, remaining, others))
        found.append(np.array(ends, dtype=np.int64))
        for drafter in free:
            drafter.observe(0, answer[position : position + 1])
    return found


def _chain(free: Sequence[Lookup], remaining: Sequence[int], start: int) -> int:
    """The end of the correct tokens that model-free drafters offer from `start` on, one after the other.

    What a drafter offers after its own tokens it would also offer after these as a prefix.
    """
    while start < len(remaining):
        correct = [_num_correct(drafter.propose(0, remaining[:start]), remaining[start:]) for drafter in free]
        if not any(correct):
            break
        start += max(correct)
    return start


def _num_correct(offer: Iterable[DraftToken], answer: Sequence[int]) -> int:
    pairs = zip(answer, offer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token, pairs))


def _least_s(
    recording: Recording,
    reach: Sequence[_Counts],
    costs: CallCosts,
    own_s: float,
    draft: CallCosts | None = None,
    runs: Sequence[int] = (),
    *,
    is_block: bool = False,
) -> float:
    """Backward induction over positions and the tokens that the draft model has yet to read. At the start
    the last token of the prompt is all that is uncached."""
    end = len(recording.tokens)
    beyond = 0 if is_limited(recording) else MAX_TOKENS
    uncached = np.arange(end + 2)
    times_s = np.zeros((end + 1, end + 2))
    """seconds still needed, shape (positions + 1, uncached tokens + 1)"""
    for position in range(end - 1, -1, -1):
        room, context = end - position - 1, len(recording.prompt) + position
        # Of a step of which 0, 1, … drafted tokens are correct, up to the last of the answer but one.
        calls_s = _or_longer(costs.calls_s(room + 1 + beyond, context=context) + own_s)[: room + 1]
        emitted = np.arange(1, min(int(reach[position][0]), room) + 2)
        later_s = times_s[position + emitted, np.minimum(uncached[:, None] + emitted, end + 1)]
        best_s = (calls_s[: len(emitted)] + later_s).min(axis=1)
        if draft is not None:
            first_s = _or_longer(draft.calls_s(2 * end + 4, context=context))
            more_s = first_s * (not is_block)  # its further tokens come with the first call
            reached = _with_model(position, reach[position], runs, more_s, calls_s, times_s)
            first = np.maximum(uncached, 1)[:, None] + np.arange(len(emitted)) - 1
            best_s = np.minimum(best_s, (first_s[first] + reached[: len(emitted)]).min(axis=1))
        times_s[position] = best_s
    return float(times_s[0, 1])


def _with_model(
    position: int,
    reach: _Counts,
    runs: Sequence[int],
    draft_s: _Seconds,
    calls_s: _Seconds,
    times_s: _Seconds,
) -> _Seconds:
    """Least seconds still needed, at a position, after a call of the draft model that has read 0, 1, …
    correct drafted tokens; `draft_s` are its calls over 1, 2, … tokens."""
    room = len(calls_s) - 1
    num_read = min(len(reach) - 1, room)
    least_s = np.full(num_read + 1, np.inf)
    for read in range(num_read, -1, -1):
        is_right = read < room and runs[position + read] > 0
        end = min(int(reach[min(read + is_right, len(reach) - 1)]), room)
        correct = np.arange(end + 1)
        unread = np.maximum(correct + 1 - read, 0)
        least_s[read] = (calls_s[correct] + times_s[position + correct + 1, unread]).min()
        more = least_s[read + 1 : end + 1]
        if len(more):
            least_s[read] = min(least_s[read], float((draft_s[: len(more)] + more).min()))
    return least_s


def _or_longer(calls_s: _Seconds) -> _Seconds:
    """The least seconds of a call over 1, 2, … tokens or more."""
    least_s: _Seconds = np.minimum.accumulate(calls_s[::-1])[::-1]
    return least_s
