"""`outrider trim`: a draft with fewer tokens and faster weight types, and what that gained."""

from __future__ import annotations

from pathlib import Path

from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.quantizer import check_output
from outrider.cli.check import loader, verdict_rows
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import write_json
from outrider.cli.plans import hub_options
from outrider.cli.screen import Rows, Screen
from outrider.cli.settings import TrimSettings
from outrider.core.errors import SettingError
from outrider.core.numbers import gigabytes, milliseconds, percent, speedup
from outrider.lab.check import as_text
from outrider.lab.models import ModelFile, find_model
from outrider.lab.trim import Report, TrimRequest, trim
from outrider.lab.workloads import load_workload
from outrider.models.reference import local_shards

_SHOWN_SIZES = 7


def trim_draft(settings: TrimSettings) -> int:
    """Trim, and show; returns the exit status: 0 if the draft pays, else 1."""
    errors = Screen(stderr=True)
    asked = _asked(settings)
    show_log(settings.verbose)
    with LoadInterrupt(), errors.progress() as progress:
        report = trim(asked, progress)
    errors.note(*report.notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_trimmed(Screen(), report)
    return 0 if report.after.verdict.pays else 1


def _asked(settings: TrimSettings) -> TrimRequest:
    hub = hub_options(settings)
    target, small = (find_model(name, hub=hub) for name in (settings.target, settings.small))
    out = settings.out or _usual_place(settings, small)
    check_output(small.path, out, force=settings.force)
    if out.exists() and any(out.samefile(part) for part in local_shards(target.path)):
        raise SettingError(str(out), "it is the target itself", "Name another file (-o).")
    return TrimRequest(
        small=small,
        target=target,
        out=out,
        loader=loader(settings),
        vocabulary=settings.vocabulary,
        workloads=tuple(map(load_workload, dict.fromkeys(settings.prompts))),
        seconds=settings.seconds,
        keep_types=settings.keep_types,
    )


def _usual_place(settings: TrimSettings, small: ModelFile) -> Path:
    name = f"{small.path.stem}.trimmed.gguf"
    is_local = Path(settings.small).expanduser().exists()
    return small.path.with_name(name) if is_local else Path(name)


def print_trimmed(console: Screen, report: Report) -> None:
    """What was done, before and after, and whether it pays."""
    tokens = [
        f"{choice.tokens:,}: {percent(choice.lost_ratio, 1)} of the answers lost, step about "
        f"{milliseconds(choice.step_s)}, {choice.speedup:.2f}x"
        for choice in report.sizes[:: max(1, len(report.sizes) // _SHOWN_SIZES)]
    ]
    types = [
        f"{tried.model.quantization}: {gigabytes(tried.model.file_bytes)}, step {milliseconds(tried.step_s)}"
        f", agreement {percent(tried.agreement, 1)}, {speedup(tried.alone)}"
        for tried in report.types
    ]
    made: Rows = [
        ("  made of", report.before.model.name),
        ("  keeps", f"{report.known_tokens:,} of {report.source_tokens:,} tokens"),
        ("  counted in", report.counted),
        ("  tokens", tokens),
        ("  types", types),
    ]
    console.say(report.path, "bold")
    console.rows(made, width=10, style="")
    console.print()
    before, after = (
        (
            gigabytes(draft.model.file_bytes),
            milliseconds(draft.step_s),
            f"{draft.step_ratio or 0:.2f}",
            percent(draft.agreement, 1),
            *("" if speed is None else as_text(speed) for speed in (draft.over_plain, draft.alone)),
        )
        for draft in (report.before, report.after)
    )
    names = ("file", "step", "of the target's", "agreement", "speed, with lookup", "without lookup")
    console.table(("", "before", "after"), zip(names, before, after, strict=True), left=("",))
    console.print()
    verdict = report.after.verdict
    use = f"outrider run -m {report.target.path} -md {report.path}" if verdict.pays else ""
    console.rows([*verdict_rows(verdict), ("use it", use)], width=10, style="")
    console.say(f"took {report.seconds:.0f} s", "dim")
