"""What a sweep is over: models, settings of speculation, workloads, and how often each is run.

The same names everywhere: fields of `Plan`, keys of the TOML file, flags of `outrider bench`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from outrider.backends.gguf.options import LoadOptions
from outrider.core.errors import SettingError
from outrider.core.files import read_toml
from outrider.core.invalid import invalid
from outrider.core.schema import values_for
from outrider.lab.models import OWN_HEAD
from outrider.lab.settings import PLAIN, Setting
from outrider.lab.workloads.reading import BUILT_IN, Names, Part, WorkloadSpec, several
from outrider.models.reference import DEFAULT

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

LONGEST_DRAFT = 64
"""The longest draft that is swept: what the automatic choice goes to at most."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Draft lengths as people write them, ascending. Raises ValueError.

    >>> parse_lengths("0-3,8")
    (0, 1, 2, 3, 8)
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > LONGEST_DRAFT:
            raise ValueError(f"{part.strip()!r} is not a length of 0 to {LONGEST_DRAFT}, as in 0-16 or 2,4,8")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _lengths(value: Any) -> Any:
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
        raise ValueError("lengths are numbers, as in 0-16 or 2,4,8")
    return parse_lengths(",".join(map(str, parts))) if parts else ()


class SweepPlan(Part):
    """What is swept, and how precisely. Lengths are tokens; `plan.toml` beside this module explains each."""

    name: Annotated[str, Field(pattern=r"^[\w][\w .+-]*$")] = "bench"
    targets: Annotated[Names, Field(min_length=1)] = ("default",)
    drafts: Names = ()
    """files, and `OWN_HEAD`"""
    lookup_only: bool = True
    """whether "no draft model" is a column too"""
    drafters: Annotated[
        tuple[Literal["lookup", "model", "both"], ...], BeforeValidator(several), Field(min_length=1)
    ] = ("lookup", "model", "both")
    draft_lengths: Annotated[
        tuple[Annotated[int, Field(ge=0, le=LONGEST_DRAFT)], ...],
        BeforeValidator(_lengths),
        Field(min_length=1),
    ] = tuple(range(17))
    p_mins: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0, 0.5, 0.75)
    workloads: Annotated[tuple[WorkloadSpec, ...], Field(min_length=1)] = tuple(
        WorkloadSpec(name=name) for name in ("chat", "code", "edits", "json")
    )
    finalists: Annotated[int, Field(ge=0, le=64)] = 2
    controls: Names = ("model 3", "lookup 8")
    """settings that run for real whatever is predicted, by name"""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 4
    """of every real run"""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """for the whole sweep; None: as long as it takes"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    context: Annotated[int, Field(ge=0)] = 0
    """0: as much as the prompts and answers need"""
    costs: Path | None = None
    """cost curves to take instead of measuring them"""

    gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    threads: int = 0
    threads_batch: int = 0
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    full_window: bool = True
    extra_buffer_types: bool = True
    backend: str = "auto"
    """native library; "auto": of each target the one that is faster for it"""
    library: str = ""

    @field_validator("gpu_layers", mode="before")
    @classmethod
    def _all_layers(cls, value: Any) -> Any:
        return -1 if value == "all" else value

    @field_validator("controls")
    @classmethod
    def _settings(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        with _as_values():
            found = [Setting.of(name) for name in names]
        return tuple(dict.fromkeys(setting.name for setting in found if setting != PLAIN))

    @field_validator("p_mins", "drafters")
    @classmethod
    def _once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(values))

    @model_validator(mode="after")
    def _fits_together(self) -> SweepPlan:
        if not self.drafts and not self.lookup_only:
            raise ValueError("there is no draft model and lookup_only is off: nothing is left to sweep")
        names = [spec.name for spec in self.workloads]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f'two of the workloads are called {twice!r}; give one another name: name = "…" beside it'
            )
        with _as_values():
            self.load_options()
        return self

    def load_options(self, backend: str = "") -> LoadOptions:
        """How the weights of every model are loaded, under the plan's backend or another."""
        return LoadOptions(**values_for(LoadOptions, self) | ({"backend": backend} if backend else {}))


@contextmanager
def _as_values() -> Iterator[None]:
    """A setting that is refused within is a value that is."""
    try:
        yield
    except SettingError as error:
        way_out = error.way_out[:1].lower() + error.way_out[1:].rstrip(".")
        raise ValueError(f"{error.what}: {error.why}; {way_out}") from None


# A plan from a TOML file and from flags, and what is wrong with it in one sentence.

_WAY_OUT = "`outrider bench init` writes a file that explains every setting."


def plan_text() -> str:
    """The file that `outrider bench init` writes: every setting explained, at its default."""
    return (files("outrider.lab.bench") / "plan.toml").read_text(encoding="utf-8")


def plan_values(path: Path) -> dict[str, Any]:
    """What a TOML file says, not yet checked but for its form, with paths that hold from anywhere.

    Raises SettingError, which names the file.
    """
    values = read_toml(path, "Name a TOML file; `outrider bench init` writes one.")
    folder = path.absolute().parent
    for name, found in values.items():
        if name in ("targets", "drafts") and isinstance(found, str | list):
            values[name] = [_model_from(folder, model) for model in several(found)]
        elif name == "costs":
            values[name] = _from(folder, found)
        elif name == "workloads" and isinstance(found, list):
            values[name] = [_workload_from(folder, spec) for spec in found]
    return {"name": path.stem} | values


def _from(folder: Path, name: Any) -> Any:
    """A path as it holds from anywhere; joining keeps what is absolute."""
    return str(folder / os.path.expanduser(name)) if name and isinstance(name, str) else name


def _model_from(folder: Path, reference: Any) -> Any:
    if not isinstance(reference, str) or reference in (DEFAULT, OWN_HEAD) or reference.startswith("hf:"):
        return reference
    # The folder's own brackets are no pattern.
    is_pattern = glob.has_magic(reference) and not (folder / os.path.expanduser(reference)).exists()
    return _from(Path(glob.escape(str(folder))) if is_pattern else folder, reference)


def _workload_from(folder: Path, spec: Any) -> Any:
    if isinstance(spec, dict) and "file" in spec:
        return spec | {"file": _workload_from(folder, spec["file"])}
    return _from(folder, spec) if spec not in BUILT_IN else spec


def make_plan(
    values: Mapping[str, Any], source: str = "", names: Mapping[str, str] | None = None
) -> SweepPlan:
    """The plan of these values. A complaint calls a field by `source` and its name, or as `names` says.

    Raises SettingError: one sentence about the first thing that is wrong.
    """
    try:
        return SweepPlan.model_validate(dict(values))
    except ValidationError as error:
        raise _complaint(error, source, names or {}) from None


def _complaint(error: ValidationError, source: str, names: Mapping[str, str]) -> SettingError:
    """The first thing that is wrong, with the name that its field has for the user."""
    first = invalid(error)
    named = str(first.place[0]) if first.place else ""
    shown = names.get(named) or source + first.path
    what = shown or source.removesuffix(": ") or "the plan"
    if first.kind == "extra_forbidden":
        table = WorkloadSpec if named == "workloads" else SweepPlan
        alike = get_close_matches(str(first.place[-1]), table.model_fields, 1, 0.6)
        way_out = f"Did you mean {alike[0]}?" if alike else _WAY_OUT
        return SettingError(what, "no such setting", way_out)
    given = first.given
    is_shown = first.kind not in ("missing", "value_error") and not isinstance(given, dict | list | tuple)
    return SettingError(what, f"{given!r}: {first.reason}" if is_shown else first.reason, _WAY_OUT)
