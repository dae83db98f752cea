"""`outrider plan`: what a pair would do on hardware that is not here, and what another engine starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from outrider.cli.output import readable, write, write_json
from outrider.cli.plan_settings import PlanSettings
from outrider.cli.screen import Cell, Rows, Screen
from outrider.core import numbers
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.lab.plan.acceptance import (
    ALL,
    Acceptance,
    of_draft,
    of_head,
    of_workload,
    read_acceptance,
    source,
)
from outrider.lab.plan.calls import (
    Curve,
    Engine,
    Machine,
    PlannedCurve,
    error_line,
    machine_of,
    memory_bytes,
    model_error,
    read_curves,
)
from outrider.lab.plan.catalogue import Catalogue, catalogue
from outrider.lab.plan.exports import ENGINES
from outrider.lab.plan.fitting import Wanted, fitting
from outrider.lab.plan.metrics import Observed, advice, read_metrics
from outrider.lab.plan.plan import COSTS, MAX_BATCH, ODDS, Asked, BatchPlan, Model, Plan, Way, make_plan
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape

_LIST = "--list shows what is known."


def plan(settings: PlanSettings) -> int:
    """Plan, and show; returns the exit status."""
    known = catalogue(settings.hardware)
    console = Screen()
    if settings.list_known:
        print_known(console, known)
        return 0
    if settings.export is not None and settings.export not in ENGINES:
        way_out = f"Choose one of {', '.join(ENGINES)}."
        raise SettingError("--export", f"{settings.export!r} is not an engine", way_out)
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
    settings: PlanSettings, known: Catalogue, console: Screen, observed: Observed | None
) -> None:
    advised: list[str] = []
    with collect_notices() as notices:
        asked, about = _asked(settings, known)
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
        Screen(stderr=True).note(*notices)
        print_plan(console, made, about)
        if observed is not None:
            print_observed(console, observed, advised)


def _asked(settings: PlanSettings, known: Catalogue) -> tuple[Asked, str]:
    """The request, and what its acceptance rests on."""
    if settings.costs is None and (settings.on is None or settings.target is None):
        what, flag = ("hardware", "--on") if settings.on is None else ("a target", "--target")
        raise SettingError("plan", f"it needs {what}", f"Name it with {flag}; {_LIST}")
    machine = None if settings.on is None else machine_of(settings.on, known, _engine(settings, known))
    is_single = machine is None or machine.engine == "llama.cpp"
    batches = _batches(settings.batch or ("1" if is_single else "1,8,32"))
    shapes = _shapes(settings, known, machine, batches[0])
    curves: list[Curve | None] = [None, None]
    if settings.costs is not None:
        curves = list(read_curves(settings.costs))
        shapes += [None] if len(shapes) == 1 and curves[1] is not None and settings.drafts != ["none"] else []
    names = [shape.name if shape else ("draft" if i else "target") for i, shape in enumerate(shapes)]
    tables, about = _acceptance(settings, names[1:], shapes)
    models = []
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        curve = (curves[i] if i < len(curves) else None) or _planned(name, shape, machine, is_target=not i)
        models.append(Model(name, curve, shape, tables.get(name) if i else None))
    asked = Asked(
        models[0],
        models[1:],
        batches,
        settings.context,
        machine,
        lookup=tables.get("lookup"),
        odds=1.0 if settings.acceptance or settings.recordings else ODDS,
        costs=1.0 if settings.costs is not None else COSTS,
    )
    return asked, about


def _acceptance(
    settings: PlanSettings, drafts: Sequence[str], shapes: Sequence[ModelShape | None]
) -> tuple[dict[str, Acceptance], str]:
    """The tables by drafter, as recorded, given or bundled, and what they rest on."""
    if settings.recordings:
        return _recorded(settings, drafts)
    given = dict(read_acceptance(text) for text in settings.acceptance)
    if unused := [name for name in given if name not in ("", "lookup", *drafts)]:
        raise SettingError(
            f"--acceptance {unused[0]}=", "there is no such draft", "Name one as --draft does."
        )
    if given:  # a plain value is of the draft models; of lookup where that is the only drafter
        plain = given.pop("", None)
        return {name: plain for name in drafts or ["lookup"] if plain} | given, "as given"
    workload = settings.workload or ALL
    usual = {name: _usual(workload, shape, shapes[0]) for name, shape in zip(drafts, shapes[1:], strict=True)}
    return {"lookup": of_workload(workload)["lookup"], **usual}, f"{workload}: {source(drafts)}"


def _recorded(settings: PlanSettings, drafts: Sequence[str]) -> tuple[dict[str, Acceptance], str]:
    if settings.acceptance or settings.workload:
        way_out = "Leave out --acceptance and --workload."
        raise SettingError("--recordings", "acceptance is given too", way_out)
    from outrider.lab.plan.recorded import tables_of
    from outrider.lab.recording import read_recordings  # they load slowly

    found = [recording for path in settings.recordings for recording in read_recordings(path)]
    if not found:
        place = str(settings.recordings[0])
        raise SettingError(place, "it holds no recorded answers", "Record some: outrider bench.")
    offers = list(found[0].offers)
    names = {name: name if name in offers else next(iter(offers), name) for name in drafts}
    return tables_of(found, names), f"{len(found)} recorded answers"


def _usual(workload: str, shape: ModelShape | None, target: ModelShape | None) -> Acceptance:
    """What is bundled of a draft like this."""
    if shape is not None and shape.is_head:
        return of_head(shape.name, workload)
    if shape is None or target is None:
        return of_workload(workload)["draft"]
    return of_draft(workload, shape.parameters / target.parameters)


def _engine(settings: PlanSettings, known: Catalogue) -> Engine | None:
    """The engine that is asked for, or the only one that loads such weights; None: the usual one."""
    if settings.export is not None:
        return "llama.cpp" if settings.export == "llama-server" else "vllm"
    kind = (settings.target or "").rpartition(":")[2].lower()
    if (settings.target or "").endswith(".gguf"):
        return "llama.cpp"
    if kind in known.tables["types"] and kind not in ("f16", "bf16"):
        return "llama.cpp" if known.weight_type(kind).operations == "i8" and kind != "int8" else "vllm"
    return None


def _shapes(
    settings: PlanSettings, known: Catalogue, machine: Machine | None, batch: int
) -> list[ModelShape | None]:
    """The shapes of target and drafts; None for an unnamed target."""
    drafts = tuple(name for name in settings.drafts if name != "none") if settings.drafts else None
    if settings.target is None:
        if heads := [name for name in drafts or () if name in HEADS]:
            raise SettingError(
                heads[0], "it is a head on the target, whose shape is not known", "Add --target."
            )
        return [None, *(find_shape(name, known) for name in drafts or ())]
    if settings.costs is not None or settings.recordings:
        drafts = drafts or ()  # nothing is known of others
    wanted = Wanted(settings.target, drafts, machine, batch, settings.context, settings.kv_type)
    return [*fitting(wanted, known)]


def _planned(name: str, shape: ModelShape | None, machine: Machine | None, *, is_target: bool) -> Curve:
    if shape is None or machine is None:
        raise SettingError(
            name, "its calls were not measured, and no hardware is named", f"Add --on; {_LIST}"
        )
    if is_target or shape.is_head or machine.count == 1:
        return PlannedCurve(shape, (machine,), is_target=is_target)
    return PlannedCurve(shape, (machine, replace(machine, count=1)))  # a small draft: where it is faster


def _batches(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingError("--batch", f"{text!r} is not a list of numbers", "Give 1,8,32.") from None
    if not 1 <= found[0] <= found[-1] <= MAX_BATCH:
        raise SettingError("--batch", f"{text!r} is out of range", f"Give 1 to {MAX_BATCH}.")
    return found


# A plan as people read it

_WORTH = 1.03
"""A smaller gain is not worth any setup."""
_ENGINES = {"llama.cpp": "llama.cpp", "vllm": "vLLM"}


def print_plan(console: Screen, plan: Plan, acceptance: str) -> None:
    """Print a plan: the advice, then a table by drafter and batch size."""
    asked = plan.asked
    console.say(verdict(plan), "bold")
    console.print()
    best, hardware = plan.batches[0].best, ""
    if (machine := asked.machine) is not None:
        count = f"{machine.count} x " if machine.count > 1 else ""
        hardware = f"{count}{machine.device.title}, under {_ENGINES[machine.engine]}"
    console.rows(
        [
            ("target", _described(asked.target)),
            ("draft", [_described(draft) for draft in asked.drafts if best and draft.name == best.draft]),
            ("hardware", hardware),
            ("texts", f"{asked.context} tokens each"),
            ("acceptance", acceptance),
        ]
    )
    console.print()
    head = ("batch", "drafts", "tokens", "plain", "with", "speed-up", "range", "memory")
    cells = [
        _row(plan, batch, way) for place, batch in enumerate(plan.batches) for way in _shown(batch, place)
    ]
    console.table(head, cells, left=("drafts",), gap=1)
    console.print()
    console.rows(_ends(plan))


def verdict(plan: Plan) -> str:
    """What to do and what it would gain, in a sentence."""
    batch = plan.batches[0]
    ways = batch.drafters
    if not ways:
        return f"About {numbers.digits(batch.plain_tokens_per_s)} tokens/s: nothing is known of drafts."
    best = ways[0]
    figures = f"{best.speedup.value:.1f}x ({best.speedup.low:.1f} to {best.speedup.high:.1f}x) plain decoding"
    if best.speedup.value < _WORTH:
        return f"Decode plainly: the best that could draft, {readable(best.name)}, would give {figures}."
    rates = (
        f"{numbers.digits(batch.plain_tokens_per_s)} to about {numbers.digits(best.tokens_per_s)} tokens/s"
    )
    said = f"Draft with {readable(best.name)}, up to {best.length} tokens: {figures}, from {rates}."
    if best.speedup.low < 1:
        said += " It may also lose: measure it on your texts."
    alone = next((way for way in ways[1:] if way.drafting == "lookup"), None)
    if alone is not None and alone.speedup.value > best.speedup.value / _WORTH:
        said += " Lookup alone, without a draft model, is as good."
    return said


def _described(model: Model) -> str:
    if (shape := model.shape) is None:
        return f"{model.name} (measured)"
    active = f", {numbers.short_count(shape.active_parameters)} active" if shape.experts else ""
    size = numbers.gigabytes(round(shape.memory_bytes))
    return f"{model.name} ({numbers.short_count(shape.parameters)}{active}; {shape.type}, {size})"


def _shown(batch: BatchPlan, place: int) -> Sequence[Way | None]:
    """The rows of a batch size: every drafter for the first one, the best for others."""
    ways = batch.drafters
    ways = [*ways[:1], *(way for way in ways[1:] if way.drafting != "both")]
    return (ways if place == 0 else ways[:1]) or [None]


def _row(plan: Plan, batch: BatchPlan, way: Way | None) -> tuple[Cell, ...]:
    memory: Cell = numbers.NOTHING
    if shapes := plan.asked.loaded(way):
        needed = sum(memory_bytes(shapes, batch=batch.batch, context=plan.asked.context))
        memory = numbers.gigabytes(round(needed))
        if batch.usable_bytes is not None and needed > batch.usable_bytes:
            memory = Text(f"{memory}: no", "red")
    plain = numbers.digits(batch.plain_tokens_per_s)
    if way is None:
        return (str(batch.batch), "none", numbers.NOTHING, plain, *(numbers.NOTHING,) * 3, memory)
    style = "bold green" if way.speedup.low > 1 else "green" if way.speedup.value > 1 else "dim"
    return (
        str(batch.batch),
        f"{way.draft}, lookup" if way.drafting == "both" else way.name,
        str(way.length),
        plain,
        numbers.digits(way.tokens_per_s),
        Text(f"{way.speedup.value:.2f}x", style),
        f"{way.speedup.low:.1f} to {way.speedup.high:.1f}",
        memory,
    )


def _sequences(plan: Plan, count: int) -> str:
    return f"{numbers.counted(count, 'sequence')} of {plan.asked.context} tokens"


def _ends(plan: Plan) -> Rows:
    """How large a batch pays and fits, and how far off the model may be."""
    pays = "at no batch size"
    if plan.pays_to is None:
        pays = f"up to the largest batch that {'fits' if plan.fits_to else 'is looked at'}"
    elif plan.pays_to:
        pays = (
            f"up to {numbers.counted(plan.pays_to, 'sequence')} at once; above that plain decoding is faster"
        )
    fits, needed = plan.fits_to, [found[0] for found in plan.batches[0].break_even.values() if found]
    return [
        ("pays", pays),
        ("fits", None if fits is None else f"up to {_sequences(plan, fits)}"),
        (
            "breaks even",
            f"where {min(needed):.0%} of a draft model's tokens are accepted" if needed else None,
        ),
        ("", error_line()),
    ]


def print_observed(console: Screen, observed: Observed, advised: Sequence[str]) -> None:
    """What a server's counters say, and what to change."""
    shares = " ".join(f"{share:.0%}" for share in observed.shares)
    accepted = f"{observed.accepted / max(observed.drafted, 1):.0%} of their tokens; by position {shares}"
    each = f"{observed.tokens_per_call:.2f} tokens of each call that checks a draft"
    server = f"{observed.program}, {observed.drafts:,.0f} drafts of {observed.length:.1f} tokens"
    console.rows([("server", server), ("accepted", [accepted, each]), ("to change", advised)])


def print_known(console: Screen, known: Catalogue) -> None:
    """The hardware and the models that have names."""
    devices = [known.device(name) for name in known.tables["hardware"]]
    rows = [(d.name, d.title, f"{d.memory_gb:g} GB", f"{d.memory_gb_s:,.0f}") for d in devices]
    console.table(("hardware", "", "memory", "GB/s"), rows, left=("hardware", ""), gap=1)
    console.print()
    types = f"{', '.join(known.tables['types'])} (MODEL:TYPE)"
    console.rows([("models", ", ".join(known.tables["models"])), ("types", types)])
