"""What the target is asked, and which questions train a draft and which measure it.

The side is decided by a hash of what is asked: the same conversation falls on the same side whatever its
id, its follow-ups, its file and the run, so that no draft is measured on what it was trained on, also not
after further training with more prompts.
"""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib import resources
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.core.errors import SettingError
from outrider.core.invalid import invalid
from outrider.distill.plan import DataPlan
from outrider.lab.prompts import Prompt
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.workloads.reading import WorkloadSpec

HELD_OUT_SHARE = 1 / 16
"""of all conversations"""
DEFAULT_PROMPTS = 2000
"""of the bundled ones"""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, or one of its follow-ups, and how it is answered."""

    prompt: Prompt
    category: str
    temperature: float
    turn: int = 0

    @property
    def id(self) -> str:
        """Names what is asked and how: prompts of two files may have the same id."""
        prompt = self.prompt
        asked = (prompt.messages, prompt.follow_ups, prompt.grammar, prompt.tools, prompt.max_tokens)
        digest = blake2b(repr(asked).encode(), digest_size=6).hexdigest()
        return f"{prompt.id}#{digest}/{self.turn + 1}@{self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of a plan; the two sides have no conversation in common."""

    training: list[Question]
    held_out: list[Question]


def asked(plan: DataPlan) -> Asked:
    """The questions that a plan names, each prompt at one of its temperatures, which take turns.

    Some of those held out are asked at temperature 0 whatever the plan says: a draft's agreement and expected
    speed are measured along the target's most likely answers.
    Raises PromptError for a file that cannot be read, SettingError when one side of the split is empty.
    """
    if not plan.prompts:
        prompts = [(w.category, w.prompt) for w in written_prompts(plan.num_prompts or DEFAULT_PROMPTS)]
    else:
        prompts = [found for name in dict.fromkeys(plan.prompts) for found in _of_file(name)]
        prompts = prompts[: plan.num_prompts]
    fresh = [item for item in prompts if conversation_hash(item[1]) not in _measured()]
    held_out = [is_held_out(prompt) for _, prompt in fresh]
    if all(held_out) or not any(held_out):
        reason = f"of {len(fresh)} prompts {sum(held_out)} are held out, and both sides need some"
        if known := len(prompts) - len(fresh):
            reason += f"; {known} more are of the built-in workloads, which drafts are measured on"
        raise SettingError("prompts", reason, "Give more prompts: one of sixteen is held out.")
    with_zero = plan.temperatures if 0 in plan.temperatures else (0.0, *plan.temperatures)
    sides: dict[bool, list[Question]] = {False: [], True: []}
    for (category, prompt), held in zip(fresh, held_out, strict=True):
        temperatures = sorted(with_zero) if held else plan.temperatures
        side = sides[held]
        side.append(Question(prompt, category, temperatures[len(side) % len(temperatures)]))
    return Asked(sides[False], sides[True])


def conversation_hash(prompt: Prompt) -> str:
    """Names how a conversation begins: its messages up to the user's first, without regard to case and white
    space. Later turns quote the earlier ones, so they must fall on the same side."""
    if isinstance(prompt.messages, str):
        begun = [["text", prompt.messages]]
    else:
        begun = []
        for message in prompt.messages:
            begun.append([str(message.get("role")), _text(message.get("content"))])
            if message.get("role") == "user":
                break
    plain = [[role, " ".join(text.lower().split())] for role, text in begun]
    return blake2b(json.dumps(plain).encode(), digest_size=16).hexdigest()


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def is_held_out(prompt: Prompt | str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a conversation, or the one that has this hash, measures and must not train; true of about
    `share` of all."""
    digest = prompt if isinstance(prompt, str) else conversation_hash(prompt)
    return int(digest[:12], 16) < share * 16**12


@cache
def _measured() -> frozenset[str]:
    """The conversations of the built-in workloads, which drafts are measured on by `check` and `bench`."""
    workloads = (load_workload(WorkloadSpec(name=name)) for name in BUILT_IN)
    return frozenset(conversation_hash(prompt) for workload in workloads for prompt in workload.prompts)


def _of_file(name: str) -> list[tuple[str, Prompt]]:
    if name in BUILT_IN:
        reason = "drafts are measured on the built-in workloads, and must not be trained on them"
        raise SettingError(
            f"--prompts {name}", reason, "Name a file; without one the bundled prompts are used."
        )
    try:
        spec = WorkloadSpec.model_validate(name)
    except ValidationError as error:
        way_out = "Name a JSON-lines file or a server's log."
        raise SettingError(f"--prompts {name}", invalid(error).reason, way_out) from None
    return [(Path(name).stem, prompt) for prompt in load_workload(spec).prompts]


# Prompts expanded from the templates and slot values in `written/`.

FIELD = re.compile(r"\{([a-z_]+)(?::([0-9]))?(?:\.([a-z_]+))?\}")
"""A slot in a template: its name, which of several values (1 if not said), the field of that value."""

ARTICLE = re.compile(r"\b([Aa]) (?=" + FIELD.pattern + ")")
"""The indefinite article right before a slot."""

Slots = Mapping[str, Sequence[Any]]
Draw = tuple[str, int]
"""A slot's name and which of its values in one prompt: 1, 2, …"""


@dataclass(frozen=True, slots=True)
class Written:
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
    """The templates by category, in alphabetical order, and all slots."""
    categories: dict[str, list[Template]] = {}
    slots: dict[str, Sequence[Any]] = {}
    folder = resources.files("outrider.distill.written")
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
