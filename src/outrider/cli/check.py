"""`outrider check`: do these models line up, and would the draft, or lookup alone, pay here?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import LoadOptions, candidates, show_log
from outrider.check import check as check_pair
from outrider.check.check import CheckRequest
from outrider.cli.check_report import print_check
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import readable, write_json
from outrider.cli.plans import check_context, hub_options, load_options
from outrider.cli.settings import CheckSettings
from outrider.cli.tables import print_notes
from outrider.core.errors import ModelFileError, SettingError
from outrider.lab.models import DEFAULT, ModelFile, find_models, usable_backends
from outrider.lab.opened import Progress
from outrider.lab.prompts import Workload
from outrider.lab.workloads.reading import load_workload
from outrider.lab.workloads.spec import BUILT_IN, WorkloadSpec
from outrider.models import DEFAULT_DRAFT, embedded_draft
from outrider.models.hub import HubOptions


def check(settings: CheckSettings) -> int:
    """Check, and show; returns the exit status: 0 where something pays, else 1."""
    errors = Console(stderr=True, highlight=False)
    backend = _backend(settings.backend, errors)
    asking = _asking(settings.model_copy(update={"backend": backend}))
    show_log(settings.verbose)
    with LoadInterrupt(), _status(errors) as progress:
        report = check_pair(asking, progress)
    print_notes(errors, report.notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_check(Console(highlight=False, emoji=False, markup=False), report)
    return 0 if report.pays else 1


def _asking(settings: CheckSettings) -> CheckRequest:
    """What is to be done. All that can be refused is refused here, before anyone waits."""
    check_context("-c", settings.ctx_size)
    workloads = tuple(map(_workload, dict.fromkeys(settings.prompts or BUILT_IN)))
    hub = hub_options(settings)
    target = _only(settings.target, hub)
    return CheckRequest(
        target=target,
        drafts=tuple(find_models(settings.drafts or _own_draft(settings.target), hub=hub, taken=[target])),
        workloads=workloads,
        seconds=settings.seconds,
        context_length=settings.ctx_size,
        options=load_options(settings),
        draft_options=load_options(settings, draft=True),
    )


def _backend(asked: str, errors: Console) -> str:
    """The backend to load with: of several the faster one, which a trial finds. One that is not here is named
    in a line. Raises SettingError, and BackendError where none is here."""
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    if len(names) == 1:
        return names[0]
    if "auto" in names:
        raise SettingError(f"--backend {asked}", "auto takes one of them by itself", "Leave it out.")
    usable, refused = usable_backends(names, lambda name: _open(LoadOptions(backend=name)))
    for error in refused.values():
        print_notes(errors, [f"{error.what}: {error.why}"])
    return "auto" if len(usable) > 1 else usable[0]


def _open(options: LoadOptions) -> None:
    next(candidates(options))


def _own_draft(target: str) -> list[str]:
    """The draft to check where none is named: the embedded default has one of its own."""
    return [DEFAULT_DRAFT] if target == DEFAULT and embedded_draft() is not None else []


def _only(reference: str, hub: HubOptions) -> ModelFile:
    found = find_models([reference], hub=hub)
    if len(found) > 1:
        why = f"{len(found)} files match, and one target is checked at a time"
        raise ModelFileError(reference, why, "Name one of them; `outrider bench` compares targets.")
    return found[0]


def _workload(name: str) -> Workload:
    try:
        spec = WorkloadSpec.model_validate(name)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        way_out = f"Name a JSON-lines file, or one of {', '.join(BUILT_IN)}."
        raise SettingError(f"--prompts {name}", reason, way_out) from None
    return load_workload(spec)


@contextmanager
def _status(errors: Console) -> Iterator[Progress]:
    """One line on standard error where that is a terminal, for what is being done; gone at the end."""
    with errors.status("reading") as status:

        def progress(what: str, part: float | None) -> None:
            status.update(Text(readable(what if part is None else f"{what}: {part:.0%}")))

        yield progress
