"""Hardware, models and types of weights by name, as data: the built-in file, and one of the user's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.core.errors import SettingError
from outrider.core.files import read_toml
from outrider.core.invalid import invalid
from outrider.core.schema import Count, Natural

_SECTIONS = ("kinds", "hardware", "types", "models")
_WAY_OUT = "Name a TOML file like Outrider's lab/plan/catalogue.toml."

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=1)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Entry):
    """One device: its public figures, and what part of them calls of a language model reach.

    Bandwidths are in 10^9 bytes a second, operations in 10^12 a second by type (a multiply-add is two),
    `link_gb_s` to the other devices, one way. `overlap` is p in (reading^p + computing^p)^(1/p).
    `token_ratio`: what each further token of a call costs under llama.cpp, as a part of reading the weights
    that a token uses.
    """

    name: str
    title: str
    kind: str
    engine: Literal["llama.cpp", "vllm"] = "vllm"
    source: str
    token_ratio: Seconds = 0.0
    memory_gb: Positive
    memory_gb_s: Positive
    tera_operations_s: dict[str, Positive]
    link_gb_s: Positive = 25.0
    bandwidth_ratio: Ratio
    operations_ratio: Ratio
    overlap: Annotated[float, Field(ge=1, le=64)]
    call_s: Seconds
    layer_s: Seconds
    layer_token_s: Seconds = 0.0
    step_s: Seconds = 0.0
    link_s: Seconds
    parallel: Literal["tensor", "pipeline"]

    def operations_s(self, kind: str) -> float:
        """Operations a second that calls reach; those at 16 bits where the device has no others."""
        table = self.tera_operations_s
        return table.get(kind, table["f16"]) * 1e12 * self.operations_ratio


class WeightType(_Entry):
    """What a weight takes, scales included, and which of a device's operations it is multiplied by.
    Checkpoints of some types keep the output layer and heads at `output_bits`."""

    bits: Positive
    output_bits: Positive | None = None
    operations: str


class ModelFields(_Entry):
    """A model by the fields of its config. `inner` is the width of the feed-forward part, of one expert where
    there are `experts`; ranks and widths of compressed attention (MLA) are given together. `gated`: three
    matrices rather than two. A `type` of weights is a name among the types; `expert_type` that of experts.

    `full_…` are of layers that see all of a text where these differ from windowed ones. `linear_layers` keep
    a state instead of K and V (gated delta net); `gated_attention`: queries come with a gate of their size.
    Models of one `family` share a tokenizer; `mtp`: with layers that predict further tokens."""

    hub: str = ""
    source: str = ""
    family: str = ""
    mtp: bool = False
    layers: Count
    width: Count
    heads: Count
    kv_heads: Count | None = None
    head_width: Count | None = None
    inner: Count
    vocabulary: Count
    tied: bool = False
    gated: bool = True
    experts: Natural = 0
    experts_used: Natural = 0
    shared_inner: Natural = 0
    dense_layers: Natural = 0
    dense_inner: Natural = 0
    q_rank: Natural = 0
    kv_rank: Natural = 0
    nope_width: Natural = 0
    rope_width: Natural = 0
    value_width: Natural = 0
    window_tokens: Natural = 0
    window_layers: Natural = 0
    full_kv_heads: Natural = 0
    full_head_width: Natural = 0
    linear_layers: Natural = 0
    linear_key_width: Natural = 0
    linear_value_width: Natural = 0
    gated_attention: bool = False
    type: str = "bf16"
    expert_type: str = ""

    @property
    def windowed_layers(self) -> int:
        return min(self.window_layers, self.layers - self.linear_layers)

    @property
    def full_layers(self) -> int:
        return self.layers - self.linear_layers - self.windowed_layers

    def of_full_layers(self) -> ModelFields:
        """With the sizes of the layers that see all of a text in the place of the others'."""
        own = {"kv_heads": self.full_kv_heads, "head_width": self.full_head_width}
        return self.model_copy(update={name: value for name, value in own.items() if value})


