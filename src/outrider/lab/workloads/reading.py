"""A workload from its file: the lines that hold prompts, those of the categories asked for, evenly spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.core.errors import PromptError
from outrider.core.files import parse_json, read_text
from outrider.core.params import SamplingParams
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.workloads.lines import Unreadable, is_event, prompt_of, prompts_of_event

_FORMS = 'Each line is {"turns": […]}, {"messages": […]}, {"prompt": "…"} or an event of a server\'s log.'


def load_workload(spec: WorkloadSpec) -> Workload:
    """The prompts of a workload, each with an id of its own, and how they are answered.

    Raises PromptError, which names the file and the line.
    """
    reference, categories = spec.file or spec.name, spec.categories
    if reference in BUILT_IN:
        what, source = f"the built-in workload {reference}", "built in"
        text = (files("outrider.lab.workloads") / f"{reference}.jsonl").read_text(encoding="utf-8")
    else:
        path, categories = _parts(reference, categories)
        way_out = f"Name a JSON-lines file, or a built-in workload: {', '.join(BUILT_IN)}."
        text, what, source = read_text(path, way_out, PromptError), str(path), str(path)
    found, passed_over = _read(text, what, spec.max_tokens)
    prompts = _of_categories(found, categories, what)
    if spec.prompts is not None and spec.prompts < len(prompts):  # from the first on at even distances
        prompts = [prompts[i * len(prompts) // spec.prompts] for i in range(spec.prompts)]
    skipped = [f"{number} skipped: {why}" for why, number in sorted(passed_over.items())]
    return Workload(
        name=spec.name,
        prompts=tuple(prompts),
        sampling=SamplingParams(temperature=spec.temperature, seed=spec.seed),
        max_tokens=spec.max_tokens,
        source=f"{source} ({'; '.join(skipped)})" if skipped else source,
    )


def _parts(reference: str, categories: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """The file and the categories that "file.jsonl#coding,math" means."""
    whole = Path(reference).expanduser()
    name, mark, wanted = reference.rpartition("#")
    if whole.exists() or not mark:
        return whole, tuple(categories)
    more = tuple(part.strip() for part in wanted.split(",") if part.strip())
    return Path(name).expanduser(), tuple(dict.fromkeys((*categories, *more)))


def _read(text: str, what: str, max_tokens: int) -> tuple[list[tuple[Prompt, str]], Counter[str]]:
    """All prompts with their categories, in the order of the file and each with an id of its own; and what of
    a log was passed over, by reason: requests that cannot be asked again."""
    # Not splitlines: text may hold its line ends, which JSON leaves as they are.
    values = [(number, _json(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found: dict[str, tuple[Prompt, str]] = {}
    passed_over: Counter[str] = Counter()
    is_log = any(is_event(value) for _, value in values)
    for number, value in values:
        try:
            prompts = prompts_of_event(value, max_tokens) if is_log else [prompt_of(value, str(number))]
        except Unreadable as error:
            if not is_log:
                raise PromptError(f"{what}, line {number}", str(error), error.way_out or _FORMS) from None
            passed_over[str(error)] += 1
            continue
        category = "" if is_log else value.get("category")
        for prompt in prompts:
            names = chain([prompt.id], (f"{prompt.id}.{i}" for i in count(2)))
            name = next(name for name in names if name not in found)
            found[name] = replace(prompt, id=name), category if isinstance(category, str) else ""
    if not found and is_log:
        reasons = [f"; {why} ({number})" for why, number in sorted(passed_over.items())]
        why = "the log holds no request that could be asked again" + "".join(reasons)
        raise PromptError(what, why, "Log the bodies too: outrider serve --log-json --log-prompts.")
    if not found:
        raise PromptError(what, "it holds no prompts", _FORMS)
    return list(found.values()), passed_over


def _json(line: str) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError):
        return line


def _of_categories(found: Sequence[tuple[Prompt, str]], wanted: Sequence[str], what: str) -> list[Prompt]:
    there = dict.fromkeys(category for _, category in found if category)
    if missing := [category for category in wanted if category not in there]:
        known = f"It has: {', '.join(there)}." if there else "Its lines name none; leave the category out."
        raise PromptError(what, f"it has no category {missing[0]!r}", known)
    return [prompt for prompt, category in found if not wanted or category in wanted]


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
                raise ValueError(f"{name} is not a switch: {str(value).lower()} means nothing")
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
            path, _, category = data["file"].partition("#")  # "questions coding": questions.jsonl#coding
            data = data | {"name": f"{Path(path).stem} {category}".strip()}
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
