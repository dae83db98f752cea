"""`outrider plan`: what a pair would do on hardware that is not here, and what vLLM starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.text import Text

from outrider.cli.output import write, write_json
from outrider.cli.screen import Cell, Rows, Screen
from outrider.cli.settings import PlanSettings
from outrider.core import numbers
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.core.numbers import readable
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
    Engine,
    PlannedModel,
    error_line,
    machine_of,
    memory_bytes,
    model_error,
)
from outrider.lab.plan.catalogue import Catalogue, catalogue
from outrider.lab.plan.plan import (
    COSTS,
    MAX_BATCH,
    ODDS,
    Asked,
    BatchPlan,
    Plan,
    Way,
    export_vllm,
    fitting,
    make_plan,
)
from outrider.lab.plan.shapes import ModelShape

_LIST = "--list shows what is known."


def plan(settings: PlanSettings) -> int:
    """Plan, and show; returns the exit status."""
    known = catalogue(settings.hardware)
    console = Screen()
    if settings.list_known:
        print_known(console, known)
        return 0
    with collect_notices() as notices:
        asked, about = _asked(settings, known)
    made = make_plan(asked)
    if settings.export is not None:
        started = export_vllm(made)
        write_json(asdict(started)) if settings.print_json else write(started.script)
    elif settings.print_json:
        more = {"acceptance": about, "model_error": model_error(), "notices": notices}
        write_json(made.as_json() | more)
    else:
        Screen(stderr=True).note(*notices)
        print_plan(console, made, about)
    return 0


def _asked(settings: PlanSettings, known: Catalogue) -> tuple[Asked, str]:
    if settings.on is None or settings.target is None:
        what, flag = ("hardware", "--on") if settings.on is None else ("a target", "--target")
        raise SettingError("plan", f"it needs {what}", f"Name it with {flag}; {_LIST}")
    machine = machine_of(settings.on, known, _engine(settings.target, settings.export, known))
    batches = _batches(settings.batch or ("1" if machine.engine == "llama.cpp" else "1,8,32"))
    drafts = [name for name in settings.drafts if name != "none"] if settings.drafts else None
    texts: dict[str, Any] = {"context": settings.context, "kv_type": settings.kv_type}
    target, *shapes = fitting(settings.target, drafts, machine, known, batch=batches[0], **texts)
    tables, about = _acceptance(settings, target, shapes)
    # A small draft runs where it is faster: on all devices or on one.
    places = (machine, replace(machine, count=1)) if machine.count > 1 else (machine,)
    asked = Asked(
        PlannedModel(target, (machine,), is_target=True),
        [
            PlannedModel(shape, (machine,) if shape.is_head else places, acceptance=tables.get(shape.name))
            for shape in shapes
        ],
        batches,
        settings.context,
        machine,
        lookup=tables.get("lookup"),
        odds=1.0 if settings.acceptance else ODDS,
        costs=COSTS,
    )
    return asked, about


def _acceptance(
    settings: PlanSettings, target: ModelShape, drafts: Sequence[ModelShape]
) -> tuple[dict[str, Acceptance], str]:
    """The tables by drafter, given or bundled, and what they rest on."""
    names = [draft.name for draft in drafts]
    given = dict(read_acceptance(text) for text in settings.acceptance)
    if unused := [name for name in given if name not in ("", "lookup", *names)]:
        raise SettingError(
            f"--acceptance {unused[0]}=", "there is no such draft", "Name one as --draft does."
        )
    if given:  # a plain value is of the draft models; of lookup where that is the only drafter
        plain = given.pop("", None)
        return {name: plain for name in names or ["lookup"] if plain} | given, "as given"
    workload = settings.workload or ALL
    usual = {
        draft.name: of_head(draft.name, workload)
        if draft.is_head
        else of_draft(workload, draft.parameters / target.parameters)
        for draft in drafts
    }
    return {"lookup": of_workload(workload)["lookup"], **usual}, f"{workload}: {source(names)}"


def _engine(target: str, export: str | None, known: Catalogue) -> Engine | None:
    """The engine that is asked for, or the only one that loads such weights; None: the usual one."""
    if export is not None:
        return "vllm"
    kind = target.rpartition(":")[2].lower()
    if target.endswith(".gguf"):
        return "llama.cpp"
    if kind in known.tables["types"] and kind not in ("f16", "bf16"):
        return "llama.cpp" if known.weight_type(kind).operations == "i8" and kind != "int8" else "vllm"
    return None


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
    asked, machine = plan.asked, plan.asked.machine
    console.say(verdict(plan), "bold")
    console.print()
    count = f"{machine.count} x " if machine.count > 1 else ""
    target, *drafts = map(_described, asked.loaded(plan.batches[0].best))
    console.rows(
        [
            ("target", target),
            ("draft", drafts),
            ("hardware", f"{count}{machine.device.title}, under {_ENGINES[machine.engine]}"),
            ("texts", f"{asked.context} tokens each"),
            ("acceptance", acceptance),
        ]
    )
    console.print()
    head = ("batch", "drafts", "tokens", "plain", "with", "speed-up", "range", "memory")
    cells = [_row(plan, batch, way) for i, batch in enumerate(plan.batches) for way in _shown(batch, i)]
    console.table(head, cells, left=("drafts",), gap=1)
    console.print()
    console.rows(_ends(plan))


def verdict(plan: Plan) -> str:
    """What to do and what it would gain, in a sentence."""
    batch = plan.batches[0]
    if not batch.drafters:
        return f"About {numbers.digits(batch.plain_tokens_per_s)} tokens/s: nothing is known of drafts."
    best = batch.drafters[0]
    figures = f"{best.speedup:.1f}x ({best.low:.1f} to {best.high:.1f}x) plain decoding"
    if best.speedup < _WORTH:
        return f"Decode plainly: the best that could draft, {readable(best.name)}, would give {figures}."
    rates = (
        f"{numbers.digits(batch.plain_tokens_per_s)} to about {numbers.digits(best.tokens_per_s)} tokens/s"
    )
    said = f"Draft with {readable(best.name)}, up to {best.draft_length} tokens: {figures}, from {rates}."
    if best.low < 1:
        said += " It may also lose: measure it on your texts."
    alone = next((way for way in batch.drafters[1:] if way.drafters == "lookup"), None)
    if alone is not None and alone.speedup > best.speedup / _WORTH:
        said += " Lookup alone, without a draft model, is as good."
    return said


def _described(shape: ModelShape) -> str:
    active = f", {numbers.short_count(shape.active_parameters)} active" if shape.experts else ""
    size = numbers.gigabytes(round(shape.memory_bytes))
    return f"{shape.name} ({numbers.short_count(shape.parameters)}{active}; {shape.type}, {size})"


def _shown(batch: BatchPlan, place: int) -> Sequence[Way | None]:
    first, rest = batch.drafters[:1], batch.drafters[1:] if place == 0 else []
    return [*first, *(way for way in rest if way.drafters != "both")] or [None]


def _row(plan: Plan, batch: BatchPlan, way: Way | None) -> tuple[Cell, ...]:
    needed = sum(memory_bytes(plan.asked.loaded(way), batch=batch.batch, context=plan.asked.context))
    memory: Cell = numbers.gigabytes(round(needed))
    if needed > batch.memory["usable_bytes"]:
        memory = Text(f"{memory}: no", "red")
    plain = numbers.digits(batch.plain_tokens_per_s)
    if way is None:
        return (str(batch.batch), "none", numbers.NOTHING, plain, *(numbers.NOTHING,) * 3, memory)
    style = "bold green" if way.low > 1 else "green" if way.speedup > 1 else "dim"
    return (
        str(batch.batch),
        f"{way.draft}, lookup" if way.drafters == "both" else way.name,
        str(way.draft_length),
        plain,
        numbers.digits(way.tokens_per_s),
        Text(f"{way.speedup:.2f}x", style),
        f"{way.low:.1f} to {way.high:.1f}",
        memory,
    )


def _ends(plan: Plan) -> Rows:
    """How large a batch pays and fits, and how far off the model may be."""
    pays, fits = "at no batch size", plan.fits_to
    if plan.pays_to is None:
        pays = f"up to the largest batch that {'fits' if fits else 'is looked at'}"
    elif plan.pays_to:
        pays = (
            f"up to {numbers.counted(plan.pays_to, 'sequence')} at once; above that plain decoding is faster"
        )
    found = plan.batches[0].break_even_acceptance.values()
    needed = min((each["acceptance"] for each in found if each), default=None)
    even = "" if needed is None else f"where {needed:.0%} of a draft model's tokens are accepted"
    texts = "" if fits is None else f"{numbers.counted(fits, 'sequence')} of {plan.asked.context} tokens"
    return [
        ("pays", pays),
        ("fits", texts and f"up to {texts}"),
        ("breaks even", even),
        ("", error_line()),
    ]


def print_known(console: Screen, known: Catalogue) -> None:
    """The hardware and the models that have names."""
    devices = [known.device(name) for name in known.tables["hardware"]]
    rows = [(d.name, d.title, f"{d.memory_gb:g} GB", f"{d.memory_gb_s:,.0f}") for d in devices]
    console.table(("hardware", "", "memory", "GB/s"), rows, left=("hardware", ""), gap=1)
    console.print()
    types = f"{', '.join(known.tables['types'])} (MODEL:TYPE)"
    console.rows([("models", ", ".join(known.tables["models"])), ("types", types)])
