"""The certificate: all tests, what they found, and on what, in a form that outlives the terminal.

The JSON's schema is `outrider.verify/1`. It is self-contained: models by their hashes, versions,
machine, settings in force, the kind of verdict, every near-tie with its margins and every test with its
p-value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from pydantic_core import to_jsonable_python

from outrider.core.contracts import Model
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import write_whole
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.certify.distribution import LENGTH, SEARCHED_TOKENS
from outrider.lab.certify.drafts import compare_drafts
from outrider.lab.certify.faults import (
    CALL_FAULTS,
    DRAFT_FAULTS,
    SHIFTED,
    break_calls,
    break_masks,
    check_shown,
    verifier_with,
)
from outrider.lab.certify.plan import BESIDE, GREEDY, REPEATED, STABLE, CertifyPlan, Findings, Subject
from outrider.lab.certify.sampled import sampled_tests
from outrider.lab.certify.texts import Compared, RowRecorder, compare_texts, repeat
from outrider.lab.loaded import Progress
from outrider.models.hub import file_sha256
from outrider.models.reference import local_shards

SCHEMA = "outrider.verify/1"
_TEMPERATURES = (0.7, 1.0)
_SHOWN_ROWS = 3
"""texts whose bits differ that are listed"""


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
        Request(prompt, greedy, plan.num_tokens, verification=Verification(plan.rule), grammar=plan.grammar)
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
    drafts, head = None, subject.head
    if speculates and head is not None:
        progress("drafts", 0.0)
        drafts = compare_drafts(subject.target, head, subject.alignment, few, plan.fault)
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


def _each(stage: str, requests: Sequence[Request], progress: Progress) -> Iterator[tuple[int, Request]]:
    for i, request in enumerate(requests):
        progress(stage, i / len(requests))
        yield i, request


def _seeded(request: Request, seed: int, plan: CertifyPlan) -> Iterator[Request]:
    """Sampled ways of a request; also under the seed-stable rule, which promises the same text without
    drafters."""
    rules: tuple[Rule, ...] = ("auto", "stable") if plan.rule == "auto" else (plan.rule,)
    for temperature, rule in product(_TEMPERATURES, rules):
        yield replace(
            request,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_tokens=plan.num_seeded,
            verification=Verification(rule),
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
    if plan.fault == SHIFTED and getattr(subject.head, "block", 1) == 1:
        raise SettingError(f"--inject {SHIFTED}", "no block drafter is in use", "Name a DFlash file (-md).")
    searched = LENGTH if plan.grammar is None else SEARCHED_TOKENS + LENGTH
    room = max(plan.num_tokens, plan.num_seeded, searched)
    context = subject.target.context_length
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) + room >= context:
            reason = f"its {len(prompt)} tokens and {room} more do not fit a context of {context}"
            way_out = "Give a larger context (-c), fewer tokens (-n) or a shorter prompt."
            raise PromptError(f"prompt {i}", reason, way_out)


# The document


@dataclass(frozen=True, slots=True)
class Certificate:
    """Findings, and everything that they depend on.

    `models`, `versions`, `machine` and `settings` are plain data; `started` is a UTC time in
    ISO 8601, `duration_s` what the tests took.
    """

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


def reasons(findings: Findings) -> list[str]:
    """Why a certificate does not hold, one line for each kind of test; nothing where it does."""
    lines = []
    for name, parts in findings.texts.items():
        if failed := [part for part in parts if part.differences and not part.holds]:
            last = failed[0].differences[-1]
            how = "" if findings.bit_equal or name == REPEATED else ", not by rounding"
            where = f"first in prompt {failed[0].prompt + 1} at token {last.position + 1}"
            tokens = f"{last.speculative_text!r} instead of {last.plain_text!r}"
            lines.append(f"{name}: {len(failed)} of {len(parts)} texts differ{how}; {where}: {tokens}")
    if findings.bit_equal and not findings.compared_rows:
        lines.append("logits: none were compared")
    differing = [
        f"logits, {name}, prompt {part.prompt + 1}: other bits at {rows.differing} of {rows.positions} "
        f"positions, first at token {(rows.first or 0) + 1}"
        for name, parts in findings.texts.items()
        for part in parts
        if (rows := part.rows) is not None and rows.differing
    ]
    lines += differing[:_SHOWN_ROWS]
    for test in findings.decisions:
        if test.rejected:
            found = f"p = {test.p_value:.1e}"
            if test.impossible:
                found = f"{test.impossible} impossible outcomes"
            lines.append(f"{test.rule} rule, {test.kind}: {found} of {test.decisions} decisions")
    if (drafts := findings.drafts) is not None and not drafts.holds:
        wrong = f"{drafts.compared - drafts.same} of {drafts.compared}"
        lines.append(f"drafts: {wrong} are not those of a drafter that reads the text afresh")
    if failing := [test for test in findings.sampled if test.rejected]:
        least = min(failing, key=lambda test: (test.p_value, -test.impossible))
        impossible = f", {least.impossible} impossible texts" if least.impossible else ""
        lines.append(
            f"sampled: {len(failing)} of {len(findings.sampled)} tests find another distribution; for "
            f"instance {least.setting} (p = {least.p_value:.1e}{impossible})"
        )
    return lines
