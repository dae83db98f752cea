"""Prompts of our own writing: one TOML file a category, to read and to extend.

A file holds `[[templates]]` and `[slots]`. A template has `text`, what the user asks, and may have

- `system`: a system message (without it, the model's own default applies),
- `earlier`: turns before `text`, the user's and the assistant's alternately,
- `follow_ups`: what is asked after the model's own answers.

In each of them `{place}` is replaced by one of the values of the slot `place`, the same one wherever the
template names it; `{place:2}` is a second value, different from the first. A slot is a list of texts, a
list of tables whose fields are named as in `{passage.text}`, or a range of numbers
`{ from = 2, to = 9, step = 1 }` (both ends belong to it). Slots may be used in every file, whichever
defines them. `shared.toml` and `passages.toml` define slots alone. Values are put in as they are: braces
in them mean nothing. An "a" before a slot becomes "an" where the value begins with a vowel.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from outrider.core.errors import SettingError
from outrider.lab.prompts import Prompt

FIELD = re.compile(r"\{([a-z_]+)(?::([0-9]))?(?:\.([a-z_]+))?\}")
"""A slot in a template: its name, which of several values (1 if not said), the field of that value."""

ARTICLE = re.compile(r"\b([Aa]) (?=" + FIELD.pattern + ")")
"""The indefinite article right before a slot."""

Slots = Mapping[str, Sequence[Any]]
Draw = tuple[str, int]
"""A slot's name and which of its values in one prompt: 1, 2, …"""


class Written(NamedTuple):
    """One prompt, and the category whose template it was made from."""

    category: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with slots to fill. `name`: its category and number in its file, from 1; `texts`: of its
    messages, up to the user's last turn."""

    name: str
    roles: tuple[str, ...]
    texts: tuple[str, ...]
    follow_ups: tuple[str, ...]

    def capacity(self, slots: Slots) -> int:
        """How many prompts of different messages the template gives: a slot gives no value twice."""
        uses = Counter(slot for slot, _ in _draws(self.texts))
        return math.prod(math.perm(len(slots[slot]), count) for slot, count in uses.items())

    def filled(self, number: int, slots: Slots, rng: random.Random) -> Prompt:
        """Its prompt `number` (from 0 to below `capacity`). `rng` chooses what only the follow-ups use."""
        draws = _draws(self.texts)
        left = {slot: list(slots[slot]) for slot, _ in [*draws, *_draws(self.follow_ups)]}
        values: dict[Draw, Any] = {}
        for slot, which in draws:
            number, digit = divmod(number, len(left[slot]))
            values[slot, which] = left[slot].pop(digit)
        for slot, which in _draws(self.follow_ups):
            if (slot, which) not in values:
                values[slot, which] = left[slot].pop(rng.randrange(len(left[slot])))
        spoken = zip(self.roles, self.texts, strict=True)
        return Prompt(
            id="",
            messages=tuple({"role": role, "content": _fill(text, values)} for role, text in spoken),
            follow_ups=tuple(_fill(text, values) for text in self.follow_ups),
        )


def _draws(texts: Sequence[str]) -> list[Draw]:
    """The values that `texts` ask for, each once, in the order of their first use."""
    found = (match for text in texts for match in FIELD.finditer(text))
    return list(dict.fromkeys((match[1], int(match[2] or 1)) for match in found))


def _fill(text: str, values: Mapping[Draw, Any]) -> str:
    """`text` with its slots replaced by `values`; "a" becomes "an" before a vowel."""

    def value(slot: str, which: str | None, field: str | None) -> str:
        chosen = values[slot, int(which or 1)]
        return str(chosen[field] if field else chosen)

    def article(match: re.Match[str]) -> str:
        return f"{match[1]}{'n' if value(*match.groups()[1:])[:1] in 'aeiou' else ''} "

    return FIELD.sub(lambda match: value(*match.groups()), ARTICLE.sub(article, text)).strip()


@cache
def _collection() -> tuple[Mapping[str, Sequence[Template]], Slots]:
    categories: dict[str, list[Template]] = {}
    slots: dict[str, Sequence[Any]] = {}
    folder = resources.files(__name__)
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml"):
            continue
        category = file.name.removesuffix(".toml")
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, slot in data.get("slots", {}).items():
            if isinstance(slot, dict):
                slot = [str(number) for number in range(slot["from"], slot["to"] + 1, slot.get("step", 1))]
            slots[name] = slot
        for number, entry in enumerate(data.get("templates", ()), start=1):
            turns = (*entry.get("earlier", ()), entry["text"])
            roles = tuple("assistant" if i % 2 else "user" for i in range(len(turns)))
            if "system" in entry:
                roles, turns = ("system", *roles), (entry["system"], *turns)
            made = Template(f"{category}-{number}", roles, turns, tuple(entry.get("follow_ups", ())))
            categories.setdefault(category, []).append(made)
    return categories, slots


def _in_turn(templates: Sequence[Template], slots: Slots, seed: int) -> Iterator[Prompt]:
    """All prompts of `templates`: one of each, then a second of each, …, until none has one left.

    The prompts of a template come in steps of about the golden section of their number: every one once, and
    the values of each slot evenly mixed from the first few on.
    """
    rng = random.Random(f"{seed} {templates[0].name}")
    order = rng.sample(templates, len(templates))
    sizes = {entry: entry.capacity(slots) for entry in order}
    starts = {entry: rng.randrange(sizes[entry]) for entry in order}
    for turn in range(max(sizes.values())):
        for entry in order:
            if turn < (size := sizes[entry]):
                number = (starts[entry] + turn * _stride(size)) % size
                made = entry.filled(number, slots, random.Random(f"{seed} {entry.name} {number}"))
                yield replace(made, id=f"{entry.name}-{number}")


@cache
def _stride(size: int) -> int:
    """A step near the golden section of `size` that visits all of `size` numbers."""
    step = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, size) != 1:
        step += 1
    return step


def written_prompts(count: int, seed: int = 0) -> list[Written]:
    """The first `count` bundled prompts in the order that `seed` gives them.

    No conversation comes twice. The categories take turns, and each uses all of its templates before it
    uses one again. A larger `count` begins with the same prompts. A prompt's id names its template and its
    number there, whatever the seed.

    Raises SettingError if `count` is below 1 or above what there is.
    """
    categories, slots = _collection()
    available = sum(entry.capacity(slots) for templates in categories.values() for entry in templates)
    if not 1 <= count <= available:
        reason = f"there are {available:,}, and at least 1 has to be asked for"
        way_out = f"Ask for 1 to {available:,}, or give prompts of your own."
        raise SettingError(f"{count} written prompts", reason, way_out)
    columns = [_in_turn(templates, slots, seed) for templates in categories.values()]
    found = (
        Written(category, prompt)
        for row in zip_longest(*columns)
        for category, prompt in zip(categories, row, strict=True)
        if prompt is not None
    )
    return list(islice(found, count))
