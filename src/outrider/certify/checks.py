"""All tests of a certificate, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from outrider.certify.exact import LENGTH, SEARCHED_TOKENS
from outrider.certify.faults import (
    CALL_FAULTS,
    Constrain,
    break_calls,
    break_masks,
    check_shown,
    judge_with,
)
from outrider.certify.plan import Findings, Plan, Progress, SampledTest, Subject
from outrider.certify.runs import RowRecorder
from outrider.certify.sampled import sampled_tests
from outrider.certify.texts import Compared, Repeated, compare_greedy, compare_stable, repeat
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.statistics import holm

_TEMPERATURES = (0.7, 1.0)


def certify(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Findings:
    """Run every test on these prompts (tokens of the target).

    The models' sequence 0 is used and forgotten, and another one where there is one and texts must be
    bit-equal. Where nothing is drafted the sampled tests are left out. Raises PromptError without prompts,
    or for one that leaves no room in the context, SettingError for a grammar without `Subject.constrain` and
    for a fault that cannot show.
    """
    _check(subject, prompts, plan)
    speculates = subject.speculates(plan.grammar)
    target = break_calls(plan.fault, subject.target)
    if plan.fault in CALL_FAULTS and not speculates:
        why = "it breaks the calls that check drafts, and nothing is drafted"
        raise SettingError(f"--inject {plan.fault}", why, "Let something be drafted.")
    engine = Engine(
        RowRecorder(target) if subject.bit_equal else target,
        subject.drafters,
        subject.policy,
        verifier=judge_with(plan.fault),
        constrain=break_masks(plan.fault, subject.constrain),
    )
    texts = _Texts(engine, prompts, plan, progress, subject.constrain)
    greedy, beside = texts.greedy(), texts.beside() if subject.bit_equal else []
    stable, repeated = texts.seeded()
    check_shown(plan.fault, target)
    engine.reset()
    tests: list[SampledTest] = []
    calls = 0
    if speculates:
        tests, calls = sampled_tests(subject, prompts, plan, progress)
    return Findings(
        speculates=speculates,
        stand_in=speculates and subject.draft is None,
        greedy=tuple(greedy),
        stable=tuple(stable),
        repeated=tuple(repeated),
        sampled=tuple(tests),
        rejected=tuple(holm([test.p_value for test in tests], plan.significance)),
        sampled_calls=calls,
        bit_equal=subject.bit_equal,
        beside=tuple(beside),
    )


def _check(subject: Subject, prompts: Sequence[tuple[int, ...]], plan: Plan) -> None:
    target = subject.target
    if not prompts:
        raise PromptError("prompts", "there are none", "Give at least one (-p or -f).")
    if plan.grammar is not None and subject.constrain is None:
        raise SettingError("grammar", "this subject was made without constraints", "Give it `constrain`.")
    searched = LENGTH if plan.grammar is None else SEARCHED_TOKENS + LENGTH
    room = max(plan.num_tokens, plan.num_seeded, searched)
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) + room >= target.context_length:
            raise PromptError(
                f"prompt {i}",
                f"its {len(prompt)} tokens and {room} more do not fit a context of {target.context_length}",
                "Give a larger context (-c), fewer tokens (-n) or a shorter prompt.",
            )


@dataclass(frozen=True, slots=True)
class _Texts:
    """The comparisons of texts, token by token."""

    engine: Engine
    prompts: Sequence[tuple[int, ...]]
    plan: Plan
    progress: Progress
    constrain: Constrain | None

    def greedy(self) -> list[Compared]:
        """Every prompt's greedy text."""
        return [
            compare_greedy(self.engine, self._request(i), i, self.constrain)
            for i in self._numbers("greedy", len(self.prompts))
        ]

    def beside(self) -> list[Compared]:
        """Greedy texts that are generated while the next prompt's is, where the target has room for two."""
        if self.engine.target.max_sequences < 2:
            return []
        compared = []
        for i in self._numbers("beside", self.plan.num_repeated):
            other = replace(self._request((i + 1) % len(self.prompts)), grammar=None, ignore_end=True)
            compared.append(compare_greedy(self.engine, self._request(i), i, self.constrain, other))
        return compared

    def seeded(self) -> tuple[list[Compared], list[Repeated]]:
        """The same seed twice, and with and without the drafters where the rule promises that."""
        plan = self.plan
        rules: tuple[Rule, ...] = ("auto", "stable") if plan.rule == "auto" else (plan.rule,)
        if plan.lenience < 1:
            rules = (plan.rule,)
        stable, repeated = [], []
        for i in self._numbers("seeds", plan.num_repeated):
            for temperature, rule in product(_TEMPERATURES, rules):
                request = replace(
                    self._request(i),
                    sampling=SamplingParams(temperature=temperature, seed=plan.seed + i),
                    max_tokens=plan.num_seeded,
                    verification=Verification(rule, lenience=plan.lenience),
                )
                repeated.append(repeat(self.engine, request, i))
                if rule == "stable":
                    stable.append(compare_stable(self.engine, request, i, self.constrain))
        return stable, repeated

    def _numbers(self, stage: str, count: int) -> Iterator[int]:
        """The first prompts' numbers, each reported."""
        count = min(count, len(self.prompts))
        for i in range(count):
            self.progress(stage, i, count)
            yield i

    def _request(self, i: int) -> Request:
        plan = self.plan
        return Request(
            self.prompts[i],
            SamplingParams(temperature=0),
            plan.num_tokens,
            verification=plan.verification,
            grammar=plan.grammar,
        )
