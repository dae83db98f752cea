"""`outrider costs`: what calls of target and draft cost on this machine, and what that means for drafts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.curves import Loaded, costs_of, subject_of
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.load_options import load_options
from outrider.cli.output import readable, write_json
from outrider.cli.plans import check_context, draft_reference, hub_options, target_reference
from outrider.cli.screen import Report, Screen
from outrider.cli.settings import CostsSettings
from outrider.core.errors import SettingError
from outrider.core.files import check_writable
from outrider.core.notices import collect_notices, notify
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.expected_speed import StepCosts, best_call, good_sizes
from outrider.costs.store import PairCosts, export_costs, import_costs
from outrider.models.finding import AUTO_DRAFT
from outrider.models.hub import HubOptions
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair, SessionOptions
from outrider.session.drafts import resolve_models

_SECONDS = 20.0
_LONGEST_CONTEXT_TOKENS = 8192 + 64
"""Room for the longer contexts that calls are measured at."""


def costs(settings: CostsSettings) -> int:
    """Measure or look up, and show; returns the exit status."""
    errors = Screen(stderr=True)
    _check(settings)
    target = target_reference(settings)
    draft = draft_reference(settings)
    options = {role: load_options(settings, draft=role == "draft") for role in ("target", "draft")}
    if settings.costs is not None and settings.costs.exists():
        _show(settings, import_costs(settings.costs), [], {})
        return 0
    show_log(settings.verbose)
    with LoadInterrupt(), errors.progress() as report, collect_notices() as notices:
        named = resolve_models(target, draft, hub_options(settings))
        found = [] if named.found is None else [draft.card for draft in named.found.drafts]
        cards = {"target": named.target, "draft": named.draft or next(iter(found), None)}
        references = {role: str(card.path) for role, card in cards.items() if card is not None}
        if named.found is not None:
            references["draft"] = AUTO_DRAFT
        pair, compared = _measure(settings, references, options, report)
    if settings.costs is not None:
        export_costs(settings.costs, pair)
    errors.note(*notices)
    _show(settings, pair, notices, compared)
    return 0


def _check(settings: CostsSettings) -> None:
    check_context("-c", settings.ctx_size)
    if settings.costs is None:
        return
    if settings.costs.exists() and settings.fresh:
        why = f"{settings.costs} exists, so it would be shown"
        raise SettingError("--fresh and --costs", why, "Remove it first.")
    if not settings.costs.exists():
        check_writable(settings.costs, "costs")


def _measure(
    settings: CostsSettings,
    references: dict[str, str],
    options: dict[str, LoadOptions],
    report: Report,
) -> tuple[PairCosts, dict[str, str]]:
    """Both models' curves, one after the other, in the contexts that a session would have; and why each has
    its library, in a line."""
    report("loading")
    opening = SessionOptions(settings.ctx_size, max_running=settings.sequences, measure=True)
    pair = Pair.load(
        references["target"],
        references.get("draft"),
        options=options["target"],
        draft_options=options.get("draft"),
        hub=HubOptions(offline=True),
        opening=opening,
        progress=report,
    )
    with closing(pair):
        notify(*pair.notices)
        longest = min(max(_LONGEST_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS), pair.target.trained_context)
        opening = replace(opening, context_length=settings.ctx_size or longest)
        target = pair.open_target(opening, report)
        models: dict[str, tuple[Loaded, Rows]] = {"target": (target, "all")}
        if (beside := pair.open_draft(target, opening)) is not None:
            models["draft"] = beside[0], "last"
        found: dict[str, CallCosts] = {}
        for role, (model, rows) in models.items():
            seconds = settings.seconds or _SECONDS
            found[role] = costs_of(
                model, rows=rows, seconds=seconds, fresh=settings.fresh, progress=partial(report, role)
            )
        compared = dict(zip(("target", "draft"), (each.compared for each in pair.models), strict=False))
        about = {role: asdict(subject_of(model, rows)) for role, (model, rows) in models.items()}
    return PairCosts(found["target"], found.get("draft"), about), compared


def _show(settings: CostsSettings, pair: PairCosts, notices: list[str], compared: dict[str, str]) -> None:
    if settings.print_json:
        write_json(costs_json(pair) | {"compared": compared, "notices": notices})
        return
    console = Screen(soft_wrap=True)
    for role, line in compared.items():
        if line:
            console.say(f"{role}: {line}")
    print_costs(console, pair)


# Cost curves as people read them.

_SHOWN = (*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_DRAFTED = (1, 2, 4, 8)
_LONG_CONTEXT_TOKENS = 4096
_ACCEPTANCES = (0.5, 0.7, 0.9)


def print_costs(console: Screen, pair: PairCosts) -> None:
    """The curves, and what they mean for drafts."""
    for role, curve in (("target", pair.target), ("draft", pair.draft)):
        if curve is not None:
            about: Any = (pair.about or {}).get(role)
            name = about.get("model", "") if isinstance(about, dict) else ""
            _print_curve(console, role, readable(str(name)), curve)
    _print_meaning(console, pair)


def _print_curve(console: Screen, role: str, name: str, costs: CallCosts) -> None:
    calls_s = costs.calls_s(MAX_TOKENS, context=0)
    measured = {point.num_tokens for point in costs.points if point.num_sequences == 1}
    shown = [n for n in _SHOWN if n <= max(measured, default=1)]
    good = good_sizes(calls_s[: shown[-1]])
    marks = {n: ("*" if n in good else " ") + (" " if n in measured else "~") for n in shown}
    console.say(f"{role} {name}".rstrip(), "bold")
    console.calls({n: float(calls_s[n - 1]) for n in shown}, marks)
    notes = ["* no longer call is as cheap"]
    if any(n not in measured for n in shown):
        notes.append("~ interpolated")
    console.say(", ".join(notes), "dim")
    console.print()


def _print_meaning(console: Screen, pair: PairCosts) -> None:
    target = pair.target
    console.say("what it means", "bold")
    head = ["drafted", "pays by lookup from", "pays by the draft model from"]
    rows = [(str(n), _acceptance(lookup), _acceptance(model)) for n, lookup, model in _break_evens(pair)]
    columns = len(head) if pair.draft else len(head) - 1
    console.table(head[:columns], [row[:columns] for row in rows])
    console.say("(the share of drafted tokens that must be accepted if those before were)", "dim")
    calls_s = target.calls_s(MAX_TOKENS, context=0)
    best = ", ".join(f"{best_call(calls_s, a) - 1} at {a:.0%}" for a in _ACCEPTANCES)
    console.print(f"best length of a free draft: {best} acceptance")
    if pair.draft is not None:
        ratio = pair.draft.call_s(1, context=0) / target.call_s(1, context=0)
        console.print(f"a draft token costs {ratio:.2f} of a target call")
    slower = target.call_s(1, context=_LONG_CONTEXT_TOKENS) / target.call_s(1, context=0)
    known = any(point.context_tokens for point in target.points)
    how = "" if known else " (estimated, not measured)"
    console.print(f"after {_LONG_CONTEXT_TOKENS} tokens a call takes {slower:.2f}x as long{how}")
    if target.prefill_token_s:
        console.print(f"a prompt is read at {1 / target.prefill_token_s:.0f} tokens/s")


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
        "good_sizes": list(good_sizes(pair.target.calls_s(MAX_TOKENS, context=0))),
    }


def _acceptance(value: float | None) -> str:
    return "never" if value is None else "always" if value == 0 else f"{value:.0%}"