_Kind = TypeVar("_Kind", bound=_Entry)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tables, unread: an entry is checked when it is asked for."""

    tables: Mapping[str, Mapping[str, Any]]

    def device(self, name: str) -> Device:
        """The device of this name, however it is spelled. Raises SettingError, with the nearest names."""
        name = self.spelled("hardware", name)
        fields = self._fields("hardware", name)
        usual = self._fields("kinds", fields.get("kind", ""))
        if (ratio := token_ratios().get(fields["kind"])) is not None:
            usual["token_ratio"] = ratio
        source = fields.get("source", "")
        fields |= {"name": name, "source": self.tables["sources"].get(source, source)}
        device = _read(Device, f"hardware {name}", usual | fields)
        if "f16" not in device.tera_operations_s:
            raise SettingError(f"hardware {name}", "it lacks operations at f16", "Add tera_operations_s.f16.")
        return device

    def model(self, name: str) -> ModelFields:
        name = self.spelled("models", name)
        return _read(ModelFields, f"model {name}", self._fields("models", name))

    def spelled(self, section: str, text: str) -> str:
        """The name in a section that people mean by `text`; the text itself where none is."""
        table = self.tables[section]
        if text in table:
            return text
        known = {_plain(name): name for name in table}
        if section == "models":
            known |= {
                _plain(str(entry.get("hub", ""))): name for name, entry in table.items() if "hub" in entry
            }
        else:
            known |= {_plain(alias): str(name) for alias, name in self.tables["aliases"].items()}
        return known.get(_plain(text)) or known.get(_plain(_MEMORY.sub("", text)), text)

    def drafts_for(self, name: str) -> list[str]:
        """Models of the same family that are no more than a third of its size by their fields, and its own
        MTP layers where it has them."""
        target = self.model(name)
        mine = target.layers * target.width**2
        found = []
        for other in self.tables["models"]:
            fields = self.model(other)
            is_small = not fields.experts and 3 * fields.layers * fields.width**2 <= mine
            if fields.family and fields.family == target.family and is_small:
                found.append(other)
        own = [other for other in found if ("coder" in other) == ("coder" in name)]
        return (["mtp"] if target.mtp else []) + (own or found)

    def weight_type(self, name: str) -> WeightType:
        return _read(WeightType, f"type {name}", self._fields("types", name))

    def _fields(self, section: str, name: str) -> dict[str, Any]:
        table, seen = self.tables[section], [name]
        if name not in table:
            raise unknown(_WORDS[section], name, table)
        fields = dict(table[name])
        while (other := fields.pop("like", None)) is not None:
            if other in seen or other not in table:
                raise SettingError(
                    f"{_WORDS[section]} {name}", f"it is like {other!r}, which is not there", _WAY_OUT
                )
            seen.append(other)
            fields = {**table[other], **fields}
        return fields


_WORDS = {"hardware": "hardware", "models": "model", "types": "type of weights", "kinds": "kind"}
_FILLERS = re.compile(
    r"nvidia|geforce|amd\b|radeon|apple|instruct|chat|gguf|blackwell|workstation|edition|generation"
    r"|\b(?:it|2501|2506|2507)\b"
)
_MEMORY = re.compile(r"\b\d+ ?gb\b", re.IGNORECASE)
_PREFIXES = re.compile(r"^(?:rtx|rx|gtx)(?=\d)")


def _plain(name: str) -> str:
    """A name without what people write in several ways: owner, case, blanks, the maker, "Instruct".

    >>> _plain("NVIDIA GeForce RTX 3090") == _plain("rtx3090") == _plain("3090")
    True
    """
    text = _FILLERS.sub("", name.lower().rpartition("/")[2].replace("-", " ").replace("_", " "))
    return _PREFIXES.sub("", re.sub(r"[^a-z0-9.]", "", text))


def unknown(what: str, name: str, known: Iterable[str]) -> SettingError:
    """The error about a name that is not known, with those that are nearest to it."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, 3, 0.5) or [n for n in names if name.lower() in n][:3]
    way_out = f"Did you mean {', '.join(near)}?" if near else f"There are {', '.join(names)}."
    return SettingError(name, f"no such {what} is known", way_out)


def _read(kind: type[_Kind], what: str, fields: Mapping[str, Any]) -> _Kind:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SettingError(what, str(invalid(error)), _WAY_OUT) from None


@cache
def bundled(name: str) -> Mapping[str, Any]:
    """One of the data files beside this module."""
    return tomllib.loads((files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))


def token_ratios() -> Mapping[str, float]:
    """By kind of card what a further token costs under llama.cpp, as benchmarks/plan/check.py fits it;
    `hybrid`: how many times that for models with layers of linear attention."""
    return bundled("fitted")["token_ratio"]  # type: ignore[no-any-return]


def catalogue(own: Path | None = None) -> Catalogue:
    """The built-in tables, and those of the file `own`, whose entries replace others of their name.

    Raises SettingError for a file that cannot be read, or that has other tables.
    """
    if own is None:
        return Catalogue(bundled("catalogue"))
    added = read_toml(own, _WAY_OUT)
    if wrong := [name for name in added if name not in _SECTIONS or not isinstance(added[name], dict)]:
        raise SettingError(str(own), f"{wrong[0]!r} is none of its tables {', '.join(_SECTIONS)}", _WAY_OUT)
    for section, table in added.items():
        if wrong := [name for name, entry in table.items() if not isinstance(entry, dict)]:
            raise SettingError(str(own), f"{section}.{wrong[0]} is not a table", _WAY_OUT)
    return Catalogue({name: {**table, **added.get(name, {})} for name, table in bundled("catalogue").items()})
