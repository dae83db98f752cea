"""`outrider check`: do these models fit together, and would the draft, or lookup alone, pay here?"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from rich.text import Text

from outrider.backends.gguf.log import show_log
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.load_options import load_options
from outrider.cli.output import readable, write_json
from outrider.cli.plans import check_context, hub_options
from outrider.cli.report import break_even_line
from outrider.cli.screen import Rows, Screen
from outrider.cli.settings import CheckSettings
from outrider.core.contracts import RewindKind
from outrider.core.errors import SettingError
from outrider.core.invalid import invalid
from outrider.core.numbers import gigabytes, milliseconds, short_count
from outrider.lab.check import (
    Acceptance,
    Calls,
    CheckRequest,
    DraftReport,
    DraftVerdict,
    LookupReport,
    Outcome,
    Report,
    Sample,
    Tokenizers,
    as_text,
)
from outrider.lab.check import check as check_pair
from outrider.lab.models import ModelFacts, ModelFile, find_model, find_models, own_head
from outrider.lab.predict import Speedups
from outrider.lab.prompts import Workload
from outrider.lab.workloads.reading import BUILT_IN, WorkloadSpec, load_workload
from outrider.models.embedded import embedded_draft
from outrider.models.finding import find_drafts
from outrider.models.gguf import HEADS
from outrider.models.hub import HubOptions
from outrider.models.reference import DEFAULT, DEFAULT_DRAFT
from outrider.session.drafts import FoundFile, listed, of_draft, why_no_head


def check(settings: CheckSettings) -> int:
    """Check, and show; returns the exit status: 0 if something pays, else 1."""
    errors = Screen(stderr=True)
    asking = _asking(settings)
    show_log(settings.verbose)
    with LoadInterrupt(), errors.progress() as progress:
        report = check_pair(asking, progress)
    errors.note(*report.notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_check(Screen(), report)
    return 0 if report.pays else 1


def _asking(settings: CheckSettings) -> CheckRequest:
    """The request. Whatever can be refused is refused here, before anyone waits."""
    check_context("-c", settings.ctx_size)
    workloads = tuple(map(workload_of, dict.fromkeys(settings.prompts or BUILT_IN)))
    hub = hub_options(settings)
    target = model_of(settings.target, hub)
    references, found = list(settings.drafts), None
    if not references and settings.target == DEFAULT:
        references = [DEFAULT_DRAFT] if embedded_draft() is not None else []
    elif not references:
        references, found = _drafts_here(settings.target, target, hub)
    options = load_options(settings)
    heads = [head] if options.heads and (head := own_head(target)) else []
    return CheckRequest(
        target=target,
        found=found,
        drafts=(*find_models(references, hub=hub, taken=[*heads, target]), *heads),
        workloads=workloads,
        seconds=settings.seconds,
        context_length=settings.ctx_size,
        options=options,
        draft_options=load_options(settings, draft=True),
    )


def _drafts_here(
    reference: str, target: ModelFile, hub: HubOptions
) -> tuple[list[str], tuple[FoundFile, ...]]:
    """The drafts to check if none is named, and all that were found."""
    found = find_drafts(target.card, hub, reference)
    heads = [head for head in found.heads if not why_no_head(head.card, target.card)]
    drafts = [of_draft(target.card, draft) for draft in (*heads, *found.drafts)]
    here = {file.reference for file in drafts}
    others = [file for file in listed(target.card, found) if file.reference not in here]
    return [file.reference for file in drafts[:_MAX_FOUND]], (*drafts, *others)


def model_of(reference: str, hub: HubOptions) -> ModelFile:
    """The one model that a reference means. Raises ModelFileError."""
    return find_model(
        reference,
        hub=hub,
        purpose=", and one target is checked at a time",
        way_out="; `outrider bench` compares targets.",
    )


def workload_of(name: str) -> Workload:
    """The prompts that --prompts names. Raises SettingError and PromptError."""
    try:
        spec = WorkloadSpec.model_validate(name)
    except ValidationError as error:
        way_out = f"Name a JSON-lines file, or one of {', '.join(BUILT_IN)}."
        raise SettingError(f"--prompts {name}", invalid(error).reason, way_out) from None
    return load_workload(spec)


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
    """The target, lookup alone, every draft, and the verdict over all of them."""
    _block(console, f"target {report.target.name}", _target_rows(report))
    if report.found:
        checked = {draft.model.path for draft in report.drafts}
        rows = [("measured" if file.reference in checked else "-", str(file)) for file in report.found]
        _block(console, "drafts found", rows)
    print_judged(console, report)
    if len(report.drafts) != 1 and (report.drafts or report.lookup is None):
        _block(console, "verdict", [("", report.verdict)])
    console.say(f"took {report.seconds:.0f} s on {report.machine}", "dim")


def print_judged(console: Screen, report: Report) -> None:
    """Lookup alone, and every draft."""
    if report.lookup is not None:
        _block(console, "lookup alone", _lookup_rows(report.lookup), report.lookup.verdict)
    for draft in report.drafts:
        _block(console, f"draft {draft.model.name}", _draft_rows(draft, report), draft.verdict)


def _block(console: Screen, title: str, rows: Rows, verdict: DraftVerdict | None = None) -> None:
    console.print(Text(readable(title), style="bold", overflow="fold"))
    if verdict is not None:
        sentence = Text(readable(verdict.sentence), _STYLES[verdict.outcome])
        rows = [*rows, ("verdict", sentence), ("try", [f"- {advice}" for advice in verdict.advice])]
    console.rows([(f"  {name}", said) for name, said in rows], width=10, style="")
    console.print()


def _target_rows(report: Report) -> Rows:
    sample = report.sample
    return [
        ("model", _model(report.target)),
        ("size", _size(report.target)),
        ("library", report.target.library),
        ("rewind", _REWINDS[report.rewind]),
        ("calls", _calls(report.calls)),
        ("answers", _sample(sample) if sample else None),
        ("plain", f"{sample.plain_tokens_per_s:.1f} tokens/s" if sample else None),
    ]


def _lookup_rows(lookup: LookupReport) -> Rows:
    found = "nothing was found to look up"
    if lookup.drafted:
        found = f"{lookup.accepted / lookup.drafted:.0%} of {lookup.drafted} tokens right"
    return [
        ("looked up", found),
        ("pays from", break_even_line(lookup.break_even)),
        ("expected", _speedups(lookup.speedups)),
    ]


def _draft_rows(draft: DraftReport, report: Report) -> Rows:
    model, size = _model(draft.model), _size(draft.model)
    if draft.kind != "model":
        model = f"{HEADS[draft.kind]} that draft from the target's hidden states"
        reads = f"{gigabytes(draft.model.bytes_per_token)}, the output layer included"
        size = f"{gigabytes(draft.model.file_bytes)} beside the target; a token reads {reads}"
    tokenizers = draft.tokenizers
    differences = () if tokenizers.why_not is None else tokenizers.report.differences
    cost = f"it reads {draft.bytes_ratio:.2f} of the target's bytes for a token"
    if draft.step_ratio is not None and draft.calls is not None:
        cost = f"{milliseconds(draft.calls.call_s)}, {draft.step_ratio:.2f} of the target's; {cost}"
    rows: Rows = [
        ("model", model),
        ("size", size),
        ("tokenizer", [_tokenizers(tokenizers), *differences]),
        ("step", cost),
    ]
    if draft.acceptance is None or draft.speedups is None:
        return rows
    expected = _speedups(draft.speedups)
    if draft.over_lookup is not None:
        expected.append(f"{as_text(draft.over_lookup)} automatic, over lookup alone")
    if report.sample is not None and draft.answers < report.sample.answers:
        expected.append(f"on {draft.answers} of the {report.sample.answers} answers, for time")
    return [
        *rows,
        ("right", [_acceptance(draft.acceptance), _positions(draft.acceptance)]),
        ("pays from", break_even_line(draft.break_even)),
        ("expected", expected),
    ]


def _speedups(speedups: Speedups) -> list[str]:
    default = speedups.llama_cpp_default
    return [
        f"{as_text(speedups.auto)} automatic, over plain decoding",
        f"{as_text(speedups.best)} best setting on these prompts: {speedups.best_setting}",
        f"{as_text(default)} llama.cpp's default, 3 tokens" if default else "",
    ]


def _model(model: ModelFacts) -> str:
    experts = f", {model.experts_used} of {model.experts} experts a token" if model.experts else ""
    parameters = f"{short_count(model.parameters)} parameters"
    if model.active_parameters < model.parameters:
        parameters += f" ({short_count(model.active_parameters)} active)"
    return f"{model.architecture}, {parameters}{experts}, {model.quantization}"


def _size(model: ModelFacts) -> str:
    memory = f"; {gigabytes(model.memory_bytes)} of memory in use" if model.memory_bytes else ""
    return f"{gigabytes(model.file_bytes)}, of which a token reads {gigabytes(model.bytes_per_token)}{memory}"


def _calls(calls: Calls) -> str:
    ratios = ", ".join(f"{n}: {ratio:.2f}x" for n, ratio in calls.ratios.items() if n > 1)
    return f"{milliseconds(calls.call_s)} over one token; over {ratios}"


def _sample(sample: Sample) -> str:
    names = ", ".join(f"{number} {name}" for name, number in sample.workloads.items())
    return f"{sample.answers} of up to 64 tokens in {sample.seconds:.0f} s: {names}"


def _tokenizers(found: Tokenizers) -> str:
    report = found.report
    if found.identical:
        return f"the same {report.target_tokens:,} tokens"
    lost = "" if found.lost_ratio is None else f", {found.lost_ratio:.1%} of these answers"
    if report.is_reduced:
        if found.why_not is not None:
            return "reduced, for another target or damaged"
        known = f"reduced: it knows {report.common_tokens:,} of the target's {report.target_tokens:,} tokens"
        return known if found.lost_ratio is None else f"{known}, {1 - found.lost_ratio:.1%} of these answers"
    agree = f"{report.common_tokens:,} tokens agree ({report.text_ratio:.1%} of the text tokens)"
    text = f"{agree}, {report.cuts.ratio:.0%} of sample text is cut alike"
    if not found.lost_tokens:
        return f"{text}; nothing is lost"
    return f"{text}; {found.lost_tokens:,} text tokens the draft cannot offer{lost}"


def _acceptance(acceptance: Acceptance) -> str:
    rate = acceptance.rate
    share = f"{rate.value:.0%} of its most likely tokens ({rate.low:.0%} to {rate.high:.0%})"
    return f"{share}, {acceptance.positions} positions"


def _positions(acceptance: Acceptance) -> str:
    shares = " ".join("-" if share is None else f"{share:.0%}" for share in acceptance.by_position)
    return f"by place in the draft: {shares}"
