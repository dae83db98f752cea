"""`outrider costs`: what calls of target and draft cost on this machine, and what that means for drafts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.backends.gguf import GgufModel, LoadOptions, Weights, show_log
from outrider.backends.tuning import Tuning, costs_of, subject_of, tune, tuned_options
from outrider.cli.costs_report import costs_json, print_costs, print_trials
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import write_json
from outrider.cli.plans import check_context, draft_reference, hub_options, load_options, target_reference
from outrider.cli.progress import Report, bars
from outrider.cli.settings import CostsSettings
from outrider.cli.tables import print_notes
from outrider.core.errors import SettingError
from outrider.core.files import check_writable
from outrider.costs import CallCosts, PairCosts, export_costs, import_costs
from outrider.costs.timing import Rows
from outrider.models.hub import HubOptions
from outrider.models.reference import resolve_pair
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair
from outrider.session.loading import in_same_library

_SECONDS = 20.0
_TUNE_SECONDS = 60.0
_LONGEST_CONTEXT_TOKENS = 8192 + 64
"""Room for the longer contexts that calls are measured at."""


def costs(settings: CostsSettings) -> int:
    """Measure, or look up, and show; returns the exit status."""
    errors = Console(stderr=True, highlight=False)
    _check(settings)
    target = target_reference(settings)
    draft = draft_reference(settings)
    options = {role: load_options(settings, draft=role == "draft") for role in ("target", "draft")}
    if settings.costs is not None and settings.costs.exists():
        _show(settings, import_costs(settings.costs), [], {})
        return 0
    show_log(settings.verbose)
    with LoadInterrupt(), bars(errors) as report:
        target_path, draft_path = resolve_pair(target, draft, hub_options(settings))
        paths = (
            {"target": target_path} if draft_path is None else {"target": target_path, "draft": draft_path}
        )
        tunings = _tune(settings, paths, options, report) if settings.tune else {}
        notices = [note for tuning in tunings.values() if (note := tuning.notice)]
        pair = _measure(settings, paths, options, report, notices, tunings)
    if settings.costs is not None:
        export_costs(settings.costs, pair)
    print_notes(errors, notices)
    _show(settings, pair, notices, tunings)
    return 0


def _check(settings: CostsSettings) -> None:
    """Refuse what cannot work before anything is loaded. Raises SettingError."""
    check_context("-c", settings.ctx_size)
    if settings.costs is None:
        return
    if settings.costs.exists() and (settings.fresh or settings.tune):
        what = "--fresh" if settings.fresh else "--tune"
        raise SettingError(
            f"{what} and --costs", f"{settings.costs} exists, so it would be shown", "Remove it first."
        )
    if not settings.costs.exists():
        check_writable(settings.costs, "costs")


def _tune(
    settings: CostsSettings, paths: dict[str, Path], options: dict[str, LoadOptions], report: Report
) -> dict[str, Tuning]:
    seconds = settings.seconds or _TUNE_SECONDS
    found: dict[str, Tuning] = {}
    for role, path in paths.items():

        def report_role(what: str, part: float, role: str = role) -> None:
            report(f"{role}: {what}", part)

        given = options[role]
        if role == "draft":
            given = in_same_library(found["target"].options, given)
        found[role] = tune(path, given, draft=role == "draft", seconds=seconds, progress=report_role)
    return found


def _measure(
    settings: CostsSettings,
    paths: dict[str, Path],
    options: dict[str, LoadOptions],
    report: Report,
    notices: list[str],
    tunings: dict[str, Tuning],
) -> PairCosts:
    """The curves of both models, one after the other: contexts that lie idle cost memory alone."""
    report("loading", 0.0)
    pair = Pair.load(
        paths["target"],
        paths.get("draft"),
        options=options["target"],
        draft_options=options.get("draft"),
        hub=HubOptions(offline=True),
        measuring=report,
    )
    try:
        notices += pair.notices
        found: dict[str, CallCosts] = {}
        about: dict[str, Any] = {}
        for role, weights in (("target", pair.target), ("draft", pair.draft)):
            if weights is not None:
                model = _open(settings, weights)
                own = (
                    options[role] if role == "target" else in_same_library(pair.target.options, options[role])
                )
                if tuning := tuned_options(weights.path, own, draft=role == "draft"):
                    tunings.setdefault(role, tuning)
                rows: Rows = "all" if role == "target" else "last"
                about[role] = subject_of(model, rows).as_json()
                found[role], lines = costs_of(
                    model,
                    rows=rows,
                    seconds=settings.seconds or _SECONDS,
                    fresh=settings.fresh,
                    progress=lambda part, role=role: report(f"measuring the {role}", part),  # type: ignore[misc]
                )
                notices += lines
                model.close()
    finally:
        pair.close()
    return PairCosts(found["target"], found.get("draft"), about)


def _open(settings: CostsSettings, weights: Weights) -> GgufModel:
    usual = min(max(_LONGEST_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS), weights.trained_context)
    return weights.open(settings.ctx_size or usual, max_sequences=settings.sequences)


def _show(settings: CostsSettings, pair: PairCosts, notices: list[str], tunings: dict[str, Tuning]) -> None:
    if settings.print_json:
        tried = {
            role: {
                "options": asdict(tuning.options),
                "trials": [{"changed": trial.changed, "time_ratio": trial.score} for trial in tuning.trials],
            }
            for role, tuning in tunings.items()
        }
        write_json(costs_json(pair) | {"tuned": tried, "notices": notices})
        return
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    for role, tuning in tunings.items():
        if tuning.trials:
            print_trials(console, role, tuning)
    print_costs(console, pair)
