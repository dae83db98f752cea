"""`outrider trim`: a draft with fewer tokens, of the type that suits, and what that gained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import show_log
from outrider.backends.gguf.quantizer import check_output
from outrider.cli.check import model_of, status, workload_of
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.load_options import load_options
from outrider.cli.output import INTERRUPTED, print_notes, print_rows, print_table, readable, write_json
from outrider.cli.plans import check_context, hub_options
from outrider.cli.settings import TrimSettings
from outrider.core.errors import SettingError
from outrider.core.numbers import gigabytes, milliseconds, percent
from outrider.lab.models import ModelFile
from outrider.lab.trim.report import Report, agreement_of, step_s_of
from outrider.lab.trim.trim import TrimRequest, trim
from outrider.lab.verdict import as_text
from outrider.models.reference import local_shards

_SHOWN_SIZES = 7


def trim_draft(settings: TrimSettings) -> int:
    """Trim, and show; returns the exit status: 0 where the draft is of use, else 1."""
    errors = Console(stderr=True, highlight=False)
    asked = _asked(settings)
    show_log(settings.verbose)
    report: Report | None = None
    try:
        with LoadInterrupt(), status(errors) as progress:
            report = trim(asked, progress)
    except KeyboardInterrupt:
        what = "nothing was written" if report is None else f"{asked.out} is written"
        errors.print(Text(readable(f"interrupted: {what}")))
        return INTERRUPTED
    print_notes(errors, report.notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_trimmed(Console(highlight=False, emoji=False, markup=False), report)
    return 0 if report.after.verdict.pays else 1


def _asked(settings: TrimSettings) -> TrimRequest:
    """What is to be done. All that can be refused is refused here, before anyone waits."""
    check_context("-c", settings.ctx_size)
    hub = hub_options(settings)
    target, small = model_of(settings.target, hub), model_of(settings.small, hub)
    out = settings.out or _usual_place(settings, small)
    check_output(small.path, out, force=settings.force)
    if out.exists() and any(out.samefile(part) for part in local_shards(target.path)):
        raise SettingError(str(out), "it is the target itself", "Name another file (-o).")
    return TrimRequest(
        small=small,
        target=target,
        out=out,
        vocabulary=settings.vocabulary,
        workloads=tuple(map(workload_of, dict.fromkeys(settings.prompts))),
        corpora=tuple(settings.corpus),
        seconds=settings.seconds,
        keep_types=settings.keep_types,
        context_length=settings.ctx_size,
        options=load_options(settings),
        draft_options=load_options(settings, draft=True),
    )


def _usual_place(settings: TrimSettings, small: ModelFile) -> Path:
    name = f"{small.path.stem}.trimmed.gguf"
    is_local = Path(settings.small).expanduser().exists()
    return small.path.with_name(name) if is_local else Path(name)


# What came of it, in 80 columns: what was done, then before and after, then whether it is of use.


def print_trimmed(console: Console, report: Report) -> None:
    """The report as people read it."""
    console.print(Text(readable(report.path), style="bold"))
    print_rows(console, [(f"  {name}", line) for name, line in _made(report)], width=10, style="")
    console.print()
    head = ("", "before", "after", "")
    print_table(console, head, _compared(report), left=("",))
    console.print()
    verdict = report.after.verdict
    style = "bold green" if verdict.pays else "bold red"
    rows = [("verdict", Text(readable(verdict.sentence), style))]
    rows += [("" if i else "try", Text(readable(f"- {line}"))) for i, line in enumerate(verdict.advice)]
    if verdict.pays:
        rows.append(("use it", Text(readable(f"outrider run -m {report.target.path} -md {report.path}"))))
    print_rows(console, rows, width=10, style="")
    console.print(Text(f"took {report.seconds:.0f} s", style="dim"))


def _made(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("made of", report.source.name),
        ("keeps", f"{report.known_tokens:,} of {report.source_tokens:,} tokens"),
    ]
    rows += [("" if i else "counted in", origin) for i, origin in enumerate(report.counted)]
    step = max(1, len(report.sizes) // _SHOWN_SIZES)
    rows += [
        (
            "" if i else "tokens",
            f"{choice.tokens:,}: {percent(choice.lost_ratio, 1)} of the answers lost, step about "
            f"{milliseconds(choice.step_s)}, {choice.speedup:.2f}x",
        )
        for i, choice in enumerate(report.sizes[::step])
    ]
    rows += [
        (
            "" if i else "types",
            f"{tried.quantization}: {gigabytes(tried.file_bytes)}, step {milliseconds(tried.step_s)}, "
            f"agreement {percent(tried.agreement.value, 1)}, {tried.speedup:.2f}x",
        )
        for i, tried in enumerate(report.types)
    ]
    return rows


def _compared(report: Report) -> list[tuple[str, str, str, str]]:
    drafts = report.before, report.after
    rows: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("file", [report.source.file_bytes, report.file_bytes], lambda size: gigabytes(int(size))),
        ("step", list(map(step_s_of, drafts)), milliseconds),
        ("of the target's", [draft.step_ratio or 0.0 for draft in drafts], lambda ratio: f"{ratio:.2f}"),
        ("agreement", [agreement_of(draft).value for draft in drafts], lambda share: percent(share, 1)),
    ]
    speeds = [
        ("speed, with lookup", [draft.over_plain for draft in drafts]),
        ("without lookup", [draft.alone for draft in drafts]),
    ]
    found = []
    for name, (before, after), shown in rows:
        found.append((name, shown(before), shown(after), f"{after / max(before, 1e-9):.2f}x"))
    for name, both in speeds:
        first, second = ("" if speed is None else as_text(speed) for speed in both)
        found.append((name, first, second, ""))
    return found
