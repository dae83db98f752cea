"""A vocabulary with the traps of real ones, and texts written under a constraint."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from vocabularies import TableVocabulary, Token, bytes_and

WORDS = (
    '{"',
    '": ',
    '", "',
    '"}',
    "name",
    "na",
    "me",
    "am",
    "</",
    "think",
    "</think>",
    ">{",
    '>{"',
    ">\n",
    "ab",
    "é",
)
CONTROLS = ("</think>", "<tool>", "<end>", "<eot>")
ENDS = ("<end>", "<eot>")

VOCABULARY = TableVocabulary(
    [*bytes_and(*WORDS), *(Token(name.encode(), control=True, end=name in ENDS) for name in CONTROLS)]
)
"""Every byte, words that text may be split into in several ways, and control tokens; the first is
spelled like a word of the text."""

COMPILER = Compiler(VOCABULARY)
CONTROL_IDS = {name: 256 + len(WORDS) + i for i, name in enumerate(CONTROLS)}
END_IDS = [CONTROL_IDS[name] for name in ENDS]


def start(grammar: Grammar, compiler: Compiler = COMPILER) -> GrammarConstraint:
    return compiler.compile(grammar).start()


def word(text: str) -> int:
    """The token of a whole word."""
    return 256 + WORDS.index(text)


def spell(text: str | bytes) -> list[int]:
    """A text as single bytes."""
    return list(text if isinstance(text, bytes) else text.encode())


def allowed(constraint: GrammarConstraint, drafted: Sequence[int] = ()) -> list[int]:
    mask = constraint.allowed(drafted)
    assert mask is not None
    tokens: list[int] = np.flatnonzero(mask).tolist()
    return tokens


def takes(constraint: GrammarConstraint, text: str | bytes) -> bool:
    """Whether a text may be written byte by byte, and be the whole of it."""
    tokens = spell(text)
    return constraint.permits((), [*tokens, END_IDS[0]]) == len(tokens) + 1


def written(tokens: Sequence[int], vocabulary: Vocabulary = VOCABULARY) -> bytes:
    return b"".join(map(vocabulary.piece, tokens))


def walk(
    constraint: GrammarConstraint,
    rng: random.Random,
    *,
    most: int,
    seen: Callable[[int], None] | None = None,
    ends: Sequence[int] = tuple(END_IDS),
) -> list[int]:
    """Tokens drawn under the masks up to an end, at most so many; `seen` is told each before it is final."""
    tokens: list[int] = []
    while len(tokens) < most and not constraint.is_complete:
        options = allowed(constraint)
        token = rng.choice(options)
        if seen:
            seen(token)
        constraint.accept([token])
        if token in ends:
            break
        tokens.append(token)
    return tokens
