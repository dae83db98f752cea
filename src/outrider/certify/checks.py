"""All tests of a certificate, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.certify.calls import break_calls, check_shown
from outrider.certify.faults import CALL_FAULTS, judge_with
from outrider.certify.masks import Constrain, break_masks
from outrider.certify.plan import Findings, Plan, Progress, Subject
from outrider.certify.remembered import sampled_tests
from outrider.certify.rows import NotingModel
from outrider.certify.sampled import LENGTH, SampledTest
from outrider.certify.starts import LOOKED_AT
from outrider.certify.texts import Compared, Repeated, compare_greedy, compare_stable, repeat
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.statistics import holm

__all__ = ["certify"]

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
    constrain, speculates = subject.constrain, subject.speculates(plan.grammar)
    target = break_calls(plan.fault, subject.target)
    if plan.fault in CALL_FAULTS and not speculates:
        why = "it breaks the calls that check drafts, and nothing is drafted"
        raise SettingError(f"--inject {plan.fault}", why, "Let something be drafted.")
    engine = Engine(
        NotingModel(target) if subject.bit_equal else target,
        subject.drafters,
        subject.policy,
        verifier=judge_with(plan.fault),
        constrain=break_masks(plan.fault, constrain),
    )
    greedy = []
    for i, prompt in enumerate(prompts):
        progress("greedy", i, len(prompts))
        greedy.append(compare_greedy(engine, _greedy(prompt, plan), i, constrain))
    beside = _check_beside(engine, prompts, plan, progress, constrain) if subject.bit_equal else []
    stable, repeated = _check_seeds(engine, prompts, plan, progress, constrain)
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


def _greedy(prompt: tuple[int, ...], plan: Plan) -> Request:
    sampling = SamplingParams(temperature=0)
    return Request(prompt, sampling, plan.num_tokens, verification=plan.verification, grammar=plan.grammar)


def _check_beside(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    progress: Progress,
    constrain: Constrain | None,
) -> list[Compared]:
    """Greedy texts that are generated while the next prompt's is, where the target has room for two."""
    if engine.target.max_sequences < 2:
        return []
    chosen = list(enumerate(prompts))[: plan.num_repeated]
    compared = []
    for done, (i, prompt) in enumerate(chosen):
        progress("beside", done, len(chosen))
        other = replace(_greedy(prompts[(i + 1) % len(prompts)], plan), grammar=None, ignore_end=True)
        compared.append(compare_greedy(engine, _greedy(prompt, plan), i, constrain, other))
    return compared


def _check(subject: Subject, prompts: Sequence[tuple[int, ...]], plan: Plan) -> None:
    target = subject.target
    if not prompts:
        raise PromptError("prompts", "there are none", "Give at least one (-p or -f).")
    if plan.grammar is not None and subject.constrain is None:
        raise SettingError("grammar", "this subject was made without constraints", "Give it `constrain`.")
    looked_at = LENGTH if plan.grammar is None else LOOKED_AT + LENGTH
    room = max(plan.num_tokens, plan.num_seeded, looked_at)
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) + room >= target.context_length:
            raise PromptError(
                f"prompt {i}",
                f"its {len(prompt)} tokens and {room} more do not fit a context of {target.context_length}",
                "Give a larger context (-c), fewer tokens (-n) or a shorter prompt.",
            )


def _check_seeds(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    progress: Progress,
    constrain: Constrain | None,
) -> tuple[list[Compared], list[Repeated]]:
    """The same seed twice, and with and without the drafters where the rule promises that."""
    rules: tuple[Rule, ...] = ("auto", "stable") if plan.rule == "auto" else (plan.rule,)
    if plan.lenience < 1:
        rules = (plan.rule,)
    chosen = list(enumerate(prompts))[: plan.num_repeated]
    stable, repeated = [], []
    for done, (i, prompt) in enumerate(chosen):
        progress("seeds", done, len(chosen))
        for temperature in _TEMPERATURES:
            sampling = SamplingParams(temperature=temperature, seed=plan.seed + i)
            for rule in rules:
                verification = Verification(rule, lenience=plan.lenience)
                request = Request(
                    prompt, sampling, plan.num_seeded, verification=verification, grammar=plan.grammar
                )
                repeated.append(repeat(engine, request, i))
                if rule == "stable":
                    stable.append(compare_stable(engine, request, i, constrain))
    return stable, repeated
