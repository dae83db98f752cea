"""A plan as people read it: rows by batch size, and a picture of the speed-up over batch size and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from outrider.cli.output import Cell, print_rows, print_table, readable
from outrider.lab import numbers
from outrider.planning.catalogue import Catalogue
from outrider.planning.checked import error_line
from outrider.planning.metrics import Observed
from outrider.planning.plan import LENGTHS, BatchPlan, Plan, Way

_SHADES = ((0.95, "red"), (1.02, "dim"), (1.3, "green"), (2.0, "bold green"))
"""How a speed-up below each is set."""
_BEST = "bold bright_green"


def print_plan(console: Console, plan: Plan, acceptance: str) -> None:
    """The whole plan."""
    asked = plan.asked
    rows: list[tuple[str, Cell]] = [("target", _model(plan, 0))]
    rows += [("" if i else "draft", _model(plan, i + 1)) for i in range(len(asked.drafts))]
    if asked.machine is not None:
        count = f"{asked.machine.count} x " if asked.machine.count > 1 else ""
        rows.append(("hardware", f"{count}{asked.machine.device.title}"))
    rows += [("texts", f"{asked.context} tokens each"), ("acceptance", acceptance)]
    print_rows(console, rows)
    console.print()
    head = ("batch", "plain", "best", "tokens/s", "speed-up", "pays from", "memory", "J/token")
    print_table(console, head, [_row(batch) for batch in plan.batches], left=("best",))
    console.print()
    _print_picture(console, plan)
    print_rows(console, _ends(plan))


def _model(plan: Plan, index: int) -> str:
    model = [plan.asked.target, *plan.asked.drafts][index]
    if model.shape is None:
        return f"{model.name} (measured)"
    shape = model.shape
    active = f", {_billions(shape.active_parameters)} active" if shape.experts else ""
    weights = numbers.gigabytes(round(shape.memory_bytes))
    return f"{model.name} ({_billions(shape.parameters)}{active}; {shape.type}, {weights})"


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B"


def _row(batch: BatchPlan) -> tuple[Cell, ...]:
    best = batch.best
    needed = [found for found in batch.break_even.values() if found is not None]
    least = f"{min(needed)[0]:.0%}" if needed else numbers.NOTHING if not batch.break_even else "never"
    joules = batch.joules
    return (
        str(batch.batch),
        numbers.digits(batch.plain_tokens_per_s),
        "none" if best is None else f"{best.name}, {best.length}",
        numbers.NOTHING if best is None else numbers.digits(best.tokens_per_s),
        numbers.NOTHING if best is None else _speedup(best),
        least,
        _memory(batch),
        numbers.NOTHING if joules is None else f"{numbers.digits(joules[0])} → {numbers.digits(joules[1])}",
    )


def _speedup(way: Way) -> str:
    interval = way.speedup
    if interval.high - interval.low < 1e-9:
        return numbers.speedup(interval)
    return f"{numbers.speedup(interval)} ({numbers.bounds(interval)})"


def _memory(batch: BatchPlan) -> Cell:
    memory = batch.memory
    if memory is None:
        return numbers.NOTHING
    total = numbers.gigabytes(round(memory.weights + memory.kv))
    if memory.missing:
        return Text(f"{total}, {numbers.gigabytes(round(memory.missing))} too much", "red")
    return total


def _print_picture(console: Console, plan: Plan) -> None:
    """Speed-up of the drafter that is best at the first batch, over batch size and draft length."""
    first = plan.batches[0]
    best = max(first.ways, key=lambda way: way.speedup.value, default=None)
    if best is None:
        return
    console.print(
        Text.assemble((f"speed-up with {readable(best.name)}", "bold"), " by batch size and draft length")
    )
    rows: list[list[Cell]] = []
    for batch in plan.batches:
        mine = {w.length: w for w in batch.ways if (w.drafting, w.draft) == (best.drafting, best.draft)}
        top = max(way.speedup.value for way in mine.values())
        rows.append([str(batch.batch), *(_shaded(mine[n].speedup.value, top) for n in LENGTHS if n in mine)])
    print_table(console, ["", *map(str, LENGTHS)], rows, gap=1)
    console.print()


def _shaded(value: float, top: float) -> Text:
    style = (
        _BEST
        if value == top and value > 1
        else next((s for most, s in _SHADES if value < most), "bold green")
    )
    return Text(f"{value:.2f}", style)


def _ends(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """Where it ends to pay, and to fit; and how wrong all that may be."""
    if plan.pays_to == 0:
        yield "pays", "at no batch size"
    elif plan.pays_to is None:
        yield "pays", "at every batch size that fits" if plan.fits_to is not None else "at every batch size"
    else:
        yield "pays", f"up to {plan.pays_to} sequences at once; above that plain decoding is faster"
    if plan.fits_to is not None:
        yield "fits", f"up to {plan.fits_to} sequences of {plan.asked.context} tokens"
    yield "the model", error_line()


def print_observed(console: Console, observed: Observed, advised: Sequence[str]) -> None:
    """What a server's counters say, and what to change."""
    shares = " ".join(f"{share:.0%}" for share in observed.as_json()["accepted_by_position"])
    rows: list[tuple[str, Cell]] = [
        ("server", f"{observed.program}, {observed.drafts:,.0f} drafts of {observed.length:.1f} tokens"),
        (
            "accepted",
            f"{observed.accepted / max(observed.drafted, 1):.0%} of their tokens; by position {shares}",
        ),
        ("", f"{observed.tokens_per_call:.2f} tokens of each call that checks a draft"),
    ]
    print_rows(console, rows + [("to change" if i == 0 else "", line) for i, line in enumerate(advised)])


def print_known(console: Console, known: Catalogue) -> None:
    """The hardware and the models that have names."""
    devices = [known.device(name) for name in known.tables["hardware"]]
    rows = [
        (d.name, d.title, f"{d.memory_gb:g} GB", f"{d.memory_gb_s:,.0f}", f"{d.tera_operations_s['f16']:g}")
        for d in devices
    ]
    print_table(console, ("hardware", "", "memory", "GB/s", "TFLOPS"), rows, left=("hardware", ""))
    console.print()
    names = ", ".join(known.tables["models"])
    types = ", ".join(known.tables["types"])
    print_rows(console, [("models", names), ("types", f"{types} (MODEL:TYPE)")])
