"""One recorded answer predicts every setting: a policy decodes it in simulated time, at any costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from outrider.core.contracts import (
    FREE,
    Constraint,
    Drafter,
    Drafters,
    DraftInput,
    DraftProgress,
    DraftRequest,
    Lookup,
    Policy,
    Rewinding,
    Vocabulary,
)
from outrider.core.data import Draft, DraftToken, DraftWork, Request, StepRecord
from outrider.core.numbers import Interval
from outrider.core.params import SamplingParams
from outrider.core.sequences import common_prefix
from outrider.costs import CallCosts
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import PreferredTokenization
from outrider.engine.limits import PreferredConstraint
from outrider.lab.recording import LONGEST_DEPARTURE, MIN_PREFIX_PROB, Offers, Recording
from outrider.lab.rows import AnswerRow, CaseOutcome
from outrider.lab.settings import AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.statistics import speedup_of
from outrider.policy.state import PretrainedCalibration
from outrider.sampling import RequestSampler

_ROOM = 1024
"""how long a draft may be where the end of the answer is not known"""

SAMPLER = RequestSampler(SamplingParams(temperature=0), cast(Vocabulary, SimpleNamespace(size=0)), ())
"""Recorded tokens are the target's most likely: nothing is sampled."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy made of a recording. `seconds` are those of decoding, the draft model's reading of the
    prompt included; `plain_s` those of one call per token."""

    records: tuple[StepRecord, ...]
    seconds: float
    plain_s: float

    @property
    def speedup(self) -> float:
        return self.plain_s / self.seconds


def replay(
    recording: Recording,
    policy: Policy,
    costs: CallCosts,
    draft_costs: Mapping[str, CallCosts] | None = None,
    *,
    free: Sequence[Lookup] | None = None,
    constraint: Constraint | None = None,
    own_s: float = 0.0,
    own_token_s: float = 0.0,
    rewinding: Rewinding = FREE,
    is_warm: bool = False,
) -> Replayed:
    """Run `policy` over a recorded answer; what calls take is what the curves say.

    Draft models are those of `draft_costs`; `free` drafters see the prompt and the answer as they would
    in the engine (None: the lookup over the text itself). A fresh `constraint` is that of the request.
    `own_s` is spent beside the calls of a step, and `own_token_s` for each token drafted;
    `rewinding` is the target's. `is_warm`: it has the prompt's KV from before, unless it recomputes.
    """
    drafters = _begun(recording, draft_costs or {}, free)
    asked = Drafters.of(drafters)
    policy.begin(0, len(recording.prompt), len(recording.tokens) if is_limited(recording) else None)
    answer, done, plain_s, reread, records = recording.tokens, 0, 0.0, 0, list[StepRecord]()
    while done < len(answer):
        position = len(recording.prompt) + done
        num_unread = 0 if done or (is_warm and not rewinding.recomputes) else len(recording.prompt) - 1
        longest = rewinding.max_draft(reread or num_unread, in_prompt=num_unread > 0)
        room = min(len(answer) - done - 1 if is_limited(recording) else _ROOM, longest)
        (draft, work), lost = (Draft(), DraftWork()), reread if rewinding.recomputes else None
        if room > 0:
            request = DraftRequest(
                0, room, SAMPLER, constraint=constraint, recomputed=lost, num_unread=num_unread
            )
            [draft], work = policy.propose(asked, [request], reread)
        num_evaluated = reread + 1 + len(draft)
        accepted = common_prefix(draft.tokens, answer[done:])
        switches = not records or records[-1].num_evaluated != num_evaluated
        record = _record(
            draft,
            work,
            num_evaluated,
            step=len(records),
            position=position,
            num_accepted=accepted,
            tokens=answer[done : done + accepted + 1],
            verify_s=costs.call_s(num_evaluated, context=position - reread) + switches * costs.switch_s,
            other_s=own_s + own_token_s * len(draft),
        )
        records.append(record)
        if constraint is not None:
            constraint.accept(record.tokens)
        for drafter in drafters:
            drafter.observe(0, record.tokens)
        policy.observe({0: record})
        plain_s += sum(costs.call_s(1, context=position + i) + own_s for i in range(len(record.tokens)))
        done += len(record.tokens)
        reread = reread + 1 + accepted if rewinding.recomputes and accepted < len(draft) else 0
    return Replayed(tuple(records), sum(record.total_s for record in records), plain_s)


def _record(draft: Draft, work: DraftWork, num_evaluated: int, **found: Any) -> StepRecord:
    return StepRecord(
        request=0,
        kind="decode",
        num_evaluated=num_evaluated,
        draft=draft,
        work=work,
        draft_s=work.model_s,
        sampling_s=0.0,
        end_s=0.0,
        batch_tokens=num_evaluated,
        batch_drafted=len(draft),
        **found,
    )


def _begun(
    recording: Recording, draft_costs: Mapping[str, CallCosts], free: Sequence[Lookup] | None
) -> list[Drafter]:
    drafters: list[Drafter] = [*([SuffixDrafter()] if free is None else free)]
    drafters += [RecordedDrafter(recording, name, curve) for name, curve in draft_costs.items()]
    for drafter in drafters:
        drafter.begin(0, Request(recording.prompt))
    return drafters


def is_limited(recording: Recording) -> bool:
    """Whether the request's limit ended the answer: only then it was known where it would end."""
    return recording.finish_reason == "length"


