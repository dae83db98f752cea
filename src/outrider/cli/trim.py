"""`outrider trim`: a draft with fewer tokens, of the type that suits, and what that gained."""

from __future__ import annotations

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
from outrider.lab.models import ModelFile
from outrider.lab.numbers import gigabytes, milliseconds, percent
from outrider.lab.statistics import Interval
from outrider.lab.trim.report import Measured, Report
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
    return 0 if report.is_useful else 1


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
        recordings=tuple(settings.recordings),
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
    style = "bold green" if report.is_useful else "bold red"
    rows = [("verdict", Text(readable(report.verdict), style))]
    rows += [("" if i else "try", Text(readable(f"- {line}"))) for i, line in enumerate(report.advice)]
    if report.is_useful:
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
    before, after = report.before, report.after
    sizes = report.source.file_bytes, report.file_bytes

    def speed(measured: Measured, name: str) -> str:
        value: Interval = getattr(measured, name)
        return as_text(value)

    return [
        ("file", gigabytes(sizes[0]), gigabytes(sizes[1]), f"{sizes[1] / sizes[0]:.2f}x"),
        ("step", milliseconds(before.step_s), milliseconds(after.step_s), f"{report.step_ratio:.2f}x"),
        ("of the target's", _share(before), _share(after), ""),
        (
            "agreement",
            percent(before.agreement.value, 1),
            percent(after.agreement.value, 1),
            f"{report.agreement_ratio:.2f}x",
        ),
        ("speed, with lookup", speed(before, "with_lookup"), speed(after, "with_lookup"), ""),
        ("without lookup", speed(before, "without_lookup"), speed(after, "without_lookup"), ""),
        ("lookup alone", speed(before, "lookup_alone"), speed(after, "lookup_alone"), ""),
    ]


def _share(measured: Measured) -> str:
    ratio = measured.judged.step_ratio
    return "" if ratio is None else f"{ratio:.2f}"
