"""Prompts expanded from the templates and slot values in `written/`."""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any

from outrider.core.errors import SettingError
from outrider.lab.prompts import Prompt

FIELD = re.compile(r"\{([a-z_]+)(?::([0-9]))?(?:\.([a-z_]+))?\}")
"""A slot in a template: its name, which of several values (1 if not said), the field of that value."""

ARTICLE = re.compile(r"\b([Aa]) (?=" + FIELD.pattern + ")")
"""The indefinite article right before a slot."""

Slots = Mapping[str, tuple[Any, ...]]
Draw = tuple[str, int]
"""A slot's name and which of its values in one prompt: 1, 2, …"""


@dataclass(frozen=True, slots=True)
class Written:
    """One prompt, and the category whose template it was made from."""

    category: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with slots to fill. `messages` are pairs of role and text, up to the user's last turn."""

    name: str
    """category and number in its file, from 1"""
    messages: tuple[tuple[str, str], ...]
    follow_ups: tuple[str, ...] = ()

    def draws(self) -> list[Draw]:
        """The values that the messages take, in the order of their first use."""
        return draws_in(text for _, text in self.messages)

    def choices(self, slots: Slots) -> list[int]:
        """How many values each of `draws` chooses from: those that the same slot has not given yet."""
        draws = self.draws()
        return [
            len(slots[slot]) - sum(other == slot for other, _ in draws[:index])
            for index, (slot, _) in enumerate(draws)
        ]

    def capacity(self, slots: Slots) -> int:
        """How many prompts of different messages the template gives."""
        return math.prod(self.choices(slots))

    def filled(self, number: int, slots: Slots, rng: random.Random) -> Prompt:
        """Its prompt `number` (from 0 to below `capacity`). `rng` chooses what only the follow-ups use."""
        draws, rest = self.draws(), number
        left = {slot: list(slots[slot]) for slot, _ in [*draws, *draws_in(self.follow_ups)]}
        values: dict[Draw, Any] = {}
        for draw, choices in zip(draws, self.choices(slots), strict=True):
            rest, digit = divmod(rest, choices)
            values[draw] = left[draw[0]].pop(digit)
        for draw in draws_in(self.follow_ups):
            if draw not in values:
                values[draw] = left[draw[0]].pop(rng.randrange(len(left[draw[0]])))
        return Prompt(
            id=f"{self.name}-{number}",
            messages=tuple({"role": role, "content": fill(text, values)} for role, text in self.messages),
            follow_ups=tuple(fill(text, values) for text in self.follow_ups),
        )


def draws_in(texts: Iterator[str] | tuple[str, ...]) -> list[Draw]:
    """The values that `texts` ask for, each once, in the order of their first use."""
    found = (match for text in texts for match in FIELD.finditer(text))
    return list(dict.fromkeys((match[1], int(match[2] or 1)) for match in found))


def fill(text: str, values: Mapping[Draw, Any]) -> str:
    """`text` with its slots replaced by `values`; "a" becomes "an" before a vowel."""

    def value(slot: str, which: str | None, field: str | None) -> str:
        chosen = values[slot, int(which or 1)]
        return str(chosen[field] if field else chosen)

    def article(match: re.Match[str]) -> str:
        word = value(match[2], match[3], match[4])
        return f"{match[1]}{'n' if word[:1] in 'aeiou' else ''} "

    text = ARTICLE.sub(article, text)
    return FIELD.sub(lambda match: value(match[1], match[2], match[3]), text).strip()


def template(name: str, entry: Mapping[str, Any]) -> Template:
    """A template as its file gives it."""
    system = (("system", entry["system"]),) if "system" in entry else ()
    turns = [*entry.get("earlier", ()), entry["text"]]
    spoken = tuple(("assistant" if index % 2 else "user", text) for index, text in enumerate(turns))
    return Template(name, (*system, *spoken), tuple(entry.get("follow_ups", ())))


def values_of(slot: Any) -> tuple[Any, ...]:
    """A slot's values: those listed, or the numbers of a range."""
    if isinstance(slot, dict):
        return tuple(str(number) for number in range(slot["from"], slot["to"] + 1, slot.get("step", 1)))
    return tuple(slot)


@cache
def collection() -> tuple[Mapping[str, tuple[Template, ...]], Slots]:
    """The templates by category, in alphabetical order, and all slots."""
    categories: dict[str, tuple[Template, ...]] = {}
    slots: dict[str, tuple[Any, ...]] = {}
    folder = resources.files("outrider.distill.written")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        category, dot, kind = file.name.partition(".")
        if dot + kind != ".toml":
            continue
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        slots.update({name: values_of(slot) for name, slot in data.get("slots", {}).items()})
        if entries := data.get("templates"):
            categories[category] = tuple(
                template(f"{category}-{number}", entry) for number, entry in enumerate(entries, start=1)
            )
    return categories, slots


def in_turn(templates: tuple[Template, ...], slots: Slots, seed: int) -> Iterator[Prompt]:
    """All prompts of `templates`: one of each, then a second of each, …, until none has one left.

    The prompts of a template come in steps of about the golden section of their number: every one once, and
    the values of each slot evenly mixed from the first few on.
    """
    rng = random.Random(f"{seed} {templates[0].name}")
    order = rng.sample(templates, len(templates))
    capacity = {entry: entry.capacity(slots) for entry in order}
    start = {entry: rng.randrange(capacity[entry]) for entry in order}
    for turn in range(max(capacity.values())):
        for entry in order:
            if turn < (size := capacity[entry]):
                number = (start[entry] + turn * stride(size)) % size
                yield entry.filled(number, slots, random.Random(f"{seed} {entry.name} {number}"))


@cache
def stride(size: int) -> int:
    """A step near the golden section of `size` that visits all of `size` numbers."""
    step = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, size) != 1:
        step += 1
    return step


def interleaved(seed: int) -> Iterator[Written]:
    """Every prompt there is: one of each category in turn, for as long as a category has any left."""
    categories, slots = collection()
    left = {category: in_turn(templates, slots, seed) for category, templates in categories.items()}
    while left:
        for category, prompts in list(left.items()):
            prompt = next(prompts, None)
            if prompt is None:
                del left[category]
            else:
                yield Written(category, prompt)


def written_prompts(count: int, seed: int = 0) -> list[Written]:
    """The first `count` bundled prompts in the order that `seed` gives them.

    No conversation comes twice. The categories take turns, and each uses all of its templates before it
    uses one again. A larger `count` begins with the same prompts. A prompt's id names its template and its
    number there, whatever the seed.

    Raises SettingError if `count` is below 1 or above what there is.
    """
    categories, slots = collection()
    available = sum(entry.capacity(slots) for templates in categories.values() for entry in templates)
    if not 1 <= count <= available:
        raise SettingError(
            f"{count} written prompts",
            f"there are {available:,}, and at least 1 has to be asked for",
            f"Ask for 1 to {available:,}, or give prompts of your own.",
        )
    return list(islice(interleaved(seed), count))
