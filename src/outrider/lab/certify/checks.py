"""All tests of a certificate, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

from outrider.core.contracts import Model
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.certify.drafts import compare_drafts
from outrider.lab.certify.exact_distribution import LENGTH, SEARCHED_TOKENS
from outrider.lab.certify.faults import (
    CALL_FAULTS,
    DRAFT_FAULTS,
    break_calls,
    break_masks,
    check_shown,
    verifier_with,
)
from outrider.lab.certify.plan import (
    BESIDE,
    GREEDY,
    REPEATED,
    STABLE,
    CertifyPlan,
    DraftsTest,
    Findings,
    Subject,
)
from outrider.lab.certify.runs import RowRecorder
from outrider.lab.certify.sampled import sampled_tests
from outrider.lab.certify.text_equality import Compared, compare_texts, repeat
from outrider.lab.loaded import Progress

_TEMPERATURES = (0.7, 1.0)


def certify(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    plan: CertifyPlan,
    progress: Progress = lambda _stage, _part: None,
) -> Findings:
    """Run every test on these prompts (tokens of the target).

    The models' sequence 0 is used and forgotten, and another one where there is one and texts must be
    bit-equal. Where nothing is drafted the sampled tests are left out. Raises PromptError without prompts,
    or for one that leaves no room in the context, SettingError for a grammar without `Subject.constrain` and
    for a fault that cannot show.
    """
    target = break_calls(plan.fault, subject.target)
    _check(subject, prompts, plan)
    speculates = subject.speculates(plan.grammar)
    engine = Engine(
        cast(Model, RowRecorder(target)) if subject.bit_equal else target,
        subject.drafters,
        subject.policy,
        verifier=verifier_with(plan.fault),
        constrain=break_masks(plan.fault, subject.constrain),
    )
    compare = partial(compare_texts, engine, constrain=subject.constrain)
    greedy = SamplingParams(temperature=0)
    requests = [
        Request(prompt, greedy, plan.num_tokens, verification=plan.verification, grammar=plan.grammar)
        for prompt in prompts
    ]
    few = requests[: plan.num_repeated]
    texts: dict[str, list[Compared]] = {GREEDY: [], BESIDE: [], REPEATED: [], STABLE: []}
    for i, request in _each("greedy", requests, progress):
        texts[GREEDY].append(compare(request, i))
    if subject.bit_equal and target.max_sequences > 1:
        for i, request in _each("beside", few, progress):
            other = replace(requests[(i + 1) % len(requests)], grammar=None, ignore_end=True)
            texts[BESIDE].append(compare(request, i, beside=other))
    for i, request in _each("seeds", few, progress):
        for seeded in _seeded(request, plan.seed + i, plan):
            texts[REPEATED].append(repeat(engine, seeded, i))
            if seeded.verification.rule == "stable":
                texts[STABLE].append(compare(seeded, i))
    check_shown(plan.fault, target)
    engine.reset()
    drafts = _drafts(subject, few, plan, progress) if speculates else None
    sampled, decisions, calls = sampled_tests(subject, prompts, plan, progress) if speculates else ((), (), 0)
    return Findings(
        speculates=speculates,
        stand_in=speculates and subject.sampled_draft is None,
        texts={name: tuple(parts) for name, parts in texts.items() if parts},
        sampled=sampled,
        decisions=decisions,
        sampled_calls=calls,
        bit_equal=subject.bit_equal,
        drafts=drafts,
    )


def _drafts(
    subject: Subject, requests: Sequence[Request], plan: CertifyPlan, progress: Progress
) -> DraftsTest | None:
    """Whether a head drafts as if it read its texts afresh; None where none does."""
    if (head := subject.head) is None:
        return None
    progress("drafts", 0.0)
    return compare_drafts(subject.target, head, subject.alignment, requests, plan.fault)


def _each(stage: str, requests: Sequence[Request], progress: Progress) -> Iterator[tuple[int, Request]]:
    """The requests with their numbers, each reported."""
    for i, request in enumerate(requests):
        progress(stage, i / len(requests))
        yield i, request


def _seeded(request: Request, seed: int, plan: CertifyPlan) -> Iterator[Request]:
    """Sampled ways of a request; also under the seed-stable rule, which promises the same text without
    drafters."""
    both = plan.rule == "auto" and plan.lenience == 1
    rules: tuple[Rule, ...] = ("auto", "stable") if both else (plan.rule,)
    for temperature, rule in product(_TEMPERATURES, rules):
        yield replace(
            request,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_tokens=plan.num_seeded,
            verification=Verification(rule, lenience=plan.lenience),
        )


def _check(subject: Subject, prompts: Sequence[tuple[int, ...]], plan: CertifyPlan) -> None:
    if not prompts:
        raise PromptError("prompts", "there are none", "Give at least one (-p or -f).")
    if plan.fault in CALL_FAULTS and not subject.speculates(plan.grammar):
        why = "it breaks the calls that check drafts, and nothing is drafted"
        raise SettingError(f"--inject {plan.fault}", why, "Let something be drafted.")
    if plan.fault in DRAFT_FAULTS and subject.head is None:
        why = "no head drafts, or none that always has its target's states"
        raise SettingError(f"--inject {plan.fault}", why, "Name one (-md) for a target of attention alone.")
    searched = LENGTH if plan.grammar is None else SEARCHED_TOKENS + LENGTH
    room = max(plan.num_tokens, plan.num_seeded, searched)
    context = subject.target.context_length
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) + room >= context:
            reason = f"its {len(prompt)} tokens and {room} more do not fit a context of {context}"
            way_out = "Give a larger context (-c), fewer tokens (-n) or a shorter prompt."
            raise PromptError(f"prompt {i}", reason, way_out)
