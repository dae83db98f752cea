"""A certificate as people read it, on one screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from outrider.cli.output import Cell, print_rows
from outrider.cli.report import structure_line
from outrider.lab.certify.certificate import Certificate, reasons, totals
from outrider.lab.certify.plan import BESIDE, GREEDY, REPEATED, STABLE, Findings
from outrider.lab.certify.text_equality import Compared, Difference

_SHOWN_TIES = 4
_CHANGES = ": speculation changes the output"
_TEXT_ROWS = {
    GREEDY: ("greedy", ""),
    BESIDE: ("", "while another request runs: "),
    REPEATED: ("same seed", "twice: "),
    STABLE: ("seed-stable", "with and without drafts: "),
}
"""label and beginning of the lines about texts"""


def print_verdict(certificate: Certificate, place: Path | None) -> None:
    """The verdict on standard output, then what it rests on."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.print(_headline(certificate))
    rows: list[tuple[str, Cell]] = [*_rows(certificate)]
    if place is not None:
        rows.append(("certificate", str(place)))
    print_rows(console, rows, width=11)


def _headline(certificate: Certificate) -> Text:
    plan, findings = certificate.plan, certificate.findings
    if not certificate.holds:
        headline = Text("DOES NOT HOLD", style="bold red").append(
            ": a head drafts wrongly" if replace(findings, drafts=None).holds else _CHANGES, "not bold"
        )
    elif not findings.speculates:
        headline = Text("HOLDS, BUT NOTHING WAS SPECULATED", style="bold yellow").append(
            ": this target decoded plainly", "not bold"
        )
    elif not totals(findings).drafted_tokens:
        headline = Text("HOLDS, BUT NO TEXT MET A DRAFT", style="bold yellow").append(
            ": give longer answers (-n) or other prompts", "not bold"
        )
    else:
        how = (
            "gives plain decoding's text, bit for bit" if findings.bit_equal else "did not change the output"
        )
        headline = Text("HOLDS", style="bold green").append(f": speculation {how}", "not bold")
    if plan.fault:
        headline.append(f" (fault injected: {plan.fault})", "not bold")
    if plan.verification.is_lossy:
        headline.append(f" (lossy: lenience {plan.lenience:g})", "not bold")
    return headline


def _rows(certificate: Certificate) -> list[tuple[str, str]]:
    findings = certificate.findings
    rows = [("because", reason) for reason in reasons(findings)]
    names = [f"{role} {model['name']}" for role, model in certificate.models.items()]
    if findings.stand_in:
        names.append("for the samples the target's own logits, disturbed, take a draft model's place")
    rows.append(("models", ", ".join(names)))
    if certificate.plan.grammar is not None:
        rows.append(("structure", structure_line(certificate.plan.grammar)))
    for name, parts in findings.texts.items():
        label, what = _TEXT_ROWS[name]
        rows.append((label, what + _texts_line(parts)))
        if name == GREEDY:
            rows += [("", line) for line in _tie_lines(parts)]
    if findings.bit_equal:
        rows.append(("logits", _logits_line(findings)))
    if findings.drafts is not None:
        same, compared = findings.drafts.same, findings.drafts.compared
        rows.append(("drafts", f"{same} of {compared} as of a drafter that read the text afresh"))
    rows.append(("sampled", _sampled_line(certificate)))
    if findings.decisions:
        rows.append(("acceptance", _decisions_line(findings)))
    counts = totals(findings)
    rows.append(
        (
            "took",
            f"{certificate.duration_s:.0f} s, {counts.target_calls} target calls for {counts.tokens} tokens; "
            f"{counts.drafted_tokens} tokens drafted, {counts.accepted_tokens} accepted",
        )
    )
    return rows


def _texts_line(parts: tuple[Compared, ...]) -> str:
    tokens = sum(part.tokens for part in parts)
    differences = [difference for part in parts for difference in part.differences]
    ties = [difference for difference in differences if difference.near_tie]
    failed = len(differences) - len(ties)
    line = f"{len(parts)} texts, {tokens} tokens: "
    if not differences:
        return line + "the same, token for token"
    if failed:
        line += f"{failed} differ" + ("" if any(part.rows for part in parts) else " beyond rounding")
        line += ", " if ties else ""
    if ties:
        line += "" if failed else "the same but for "
        noun = "near-tie" if len(ties) == 1 else "near-ties"
        line += f"{len(ties)} {noun} that rounding flips (widest {_widest(ties):.3f})"
    return line


def _logits_line(findings: Findings) -> str:
    differing = sum(part.rows.differing for part in findings.all_texts if part.rows is not None)
    line = f"{findings.compared_rows} positions, with drafts and without: "
    return line + (f"other bits at {differing}" if differing else "the same bits")


def _widest(ties: list[Difference]) -> float:
    return max(max(tie.speculative_margin or 0.0, tie.plain_margin or 0.0) for tie in ties)


def _tie_lines(parts: tuple[Compared, ...]) -> list[str]:
    ties = [(part.prompt, tie) for part in parts for tie in part.differences if tie.near_tie]
    ties.sort(key=lambda entry: -_widest([entry[1]]))
    lines = [
        f"prompt {prompt + 1}, token {tie.position + 1}: {tie.speculative_text!r} for {tie.plain_text!r}, "
        f"ahead by {tie.speculative_margin:.4f} with drafts, {tie.plain_margin:.4f} the other way without"
        for prompt, tie in ties[:_SHOWN_TIES]
    ]
    if len(ties) > _SHOWN_TIES:
        lines.append(f"and {len(ties) - _SHOWN_TIES} more, in the certificate")
    return lines


def _places(findings: Findings) -> str:
    """Where in the answers the texts lie, if not at their beginning."""
    places = sorted({test.behind_tokens for test in findings.sampled})
    if places == [0]:
        return ""
    noun = "token" if places == [1] else "tokens"
    return f" after {' or '.join(map(str, places))} {noun} of the answer"


def _decisions_line(findings: Findings) -> str:
    acceptance = [test for test in findings.decisions if test.kind == "acceptance"]
    rejected = sum(test.rejected for test in findings.decisions)
    power = ", ".join(
        f"{test.rule} " + ("none" if test.detectable_error is None else f"{test.detectable_error:.1%}")
        for test in acceptance
    )
    count = sum(test.decisions for test in acceptance)
    return (
        f"{count} decisions about drafts, and what followed them: "
        + (f"{rejected} of {len(findings.decisions)} tests reject" if rejected else "as each rule has it")
        + f"; an error of the acceptance ratio is found with probability 0.95 from: {power}"
    )


def _sampled_line(certificate: Certificate) -> str:
    findings, plan = certificate.findings, certificate.plan
    if not findings.sampled:
        return "not tested: nothing is drafted"
    least = min(test.p_value for test in findings.sampled)
    rejected = sum(test.rejected for test in findings.sampled)
    line = (
        f"{len(findings.sampled)} tests of {plan.samples} texts{_places(findings)}: "
        + (f"{rejected} reject" if rejected else "none rejects")
        + f" (least p {least:.2g}; significance {plan.significance:g} over all, Holm)"
    )
    certain = sum(test.cells == 1 for test in findings.sampled)
    return line + (f"; {certain} too certain to test anything" if certain else "")
