"""`outrider plan`: what a pair would do on hardware that is not here, and what another engine starts with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from outrider.cli.output import bars, print_notes, write, write_json
from outrider.cli.plan_report import print_known, print_observed, print_plan
from outrider.cli.plan_settings import PlanSettings
from outrider.core.errors import SettingError
from outrider.core.files import check_writable, write_whole
from outrider.planning.acceptance import ALL, Acceptance, of_workload, read_acceptance, source
from outrider.planning.calls import Machine, PlannedCurve, machine_of, memory_bytes
from outrider.planning.catalogue import Catalogue, catalogue
from outrider.planning.checked import model_error
from outrider.planning.exports import ENGINES, export
from outrider.planning.metrics import Observed, advice, read_metrics
from outrider.planning.plan import Asked, Model, Plan, as_json, make_plan
from outrider.planning.shapes import HEADS, ModelShape, find_shape, head_of

_MAX_BATCH = 4096


def plan(settings: PlanSettings) -> int:
    """Plan, and show; returns the exit status."""
    known = catalogue(settings.hardware)
    console = Console(highlight=False, emoji=False, markup=False)
    if settings.list_known:
        print_known(console, known)
        return 0
    if settings.export is not None and settings.export not in ENGINES:
        raise SettingError(
            "--export", f"{settings.export!r} is no engine", f"Choose one of {', '.join(ENGINES)}."
        )
    if settings.html is not None:
        check_writable(settings.html, "page")
    observed = None if settings.metrics is None else read_metrics(settings.metrics)
    if observed is not None and settings.target is None and settings.costs is None:
        way_out = "name --target, --draft and --on, and the plan says what it expected and what to change"
        return _show_observed(settings, console, observed, [way_out])
    asked, about, notices = _asked(settings, known)
    with _recordings(settings, asked) as asked:
        made = replace(make_plan(asked), notices=notices)
        found = None if observed is None else (observed, advice(observed, asked))
    _show(settings, console, made, about, found)
    return 0


def _show_observed(
    settings: PlanSettings, console: Console, observed: Observed, advised: Sequence[str]
) -> int:
    if settings.print_json:
        write_json({"observed": {**observed.as_json(), "advice": list(advised)}})
    else:
        print_observed(console, observed, advised)
    return 0


def _show(
    settings: PlanSettings,
    console: Console,
    made: Plan,
    about: str,
    found: tuple[Observed, Sequence[str]] | None,
) -> None:
    data = {**as_json(made), "acceptance": about, "model_error": model_error(), "notices": list(made.notices)}
    if found is not None:
        data["observed"] = {**found[0].as_json(), "advice": list(found[1])}
    if settings.html is not None:
        from outrider.planning.page import page  # loads slowly

        write_whole(settings.html, page(made, about, data), "page")
    if settings.export is not None:
        started = export(made, settings.export)
        if settings.print_json:
            write_json(started.as_json())
        else:
            write(started.script)
    elif settings.print_json:
        write_json(data)
    else:
        print_notes(Console(stderr=True, highlight=False), made.notices)
        print_plan(console, made, about)
        if found is not None:
            print_observed(console, *found)


def _asked(settings: PlanSettings, known: Catalogue) -> tuple[Asked, str, list[str]]:
    """What is planned, what its acceptance rests on, and what to know of it."""
    machine = None if settings.on is None else machine_of(settings.on, known)
    notices: list[str] = []
    tables = _given(settings.acceptance)
    bundled = {} if settings.acceptance else of_workload(settings.workload or ALL)
    models, lines = _fitting(settings, known, machine)
    notices += lines
    if settings.costs is not None:
        models, lines = _measured(settings.costs, models)
        notices += lines
    names = [model.name for model in models]
    if unused := [name for name in tables if name not in ("", "lookup", *names[1:])]:
        raise SettingError(
            f"--acceptance {unused[0]}=", "there is no such draft", "Name one as --draft does."
        )
    usual = tables.get("") or bundled.get("draft")
    drafts = [replace(draft, acceptance=tables.get(draft.name) or usual) for draft in models[1:]]
    lookup = tables.get("lookup") or bundled.get("lookup")
    if not drafts and lookup is None:
        lookup = tables.get("")  # of the only drafter that there is
    asked = Asked(models[0], drafts, _batches(settings.batch), settings.context, machine, lookup)
    if settings.acceptance:
        return asked, "as given", notices
    return asked, f"{settings.workload or ALL}: {source()}", notices


def _fitting(
    settings: PlanSettings, known: Catalogue, machine: Machine | None
) -> tuple[list[Model], list[str]]:
    """Target and drafts; where they do not fit at the types that they come in, those of known names of which
    no type is asked for at fewer bits, and a line about that."""
    made = _models(settings, known, machine, "")
    if machine is None:
        return made, []
    batch = _batches(settings.batch)[0]
    for kind in ("", "fp8", "int4"):
        found = _models(settings, known, machine, kind) if kind else made
        weights, kv = memory_bytes(_shapes(found), batch=batch, context=settings.context)
        if weights + kv <= machine.usable_bytes:
            line = (
                f"planned with weights of type {kind}: as they come the models do not fit on {machine.name}"
            )
            return found, [line] if kind else []
    return made, []


def _models(settings: PlanSettings, known: Catalogue, machine: Machine | None, kind: str) -> list[Model]:
    def named(name: str) -> str:
        return f"{name}:{kind}" if kind and name.lower() in known.tables["models"] else name

    target = settings.target and named(settings.target)
    models = [_target(settings, target, known, machine)]
    return models + [_draft(named(name), models[0], known, machine) for name in settings.drafts]


def _shapes(models: Sequence[Model]) -> list[ModelShape]:
    return [model.shape for model in models if model.shape is not None]


def _given(texts: Sequence[str]) -> dict[str, Acceptance]:
    return dict(read_acceptance(text) for text in texts)


def _target(settings: PlanSettings, name: str | None, known: Catalogue, machine: Machine | None) -> Model:
    if machine is None and settings.costs is None:
        way_out = "Name some with --on (--list shows what is known), or measured curves with --costs."
        raise SettingError("plan", "it needs hardware", way_out)
    if name is None and settings.costs is None:
        raise SettingError(
            "plan", "it needs a target", "Name one with --target (--list shows what is known)."
        )
    if name is None:
        return Model("target", _Unplanned())
    shape = find_shape(name, known)
    curve = PlannedCurve(shape, (machine,), is_target=True) if machine else _Unplanned()
    return Model(shape.name, curve, shape)


class _Unplanned:
    """The curve of a model for which no hardware is named: a measured one takes its place."""

    def call_s(self, num_tokens: int, *, batch: int = 1, context: int = 0) -> float:
        """Refuse: nothing is known."""
        del num_tokens, batch, context
        raise SettingError(
            "plan", "no curve of this draft was measured, and no hardware is named", "Add --on."
        )


def _draft(name: str, target: Model, known: Catalogue, machine: Machine | None) -> Model:
    if name in HEADS and target.shape is None:
        raise SettingError(name, "it is a head on the target, whose shape is not known", "Add --target.")
    shape = head_of(target.shape, name) if name in HEADS and target.shape else find_shape(name, known)
    if machine is None:
        return Model(shape.name, _Unplanned(), shape)
    # A small draft may be faster on one device than on all.
    machines = {machine.count: machine, 1: Machine(machine.device)} if not shape.is_head else {0: machine}
    return Model(shape.name, PlannedCurve(shape, tuple(machines.values())), shape)


def _measured(path: Path, models: Sequence[Model]) -> tuple[list[Model], list[str]]:
    """The models with the curves of a file: of the target, and of the first draft."""
    from outrider.planning.measured import read_curves  # not needed without measured curves

    target, draft = read_curves(path)
    found = [replace(models[0], curve=target), *models[1:]]
    if draft is not None:
        found[1:2] = [replace(models[1] if len(models) > 1 else Model("draft", draft), curve=draft)]
    notices = []
    if not target.knows_sequences:
        notices.append(
            "calls over several sequences were not measured: they are guessed (outrider costs -np N)"
        )
    return found, notices


def _batches(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingError("--batch", f"{text!r} is no list of numbers", "Give 1,8,32.") from None
    if not 1 <= found[0] <= found[-1] <= _MAX_BATCH:
        raise SettingError("--batch", f"{text!r} is out of range", f"Give 1 to {_MAX_BATCH}.")
    return found


@contextmanager
def _recordings(settings: PlanSettings, asked: Asked) -> Iterator[Asked]:
    """What is asked, with recorded answers in the place of tables where some are named."""
    if not settings.recordings:
        yield asked
        return
    if settings.acceptance or settings.workload:
        raise SettingError(
            "--recordings", "acceptance is given too", "Leave out --acceptance and --workload."
        )
    from outrider.lab.replay import read_recordings  # they load slowly
    from outrider.planning.recorded import Recorded

    found = [recording for path in settings.recordings for recording in read_recordings(path)]
    if not found:
        raise SettingError(
            str(settings.recordings[0]), "it holds no recorded answers", "Record some: outrider bench."
        )
    with bars(Console(stderr=True, highlight=False)) as report:
        offers = list(found[0].offers)
        names = {
            draft.name: draft.name if draft.name in offers else next(iter(offers), draft.name)
            for draft in asked.drafts
        }
        recorded = Recorded(found, names, report)
        yield replace(asked, counted=recorded.counted)
