"""`outrider check`: do these models fit together, and would the draft, or lookup alone, pay here?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.text import Text

from outrider.backends.gguf.log import show_log
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import write_json
from outrider.cli.plans import hub_options, load_options
from outrider.cli.screen import Rows, Screen
from outrider.cli.settings import CheckSettings, TrimSettings
from outrider.core.contracts import RewindKind
from outrider.core.numbers import (
    NOTHING,
    Interval,
    bounds,
    gigabytes,
    milliseconds,
    percent,
    readable,
    short_count,
    speedup,
)
from outrider.lab.check import DraftReport, Outcome, Report, Verdict
from outrider.lab.check import check as check_pair
from outrider.lab.loaded import Loader
from outrider.lab.models import ModelFacts, find_model, find_models, own_head
from outrider.lab.rows import PairRow
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.models.embedded import embedded_draft
from outrider.models.finding import find_drafts
from outrider.models.gguf import HEADS
from outrider.models.reference import DEFAULT, DEFAULT_DRAFT


def check(settings: CheckSettings) -> int:
    """Check, and show; returns the exit status: 0 if something pays, else 1."""
    errors = Screen(stderr=True)
    workloads = [load_workload(name) for name in dict.fromkeys(settings.prompts or BUILT_IN)]
    hub = hub_options(settings)
    target = find_model(settings.target, hub=hub)
    references, found = list(settings.drafts), None
    if not references and settings.target == DEFAULT:
        references = [DEFAULT_DRAFT] if embedded_draft() is not None else []
    elif not references:
        here = find_drafts(target.card, hub, settings.target)
        references, found = [str(card.path) for card in here.drafts[:_MAX_FOUND]], here.files
    heads = [head] if settings.mtp and (head := own_head(target)) else []
    drafts = [*find_models(references, hub=hub, taken=[*heads, target]), *heads]
    show_log(settings.verbose)
    with LoadInterrupt(), errors.progress() as progress:
        report = check_pair(
            target, drafts, workloads, loader(settings), progress, seconds=settings.seconds, found=found
        )
    errors.note(*report.notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_check(Screen(), report)
    return 0 if report.pays else 1


def loader(settings: CheckSettings | TrimSettings) -> Loader:
    """What loads the models as the settings say."""
    options = load_options(settings), load_options(settings, draft=True)
    return Loader(*options, hub_options(settings), settings.ctx_size)


# A check as people read it.

_MAX_FOUND = 3
"""drafts that are checked if none is named: each takes a minute"""

_REWINDS: Mapping[RewindKind, str] = {
    "none": "no: its state is recurrent or hybrid, so rejected tokens cannot be taken back",
    "free": "free",
    "window": "as far as its sliding window reaches (--swa-full: always)",
    "checkpoints": "by checkpoints of its recurrent state, accepted tokens of the call evaluated again",
}
_STYLES: dict[Outcome, str] = {
    "pays": "bold green",
    "undecided": "bold yellow",
    "does not pay": "bold red",
    "cannot work": "bold red",
}


def print_check(console: Screen, report: Report) -> None:
    """The target, lookup alone and every draft in a table and in sentences, and the verdict over all."""
    one_s = report.calls_s[1]
    ratios = ", ".join(f"{n}: {call_s / one_s:.2f}x" for n, call_s in report.calls_s.items() if n > 1)
    names = ", ".join(f"{number} {name}" for name, number in report.answers.items())
    plain = report.plain_tokens_per_s
    checked = {draft.model.path for draft in report.drafts}
    found = [f"{'measured' if f.reference in checked else '-'}  {f}" for f in report.found]
    rows: Rows = [
        ("model", _model(report.target)),
        ("library", report.library),
        ("rewind", _REWINDS[report.rewind]),
        ("calls", f"{milliseconds(one_s)} over one token; over {ratios}"),
        ("answers", f"{names}; plain decoding: {plain:.1f} tokens/s" if plain else None),
        ("drafts", found),
    ]
    console.say(f"target {report.target.name}", "bold")
    console.rows([(f"  {name}", said) for name, said in rows], width=10, style="")
    console.print()
    print_judged(console, report)
    if len(report.drafts) != 1 and (report.drafts or report.lookup is None):
        console.say(f"verdict: {report.verdict}", "bold")
    console.say(f"took {report.seconds:.0f} s on {report.machine}", "dim")


def print_judged(console: Screen, report: Report) -> None:
    """Lookup alone, and every draft: what the automatic choice gains with it, and what to make of that."""
    rows = []
    if (lookup := report.lookup) is not None:
        right = percent(lookup.accepted / lookup.drafted) if lookup.drafted else NOTHING
        gain = speedup(lookup.over_plain), _bounds(lookup.over_plain)
        rows.append(("lookup alone", right, NOTHING, *gain, NOTHING, lookup.verdict.outcome))
    for draft in report.drafts:
        right = percent(draft.agreement)
        step = NOTHING if draft.step_ratio is None else f"{draft.step_ratio:.2f}"
        gains = speedup(draft.over_plain), _bounds(draft.over_plain), speedup(draft.over_lookup)
        rows.append((draft.model.name, right, step, *gains, draft.verdict.outcome))
    if rows:
        head = ("draft", "right", "step", "over plain", "95 %", "over lookup", "verdict")
        console.table(head, rows, left=("draft",))
        console.print()
    if report.lookup is not None:
        _print_verdict(console, "lookup alone", [], report.lookup.verdict)
    for draft in report.drafts:
        _print_verdict(console, f"draft {draft.model.name}", _about(draft, report), draft.verdict)


def _print_verdict(console: Screen, title: str, about: Rows, verdict: Verdict) -> None:
    console.say(title, "bold")
    rows = [*about, *verdict_rows(verdict)]
    console.rows([(f"  {name}", said) for name, said in rows], width=10, style="")
    console.print()


def verdict_rows(verdict: Verdict) -> Rows:
    """The sentence, and what to try instead."""
    sentence = Text(readable(verdict.sentence), _STYLES[verdict.outcome])
    return [("verdict", sentence), ("try", [f"- {advice}" for advice in verdict.advice])]


def _about(draft: DraftReport, report: Report) -> Rows:
    model = _model(draft.model)
    if draft.kind != "model":
        size = f"{gigabytes(draft.model.file_bytes)} beside the target"
        model = f"{HEADS[draft.kind]} that draft from the target's hidden states, {size}"
    answers, total = draft.answers, sum(report.answers.values())
    replayed = f"{draft.positions} positions of {answers} of the {total} answers" if answers else None
    reads = f"{draft.bytes_ratio:.2f} of the target's bytes for a token"
    return [
        ("model", model),
        ("tokenizer", None if draft.pair is None else _tokenizer(draft.pair)),
        ("step", f"{milliseconds(draft.step_s)}; it reads {reads}" if draft.step_s else f"it reads {reads}"),
        ("replayed", replayed),
    ]


def _bounds(interval: Interval | None) -> str:
    if interval is not None and not math.isfinite(interval.high):
        return "one answer"
    return bounds(interval).replace(" to ", "–")


def _model(model: ModelFacts) -> str:
    experts = f", {model.experts_used} of {model.experts} experts a token" if model.experts else ""
    parameters = f"{short_count(model.parameters)} parameters"
    if model.active_parameters < model.parameters:
        parameters += f" ({short_count(model.active_parameters)} active)"
    size = f"{gigabytes(model.file_bytes)}, of which a token reads {gigabytes(model.bytes_per_token)}"
    return f"{model.architecture}, {parameters}{experts}, {model.quantization}, {size}"


def _tokenizer(pair: PairRow) -> str:
    if pair.identical:
        return f"the same {pair.common_tokens:,} tokens"
    if pair.reduced_from is not None:
        if not pair.usable:
            return "reduced, for another target or damaged"
        return f"reduced: it knows {pair.common_tokens:,} of the target's {pair.reduced_from:,} tokens"
    agree = f"{pair.common_tokens:,} tokens agree ({pair.text_ratio:.1%} of the text tokens)"
    return f"{agree}, {pair.cut_ratio:.0%} of sample text is cut alike"
