"""Cost curves as people read them: a table that is its own picture, and what it means for drafts."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.backends.tuning import Tuning
from outrider.cli.output import readable
from outrider.cli.tables import Cell, print_table
from outrider.costs import MAX_TOKENS, CallCosts, PairCosts, best_call, break_even, good_sizes

_BAR_COLUMNS = 40
_SHOWN = (*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_DRAFTED = (1, 2, 4, 8)
_LONG_CONTEXT_TOKENS = 4096
_ACCEPTANCES = (0.5, 0.7, 0.9)


def print_costs(console: Console, pair: PairCosts) -> None:
    """The curves, then what they mean."""
    names = {
        role: readable(str(about.get("model", "")))
        for role, about in (pair.about or {}).items()
        if isinstance(about, dict)
    }
    _print_curve(console, "target", names.get("target", ""), pair.target)
    if pair.draft is not None:
        _print_curve(console, "draft", names.get("draft", ""), pair.draft)
    _print_meaning(console, pair)


def _print_curve(console: Console, role: str, name: str, costs: CallCosts) -> None:
    """Every line is a call over so many tokens; the bar is its time."""
    calls_s = costs.calls_s(MAX_TOKENS, context=0)
    measured = {point.num_tokens for point in costs.points if point.num_sequences == 1}
    shown = [n for n in _SHOWN if n <= max(measured, default=1)]
    longest, good = float(max(calls_s[n - 1] for n in shown)), good_sizes(calls_s[: shown[-1]])
    mark = "█" if "utf" in console.encoding.lower() else "#"
    console.print(Text(f"{role} {name}".rstrip(), style="bold"))
    rows: list[tuple[Cell, ...]] = []
    for n in shown:
        seconds = float(calls_s[n - 1])
        sign = ("*" if n in good else " ") + (" " if n in measured else "~")
        bar = Text(mark * max(round(_BAR_COLUMNS * seconds / longest), 1), style="cyan")
        rows.append((f"{n}{sign}", _ms(seconds), f"{seconds / float(calls_s[0]):.2f}", _ms(seconds / n), bar))
    print_table(console, ("tokens", "ms", "x one", "per token", ""), rows, left=("",))
    notes = ["* no longer call costs as little"]
    if any(n not in measured for n in shown):
        notes.append("~ between measured ones")
    console.print(Text(", ".join(notes), style="dim"))
    console.print()


def _print_meaning(console: Console, pair: PairCosts) -> None:
    target = pair.target
    console.print(Text("what it means", style="bold"))
    head = ["drafted", "pays by lookup from", "pays by the draft model from"]
    rows = [(str(n), _acceptance(lookup), _acceptance(model)) for n, lookup, model in _break_evens(pair)]
    columns = len(head) if pair.draft else len(head) - 1
    print_table(console, head[:columns], [row[:columns] for row in rows])
    console.print(Text("(how often each drafted token must be accepted where those before it were)", "dim"))
    calls_s = target.calls_s(MAX_TOKENS, context=0)
    best = ", ".join(f"{best_call(calls_s, a) - 1} at {a:.0%}" for a in _ACCEPTANCES)
    console.print(f"best length of a free draft: {best} acceptance")
    if pair.draft is not None:
        ratio = pair.draft.call_s(1, context=0) / target.call_s(1, context=0)
        console.print(f"a draft token costs {ratio:.2f} of a target call")
    slower = target.call_s(1, context=_LONG_CONTEXT_TOKENS) / target.call_s(1, context=0)
    known = any(point.context_tokens for point in target.points)
    how = "" if known else " (a guess, unmeasured)"
    console.print(f"after {_LONG_CONTEXT_TOKENS} tokens a call takes {slower:.2f}x as long{how}")
    if target.prefill_token_s:
        console.print(f"a prompt is read at {1 / target.prefill_token_s:.0f} tokens/s")


def _break_evens(pair: PairCosts) -> list[tuple[int, float | None, float | None]]:
    """Drafted tokens, and the acceptance at which lookup and the draft model break even."""
    calls_s = pair.target.calls_s(MAX_TOKENS, context=0)
    rows = []
    for n in _DRAFTED:
        model = None
        if pair.draft is not None:
            # The first call of a round reads the target's own last token along.
            drafting_s = pair.draft.call_s(2, context=0) + (n - 1) * pair.draft.call_s(1, context=0)
            model = break_even(calls_s, n, drafting_s)
        rows.append((n, break_even(calls_s, n), model))
    return rows


def costs_json(pair: PairCosts) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "target": pair.target.as_json(),
        "draft": pair.draft.as_json() if pair.draft else None,
        "about": dict(pair.about or {}),
        "break_even_acceptance": [
            {"drafted_tokens": n, "lookup": lookup, "draft": model} for n, lookup, model in _break_evens(pair)
        ],
        "good_sizes": list(good_sizes(pair.target.calls_s(MAX_TOKENS, context=0))),
    }


_TRIED_SIZES = (1, 2, 4, 8, 16)


def print_trials(console: Console, role: str, tuning: Tuning) -> None:
    """The sets of options that were tried, and what was chosen."""
    what = "ms of a call by its tokens; ratio: time per token"
    console.print(Text(f"{role}: options tried", style="bold").append(f" ({what})", style="not bold"))
    head = [*map(str, _TRIED_SIZES), "ratio", "options"]
    rows = [
        (*(_ms(trial.costs.call_s(n, context=0)) for n in _TRIED_SIZES), f"{trial.score:.2f}", trial.changed)
        for trial in tuning.trials
    ]
    print_table(console, head, rows, left=("options",))
    console.print()


def _acceptance(value: float | None) -> str:
    return "never" if value is None else "always" if value == 0 else f"{value:.0%}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 3}f}"
