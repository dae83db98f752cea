"""A plan as people read it: what to do in a sentence, and a table by drafter and number of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from outrider.cli.output import Cell, print_rows, print_table, readable
from outrider.core import numbers
from outrider.lab.plan.calls import error_line, memory_bytes
from outrider.lab.plan.catalogue import Catalogue
from outrider.lab.plan.metrics import Observed
from outrider.lab.plan.plan import BatchPlan, Model, Plan, Way

_WORTH = 1.03
"""A smaller gain is none to set something up for."""
_ENGINES = {"llama.cpp": "llama.cpp", "vllm": "vLLM"}


def print_plan(console: Console, plan: Plan, acceptance: str) -> None:
    """The whole plan."""
    asked = plan.asked
    console.print(Text(verdict(plan), "bold"))
    console.print()
    rows: list[tuple[str, Cell]] = [("target", _described(asked.target))]
    best = plan.batches[0].best
    rows += [("draft", _described(draft)) for draft in asked.drafts if best and draft.name == best.draft]
    if (machine := asked.machine) is not None:
        count = f"{machine.count} x " if machine.count > 1 else ""
        rows.append(("hardware", f"{count}{machine.device.title}, under {_ENGINES[machine.engine]}"))
    rows += [("texts", f"{asked.context} tokens each"), ("acceptance", acceptance)]
    print_rows(console, rows)
    console.print()
    head = ("batch", "drafts", "tokens", "plain", "with", "speed-up", "range", "memory")
    cells = [
        _row(plan, batch, way) for place, batch in enumerate(plan.batches) for way in _shown(batch, place)
    ]
    print_table(console, head, cells, left=("drafts",), gap=1)
    console.print()
    print_rows(console, _ends(plan))


def verdict(plan: Plan) -> str:
    """What to do, and what it would give, in a sentence."""
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
    """The rows of a batch size: of the first one each drafter, of others the best."""
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


def _ends(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """Up to which batch drafting pays and the models fit, and how wrong all that may be."""
    if plan.pays_to is None:
        yield "pays", f"up to the largest batch that {'fits' if plan.fits_to else 'is looked at'}"
    elif plan.pays_to:
        yield (
            "pays",
            f"up to {numbers.counted(plan.pays_to, 'sequence')} at once; above that plain decoding is faster",
        )
    else:
        yield "pays", "at no batch size"
    if plan.fits_to is not None:
        yield "fits", f"up to {numbers.counted(plan.fits_to, 'sequence')} of {plan.asked.context} tokens"
    if needed := [found for found in plan.batches[0].break_even.values() if found is not None]:
        yield "breaks even", f"where {min(needed)[0]:.0%} of a draft model's tokens are accepted"
    yield "", error_line()


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
    rows = [(d.name, d.title, f"{d.memory_gb:g} GB", f"{d.memory_gb_s:,.0f}") for d in devices]
    print_table(console, ("hardware", "", "memory", "GB/s"), rows, left=("hardware", ""), gap=1)
    console.print()
    types = f"{', '.join(known.tables['types'])} (MODEL:TYPE)"
    print_rows(console, [("models", ", ".join(known.tables["models"])), ("types", types)])
