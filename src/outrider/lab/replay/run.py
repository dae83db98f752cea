"""A policy decodes a recorded answer, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from outrider.core.contracts import Constraint, Drafter, DraftRequest, Policy, Vocabulary
from outrider.core.data import Draft, DraftWork, Request, StepRecord
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.replay.drafter import RecordedDrafter
from outrider.lab.replay.recording import Recording, common_prefix
from outrider.sampling import RequestSampler

_ROOM = 1024
"""how long a draft may be where the end of the answer is not known"""

SAMPLER = RequestSampler(SamplingParams(temperature=0), cast(Vocabulary, SimpleNamespace(size=0)), ())
"""Recorded tokens are the target's most likely: nothing is sampled."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy made of a recording.

    `seconds` are those of decoding, the draft model's reading of the prompt included; `plain_s` those
    of one call per token.
    """

    records: tuple[StepRecord, ...]
    seconds: float
    plain_s: float

    @property
    def speedup(self) -> float:
        """Against plain decoding at the same costs."""
        return self.plain_s / self.seconds


def replay(
    recording: Recording,
    policy: Policy,
    costs: CallCosts,
    draft_costs: Mapping[str, CallCosts] | None = None,
    *,
    free: Sequence[Drafter] | None = None,
    constraint: Constraint | None = None,
    own_s: float = 0.0,
    own_token_s: float = 0.0,
) -> Replayed:
    """Run `policy` over a recorded answer; what calls take is what the curves say.

    Draft models are those of `draft_costs`; `free` drafters see the prompt and the answer as they would
    in the engine (None: the lookup over the text itself). A fresh `constraint` is that of the request.
    `own_s` is spent beside the calls of a step, and `own_token_s` for each token drafted.
    """
    drafters = [*([SuffixDrafter()] if free is None else free)]
    drafters += [RecordedDrafter(recording, name, curve) for name, curve in (draft_costs or {}).items()]
    for drafter in drafters:
        drafter.begin(0, Request(recording.prompt))
    policy.begin(0, len(recording.prompt), len(recording.tokens) if is_limited(recording) else None)
    answer, done, plain_s = recording.tokens, 0, 0.0
    records: list[StepRecord] = []
    while done < len(answer):
        position = len(recording.prompt) + done
        room = len(answer) - done - 1 if is_limited(recording) else _ROOM
        draft, work = Draft(), DraftWork()
        if room > 0:
            [draft], work = policy.propose(drafters, [DraftRequest(0, room, SAMPLER, constraint=constraint)])
        verify_s = costs.call_s(1 + len(draft), context=position)
        other_s = own_s + own_token_s * len(draft)
        record = _record(len(records), position, draft, work, answer[done:], verify_s, other_s)
        records.append(record)
        if constraint is not None:
            constraint.accept(record.tokens)
        for drafter in drafters:
            drafter.observe(0, record.tokens)
        policy.observe({0: record})
        plain_s += sum(costs.call_s(1, context=position + i) + own_s for i in range(len(record.tokens)))
        done += len(record.tokens)
    return Replayed(tuple(records), sum(record.total_s for record in records), plain_s)


def _record(
    step: int,
    position: int,
    draft: Draft,
    work: DraftWork,
    remaining: tuple[int, ...],
    verify_s: float,
    own_s: float,
) -> StepRecord:
    """The step in which this draft met the `remaining` part of the answer."""
    accepted = common_prefix(draft.tokens, remaining)
    return StepRecord(
        request=0,
        step=step,
        kind="decode",
        position=position,
        num_evaluated=1 + len(draft),
        draft=draft,
        num_accepted=accepted,
        tokens=remaining[: accepted + 1],
        work=work,
        draft_s=work.model_s,
        verify_s=verify_s,
        sampling_s=0.0,
        other_s=own_s,
        end_s=0.0,
        batch_tokens=1 + len(draft),
        batch_drafted=len(draft),
    )


def is_limited(recording: Recording) -> bool:
    """Whether the request's limit ended the answer: only then it was known where it would end."""
    return recording.finish_reason == "length"
