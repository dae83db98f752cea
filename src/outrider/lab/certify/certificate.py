"""The certificate: what was found, on what, in a form that outlives the terminal.

The JSON's schema is `outrider.verify/1`. It is self-contained: models by their hashes, versions,
machine, settings in force, the kind of verdict, every near-tie with its margins and every test with its
p-value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.core.files import write_whole
from outrider.lab.certify.plan import REPEATED, CertifyPlan, Findings
from outrider.lab.certify.runs import ComparedRows
from outrider.lab.certify.text_equality import Compared, Counts
from outrider.models.hub import file_sha256
from outrider.models.reference import local_shards

SCHEMA = "outrider.verify/1"
BIT_EQUAL = "bit-equal"
"""the kind of verdict under which no text may differ, nor any bit of its logits"""
NEAR_TIES = "equal but for near-ties"
"""the kind under which two tokens of all but equal logits may change places"""
_SHOWN_ROWS = 3
"""texts whose bits differ that are listed"""


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

    @property
    def holds(self) -> bool:
        return self.findings.holds


def totals(findings: Findings) -> Counts:
    """What all runs on the real models took, those of the samples left out."""
    return sum((part.counts for part in findings.all_texts), Counts())


def reasons(findings: Findings) -> list[str]:
    """Why a certificate does not hold, one line for each kind of test; nothing where it does."""
    lines = [
        _why_texts(name, parts, bit_equal=findings.bit_equal)
        for name, parts in findings.texts.items()
        if any(part.differences and not part.holds for part in parts)
    ]
    if findings.bit_equal and not findings.compared_rows:
        lines.append("logits: none were compared")
    lines += [
        f"logits, {name}, prompt {part.prompt + 1}: other bits at {rows.differing} of {rows.positions} "
        f"positions, first at token {(rows.first or 0) + 1}"
        for name, part, rows in _differing_rows(findings)[:_SHOWN_ROWS]
    ]
    lines += [
        f"{test.rule} rule, {test.kind}: "
        + (f"{test.impossible} impossible outcomes" if test.impossible else f"p = {test.p_value:.1e}")
        + f" of {test.decisions} decisions"
        for test in findings.decisions
        if test.rejected
    ]
    if (drafts := findings.drafts) is not None and not drafts.holds:
        wrong = f"{drafts.compared - drafts.same} of {drafts.compared}"
        lines.append(f"drafts: {wrong} are not those of a drafter that reads the text afresh")
    failing = [test for test in findings.sampled if test.rejected]
    if failing:
        least = min(failing, key=lambda test: (test.p_value, -test.impossible))
        impossible = f", {least.impossible} impossible texts" if least.impossible else ""
        lines.append(
            f"sampled: {len(failing)} of {len(findings.sampled)} tests find another distribution; for "
            f"instance {least.setting} (p = {least.p_value:.1e}{impossible})"
        )
    return lines


def _why_texts(name: str, parts: Sequence[Compared], *, bit_equal: bool) -> str:
    failed = [part for part in parts if part.differences and not part.holds]
    last = failed[0].differences[-1]
    how = "" if bit_equal or name == REPEATED else ", not by rounding"
    return (
        f"{name}: {len(failed)} of {len(parts)} texts differ{how}; first in prompt {failed[0].prompt + 1} at "
        f"token {last.position + 1}: {last.speculative_text!r} instead of {last.plain_text!r}"
    )


def as_json(certificate: Certificate) -> dict[str, Any]:
    """The certificate as plain data: the verdict, then all that it rests on."""
    findings = certificate.findings
    data: dict[str, Any] = to_jsonable_python(certificate)
    return {
        "schema": SCHEMA,
        "verdict": "holds" if findings.holds else "does not hold",
        "kind": BIT_EQUAL if findings.bit_equal else NEAR_TIES,
        "reasons": reasons(findings),
        "lossy": certificate.plan.verification.is_lossy,
        "counts": asdict(totals(findings)),
        "compared_logits": findings.compared_rows,
        "detectable_acceptance_error": acceptance_power(findings),
        **data.pop("findings"),
        **data,
    }


def _differing_rows(findings: Findings) -> list[tuple[str, Compared, ComparedRows]]:
    """The texts whose logits differ in their bits, by the test."""
    return [
        (name, part, part.rows)
        for name, parts in findings.texts.items()
        for part in parts
        if part.rows is not None and part.rows.differing
    ]


def acceptance_power(findings: Findings) -> float | None:
    """The error of the acceptance ratio that is found with probability 0.95, whichever rule has it; None
    where none up to 30 % is, or none was tested."""
    acceptance = [test for test in findings.decisions if test.kind == "acceptance"]
    found = [test.detectable_error for test in acceptance if test.rule != "stable"]
    errors = [error for error in found if error is not None]
    return max(errors) if errors and len(errors) == len(found) else None


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the JSON to `path`, all of it or nothing. Raises SettingError when it cannot be written."""
    text = json.dumps(as_json(certificate), indent=1, allow_nan=False) + "\n"
    write_whole(path, text, "certificate")


def model_files(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each of a model's files; `on_bytes` is called with how much was read.

    Raises ModelFileError when a file is gone or cannot be read.
    """
    return [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file, on_bytes)}
        for file in local_shards(path)
    ]
