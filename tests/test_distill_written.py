"""The bundled prompts: what they expand to, and that the files behind them are sound."""

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import SettingError
from outrider.lab import written
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.workloads.reading import WorkloadSpec
from outrider.lab.written_prompts import FIELD, Written, written_prompts

FOLDER = Path(written.__file__).parent
FILES = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.toml")}
ENOUGH = 12_000


@pytest.fixture(scope="module")
def prompts() -> list[Written]:
    return written_prompts(ENOUGH)


def said(entry: Written) -> str:
    """The whole of what is sent."""
    return json.dumps(entry.prompt.messages)


def asked(messages: Any) -> str:
    """The text of the last turn."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"])


def template_of(entry: Written) -> str:
    return entry.prompt.id.rpartition("-")[0]


def texts(template: dict[str, Any]) -> list[str]:
    single = [template[key] for key in ("system", "text") if key in template]
    return [*single, *template.get("earlier", []), *template.get("follow_ups", [])]


def faults(files: dict[str, Any]) -> list[str]:
    """What is wrong with the files: slots that nothing defines or uses, things that come twice."""
    slots: dict[str, Any] = {}
    found: list[str] = []
    for name, data in files.items():
        found += [f"{name}: unknown key {key}" for key in data.keys() - {"templates", "slots"}]
        found += [
            f"{name}: slot {slot} is defined twice" for slot in data.get("slots", {}).keys() & slots.keys()
        ]
        slots.update(data.get("slots", {}))
    used: set[tuple[str, str | None]] = set()
    seen: Counter[str] = Counter()
    for name, data in files.items():
        for entry in data.get("templates", []):
            found += [f"{name}: unknown key {key}" for key in entry.keys() - KEYS]
            seen[json.dumps([entry.get("system"), entry.get("earlier"), entry["text"]])] += 1
            for slot, _, field in (match for text in texts(entry) for match in FIELD.findall(text)):
                used.add((slot, field or None))
    found += [f"template comes twice: {text}" for text, count in seen.items() if count > 1]
    for slot, values in slots.items():
        found += slot_faults(slot, values, {field for name, field in used if name == slot})
    return found + [f"unknown slot {slot}" for slot in sorted({slot for slot, _ in used} - slots.keys())]


KEYS = {"text", "system", "earlier", "follow_ups"}


def slot_faults(slot: str, values: Any, fields: set[str | None]) -> list[str]:
    if not fields:
        return [f"slot {slot} is not used"]
    if isinstance(values, dict):
        return [] if values["from"] < values["to"] else [f"slot {slot} is an empty range"]
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    found = [f"slot {slot}: value comes twice: {value}" for value, count in counts.items() if count > 1]
    for value in values:
        have = set(value) if isinstance(value, dict) else {None}
        if have != fields:
            found.append(f"slot {slot}: a value has the fields {have}, the templates use {fields}")
    return found


def test_the_files_are_sound() -> None:
    assert faults(FILES) == []


def test_no_prompt_and_no_id_comes_twice(prompts: list[Written]) -> None:
    assert len({said(entry) for entry in prompts}) == len({entry.prompt.id for entry in prompts}) == ENOUGH


def test_the_categories_take_even_shares(prompts: list[Written]) -> None:
    counts = Counter(entry.category for entry in prompts)
    assert len(counts) >= 12
    assert max(counts.values()) - min(counts.values()) <= 1


def test_all_slots_are_filled_and_turns_alternate(prompts: list[Written]) -> None:
    some_with_system = some_with_follow_ups = 0
    for entry in prompts:
        roles = [message["role"] for message in entry.prompt.messages if isinstance(message, dict)]
        some_with_system += roles[0] == "system"
        some_with_follow_ups += bool(entry.prompt.follow_ups)
        roles = roles[roles[0] == "system" :]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert "{passage" not in said(entry)
        assert not any(FIELD.search(text) for text in entry.prompt.follow_ups)
    assert 0.05 * ENOUGH < some_with_system < 0.4 * ENOUGH
    assert 0.15 * ENOUGH < some_with_follow_ups < 0.6 * ENOUGH


def test_no_prompt_is_one_that_is_measured(prompts: list[Written]) -> None:
    built_in = [prompt for name in BUILT_IN for prompt in load_workload(WorkloadSpec(name=name)).prompts]
    measured = {asked(prompt.messages) for prompt in built_in}
    measured |= {text for prompt in built_in for text in prompt.follow_ups}
    assert len(measured) > 50
    for entry in prompts:
        assert measured.isdisjoint({asked(entry.prompt.messages), *entry.prompt.follow_ups})


@pytest.mark.parametrize("count", [0, -3, 10**12])
def test_a_count_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(SettingError, match=r"there are [0-9,]{6,}"):
        written_prompts(count)
