"""Where measured curves are kept: by model file, library build, machine and settings.

A curve belongs to what it was measured with; any change of that measures anew. Files that cannot be
read are passed over and replaced, with a line that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError, OutriderError, SettingError
from outrider.core.files import check_writable, write_whole
from outrider.costs.curve import SCHEMA, CallCosts
from outrider.models.cache import cache_dir
from outrider.models.shards import local_shards

_END_BYTES = 1 << 20
_SCALE_WEIGHT = 0.2
_SHAPE_WEIGHT = 0.5
"""What a session has learned moves the stored curve this far: less where it concerns all calls, which a
busy afternoon makes slower."""
_MIN_OBSERVED = 32
"""Sessions with fewer calls leave the stored curve as it is."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a curve was measured with. Two that are equal share a curve.

    `file` is the model's `fingerprint`, `build` the native library's, `machine` names processor,
    devices and cores, `settings` are the load options that change the curve, and the rows of logits.
    """

    model: str
    file: str
    build: str
    machine: str
    settings: tuple[tuple[str, str | int | bool], ...]

    def key(self) -> str:
        """A name for files. The model's own name plays no part in it: a renamed file is the same."""
        facts = json.dumps([self.file, self.build, self.machine, sorted(self.settings)])
        return blake2b(facts.encode(), digest_size=12).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """As plain data, for people who look into the file."""
        return asdict(self) | {"settings": dict(self.settings)}


def fingerprint(path: Path) -> str:
    """Names a model's content quickly: the size of each of its files and a hash of its first and last
    MiB, not of all that lies between. Good enough to tell models apart, not to certify one.

    Raises ModelFileError when a file is gone or cannot be read.
    """
    digest = blake2b(digest_size=16)
    for file in local_shards(path):
        try:
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(0)
                digest.update(f"{size}\n".encode() + stream.read(_END_BYTES))
                stream.seek(max(size - _END_BYTES, 0))
                digest.update(stream.read(_END_BYTES))
        except OSError as error:
            reason = (error.strerror or "it cannot be read").lower()
            raise ModelFileError(str(file), reason, "Check the file, and start again.") from error
    return digest.hexdigest()


def costs_dir() -> Path:
    """Where curves are kept."""
    return cache_dir() / "costs"


def load_costs(subject: Subject) -> tuple[CallCosts | None, str | None]:
    """The stored curve, or None, and what to tell the user: a file that was there but cannot be used."""
    path = _place(subject)
    data, notice = read_entry(path, "measuring anew")
    if data is None:
        return None, notice
    try:
        return CallCosts.from_json(data.get("costs"), str(path)), None
    except SettingError as error:
        return None, f"{path}: {error.why}: measuring anew"


def store_costs(subject: Subject, costs: CallCosts) -> str | None:
    """Keep a curve's measured points; a line for the user where that is impossible."""
    return write_entry(_place(subject), {"subject": subject.as_json(), "costs": costs.as_json()})


def store_refined(subject: Subject, costs: CallCosts) -> str | None:
    """Keep, at the end of a session, a part of what its calls have taught; a line where that fails."""
    if costs.num_observed < _MIN_OBSERVED:
        return None
    return store_costs(subject, costs.refined(scale=_SCALE_WEIGHT, shape=_SHAPE_WEIGHT))


def _place(subject: Subject) -> Path:
    return costs_dir() / f"{subject.key()}.json"


def read_entry(path: Path, consequence: str) -> tuple[dict[str, Any] | None, str | None]:
    """A JSON object from the cache and no line; or None, with one where a file is there but unusable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError):
        return None, f"{path} cannot be read: {consequence}"
    if not isinstance(data, dict):
        return None, f"{path} holds something else: {consequence}"
    return data, None


def write_entry(path: Path, data: Mapping[str, Any]) -> str | None:
    """Write a JSON object into the cache; a line for the user where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n", "measured costs")
    except OSError as error:
        return f"{path.parent} cannot be made ({(error.strerror or str(error)).lower()}): costs are not kept"
    except OutriderError as error:
        return f"{error}"
    return None


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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it cannot be read ({(error.strerror or str(error)).lower()})"
        raise SettingError(
            str(path), reason, "Name a file that `outrider costs --costs FILE` wrote."
        ) from error
    except ValueError as error:
        raise SettingError(str(path), f"it is no JSON ({error})", "Write it anew: outrider costs.") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "target" not in data:
        raise SettingError(str(path), f"it is not of the schema {SCHEMA}", "Write it anew: outrider costs.")
    draft, about = data.get("draft"), data.get("about")
    return PairCosts(
        CallCosts.from_json(data["target"], f"{path}, target"),
        None if draft is None else CallCosts.from_json(draft, f"{path}, draft"),
        about if isinstance(about, dict) else None,
    )
