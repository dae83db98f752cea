"""The certificate: all tests, what they found, and on what, in a form that outlives the terminal."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic_core import to_jsonable_python

from outrider.backends.bitwise import BitwiseModel
from outrider.core.contracts import Model
from outrider.core.data import Grammar, Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import write_whole
from outrider.core.numbers import counted
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.certify.decisions import DecisionTest
from outrider.lab.certify.drafts import DraftsTest, compare_drafts, head_drafter
from outrider.lab.certify.faults import (
    CALL_FAULTS,
    DRAFT_FAULTS,
    SHIFTED,
    break_calls,
    break_masks,
    check_shown,
    verifier_with,
)
from outrider.lab.certify.sampled import (
    LENGTH,
    SEARCHED_TOKENS,
    CertifyPlan,
    SampledTest,
    sampled_tests,
)
from outrider.lab.certify.texts import Compared, Constrain, RowRecorder, compare_texts, repeat
from outrider.models.hub import file_sha256
from outrider.models.reference import local_shards
from outrider.policy.fixed import FixedPolicy
from outrider.session.options import Progress

SCHEMA = "outrider.verify/1"
_TEMPERATURES = (0.7, 1.0)

GREEDY = "greedy"
BESIDE = "greedy, beside another request"
"""where the target has room for two, and texts must be bit-equal"""
REPEATED = "same seed twice"
STABLE = "seed-stable"
"""with drafts and without"""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the tests found: the `texts` that were compared, by name (`GREEDY` and so on), and of a head
    whether its `drafts` are those of one that reads a text afresh. `speculates`: whether any were made;
    `stand_in`: whether the draft model of the sampled tests was the target's own, disturbed; `bit_equal`:
    whether texts had to be equal without exception, and the bits of logits too."""

    speculates: bool
    texts: Mapping[str, tuple[Compared, ...]]
    sampled: tuple[SampledTest, ...] = ()
    decisions: tuple[DecisionTest, ...] = ()
    stand_in: bool = False
    bit_equal: bool = False
    drafts: DraftsTest | None = None

    @property
    def all_texts(self) -> list[Compared]:
        return [part for parts in self.texts.values() for part in parts]

    @property
    def counts(self) -> dict[str, int]:
        names = self.all_texts[0].counts
        return {name: sum(part.counts[name] for part in self.all_texts) for name in names}

    @property
    def compared_rows(self) -> int:
        return sum(part.rows.positions for part in self.all_texts if part.rows is not None)

    @property
    def power(self) -> float | None:
        """The error of the acceptance ratio that is found with probability 0.95, whichever rule has it; None
        where none up to 30 % is, or none was tested."""
        tests = [test for test in self.decisions if test.kind == "acceptance"]
        errors = [test.detectable_error for test in tests if test.detectable_error is not None]
        return max(errors) if errors and len(errors) == len(tests) else None

    @property
    def holds(self) -> bool:
        return (
            all(compared.holds for compared in self.all_texts)
            and (not self.bit_equal or self.compared_rows > 0)
            and not any(test.rejected for test in self.sampled)
            and not any(test.rejected for test in self.decisions)
            and (self.drafts is None or self.drafts.holds)
        )


BUILT_IN: tuple[str, ...] = tuple(
    tomllib.loads((files(__package__) / "prompts.toml").read_text(encoding="utf-8"))["prompts"]
)
"""The prompts of a certificate when none are given: one conversation's first message each."""


def speculates(engine: Engine, grammar: Grammar | None) -> bool:
    """Whether an engine ever drafts anything: what a grammar forces needs no drafter."""
    off = isinstance(engine.policy, FixedPolicy) and engine.policy.draft_max == 0
    forces = grammar is not None and grammar.fast_forward != "off"
    return bool(engine.drafters or forces) and engine.target.rewinding.is_possible and not off


def certify(
    subject: Engine,
    prompts: Sequence[tuple[int, ...]],
    plan: CertifyPlan,
    progress: Progress = lambda _stage, _part: None,
) -> Findings:
    """Run every test on these prompts (tokens of the target), with what an engine consists of, which has no
    requests meanwhile. The models' sequence 0 is used and forgotten, and another one where there is one and
    texts must be bit-equal, as those of a `BitwiseModel` must.

    Raises PromptError for one that leaves no room in the context, SettingError for a
    grammar without the engine's `constrain` and for a fault that cannot show.
    """
    target = break_calls(plan.fault, subject.target)
    _check(subject, prompts, plan)
    drafts, bit_equal = speculates(subject, plan.grammar), isinstance(subject.target, BitwiseModel)
    engine = Engine(
        cast(Model, RowRecorder(target)) if bit_equal else target,
        subject.drafters,
        subject.policy,
        verifier=verifier_with(plan.fault),
        constrain=break_masks(plan.fault, subject.constrain),
    )
    greedy = SamplingParams(temperature=0)
    requests = [
        Request(prompt, greedy, plan.num_tokens, verification=Verification(plan.rule), grammar=plan.grammar)
        for prompt in prompts
    ]
    texts = _compare_all(engine, requests, plan, subject.constrain, progress)
    check_shown(plan.fault, target)
    engine.reset()
    compared, head = None, head_drafter(subject)
    if drafts and head is not None:
        progress("drafts of heads", 0.0)
        some = requests[: plan.num_repeated]
        compared = compare_drafts(subject.target, head.model, head.alignment, some, plan.fault)
    found = sampled_tests(subject, prompts, plan, progress) if drafts else ((), (), False)
    sampled, decisions, stand_in = found
    return Findings(drafts, texts, sampled, decisions, stand_in, bit_equal, compared)


