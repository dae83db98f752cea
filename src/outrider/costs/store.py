"""Where measured curves are kept: by model file, library build, machine and settings.

A curve belongs to what it was measured with; any change of that means measuring again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from outrider.core.errors import SettingError
from outrider.core.files import check_writable, parse_json, reason_of, write_whole
from outrider.core.notices import notify
from outrider.costs.curve import SCHEMA, CallCosts
from outrider.costs.other_programs import OtherPrograms, look
from outrider.models.cache import read_entry, write_entry
from outrider.models.hub import cache_dir

_WEIGHT = 0.3  # what a session has learned moves the stored curve this far: it may have been a busy one
_MIN_OBSERVED = 32  # sessions with fewer calls leave the stored curve as it is
_BUSY_CORES = "cores_of_other_programs"
BUSY = (
    "other programs were busy while costs were measured: drafts may be longer or shorter than is best until "
    "`outrider costs` measures again on a quiet machine, as an idle server does by itself"
)
ESTIMATED = (
    "what calls cost here is estimated, and every call corrects it; `outrider costs` measures it, as an idle "
    "server does by itself"
)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Subject:
    """What a curve was measured with. Two that are equal share a curve."""

    model: str
    file: str  # the model's `fingerprint`
    build: str  # the native library's
    machine: str  # processor, devices and cores
    settings: Mapping[str, str | int | bool | float]  # load options that change the curve, and rows of logits

    def key(self) -> str:
        """A name for files. The model's own name plays no part in it: a renamed file is the same."""
        facts = json.dumps([self.file, self.build, self.machine, sorted(self.settings.items())])
        return blake2b(facts.encode(), digest_size=12).hexdigest()


def costs_dir() -> Path:
    """Where curves are kept."""
    return cache_dir() / "costs"


def _place(subject: Subject) -> Path:
    return costs_dir() / f"{subject.key()}.json"


def _entry(subject: Subject, costs: CallCosts) -> dict[str, Any]:
    return {"subject": asdict(subject), "costs": costs.as_json()}


def known_costs(
    subject: Subject, measure: Callable[[], CallCosts], *, spare_cores: float = math.inf, fresh: bool = False
) -> CallCosts:
    """The curve of a subject, as `remembered`; an estimate is measured."""

    def read(data: Mapping[str, Any]) -> CallCosts | None:
        costs = CallCosts.from_json(data.get("costs"))
        return None if costs.is_estimate else costs

    def write(costs: CallCosts) -> dict[str, Any]:
        return _entry(subject, costs)

    return remembered(_place(subject), measure, read=read, write=write, spare_cores=spare_cores, fresh=fresh)


def costs_at_once(subject: Subject, glance: Callable[[], CallCosts]) -> tuple[CallCosts, bool]:
    """The curve to begin with, and whether it is to be measured when there is time: the one that is kept, or
    else an estimate by the few calls of a `glance`."""
    data = read_entry(_place(subject), "it is estimated")
    if data is not None:
        try:
            kept = CallCosts.from_json(data.get("costs"))
            return kept, kept.is_estimate or bool(data.get(_BUSY_CORES))
        except SettingError as error:
            notify(f"{error.what}: {error.why}: they are estimated")
    costs = glance()
    costs.is_estimate = True
    return costs, True


def store_refined(subject: Subject, costs: CallCosts) -> None:
    """Keep, at the end of a session, a part of what its calls have taught."""
    if costs.num_observed >= _MIN_OBSERVED:
        place = _place(subject)
        write_entry(place, (read_entry(place) or {}) | _entry(subject, costs.refined(_WEIGHT)), quiet=True)


def remembered(
    path: Path,
    measure: Callable[[], _Found],
    *,
    read: Callable[[Mapping[str, Any]], _Found | None],
    write: Callable[[_Found], Mapping[str, Any]],
    spare_cores: float,
    fresh: bool = False,
) -> _Found:
    """What was measured before and is kept at `path`, or what is measured now.

    `read` makes it of the entry that `write` made; where it gives None, or raises SettingError, KeyError,
    TypeError or ValueError, it is measured again. What is measured while other programs take more than the
    `spare_cores` is marked (`BUSY` says so), and measured again once they do not.
    """
    data = None if fresh else read_entry(path, "measuring again")
    if data is not None:
        try:
            found = read(data)
        except (SettingError, KeyError, TypeError, ValueError) as error:
            why = error.why if isinstance(error, SettingError) else str(error).partition("\n")[0]
            notify(f"{path}: {why}: measuring again")
        else:
            if found is not None and not data.get(_BUSY_CORES):
                return found
            if found is not None and look().disturb(spare_cores):
                notify(BUSY)
                return found
    others = OtherPrograms()
    measured = measure()
    mark = {_BUSY_CORES: round(others.cores(), 2)} if others.disturb(spare_cores) else {}
    notify(BUSY if mark else None)
    write_entry(path, {**write(measured), **mark})
    return measured


# Pairs, for people and other machines


@dataclass(frozen=True, slots=True)
class PairCosts:
    """The curves of a target and, where there is one, its draft model, and what they belong to."""

    target: CallCosts
    draft: CallCosts | None = None
    about: Mapping[str, Any] | None = None


def export_costs(path: Path, pair: PairCosts) -> None:
    """Write a pair's curves, as refined by now. Raises SettingError, which names the file."""
    check_writable(path, "costs")
    data = {
        "schema": SCHEMA,
        "about": dict(pair.about or {}),
        "target": pair.target.refined().as_json(),
        "draft": pair.draft.refined().as_json() if pair.draft else None,
    }
    write_whole(path, json.dumps(data, indent=1) + "\n", "costs")


def import_costs(path: Path) -> PairCosts:
    """Read what `export_costs` wrote. Raises SettingError, which names the file."""
    way_out = "Name a file that `outrider costs --costs FILE` wrote."
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(str(path), f"it cannot be read ({reason_of(error)})", way_out) from error
    except ValueError as error:
        raise SettingError(str(path), f"not JSON ({error})", way_out) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise SettingError(str(path), f"not of the schema {SCHEMA}", way_out)
    target = CallCosts.from_json(data.get("target"), f"{path}, target")
    draft = CallCosts.from_json(data["draft"], f"{path}, draft") if data.get("draft") else None
    return PairCosts(target, draft, data.get("about"))
