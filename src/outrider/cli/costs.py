"""`outrider costs`: what calls of target and draft cost on this machine, and what that means for drafts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from outrider.backends.gguf.log import show_log
from outrider.backends.tuning import Loaded, costs_of, subject_of
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import write_json
from outrider.cli.plans import draft_reference, hub_options, load_options, target_reference
from outrider.cli.screen import Report, Screen
from outrider.cli.settings import CostsSettings
from outrider.core.files import check_writable
from outrider.core.notices import collect_notices, notify
from outrider.core.numbers import readable
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.expected_speed import StepCosts
from outrider.costs.store import PairCosts, export_costs
from outrider.session.options import SessionOptions
from outrider.session.pair import Pair

_LONGEST_CONTEXT_TOKENS = 8192 + 64
"""Room for the longer contexts that calls are measured at."""
_SHOWN = (*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_DRAFTED = (1, 2, 4, 8)
_LONG_CONTEXT_TOKENS = 4096


def costs(settings: CostsSettings) -> int:
    """Measure, keep and show; returns the exit status."""
    errors = Screen(stderr=True)
    if settings.costs is not None:
        check_writable(settings.costs, "costs")
    show_log(settings.verbose)
    with LoadInterrupt(), errors.progress() as report, collect_notices() as notices:
        pair = _measure(settings, report)
    if settings.costs is not None:
        export_costs(settings.costs, pair)
    errors.note(*notices)
    if settings.print_json:
        write_json(costs_json(pair) | {"notices": notices})
    else:
        print_costs(Screen(soft_wrap=True), pair)
    return 0


def _measure(settings: CostsSettings, report: Report) -> PairCosts:
    """Both models' curves, one after the other, in the contexts that a session would have."""
    report("loading")
    opening = SessionOptions(settings.ctx_size, measure=True)
    pair = Pair.load(
        target_reference(settings),
        draft_reference(settings),
        options=load_options(settings),
        draft_options=load_options(settings, draft=True),
        hub=hub_options(settings),
        opening=opening,
        progress=report,
    )
    with closing(pair):
        notify(*pair.notices)
        longest = min(_LONGEST_CONTEXT_TOKENS, pair.target.trained_context)
        opening = replace(opening, context_length=settings.ctx_size or longest)
        target = pair.open_target(opening, report)
        models: dict[str, tuple[Loaded, Rows]] = {"target": (target, "all")}
        if (beside := pair.open_draft(target, opening)) is not None:
            models["draft"] = beside[0], "last"
        found = {
            role: costs_of(
                model, rows=rows, seconds=settings.seconds, fresh=True, progress=partial(report, role)
            )
            for role, (model, rows) in models.items()
        }
        about = {role: asdict(subject_of(model, rows)) for role, (model, rows) in models.items()}
    return PairCosts(found["target"], found.get("draft"), about)


def print_costs(console: Screen, pair: PairCosts) -> None:
    """The curves, and what they mean for drafts."""
    for role, curve in (("target", pair.target), ("draft", pair.draft)):
        if curve is not None:
            name = (pair.about or {}).get(role, {}).get("model", "")
            console.say(f"{role} {readable(name)}", "bold")
            _print_curve(console, curve)
    target = pair.target
    console.say("what it means", "bold")
    head = ["drafted", "pays by lookup from", "pays by the draft model from"]
    rows = [(str(n), _acceptance(lookup), _acceptance(model)) for n, lookup, model in _break_evens(pair)]
    columns = len(head) if pair.draft else len(head) - 1
    console.table(head[:columns], [row[:columns] for row in rows])
    console.say("(the share of drafted tokens that must be accepted if those before were)", "dim")
    if pair.draft is not None:
        ratio = pair.draft.call_s(1, context=0) / target.call_s(1, context=0)
        console.print(f"a draft token costs {ratio:.2f} of a target call")
    if target.switch_s:
        ratio = target.switch_s / target.call_s(1, context=0)
        console.print(f"a call of another size than the last one takes {ratio:.2f} of a target call longer")
    slower = target.call_s(1, context=_LONG_CONTEXT_TOKENS) / target.call_s(1, context=0)
    known = any(point.context_tokens for point in target.points)
    how = "" if known else " (estimated, not measured)"
    console.print(f"after {_LONG_CONTEXT_TOKENS} tokens a call takes {slower:.2f}x as long{how}")
    if target.prefill_token_s:
        console.print(f"a prompt is read at {1 / target.prefill_token_s:.0f} tokens/s")


def _print_curve(console: Screen, costs: CallCosts) -> None:
    calls_s = costs.calls_s(MAX_TOKENS, context=0)
    measured = {point.num_tokens for point in costs.points}
    shown = [n for n in _SHOWN if n <= max(measured, default=1)]
    marks = {n: " " if n in measured else "~" for n in shown}
    console.calls({n: float(calls_s[n - 1]) for n in shown}, marks)
    if "~" in marks.values():
        console.say("~ interpolated", "dim")
    console.print()


def _acceptance(value: float | None) -> str:
    return "never" if value is None else "always" if value == 0 else f"{value:.0%}"


def _break_evens(pair: PairCosts) -> list[tuple[int, float | None, float | None]]:
    lookup = StepCosts.of(pair.target)
    draft = None if pair.draft is None else StepCosts.of(pair.target, pair.draft)
    return [(n, lookup.break_even(n), None if draft is None else draft.break_even(n)) for n in _DRAFTED]


def costs_json(pair: PairCosts) -> dict[str, Any]:
    """The curves and what they mean, for `--json`."""
    return {
        "target": pair.target.as_json(),
        "draft": pair.draft.as_json() if pair.draft else None,
        "about": dict(pair.about or {}),
        "break_even_acceptance": [
            {"drafted_tokens": n, "lookup": lookup, "draft": model} for n, lookup, model in _break_evens(pair)
        ],
    }
