"""What a draft of some shape costs beside its target, measured before it is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from outrider.backends.gguf import LoadOptions
from outrider.core.errors import InputError
from outrider.costs import CallCosts
from outrider.costs.timing import Rows
from outrider.distill.worth import Prices
from outrider.files import write_whole
from outrider.lab.models import ModelFile
from outrider.models import read_card
from outrider.session.loading import load_weights
from outrider.tuning import costs_of

__all__ = ["measure_prices"]

_CONTEXT_TOKENS = 256
"""An answer's usual distance from its prompt's start; prices hardly depend on it for small models."""
_MAX_DRAFTED = 16
_DRAFT_SECONDS = 5.0


def measure_prices(target: ModelFile, draft: Path, kept: Path, threads: int) -> Prices:
    """Prices of a target's calls and of a step of the draft in the file `draft`, weights untrained or not.

    Taken from `kept` where they were written there before: the choice of the best draft depends on them, and
    a run that goes on must choose as it began. Raises InputError when that file is damaged, BackendError when
    a call fails.
    """
    if kept.exists():
        return _read(kept)
    options = LoadOptions(threads=threads)
    large = _costs(target.path, options, "all", None)
    small = _costs(draft, options, "last", _DRAFT_SECONDS)
    prices = Prices(
        tuple(large.call_s(n + 1, context=_CONTEXT_TOKENS) for n in range(_MAX_DRAFTED + 1)),
        small.call_s(1, context=_CONTEXT_TOKENS),
    )
    write_whole(kept, json.dumps(asdict(prices)) + "\n", "prices")
    return prices


def _read(path: Path) -> Prices:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Prices(tuple(map(float, found["target_s"])), float(found["draft_s"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            str(path), f"it is damaged ({error})", "Remove it: prices are measured anew."
        ) from error


def _costs(path: Path, options: LoadOptions, rows: Rows, seconds: float | None) -> CallCosts:
    weights = load_weights(path, read_card(path), options, [], draft=rows == "last")
    try:
        model = weights.open(2 * _CONTEXT_TOKENS)
        if seconds is None:
            return costs_of(model, rows=rows)[0]
        return costs_of(model, rows=rows, seconds=seconds, fresh=True)[0]
    finally:
        weights.close()
