"""Which prompts a workload takes and how they are answered, as plans, commands and code name it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

BUILT_IN: tuple[str, ...] = ("chat", "code", "edits", "json", "summaries", "agent", "reasoning")
"""Their names; the prompts of each are in the file of that name beside this module."""


def several(value: Any) -> Any:
    """One name alone is a list of it."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(several)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A part of a plan: unknown keys and switches for numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches(cls, data: Any) -> Any:
        """A yes or no where a number belongs would pass for 1 or 0."""
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} is no switch: {str(value).lower()} means nothing")
        return data


class WorkloadSpec(Part):
    """Prompts of one kind, and how they are answered. One of `name` and `file` is enough."""

    name: str = ""
    """what it is called; without `file` the name of a built-in workload; empty: `file`'s stem"""
    file: str | None = None
    """a JSON-lines file, or a built-in workload under another name; "file.jsonl#coding" takes a category"""
    categories: Names = ()
    """only prompts of these categories"""
    prompts: Count | None = None
    """at most so many, evenly spread over the file; None: all"""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Count = 128
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _name(cls, data: Any) -> Any:
        data = workload_values(data)
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("file"), str):
            data = data | {"name": name_of_file(data["file"])}
        return data

    @model_validator(mode="after")
    def _is_known(self) -> WorkloadSpec:
        if not self.name:
            raise ValueError("it has neither name nor file")
        if self.file is None and self.name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise ValueError(f"there is no built-in workload {self.name!r}; name its file, or one of {known}")
        return self


def workload_values(spec: Any) -> Any:
    """The fields of a workload that is named by a text alone; anything else as it is."""
    if not isinstance(spec, str):
        return spec
    return {"name": spec} if spec in BUILT_IN else {"file": spec}


def name_of_file(file: str) -> str:
    """What a workload is called by its file: "questions coding" for questions.jsonl#coding."""
    path, _, category = file.partition("#")
    return f"{Path(path).stem} {category}".strip()
