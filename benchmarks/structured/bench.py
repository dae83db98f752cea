"""One case answered in every way: a row of live.py."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import NamedTuple

from harness import Row, in_turn
from outrider import Request, SamplingParams
from outrider.core.contracts import Policy
from outrider.core.data import Completion
from outrider.core.errors import ConstraintError, GrammarError
from outrider.core.params import FastForward, JsonStyle
from outrider.costs import PairCosts
from outrider.engine import PreferredTokenization
from outrider.lab.comparison import find_divergence
from outrider.policy import FixedPolicy
from outrider.policy.forced import FORCED
from outrider.session import Session
from outrider.session.readout import read_out
from policy.bench import automatic
from structured.bound import bound_token_s
from structured.cases import Case


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to answer. Without `drafters` nothing is drafted but what the grammar forces, and all of it."""

    name: str
    fast_forward: FastForward
    speculate: bool = True
    drafters: bool = False


OFF = Mode("off", "off", speculate=False)
AUTO = Mode("auto", "exact", drafters=True)
MODES = {m.name: m for m in (OFF, Mode("forced", "exact"), AUTO, Mode("canonical", "canonical"))}


class Run(NamedTuple):
    """An answer, or why there is none."""

    completion: Completion | None
    error: str = ""

    @property
    def token_s(self) -> float:
        if self.completion is None or not self.completion.tokens:
            return float("inf")
        decode = [r for r in self.completion.records if r.kind == "decode"]
        return sum(r.total_s - r.read_s for r in decode) / len(self.completion.tokens)

    def as_json(self, case: Case) -> Row:
        if self.completion is None:
            return {"error": self.error}
        readout, records = read_out(self.completion), self.completion.records
        decode = [record for record in records if record.kind == "decode"]
        finished = self.completion.finish_reason == "stop"
        drafted = {name: counts.drafted_tokens for name, counts in readout.drafters.items()}
        return {
            "tokens": readout.generated_tokens,
            "target_calls": readout.target_calls,
            "draft_calls": readout.draft_calls,
            "forced": drafted.get(FORCED, 0),
            "drafted": drafted,
            "accepted": {name: counts.accepted_tokens for name, counts in readout.drafters.items()},
            "evaluated": sum(record.num_evaluated for record in decode),
            "decode_s": sum(record.total_s - record.read_s for record in decode),
            "draft_prefill_s": sum(record.work.prefill_s for record in records),
            "constraint_s": sum(record.constraint_s for record in decode),
            "finish": self.completion.finish_reason,
            "complaint": case.complaint(self.completion.text) if finished else None,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How cases are answered: every one in each mode, so many times over."""

    modes: Sequence[Mode]
    num_tokens: int
    repetitions: int
    style: JsonStyle = "spaced"
    seed: int = 0


class Bench:
    """A loaded pair, and for each repetition and temperature a policy that learns from case to case."""

    def __init__(self, session: Session, costs: PairCosts, plan: Plan) -> None:
        self._engine = session.engine
        self._session = session
        self._drafters = session.engine.drafters
        self._costs = costs
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._auto: dict[tuple[int, float], Policy] = {}
        self._spellings: defaultdict[tuple[str, int, float], PreferredTokenization] = defaultdict(
            PreferredTokenization
        )

    def measure(self, case: Case, temperature: float) -> Row:
        """Answer one case in every mode, in rounds of shuffled order."""
        prompt = self._session.encode([{"role": "user", "content": case.prompt}])
        request = Request(prompt, max_tokens=self._plan.num_tokens, grammar=case.grammar(self._plan.style))
        runs: dict[str, list[Run]] = {mode.name: [] for mode in self._plan.modes}
        for number, mode in in_turn(self._plan.modes, self._plan.repetitions, self._rng):
            sampling = SamplingParams(temperature=temperature, seed=number)
            runs[mode.name].append(self.answer(replace(request, sampling=sampling), mode, number))
        self._engine.drafters = self._drafters
        self._engine.reset()
        return {
            "kind": "case",
            "id": case.id,
            "group": case.group,
            "temperature": temperature,
            "prompt_tokens": len(prompt),
            "runs": {name: [run.as_json(case) for run in found] for name, found in runs.items()},
            "texts": {name: c.text for name, found in runs.items() if (c := middle(found).completion)},
            "divergence": {} if temperature else self.divergence(request, runs),
            "bound_token_s": self.bound(request, runs),
        }

    def answer(self, request: Request, mode: Mode, number: int) -> Run:
        assert request.grammar is not None
        grammar = replace(request.grammar, fast_forward=mode.fast_forward)
        request = replace(request, grammar=grammar, speculate=mode.speculate)
        self._engine.drafters = self._drafters
        self._engine.reset()
        self._engine.preferred = self._spellings[mode.name, number, request.sampling.temperature]
        self._engine.policy = (
            self.policy(number, request.sampling.temperature) if mode is AUTO else FixedPolicy()
        )
        if not mode.drafters:
            self._engine.drafters = ()
        try:
            return Run(self._engine.generate(request))
        except (ConstraintError, GrammarError) as error:
            return Run(None, str(error))

    def policy(self, number: int, temperature: float) -> Policy:
        key = number, temperature
        if key not in self._auto:
            self._auto[key] = automatic(self._costs)
        return self._auto[key]

    def bound(self, request: Request, runs: dict[str, list[Run]]) -> float | None:
        """Seconds per token of the bound, along the middle run of the automatic choice."""
        if not {OFF.name, AUTO.name} <= runs.keys() or (grammar := request.grammar) is None:
            return None
        plain, answer = (middle(runs[name]).completion for name in (OFF.name, AUTO.name))
        if plain is None or answer is None or not answer.tokens:
            return None
        compiled = self._session.compile(replace(grammar, fast_forward=AUTO.fast_forward))
        return bound_token_s(request.prompt, answer, plain, self._costs.target, compiled.start)

    def divergence(self, request: Request, runs: dict[str, list[Run]]) -> Row:
        """By mode, where a greedy text parts from plain constrained decoding's, and by what margin the
        plain token leads there. Nothing for modes whose texts are all the same."""
        if OFF.name not in runs or (plain := runs[OFF.name][0].completion) is None:
            return {}
        request = replace(request, sampling=SamplingParams(temperature=0, seed=0))
        session = self._session
        found = {}
        for name, mode_runs in runs.items():
            others = [c for run in mode_runs if (c := run.completion) and c.tokens != plain.tokens]
            if others:
                parting = find_divergence(
                    session.target, request, plain, others[0], lambda limit: session.compile(limit).start()
                )
                lengths = len(plain.tokens), len(others[0].tokens)
                found[name] = asdict(parting) if parting else {"position": min(lengths), "margin": None}
        return found


def middle(runs: Sequence[Run]) -> Run:
    """The run of median time per token."""
    return next(run for run in runs if run.token_s == median_low(other.token_s for other in runs))
