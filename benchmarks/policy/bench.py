"""One prompt answered in every way, and what else could have been done: a row of live.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import NamedTuple

from harness import Prompt, Row, in_turn
from outrider import Request, SamplingParams, Session
from outrider.core.data import Completion
from outrider.costs.store import PairCosts
from outrider.drafters.model import ModelDrafter
from outrider.lab.comparison import find_divergence
from outrider.lab.recording import Offers, Recording, record_offers
from outrider.models.vocab import Alignment
from outrider.policy.auto import AutoPolicy
from outrider.session.readout import Estimate, estimate_speedup, read_out
from policy.bound import hindsight_bound
from policy.choices import AUTO, PLAIN, Choice, autos, settings
from policy.curves import WRONG, CallTimes, time_calls


class Run(NamedTuple):
    """One answer, and the speed-up over plain decoding that the program would claim for it."""

    completion: Completion
    estimate: Estimate | None

    @property
    def decode_s(self) -> float:
        """Everything after the target's prompt: the draft model's reading of it counts."""
        return sum(r.total_s - r.read_s for r in self.completion.records if r.kind == "decode")

    @property
    def token_s(self) -> float:
        return self.decode_s / len(self.completion.tokens)

    def as_json(self) -> Row:
        readout = read_out(self.completion)
        return {
            "tokens": readout.generated_tokens,
            "decode_s": self.decode_s,
            "draft_prefill_s": sum(r.work.prefill_s for r in self.completion.records),
            "target_calls": readout.target_calls,
            "draft_calls": readout.draft_calls,
            "drafted": {name: counts.drafted_tokens for name, counts in readout.drafters.items()},
            "accepted": {name: counts.accepted_tokens for name, counts in readout.drafters.items()},
            "estimate": asdict(self.estimate) if self.estimate else None,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How prompts are answered: `fixed` beside plain decoding and the automatic choice, which is `told`
    costs that are wrong in the way of `curves.WRONG` (None: the truth)."""

    num_tokens: int = 128
    repetitions: int = 3
    fixed: Sequence[Choice] = ()
    seed: int = 0
    told: str | None = None

    @property
    def modes(self) -> list[Choice]:
        return [PLAIN, AUTO, *self.fixed]


class Bench:
    """A loaded pair, what its calls cost, and a policy for each repetition."""

    def __init__(
        self,
        session: Session,
        alignment: Alignment | None,
        costs: PairCosts,
        plan: Plan,
    ) -> None:
        self.session = session
        self._alignment = alignment
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._drafter = draft_of(session)
        self._target_times = CallTimes(costs.target)
        self._draft_times = CallTimes(costs.draft) if costs.draft else None
        told = WRONG[plan.told](costs) if plan.told else costs
        self._auto = [automatic(told) for _ in range(plan.repetitions)]
        self._replaying: dict[str, AutoPolicy] = {}
        """one policy for each automatic choice, which learns from prompt to prompt too"""

    def measure(self, prompt: Prompt) -> tuple[Row, Recording]:
        """Answer one prompt in every way, and see what else could have been done."""
        tokens = self.session.encode(prompt.messages)
        modes = self._plan.modes
        runs: dict[str, list[Run]] = {mode.name: [] for mode in modes}
        for number, mode in in_turn(modes, self._plan.repetitions, self._rng):
            runs[mode.name].append(self.answer(tokens, mode, number))
        plain, chosen = middle(runs["plain"]), middle(runs["auto"])
        recording = self.record(prompt, tokens, chosen.completion)
        row: Row = {
            "kind": "prompt",
            "id": prompt.id,
            "category": prompt.category,
            "prompt_tokens": len(tokens),
            "runs": {name: [run.as_json() for run in found] for name, found in runs.items()},
            "equal": len({run.completion.tokens for found in runs.values() for run in found}) == 1,
            "divergence": self.divergence(tokens, plain, chosen),
        }
        row |= self.hindsight(recording, [run for found in runs.values() for run in found], plain)
        return row, recording

    def answer(self, tokens: tuple[int, ...], mode: Choice, number: int) -> Run:
        engine = self.session.engine
        engine.reset()
        policy = self._auto[number]
        engine.policy = policy if mode is AUTO else mode.policy(self._target_times.curve, {})
        completion = engine.generate(self.request(tokens, speculate=mode is not PLAIN))
        return Run(completion, estimate_speedup(completion.records, policy)[0] if mode is AUTO else None)

    def request(self, tokens: tuple[int, ...], *, speculate: bool) -> Request:
        sampling = SamplingParams(temperature=0, seed=0)
        return Request(tokens, sampling, max_tokens=self._plan.num_tokens, speculate=speculate)

    def record(self, prompt: Prompt, tokens: tuple[int, ...], answer: Completion) -> Recording:
        self.session.engine.reset()
        offers: dict[str, Offers] = {}
        if self._drafter and self._alignment:
            model = self._drafter.model
            offers[self._drafter.name] = record_offers(model, self._alignment, tokens, answer.tokens)
        return Recording(str(prompt.id), prompt.category, tokens, answer.tokens, answer.finish_reason, offers)

    def divergence(self, tokens: tuple[int, ...], plain: Run, chosen: Run) -> Row | None:
        self.session.engine.reset()
        request = self.request(tokens, speculate=False)
        found = find_divergence(self.session.target, request, plain.completion, chosen.completion)
        return asdict(found) if found else None

    def hindsight(self, recording: Recording, runs: list[Run], plain: Run) -> Row:
        """The bound and the replays at the costs of these runs."""
        target = CallTimes(self._target_times.curve)
        draft = CallTimes(self._draft_times.curve) if self._draft_times else None
        for run in runs:
            time_calls(run.completion.records, target, draft)
        self._target_times.join(target)
        costs, drafts = target.fitted(self._target_times), {}
        if draft and self._draft_times and self._drafter:
            self._draft_times.join(draft)
            # Where nobody asked it, the target tells how fast the machine was.
            scale = draft.scale if draft.ratios else target.scale
            drafts[self._drafter.name] = draft.fitted(self._draft_times, scale)
        decoded = (r for r in plain.completion.records if r.kind == "decode")
        own_s = median(r.total_s - r.read_s - r.verify_s for r in decoded)
        found = {}
        for choice in (*autos(bool(drafts)), *settings(bool(drafts))):
            known = copy.deepcopy(costs), copy.deepcopy(drafts)
            policy = choice.policy(*known)
            if isinstance(policy, AutoPolicy):
                policy = self._replaying.setdefault(choice.name, policy)
            found[choice.name] = choice.replay(recording, policy, costs, drafts, own_s).seconds
        return {
            "text_tokens": len(recording.tokens),
            "own_s": own_s,
            "calls": {"target": target.as_json(), "draft": draft.as_json() if draft else []},
            "bound_s": hindsight_bound(recording, costs, drafts, own_s=own_s),
            "replayed_s": found,
        }


def draft_of(session: Session) -> ModelDrafter | None:
    return next((d for d in session.engine.drafters if isinstance(d, ModelDrafter)), None)


def automatic(costs: PairCosts) -> AutoPolicy:
    """A policy as the program makes it, with curves of its own to refine."""
    return AutoPolicy(copy.deepcopy(costs.target), copy.deepcopy(costs.draft))


def middle(runs: list[Run]) -> Run:
    """The run of median time per token."""
    return next(run for run in runs if run.token_s == median_low(other.token_s for other in runs))