# Drafters of replays: a draft model that offers what was recorded, at the cost of a cost curve.

_UNKNOWN = -1
"""A token after those that were recorded."""


class RecordedDrafter:
    """The Drafter of one recording. Its times are those of `costs`, its offers certain tokens.

    After a wrong token of another drafter's (a request's prefix that departs from the answer) what the
    model would offer was not recorded: the confidence it has at that place of the answer is taken for it.
    Such tokens are rejected in any case.
    """

    is_free = False

    def __init__(self, recording: Recording, name: str, costs: CallCosts) -> None:
        self.name = name
        self._prompt_tokens = len(recording.prompt)
        self._answer = recording.tokens
        self._offers: Offers = recording.offers[name]
        self._rereads = self._offers.rereads(recording.tokens)
        self._costs = costs
        self.reads_ahead = not self._rereads
        self.block = self._offers.block
        self.reset()

    def reset(self) -> None:
        self._committed = 0
        self._seen = 0
        self._has_read = False
        self._path: tuple[int, ...] = ()

    def begin(self, sequence: int, request: Request) -> None:
        del sequence, request
        self.reset()

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tokens that it evaluated itself and that became final need not be read again, but by a head."""
        del sequence
        self._seen += 0 if self._rereads else common_prefix(self._path, tokens)
        self._path = ()
        self._committed += len(tokens)

    def end(self, sequence: int) -> None: ...

    def progress(self, sequence: int) -> DraftProgress:
        del sequence
        unread = self._costs.read_tokens(max(1 + self._committed - self._seen, 1))
        return DraftProgress(self._held, unread, 0 if self._has_read else self._prompt_tokens)

    @property
    def _held(self) -> int:
        return self._costs.read_tokens(self._prompt_tokens + self._committed)

    def start(self, requests: Sequence[DraftRequest]) -> _RecordedRound:
        [request] = requests
        is_early = self._rereads and request.num_unread > 0  # a head waits for the target's states
        work = DraftWork()
        if not self._has_read and not is_early:
            work = DraftWork(
                prefill_calls=1,
                prefill_s=self._costs.prefill_s(self._prompt_tokens),
                prefill_tokens=self._costs.read_tokens(self._prompt_tokens),
            )
            self._has_read = True
        return _RecordedRound(self, request, work, is_early)

    def read(self, request: DraftRequest, path: tuple[int, ...], is_first: bool) -> int:
        """The tokens of a call after which it has evaluated these drafted tokens."""
        known = common_prefix(self._path, path)
        self._path = path
        if not is_first:
            return max(1, len(path) - known)
        num_tokens = max(1, 1 + self._committed - self._seen) + len(path)
        # What a target of checkpoints lost a head reads without its states, and again once it has them.
        self._seen = self._committed + (self.block == 1) - (request.recomputed or 0) * self._rereads
        return num_tokens

    def after(self, drafted: Sequence[int]) -> tuple[int, float] | None:
        """What the model would offer after these tokens: token and confidence, or None where nothing more is
        known.

        After a wrong token of its own, of a head after any, it goes on as was recorded, and then with the
        same confidence, with unknown tokens, which are wrong in any case; after one of another's as at that
        place of the answer.
        """
        answer, offers, place = self._answer, self._offers, self._committed
        for i, token in enumerate(drafted):
            if place >= len(answer):
                return None
            is_its_own = token == offers.tokens[place]
            if is_its_own and (token != answer[place] or place in offers.departures):
                path = offers.departures.get(place, ())
                beyond = len(drafted) - i - 1
                if beyond < len(path):
                    return path[beyond]
                confidences = [offers.confidence[place], *(confidence for _, confidence in path)]
                was_cut = len(path) >= LONGEST_DEPARTURE or math.prod(confidences) < MIN_PREFIX_PROB
                return (_UNKNOWN, confidences[-1]) if was_cut else None
            place += 1
        return (offers.tokens[place], offers.confidence[place]) if place < len(answer) else None

    def call_s(self, num_tokens: int) -> float:
        return self._costs.call_s(num_tokens, context=self._held)


@dataclass
class _RecordedRound:
    drafter: RecordedDrafter
    request: DraftRequest
    read: DraftWork
    is_over: bool
    call_tokens: list[int] = field(default_factory=list)

    @property
    def work(self) -> DraftWork:
        calls = tuple(self.call_tokens)
        return self.read + DraftWork(len(calls), sum(map(self.drafter.call_s, calls)), call_tokens=calls)

    def step(self, inputs: Mapping[int, DraftInput]) -> dict[int, list[DraftToken]]:
        [(drafted, guess)] = inputs.values()
        guess = guess if self.drafter.reads_ahead else ()
        if self.is_over:
            return {}
        path, offers = drafted, list[DraftToken]()
        if self.drafter.block == 1:
            read = self.drafter.read(self.request, (*drafted, *guess), not self.call_tokens)
            self.call_tokens.append(read)
        elif len(drafted) >= self.drafter.block:
            return {}
        elif not self.call_tokens:
            self.call_tokens.append(self.drafter.read(self.request, (), True))
        for guessed in (*guess, _UNKNOWN):
            found = self.drafter.after(path)
            if found is None or not _permits(self.request, path, found[0]):
                self.is_over = not offers
                break
            token, confidence = found
            evidence = (confidence,) if self.drafter.block == 1 else (confidence, len(path) + 1.0)
            offers.append(DraftToken(token, self.drafter.name, confidence, evidence))
            path = (*path, guessed)
        return {self.request.sequence: offers} if offers else {}


def _permits(request: DraftRequest, drafted: tuple[int, ...], token: int) -> bool:
    """After a wrong token of another drafter's the constraint may not allow what is taken for an offer; of
    unknown tokens that is not known."""
    if request.constraint is None:
        return True
    return token != _UNKNOWN and request.constraint.permits(drafted, (token,)) == 1


# Every setting over the recorded answers, at measured costs: what it would take, without running it

DRAFT = ModelDrafter.name

_MIN_CALLS = 3
"""of a size that make its time known"""
_TIMED_CASES = 3


@dataclass(frozen=True, slots=True)
class Prices:
    """What everything costs: the target's calls, the draft model's if there is one, the engine itself.

    `own_s` are the engine's own seconds in a step by the kind of setting ("plain", "lookup", "auto"; one that
    is missing takes plain's), `own_token_s` those for each drafted token that is checked. `prior` is what the
    draft's file says of its acceptance.
    """

    target: CallCosts
    draft: CallCosts | None = None
    own_s: Mapping[str, float] = field(default_factory=dict)
    own_token_s: float = 0.0
    prior: PretrainedCalibration | None = None
    rewinding: Rewinding = FREE
    """the target's"""

    def step_own_s(self, setting: Setting) -> float:
        kind = "auto" if setting.is_auto else "lookup" if setting.uses_lookup else "plain"
        return self.own_s.get(kind, self.own_s.get("plain", 0.0))

    def drafts(self, setting: Setting) -> dict[str, CallCosts]:
        return {DRAFT: self.draft} if setting.uses_model and self.draft is not None else {}


