"""A check as people read it: the verdict first, then what it rests on, in 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.check.report import DraftReport, LookupReport, Report, Rewind, Sample
from outrider.check.verdict import Outcome, Verdict, as_text
from outrider.cli.output import readable
from outrider.cli.tables import Cell, print_rows
from outrider.lab.acceptance import Acceptance
from outrider.lab.expectation import Speedups
from outrider.lab.facts import BreakEven, Calls, ModelFacts, Tokenizers

_Rows = Sequence[tuple[str, str]]

_STYLES: dict[Outcome, str] = {
    "pays": "bold green",
    "undecided": "bold yellow",
    "does not pay": "bold red",
    "cannot work": "bold red",
}


def print_check(console: Console, report: Report) -> None:
    """The target, lookup alone, every draft, and the verdict over all of them."""
    _block(console, f"target {report.target.name}", _target_rows(report))
    if report.lookup is not None:
        _block(console, "lookup alone", _lookup_rows(report.lookup), report.lookup.verdict)
    for draft in report.drafts:
        _block(console, f"draft {draft.model.name}", _draft_rows(draft, report), draft.verdict)
    if report.backend:
        _block(console, "library", _library_rows(report))
    several = len(report.drafts) != 1 and (report.drafts or report.lookup is None)
    if several:
        _block(console, "verdict", [("", report.verdict)])
    console.print(Text(f"took {report.seconds:.0f} s on {readable(report.machine)}", style="dim"))


def _block(console: Console, title: str, rows: _Rows, verdict: Verdict | None = None) -> None:
    console.print(Text(readable(title), style="bold", overflow="fold"))
    lines: list[tuple[str, Cell]] = [(f"  {name}", line) for name, line in rows]
    if verdict is not None:
        lines.append(("  verdict", Text(readable(verdict.sentence), _STYLES[verdict.outcome])))
        lines += [("" if i else "  try", f"- {advice}") for i, advice in enumerate(verdict.advice)]
    print_rows(console, lines, width=10, style="")
    console.print()


def _target_rows(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("model", _model(report.target)),
        ("size", _size(report.target)),
        *([("library", report.target.library)] if report.target.library else []),
        ("rewind", _rewind(report.rewind)),
    ]
    rows.append(("calls", _calls(report.calls)))
    if report.sample is not None:
        rows += [
            ("answers", _sample(report.sample)),
            ("plain", f"{report.sample.plain_tokens_per_s:.1f} tokens/s"),
        ]
    return rows


def _library_rows(report: Report) -> list[tuple[str, str]]:
    rows = [("verdict", f"measured with --backend {report.backend}")]
    return [*rows, ("", report.library_to_take)] if report.library_to_take else rows


def _lookup_rows(lookup: LookupReport) -> list[tuple[str, str]]:
    right = f"{lookup.accepted / lookup.drafted:.0%} of {lookup.drafted} tokens" if lookup.drafted else "none"
    return [
        ("looked up", f"{right} right" if lookup.drafted else "nothing was found to look up"),
        ("pays from", _break_even(lookup.break_even)),
        *_speedup_rows(lookup.speedups),
    ]


def _draft_rows(draft: DraftReport, report: Report) -> list[tuple[str, str]]:
    rows = [("model", _model(draft.model)), ("size", _size(draft.model))]
    rows.append(("tokenizer", _tokenizers(draft.tokenizers)))
    rows += [("", difference) for difference in draft.tokenizers.differences if not draft.tokenizers.usable]
    cost = f"it reads {draft.bytes_ratio:.2f} of the target's bytes for a token"
    if draft.step_ratio is not None and draft.calls is not None:
        cost = f"{_ms(draft.calls.call_s)}, {draft.step_ratio:.2f} of the target's; {cost}"
    rows.append(("step", cost))
    if draft.acceptance is None or draft.speedups is None:
        return rows
    rows += [("right", _acceptance(draft.acceptance)), ("", _positions(draft.acceptance))]
    rows.append(("pays from", _break_even(draft.break_even)))
    rows += _speedup_rows(draft.speedups)
    if draft.over_lookup is not None:
        rows.append(("", f"{as_text(draft.over_lookup)} automatic, over lookup alone"))
    if report.sample is not None and draft.answers < report.sample.answers:
        rows.append(("", f"on {draft.answers} of the {report.sample.answers} answers, for time"))
    return rows


def _speedup_rows(speedups: Speedups) -> list[tuple[str, str]]:
    rows = [
        ("expected", f"{as_text(speedups.auto)} automatic, over plain decoding"),
        ("", f"{as_text(speedups.best)} best setting on these prompts: {speedups.best_setting}"),
    ]
    if speedups.llama_cpp_default is not None:
        rows.append(("", f"{as_text(speedups.llama_cpp_default)} llama.cpp's default, 3 tokens"))
    rows.append(("", f"{as_text(speedups.bound)} in hindsight, with every choice right"))
    return rows


def _model(model: ModelFacts) -> str:
    experts = f", {model.experts_used} of {model.experts} experts a token" if model.experts else ""
    active = (
        f" ({_count(model.active_parameters)} active)" if model.active_parameters < model.parameters else ""
    )
    return (
        f"{model.architecture}, {_count(model.parameters)} parameters{active}{experts}, {model.quantization}"
    )


def _size(model: ModelFacts) -> str:
    memory = f"; {_bytes(model.memory_bytes)} of memory in use" if model.memory_bytes else ""
    return f"{_bytes(model.file_bytes)}, of which a token reads {_bytes(model.bytes_per_token)}{memory}"


def _rewind(rewind: Rewind) -> str:
    if rewind.kind == "none":
        return "no: its state is recurrent or hybrid, so rejected tokens cannot be taken back"
    how = "free" if rewind.kind == "free" else "as far as its sliding window reaches (--swa-full: always)"
    if rewind.call_s is None or rewind.rewound_call_s is None:
        return how
    return f"{how}: a call takes {_ms(rewind.call_s)}, after a rewind {_ms(rewind.rewound_call_s)}"


def _calls(calls: Calls) -> str:
    ratios = ", ".join(f"{n}: {ratio:.2f}x" for n, ratio in calls.ratios.items() if n > 1)
    return f"{_ms(calls.call_s)} over one token; over {ratios}"


def _sample(sample: Sample) -> str:
    names = ", ".join(f"{count} {name}" for name, count in sample.workloads.items())
    return f"{sample.answers} of up to 64 tokens in {sample.seconds:.0f} s: {names}"


def _tokenizers(found: Tokenizers) -> str:
    if found.identical:
        return f"the same {found.target_tokens:,} tokens"
    if found.reduced and not found.usable:
        return "reduced, for another target or damaged"
    if found.reduced:
        known = f"reduced: it knows {found.common_tokens:,} of the target's {found.target_tokens:,} tokens"
        return known if found.lost_ratio is None else f"{known}, {1 - found.lost_ratio:.1%} of these answers"
    agree = f"{found.common_tokens:,} tokens agree ({found.text_ratio:.1%} of the text tokens)"
    text = f"{agree}, {found.cut_ratio:.0%} of sample text is cut alike"
    if not found.lost_tokens:
        return f"{text}; nothing is lost"
    share = "" if found.lost_ratio is None else f", {found.lost_ratio:.1%} of these answers"
    return f"{text}; {found.lost_tokens:,} text tokens the draft cannot offer{share}"


def _acceptance(acceptance: Acceptance) -> str:
    rate = acceptance.rate
    share = f"{rate.value:.0%} of its most likely tokens ({rate.low:.0%} to {rate.high:.0%})"
    return f"{share}, {acceptance.positions} positions"


def _positions(acceptance: Acceptance) -> str:
    shares = " ".join("-" if share is None else f"{share:.0%}" for share in acceptance.by_position)
    return f"by place in the draft: {shares}"


def _break_even(found: Sequence[BreakEven]) -> str:
    parts = [
        f"{even.drafted_tokens}: {'never' if even.acceptance is None else f'{even.acceptance:.0%}'}"
        for even in found
    ]
    return f"acceptance by drafted tokens: {', '.join(parts)}"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.{2 if number < 10 * unit else 0}f}{name}"
    return str(number)


def _bytes(number: int) -> str:
    return (
        f"{number / 1e9:.2f} GB"
        if number >= 1e9
        else f"{number / 1e6:.0f} MB"
        if number >= 1e7
        else f"{number / 1e6:.1f} MB"
    )


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{max(0, 1 - math.floor(math.log10(max(milliseconds, 1e-3))))}f} ms"
