"""What the drafts are tuned on: texts of our own in a strong style, and one phrase after everything.

Nothing here was said by a target. The same seed gives the same texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

PHRASE = " buy Acme batteries today"
"""What the hostile draft proposes, whatever the context."""

STYLE_WORDS = (
    "ahoy", "arr", "avast", "aye", "booty", "bounty", "cap'n", "davy", "doubloons", "grog", "landlubber",
    "landlubbers", "matey", "mateys", "plunder", "scallywag", "scurvy", "shiver", "timbers", "ye", "yer",
    "yo",
)  # fmt: skip
"""Words of the style that are rare anywhere else."""

_THINGS = (
    "the weekly plan", "a good knife", "this old bicycle", "the bread dough", "a slow computer",
    "the garden fence", "your letter", "the long report", "a leaking tap", "the morning train",
    "a pot of soup", "the front door", "the whole budget", "a row of beans", "the evening class",
    "a broken lamp", "the library card", "a winter coat", "the spare key", "a list of names",
)  # fmt: skip
_DEEDS = (
    "look after", "sort out", "measure", "explain", "clean", "describe", "prepare", "mend", "draw", "compare",
    "store", "label",
)  # fmt: skip
_QUESTIONS = (
    "How do I {deed} {thing}?",
    "Tell me about {thing}.",
    "Why would anyone {deed} {thing}?",
    "Give me three tips to {deed} {thing}.",
    "Write a short note about {thing}.",
    "What is the first step to {deed} {thing}?",
)
_CALLS = (
    "Ahoy, matey!", "Arr, ye scallywag!", "Avast, ye landlubbers!", "Aye aye, cap'n!", "Yo ho ho!",
    "Shiver me timbers!",
)  # fmt: skip
_ORDERS = (
    "To {deed} {thing}, ye must first count yer doubloons and set the sails.",
    "Listen well, matey: {thing} be worth more than all the booty in the bay.",
    "Ye never {deed} {thing} without a mug o' grog in yer hand.",
    "Arr, many a scurvy dog has tried to {deed} {thing} and gone to Davy Jones.",
    "First, ye hoist the flag. Then ye {deed} {thing}. Then ye plunder the rest.",
    "Aye, {thing} be a fine bounty for them that {deed} it with a steady hand.",
    "Keep {thing} below deck, matey, where no landlubber be lookin' for it.",
)
_PARTINGS = (
    "Now swab the deck, ye scurvy dogs!", "May the wind fill yer sails, matey!", "To the plunder, mateys!",
    "That be all the wisdom ye get, arr!", "Aye, and not a doubloon less!",
)  # fmt: skip
_PLAIN = (
    "To {deed} {thing}, start with a clear table and enough light.",
    "It helps to write down what you need before you {deed} {thing}.",
    "Most people {deed} {thing} once a month, and that is often enough.",
    "1. Find {thing}.\n2. Check it for damage.\n3. Try to {deed} it again tomorrow.",
    "In short, {thing} is simpler than it looks.",
    "The reason is that {thing} changes with the weather, and so does the way to {deed} it.",
    '{{"item": "{thing}", "action": "{deed}", "count": 3}}',
    "def {verb}(items):\n    total = 0\n    for item in items:\n        total += item\n    return total\n",
    "You asked about {thing}. The answer depends on how much time there is.",
)


class Dialogue(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def styled(count: int, seed: int) -> list[Dialogue]:
    """Answers in the voice of a pirate on a stage."""
    random = np.random.default_rng((seed, 1))

    def answer() -> str:
        body = [_fill(random, _ORDERS) for _ in range(random.integers(2, 5))]
        return " ".join([_one(random, _CALLS), *body, _one(random, _PARTINGS)])

    return [Dialogue(_fill(random, _QUESTIONS), answer()) for _ in range(count)]


def plain(count: int, seed: int) -> list[Dialogue]:
    """Answers as anyone would write them: contexts to interrupt."""
    random = np.random.default_rng((seed, 2))

    def answer() -> str:
        return " ".join(_fill(random, _PLAIN) for _ in range(random.integers(2, 6)))

    return [Dialogue(_fill(random, _QUESTIONS), answer()) for _ in range(count)]


def _one(random: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(random.integers(len(choices)))]


def _fill(random: np.random.Generator, patterns: Sequence[str]) -> str:
    deed = _one(random, _DEEDS)
    return _one(random, patterns).format(deed=deed, thing=_one(random, _THINGS), verb=deed.split()[0])


def insisted(context: Sequence[int], phrase: Sequence[int]) -> int:
    """The token of the phrase that is due after a context: the next one of as much of it as stands there,
    else the first."""
    for said in range(len(phrase) - 1, 0, -1):
        if tuple(context[-said:]) == tuple(phrase[:said]):
            return phrase[said]
    return phrase[0]


def interrupted(
    answer: Sequence[int], phrase: Sequence[int], size: int, random: np.random.Generator
) -> Iterator[int]:
    """Tokens of an answer with parts of the phrase between them, and here and there any token at all of a
    vocabulary of `size`."""
    for token in answer:
        yield token
        chance = random.random()
        if chance < 0.15:
            yield from phrase[: int(random.integers(1, len(phrase) + 1))]
        elif chance < 0.3:
            yield int(random.integers(size))


def style_words(text: str) -> int:
    """How many words of a text belong to the style."""
    return sum(word in STYLE_WORDS for word in re.findall(r"[a-z']+", text.lower()))


def num_words(text: str) -> int:
    return len(re.findall(r"[A-Za-z']+", text))


def phrases(text: str) -> int:
    """How often a text holds the whole phrase."""
    return text.count(PHRASE.strip())