def prices_of(target: CallCosts, answers: Sequence[AnswerRow], cases: Sequence[Recording]) -> Prices:
    """A target's prices: the engine's own times are those in the recorded calls of these answers, and what
    looking up and choosing take in a step is measured while replaying the cases, where no model is called."""
    own: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        for num_tokens, _, _, seconds in answer.calls:
            own[num_tokens].append(seconds)
    plain_s = median(own[1]) if own[1] else 0.0
    rises = [
        (median(seconds) - plain_s) / (num_tokens - 1)
        for num_tokens, seconds in own.items()
        if num_tokens > 3 and len(seconds) >= _MIN_CALLS
    ]
    token_s = max(median(rises), 0.0) if rises else 0.0
    own_s, prices = {"plain": plain_s}, Prices(target, None, {"plain": plain_s}, token_s)
    for kind, setting in (("lookup", Setting("lookup", 8)), ("auto", AUTO_LOOKUP)):
        per_step = []
        for case in cases[:_TIMED_CASES]:
            before = perf_counter()
            [outcome] = predict([case], setting, prices)
            per_step.append((perf_counter() - before) / max(outcome.target_calls, 1))
        own_s[kind] = plain_s + (median(per_step) if per_step else 0.0)
    return replace(prices, own_s=own_s)


