"""`outrider plan`: what a pair would do on hardware that is not here, and what another engine starts with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from outrider.cli.output import bars, print_notes, write, write_json
from outrider.cli.plan_report import print_known, print_observed, print_plan
from outrider.cli.plan_settings import PlanSettings
from outrider.core.errors import SettingError
from outrider.lab.plan.acceptance import ALL, of_workload, read_acceptance, source
from outrider.lab.plan.calls import (
    Curve,
    Machine,
    PlannedCurve,
    machine_of,
    memory_bytes,
    model_error,
    read_curves,
)
from outrider.lab.plan.catalogue import Catalogue, catalogue
from outrider.lab.plan.exports import ENGINES
from outrider.lab.plan.metrics import Observed, advice, read_metrics
from outrider.lab.plan.plan import MAX_BATCH, Asked, Model, make_plan
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of

_LIST = "--list shows what is known."


def plan(settings: PlanSettings) -> int:
    """Plan, and show; returns the exit status."""
    known = catalogue(settings.hardware)
    console = Console(highlight=False, emoji=False, markup=False)
    if settings.list_known:
        print_known(console, known)
        return 0
    if settings.export is not None and settings.export not in ENGINES:
        way_out = f"Choose one of {', '.join(ENGINES)}."
        raise SettingError("--export", f"{settings.export!r} is no engine", way_out)
    observed = None if settings.metrics is None else read_metrics(settings.metrics)
    if observed is not None and settings.target is None and settings.costs is None:
        advised = ["name --target, --draft and --on, and the plan says what it expected and what to change"]
        if settings.print_json:
            write_json({"observed": observed.as_json(advised)})
        else:
            print_observed(console, observed, advised)
        return 0
    _plan_and_show(settings, known, console, observed)
    return 0


def _plan_and_show(
    settings: PlanSettings, known: Catalogue, console: Console, observed: Observed | None
) -> None:
    advised: list[str] = []
    asked, about, notices = _asked(settings, known)
    with _recordings(settings, asked, about) as (asked, about):
        made = make_plan(asked)
        data: dict[str, Any] = made.as_json() | {"acceptance": about, "model_error": model_error()}
        if observed is not None:
            advised = advice(observed, asked)
            data["observed"] = observed.as_json(advised)
    data["notices"] = notices
    if settings.export is not None:
        started = ENGINES[settings.export](made)
        write_json(started.as_json()) if settings.print_json else write(started.script)
    elif settings.print_json:
        write_json(data)
    else:
        print_notes(Console(stderr=True, highlight=False), notices)
        print_plan(console, made, about)
        if observed is not None:
            print_observed(console, observed, advised)


def _asked(settings: PlanSettings, known: Catalogue) -> tuple[Asked, str, list[str]]:
    """What is planned, what its acceptance rests on, and what to know of it."""
    machine = None if settings.on is None else machine_of(settings.on, known)
    if settings.costs is None and (machine is None or settings.target is None):
        what, flag = ("hardware", "--on") if machine is None else ("a target", "--target")
        raise SettingError("plan", f"it needs {what}", f"Name it with {flag}; {_LIST}")
    batches = _batches(settings.batch)
    shapes, notices = _fitting(settings, known, machine, batches[0])
    curves: list[Curve | None] = [None, None]
    if settings.costs is not None:
        curves = list(read_curves(settings.costs, notices))
        shapes += [None] if len(shapes) == 1 and curves[1] is not None else []
    tables = dict(read_acceptance(text) for text in settings.acceptance)
    bundled = {} if tables else of_workload(settings.workload or ALL)
    models = []
    for i, shape in enumerate(shapes):
        name = shape.name if shape is not None else ("draft" if i else "target")
        curve = (curves[i] if i < len(curves) else None) or _planned(name, shape, machine, is_target=not i)
        acceptance = tables.get(name) or tables.get("") or bundled.get("draft")
        models.append(Model(name, curve, shape, acceptance if i else None))
    names = [model.name for model in models[1:]]
    if unused := [name for name in tables if name not in ("", "lookup", *names)]:
        raise SettingError(
            f"--acceptance {unused[0]}=", "there is no such draft", "Name one as --draft does."
        )
    # A plain value is of the draft models; of lookup where that is the only drafter that there is.
    lookup = tables.get("lookup") or bundled.get("lookup") or (None if names else tables.get(""))
    about = "as given" if tables else f"{settings.workload or ALL}: {source()}"
    return Asked(models[0], models[1:], batches, settings.context, machine, lookup), about, notices


def _planned(name: str, shape: ModelShape | None, machine: Machine | None, *, is_target: bool) -> Curve:
    if shape is None or machine is None:
        raise SettingError(
            name, "its calls were not measured, and no hardware is named", f"Add --on; {_LIST}"
        )
    if is_target or shape.is_head or machine.count == 1:
        return PlannedCurve(shape, (machine,), is_target=is_target)
    return PlannedCurve(shape, (machine, Machine(machine.device)))  # a small draft: where it is faster


def _fitting(
    settings: PlanSettings, known: Catalogue, machine: Machine | None, batch: int
) -> tuple[list[ModelShape | None], list[str]]:
    """The shapes of target and drafts; where they do not fit at the types that they come in, those of known
    names of which no type is asked for at fewer bits, and a line about that."""
    made = _shapes(settings, known, "")
    for kind in ("", "fp8", "int4"):
        found = _shapes(settings, known, kind) if kind else made
        sizes = [shape for shape in found if shape is not None]
        needed = sum(memory_bytes(sizes, batch=batch, context=settings.context))
        if machine is None or needed <= machine.usable_bytes:
            line = f"weights are planned at {kind}: as they come the models do not fit on {settings.on}"
            return found, [line] if kind else []
    return made, []


def _shapes(settings: PlanSettings, known: Catalogue, kind: str) -> list[ModelShape | None]:
    def named(name: str) -> str:
        return f"{name}:{kind}" if kind and name.lower() in known.tables["models"] else name

    target = None if settings.target is None else find_shape(named(settings.target), known)
    found = [target]
    for name in settings.drafts:
        if name in HEADS and target is None:
            raise SettingError(name, "it is a head on the target, whose shape is not known", "Add --target.")
        is_head = name in HEADS and target is not None
        found.append(head_of(target, name) if is_head and target else find_shape(named(name), known))
    return found


def _batches(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingError("--batch", f"{text!r} is no list of numbers", "Give 1,8,32.") from None
    if not 1 <= found[0] <= found[-1] <= MAX_BATCH:
        raise SettingError("--batch", f"{text!r} is out of range", f"Give 1 to {MAX_BATCH}.")
    return found


@contextmanager
def _recordings(settings: PlanSettings, asked: Asked, about: str) -> Iterator[tuple[Asked, str]]:
    """What is asked and what its acceptance rests on: recorded answers, where some are named."""
    if not settings.recordings:
        yield asked, about
        return
    if settings.acceptance or settings.workload:
        way_out = "Leave out --acceptance and --workload."
        raise SettingError("--recordings", "acceptance is given too", way_out)
    from outrider.lab.plan.recorded import Recorded
    from outrider.lab.recording import read_recordings  # they load slowly

    found = [recording for path in settings.recordings for recording in read_recordings(path)]
    if not found:
        place = str(settings.recordings[0])
        raise SettingError(place, "it holds no recorded answers", "Record some: outrider bench.")
    with bars(Console(stderr=True, highlight=False)) as report:
        names = _offers(asked.drafts, list(found[0].offers))
        yield replace(asked, counted=Recorded(found, names, report).counted), f"{len(found)} recorded answers"


def _offers(drafts: Sequence[Model], offers: Sequence[str]) -> dict[str, str]:
    """By draft the name of its offers in recordings: its own, or the first."""
    return {d.name: d.name if d.name in offers else next(iter(offers), d.name) for d in drafts}