def _compare_all(
    engine: Engine,
    requests: Sequence[Request],
    plan: CertifyPlan,
    constrain: Constrain | None,
    progress: Progress,
) -> dict[str, tuple[Compared, ...]]:
    compare = partial(compare_texts, engine, constrain=constrain)
    few, has_room = requests[: plan.num_repeated], engine.target.max_sequences > 1
    texts: dict[str, list[Compared]] = {GREEDY: [], BESIDE: [], REPEATED: [], STABLE: []}
    for i, request in enumerate(requests):
        progress("greedy texts", i / len(requests))
        texts[GREEDY].append(compare(request, i))
    for i, request in enumerate(few if has_room and texts[GREEDY][0].rows is not None else ()):
        progress("two at once", i / len(few))
        other = replace(requests[(i + 1) % len(requests)], grammar=None, ignore_end=True)
        texts[BESIDE].append(compare(request, i, beside=other))
    for i, request in enumerate(few):
        progress("seeded texts", i / len(few))
        for seeded in _seeded(request, plan.seed + i, plan):
            texts[REPEATED].append(repeat(engine, seeded, i))
            if seeded.verification.rule == "stable":
                texts[STABLE].append(compare(seeded, i))
    return {name: tuple(parts) for name, parts in texts.items() if parts}


def _seeded(request: Request, seed: int, plan: CertifyPlan) -> Iterator[Request]:
    rules: tuple[Rule, ...] = ("auto", "stable") if plan.rule == "auto" else (plan.rule,)
    for temperature, rule in product(_TEMPERATURES, rules):
        yield replace(
            request,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_tokens=plan.num_seeded,
            verification=Verification(rule),
        )


def _check(subject: Engine, prompts: Sequence[tuple[int, ...]], plan: CertifyPlan) -> None:
    if plan.fault in CALL_FAULTS and not speculates(subject, plan.grammar):
        why = "it breaks the calls that check drafts, and nothing is drafted"
        raise SettingError(f"--inject {plan.fault}", why, "Let something be drafted.")
    head = head_drafter(subject)
    if plan.fault in DRAFT_FAULTS and head is None:
        why = "no head drafts, or none that always has its target's states"
        raise SettingError(f"--inject {plan.fault}", why, "Name one (-md) for a target of attention alone.")
    if plan.fault == SHIFTED and head is not None and getattr(head.model, "block", 1) == 1:
        raise SettingError(f"--inject {SHIFTED}", "no block drafter is in use", "Name a DFlash file (-md).")
    searched = LENGTH if plan.grammar is None else SEARCHED_TOKENS + LENGTH
    room = max(plan.num_tokens, plan.num_seeded, searched)
    context = subject.target.context_length
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) + room >= context:
            reason = f"its {len(prompt)} tokens and {room} more do not fit a context of {context}"
            way_out = "Give a larger context (-c), fewer tokens (-n) or a shorter prompt."
            raise PromptError(f"prompt {i}", reason, way_out)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Findings, and everything that they depend on, as plain data; `started` is a UTC time in ISO 8601."""

    plan: CertifyPlan
    findings: Findings
    prompts: tuple[str, ...]
    models: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    settings: dict[str, Any]
    started: str
    duration_s: float


def as_json(certificate: Certificate) -> dict[str, Any]:
    """The certificate as plain data: the verdict, then all that it rests on."""
    findings = certificate.findings
    data: dict[str, Any] = to_jsonable_python(certificate)
    return {
        "schema": SCHEMA,
        "verdict": "holds" if findings.holds else "does not hold",
        "kind": "bit-equal" if findings.bit_equal else "equal but for near-ties",
        "reasons": reasons(findings),
        "counts": findings.counts,
        "compared_logits": findings.compared_rows,
        "detectable_acceptance_error": findings.power,
        **data.pop("findings"),
        **data,
    }


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the JSON to `path`, all of it or nothing. Raises SettingError when it cannot be written."""
    text = json.dumps(as_json(certificate), indent=1, allow_nan=False) + "\n"
    write_whole(path, text, "certificate")


def model_files(path: Path) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each of a model's files. Raises ModelFileError when one cannot be read."""
    return [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in local_shards(path)
    ]


