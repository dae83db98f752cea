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

from outrider.core.files import write_whole
from outrider.lab.certify.exact_distribution import LENGTH, POWER_SHIFT
from outrider.lab.certify.plan import CertifyPlan, Findings
from outrider.lab.certify.text_equality import Compared, Counts
from outrider.models.hub import file_sha256
from outrider.models.reference import local_shards

SCHEMA = "outrider.verify/1"
BIT_EQUAL = "bit-equal"
"""the kind of verdict under which no text may differ, nor any bit of its logits"""
NEAR_TIES = "equal but for near-ties"
"""the kind under which two tokens of all but equal logits may change places"""
_TEXTS_METHOD = (
    f"chi-square of {LENGTH} tokens against their exact distribution, null distribution simulated, "
    "rare cells pooled; the first ones, under a grammar those after `behind_tokens` of the answer"
)
_DECISIONS_METHOD = (
    "score test of every decision about a draft, repeated, against the rule's own probabilities "
    "given p and q; tails by Chernoff's bound"
)


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
        """Whether every test holds."""
        return self.findings.holds


def totals(findings: Findings) -> Counts:
    """What all runs on the real models took, those of the samples left out."""
    texts = [part.counts for part in findings.texts]
    return sum((*texts, *(run.counts for run in findings.repeated)), Counts())


def reasons(findings: Findings) -> list[str]:
    """Why a certificate does not hold, one line for each kind of test; nothing where it does."""
    texts, logits = [], []
    if findings.bit_equal and not findings.compared_rows:
        logits.append("logits: none were compared")
    for name, parts in findings.kinds.items():
        failed = [part for part in parts if part.differences and not part.holds]
        if failed:
            last = failed[0].differences[-1]
            how = "" if findings.bit_equal else ", not by rounding"
            texts.append(
                f"{name}: {len(failed)} of {len(parts)} texts differ{how}; first in prompt "
                f"{failed[0].prompt + 1} at token {last.position + 1}: {last.speculative_text!r} "
                f"instead of {last.plain_text!r}"
            )
        rows = [(part.prompt, part.rows) for part in parts if part.rows is not None]
        odd = [(prompt, found) for prompt, found in rows if found.first is not None]
        if odd and findings.compared_rows:
            logits.append(
                f"logits, {name}: their bits differ at {sum(found.differing for _, found in odd)} of "
                f"{sum(found.positions for _, found in rows)} positions; first in prompt {odd[0][0] + 1} "
                f"at token {(odd[0][1].first or 0) + 1}"
            )
    lines = [*texts, *logits]
    if wrong := [test for test in findings.head if not test.holds]:
        worst = max(test.difference for test in wrong)
        lines.append(
            f"head: in {len(wrong)} of {len(findings.head)} texts it drafts from more than what was accepted "
            f"(its logits differ by {worst:.2f} of what two places differ by)"
        )
    unsteady = [run for run in findings.repeated if run.position is not None]
    if unsteady:
        lines.append(f"same seed twice: {len(unsteady)} of {len(findings.repeated)} texts differ")
    lines += [
        f"{test.rule} rule, {test.kind}: "
        + (f"{test.impossible} impossible outcomes" if test.impossible else f"p = {test.p_value:.1e}")
        + f" of {test.decisions} decisions"
        for test in findings.decisions
        if test.rejected
    ]
    failing = [test for test in findings.sampled if test.rejected]
    if failing:
        least = min(failing, key=lambda test: (test.p_value, -test.impossible))
        impossible = f", {least.impossible} impossible texts" if least.impossible else ""
        lines.append(
            f"sampled: {len(failing)} of {len(findings.sampled)} tests find another distribution; for "
            f"instance {least.setting} (p = {least.p_value:.1e}{impossible})"
        )
    return lines


def as_json(certificate: Certificate) -> dict[str, Any]:
    """The certificate as plain data."""
    findings, plan = certificate.findings, certificate.plan
    draft = "the target's own logits, disturbed" if findings.stand_in else "the draft model"
    return {
        "schema": SCHEMA,
        "verdict": "holds" if findings.holds else "does not hold",
        "kind": BIT_EQUAL if findings.bit_equal else NEAR_TIES,
        "reasons": reasons(findings),
        "speculated": findings.speculates,
        "lossy": plan.verification.is_lossy,
        "lenience": plan.lenience,
        "fault": plan.fault,
        "seed": plan.seed,
        "started": certificate.started,
        "duration_s": round(certificate.duration_s, 3),
        "models": certificate.models,
        "versions": certificate.versions,
        "machine": certificate.machine,
        "settings": certificate.settings,
        "plan": asdict(plan),
        "counts": {
            "prompts": len(certificate.prompts),
            **asdict(totals(findings)),
            "near_ties": sum(found.near_tie for part in findings.texts for found in part.differences),
            "tests": len(findings.sampled),
            "samples": sum(test.samples for test in findings.sampled),
            "sampled_model_calls": findings.sampled_calls,
        },
        "greedy": _compared(findings.greedy),
        "beside_another_request": _compared(findings.beside) if findings.beside else None,
        "logits": _logits(findings) if findings.bit_equal else None,
        **({"head": [asdict(test) for test in findings.head]} if findings.head else {}),
        "determinism": {
            "same_seed_twice": [asdict(run) for run in findings.repeated],
            "with_and_without_drafters": _compared(findings.stable),
        },
        "sampled": {
            "holds": not any(test.rejected for test in findings.sampled),
            "method": _TEXTS_METHOD,
            "draft_model": draft if findings.speculates else None,
            "significance": plan.significance,
            "correction": "Holm",
            "power_shift": POWER_SHIFT,
            "tests": [asdict(test) for test in findings.sampled],
        },
        "decisions": {
            "holds": not any(test.rejected for test in findings.decisions),
            "method": _DECISIONS_METHOD,
            "detected_with_probability": 0.95,
            "detectable_acceptance_error": acceptance_power(findings),
            "tests": [asdict(test) for test in findings.decisions],
        },
        "prompts": list(certificate.prompts),
    }


def _logits(findings: Findings) -> dict[str, Any]:
    """How the bits of logits compare, position by position."""
    entries = [
        {"prompt": part.prompt, "temperature": part.temperature, "test": name, **asdict(part.rows)}
        for name, parts in findings.kinds.items()
        for part in parts
        if part.rows is not None and part.rows.differing
    ]
    return {
        "holds": bool(findings.compared_rows) and not entries,
        "compared_positions": findings.compared_rows,
        "differing_positions": sum(entry["differing"] for entry in entries),
        "differences": entries,
    }


def _compared(parts: Sequence[Compared]) -> dict[str, Any]:
    flat = [
        {"prompt": part.prompt, "temperature": part.temperature, **asdict(difference)}
        for part in parts
        for difference in part.differences
    ]
    return {
        "holds": all(part.holds for part in parts),
        "texts": len(parts),
        "compared_tokens": sum(part.tokens for part in parts),
        "near_ties": [entry for entry in flat if entry["near_tie"]],
        "differences": [entry for entry in flat if not entry["near_tie"]],
    }


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
