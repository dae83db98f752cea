"""A plan as people read it: rows by batch size, and a picture of the speed-up over batch size and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from outrider.cli.output import Cell, print_rows, print_table, readable
from outrider.lab import numbers
from outrider.lab.plan.calls import error_line
from outrider.lab.plan.catalogue import Catalogue
from outrider.lab.plan.metrics import Observed
from outrider.lab.plan.plan import LENGTHS, BatchPlan, Model, Plan

_SHADES = ((0.95, "red"), (1.02, "dim"), (1.3, "green"))
"""How a speed-up below each is set."""


def print_plan(console: Console, plan: Plan, acceptance: str) -> None:
    """The whole plan."""
    asked = plan.asked
    rows: list[tuple[str, Cell]] = [("target", _described(asked.target))]
    rows += [("" if i else "draft", _described(draft)) for i, draft in enumerate(asked.drafts)]
    if asked.machine is not None:
        count = f"{asked.machine.count} x " if asked.machine.count > 1 else ""
        rows.append(("hardware", f"{count}{asked.machine.device.title}"))
    rows += [("texts", f"{asked.context} tokens each"), ("acceptance", acceptance)]
    print_rows(console, rows)
    console.print()
    head = ("batch", "plain", "best", "tokens/s", "speed-up", "95 %", "pays from", "memory")
    several = len(asked.drafts) > 1
    print_table(console, head, [_row(batch, several) for batch in plan.batches], left=("best",))
    console.print()
    _print_picture(console, plan)
    print_rows(console, _ends(plan))


def _described(model: Model) -> str:
    if (shape := model.shape) is None:
        return f"{model.name} (measured)"
    active = f", {numbers.short_count(shape.active_parameters)} active" if shape.experts else ""
    size = numbers.gigabytes(round(shape.memory_bytes))
    return f"{model.name} ({numbers.short_count(shape.parameters)}{active}; {shape.type}, {size})"


def _row(batch: BatchPlan, several: bool) -> tuple[Cell, ...]:
    best = batch.best
    needed = [found for found in batch.break_even.values() if found is not None]
    memory: Cell = numbers.NOTHING
    if batch.weights_bytes is not None and batch.kv_bytes is not None:
        memory = numbers.gigabytes(round(batch.weights_bytes + batch.kv_bytes))
        if batch.missing_bytes:
            memory = Text(f"{memory}, {numbers.gigabytes(round(batch.missing_bytes))} too much", "red")
    name = "none" if best is None else best.name if several else best.drafting
    return (
        str(batch.batch),
        numbers.digits(batch.plain_tokens_per_s),
        name if best is None else f"{name}, {best.length}",
        numbers.NOTHING if best is None else numbers.digits(best.tokens_per_s),
        numbers.speedup(best.speedup if best else None),
        numbers.bounds(best.speedup if best else None),
        f"{min(needed)[0]:.0%}" if needed else "never" if batch.break_even else numbers.NOTHING,
        memory,
    )


def _print_picture(console: Console, plan: Plan) -> None:
    """Speed-up of the drafter that is best at the first batch, over batch size and draft length."""
    best = max(plan.batches[0].ways, key=lambda way: way.speedup.value, default=None)
    if best is None:
        return
    title = (f"speed-up with {readable(best.name)}", "bold")
    console.print(Text.assemble(title, " by batch size and draft length"))
    rows: list[list[Cell]] = []
    for batch in plan.batches:
        top = batch.best_of(best.drafting, best.draft)
        mine = [way for way in batch.ways if (way.drafting, way.draft) == (best.drafting, best.draft)]
        rows.append([str(batch.batch), *(_shaded(way.speedup.value, way is top) for way in mine)])
    print_table(console, ["", *map(str, LENGTHS)], rows, gap=1)
    console.print()


def _shaded(value: float, is_top: bool) -> Text:
    style = next((style for most, style in _SHADES if value < most), "bold green")
    return Text(f"{value:.2f}", "bold bright_green" if is_top and value > 1 else style)


def _ends(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """Up to which batch drafting pays and the models fit, and how wrong all that may be."""
    if plan.pays_to is None:
        yield "pays", f"up to the largest batch that {'fits' if plan.fits_to else 'is looked at'}"
    elif plan.pays_to:
        yield "pays", f"up to {plan.pays_to} sequences at once; above that plain decoding is faster"
    else:
        yield "pays", "at no batch size"
    if plan.fits_to is not None:
        yield "fits", f"up to {plan.fits_to} sequences of {plan.asked.context} tokens"
    yield "the model", error_line()


def print_observed(console: Console, observed: Observed, advised: Sequence[str]) -> None:
    """What a server's counters say, and what to change."""
    shares = " ".join(f"{share:.0%}" for share in observed.shares)
    accepted = f"{observed.accepted / max(observed.drafted, 1):.0%} of their tokens; by position {shares}"
    rows: list[tuple[str, Cell]] = [
        ("server", f"{observed.program}, {observed.drafts:,.0f} drafts of {observed.length:.1f} tokens"),
        ("accepted", accepted),
        ("", f"{observed.tokens_per_call:.2f} tokens of each call that checks a draft"),
    ]
    print_rows(console, rows + [("" if i else "to change", line) for i, line in enumerate(advised)])


def print_known(console: Console, known: Catalogue) -> None:
    """The hardware and the models that have names."""
    devices = [known.device(name) for name in known.tables["hardware"]]
    rows = [
        (d.name, d.title, f"{d.memory_gb:g} GB", f"{d.memory_gb_s:,.0f}", f"{d.tera_operations_s['f16']:g}")
        for d in devices
    ]
    print_table(console, ("hardware", "", "memory", "GB/s", "TFLOPS"), rows, left=("hardware", ""))
    console.print()
    types = f"{', '.join(known.tables['types'])} (MODEL:TYPE)"
    print_rows(console, [("models", ", ".join(known.tables["models"])), ("types", types)])