# In words

_TEXTS = {
    GREEDY: ("greedy", ""),
    BESIDE: ("greedy", "while another request runs, "),
    REPEATED: ("same seed", "twice, "),
    STABLE: ("seed-stable", "with and without drafts, "),
}
"""label and beginning of the lines about texts"""


class Line(NamedTuple):
    """What one kind of test found."""

    label: str
    text: str
    holds: bool = True


def reasons(findings: Findings) -> list[str]:
    """Why a certificate does not hold, one line for each kind of test; nothing where it does."""
    return [f"{line.label}: {line.text}" for line in lines(findings) if not line.holds]


def lines(findings: Findings) -> list[Line]:
    """A line for each kind of test that was made."""
    found = [_texts_line(name, parts) for name, parts in findings.texts.items()]
    found += [_logits_line(findings)] if findings.bit_equal else []
    if (drafts := findings.drafts) is not None:
        text = f"{drafts.same} of {drafts.compared} as of a drafter that read the text afresh"
        found.append(Line("drafts", text, drafts.holds))
    if not findings.speculates:
        found.append(Line("sampled", "not tested: nothing is drafted"))
    found += [_sampled_line(findings)] if findings.sampled else []
    return found + ([_decisions_line(findings)] if findings.decisions else [])


def _texts_line(name: str, parts: Sequence[Compared]) -> Line:
    label, what = _TEXTS[name]
    found = [(part.prompt, difference) for part in parts for difference in part.differences]
    margins = [difference.margin for _, difference in found if difference.near_tie]
    said = []
    if wrong := [one for one in found if not one[1].near_tie]:
        prompt, first = wrong[0]
        is_exact = name == REPEATED or any(part.rows for part in parts)
        said.append(
            f"{len(wrong)} differ{'' if is_exact else ' beyond rounding'}, first in prompt {prompt + 1} at "
            f"token {first.position + 1}: {first.speculative_text!r} instead of {first.plain_text!r}"
        )
    if margins:
        widest = f"{counted(len(margins), 'near-tie')} that rounding flips (widest {max(margins):.3f})"
        said.append(widest if wrong else f"the same but for {widest}")
    tokens = sum(part.tokens for part in parts)
    text = f"{what}{len(parts)} texts, {tokens} tokens: {'; '.join(said) or 'the same, token for token'}"
    return Line(label, text, all(part.holds or not part.differences for part in parts))


def _logits_line(findings: Findings) -> Line:
    text = f"{findings.compared_rows} positions, with drafts and without: "
    differing = [
        (name, part.prompt, part.rows)
        for name, parts in findings.texts.items()
        for part in parts
        if part.rows is not None and part.rows.differing
    ]
    if not differing:
        is_known = findings.compared_rows > 0
        return Line("logits", f"{text}{'the same bits' if is_known else 'none were compared'}", is_known)
    name, prompt, rows = differing[0]
    where = f"first in {name}, prompt {prompt + 1}, at token {(rows.first or 0) + 1}"
    return Line(
        "logits", f"{text}other bits at {sum(each.differing for *_, each in differing)}, {where}", False
    )


def _sampled_line(findings: Findings) -> Line:
    tests = findings.sampled
    rejected = [test for test in tests if test.rejected]
    least = min(tests, key=lambda test: (test.p_value, -test.impossible))
    behind = max(test.behind_tokens for test in tests)
    text = f"{len(tests)} tests of {least.samples} texts"
    text += f" after up to {behind} tokens of the answer: " if behind else ": "
    if rejected:
        impossible = f", {least.impossible} impossible texts" if least.impossible else ""
        text += f"{len(rejected)} find another distribution, for instance {least.setting} "
        text += f"(p = {least.p_value:.1e}{impossible})"
    else:
        text += f"none rejects (least p {least.p_value:.2g}; Holm's correction over all)"
    if certain := sum(test.cells == 1 for test in tests):
        text += f"; {certain} too certain to test anything"
    return Line("sampled", text, not rejected)


def _decisions_line(findings: Findings) -> Line:
    acceptance = [test for test in findings.decisions if test.kind == "acceptance"]
    rejected = []
    for test in findings.decisions:
        if test.rejected:
            found = f"{test.impossible} impossible outcomes" if test.impossible else f"p = {test.p_value:.1e}"
            rejected.append(f"{test.rule} rule, {test.kind}: {found} of {test.decisions} decisions")
    power = ", ".join(
        f"{test.rule} " + ("none" if test.detectable_error is None else f"{test.detectable_error:.1%}")
        for test in acceptance
    )
    text = (
        f"{sum(test.decisions for test in acceptance)} decisions about drafts, and what followed them: "
        f"{'; '.join(rejected) or 'as each rule has it'}; an error of the acceptance ratio is found with "
        f"probability 0.95 from: {power}"
    )
    return Line("acceptance", text, not rejected)