def predict(cases: Sequence[Recording], setting: Setting, prices: Prices) -> list[CaseOutcome]:
    """The outcome of each case, one after the other under one policy, as in a block of real runs.

    An automatic policy begins with these prices and no knowledge of the texts, and learns from case to case.
    """
    policy = setting.policy(prices.target, prices.drafts(setting), prices.prior)
    preferred = PreferredTokenization()
    found = []
    for case in cases:
        played = replay(
            case,
            policy,
            prices.target,
            prices.drafts(setting),
            free=[SuffixDrafter()] if setting.uses_lookup else [],
            constraint=case.constrain and PreferredConstraint(case.constrain(), preferred),
            own_s=prices.step_own_s(setting),
            own_token_s=prices.own_token_s,
            rewinding=prices.rewinding,
            is_warm=True,
        )
        places = range(len(case.prompt), len(case.prompt) + len(case.tokens))
        plain_s = sum(prices.target.call_s(1, context=place) + prices.step_own_s(PLAIN) for place in places)
        outcome = outcome_of(case.id, played.records, plain_s)
        if outcome.draft_calls and prices.draft is not None:
            unread_s = prices.draft.prefill_s(len(case.prompt)) * (1 - case.whole_ratio)
            outcome = outcome.model_copy(update={"seconds": outcome.seconds - unread_s})
        found.append(outcome)
    return found


def outcome_of(case: str, records: Sequence[StepRecord], plain_s: float) -> CaseOutcome:
    """What step records say, real ones or those of a replay."""
    decode = [record for record in records if record.kind == "decode"]
    read_s = sum(record.work.prefill_s for record in records)
    longest = max((len(record.draft) for record in decode), default=0)
    return CaseOutcome(
        case=case,
        tokens=sum(len(record.tokens) for record in decode),
        seconds=sum(record.total_s - record.work.prefill_s - record.read_s for record in decode) + read_s,
        plain_s=plain_s,
        target_calls=len(decode),
        draft_calls=sum(record.work.calls for record in decode),
        drafted=tuple(sum(len(record.draft) > i for record in decode) for i in range(longest)),
        accepted=tuple(sum(record.num_accepted > i for record in decode) for i in range(longest)),
        draft_s=sum(record.work.model_s for record in decode) + read_s,
        verify_s=sum(record.verify_s for record in decode),
    )


@dataclass(frozen=True, slots=True)
class Expectation:
    """What some answers came to under each setting. `error` is how uncertain the costs of steps with a draft
    are against those of plain ones, as a relative standard error."""

    outcomes: Mapping[Setting, Sequence[CaseOutcome]]
    error: float

    def over(self, setting: Setting, other: Setting) -> Interval:
        slow_s, fast_s = ([one.seconds for one in self.outcomes[who]] for who in (other, setting))
        drafting = max(self._drafting(setting), self._drafting(other))
        return speedup_of(slow_s, fast_s, error=0.0 if slow_s == fast_s else self.error * drafting)

    def _drafting(self, setting: Setting) -> float:
        found = self.outcomes[setting]
        drafts = sum(outcome.drafted[0] for outcome in found if outcome.drafted)
        return drafts / max(sum(outcome.target_calls for outcome in found), 1)


def expect(cases: Sequence[Recording], prices: Prices, settings: Sequence[Setting]) -> Expectation:
    """Replay settings over the answers; those of a draft model need its offers in each of them."""
    # A call over a single token, which all ratios are to, is as uncertain as its measured spread.
    curves = [prices.target] if prices.draft is None else [prices.target, prices.draft]
    single = [[p.spread_ratio for p in c.points if p.num_tokens == 1] for c in curves]
    error = max(min(found, default=0.05) for found in single)
    return Expectation({setting: predict(cases, setting, prices) for setting in settings}, error)
