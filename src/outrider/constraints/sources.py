"""Grammars of all kinds as sources in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from llguidance import regex_to_lark

from outrider.constraints.gbnf import gbnf_to_lark
from outrider.constraints.json_schema import prepare
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError

MAX_CHARACTERS = 1_000_000


def lark_source(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    """The grammar with `start` as its first rule, and notices of what it leaves open. Raises GrammarError."""
    kind = KINDS.get(grammar.kind)
    if kind is None:
        way_out = f"Choose one of {', '.join(KINDS)}."
        raise GrammarError("grammar", f"its kind {grammar.kind} is not known", way_out)
    if len(grammar.text) > MAX_CHARACTERS:
        why = f"it has {len(grammar.text):,} characters, {MAX_CHARACTERS:,} are the most"
        raise GrammarError(kind.title, why, "Shorten it.")
    _check_unicode(kind.title, grammar.text)
    return kind.to_lark(grammar)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(name, "it holds half of a surrogate pair", "Give valid Unicode.") from None


def _schema(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    text = "{}" if grammar.kind == "json" else grammar.text
    schema, notices = prepare(text, grammar.style, lenient=grammar.lenient)
    return f"start: %json {schema}\n", notices


def _regex(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    backslashes = len(grammar.text) - len(grammar.text.rstrip("\\"))
    if backslashes % 2:
        raise GrammarError("regular expression", "it ends in a backslash", "Write two for one.")
    # Digits and blanks of ASCII: Rust's \d and \s take those of every script.
    return f"start: TEXT\nTEXT: /{regex_to_lark(grammar.text, 'ds')}/\n", ()


def _choice(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        why = "it is not a list of texts in JSON"
        raise GrammarError("choice", why, 'Give something like ["yes", "no"].')
    if not any(choices):
        raise GrammarError("choice", "there is nothing to choose from", "Give at least one text.")
    _check_unicode("choice", "".join(choices))
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}\n", ()


class Kind(NamedTuple):
    """A kind of grammar: what errors call it, what readouts call a text of it, what makes its source in
    llguidance's Lark, and how the names of its files end."""

    title: str
    texts: str
    to_lark: Callable[[Grammar], tuple[str, tuple[str, ...]]]
    suffix: str | None = None


KINDS: dict[str, Kind] = {
    "json_schema": Kind("schema", "JSON of a schema", _schema),
    "json": Kind("JSON", "JSON", _schema),
    "regex": Kind("regular expression", "text of a pattern", _regex),
    "choice": Kind("choice", "one of several texts", _choice),
    "gbnf": Kind("grammar", "text of a GBNF grammar", lambda it: (gbnf_to_lark(it.text), ()), ".gbnf"),
    "lark": Kind("grammar", "text of a Lark grammar", lambda it: (f"{it.text}\n", ()), ".lark"),
}
"""Every kind, by its name in `Grammar.kind`."""


# Free text up to a trigger, and the constrained text after it


def after(trigger: str, vocabulary: Vocabulary, controls: Sequence[int]) -> str:
    """A Lark grammar of free text, the trigger, and the grammar named `body`. The trigger's first occurrence
    counts: spelled out, also inside tokens that continue after it, or with control tokens (`controls`) for
    parts of it. Raises GrammarError for a trigger that is empty or no Unicode."""
    try:
        parts = list(_parts(trigger, vocabulary, controls)) if trigger.encode() else []
    except UnicodeEncodeError:
        raise GrammarError("after", "it holds half of a surrogate pair", "Give valid Unicode.") from None
    if not trigger:
        raise GrammarError("after", "an empty text follows every token", "Give some text, or leave it out.")
    heads, rules = ["spelled"], [f"spelled[lazy]: /(?s:.*)/ {json.dumps(trigger)}"]
    marks = sorted({part for part in parts if isinstance(part, int)})
    if marks:
        heads.append("marked")
        rules += _marked(parts)
    # Overlapping sets of tokens cannot be distinguished, so the trigger's own tokens are listed one by one.
    free = [_ranges(token for token in controls if token not in marks)]
    free += [str(token) for token in marks if [token] != parts]
    start = f"({' | '.join(heads)}) @body"
    if any(free):
        start = f"(free control)* {start}"
        rules.append(f"control: {' | '.join(f'<[{tokens}]>' for tokens in free if tokens)}")
    return "\n".join([f"start: {start}", "free: /(?s:.*)/", *rules, ""])


def _parts(trigger: str, vocabulary: Vocabulary, controls: Sequence[int]) -> Iterator[int | str]:
    tokens = vocabulary.tokenize(trigger, add_special=False, parse_special=True)
    for is_control, group in groupby(tokens, key=lambda token: token in controls):
        if is_control:
            yield from group
        elif text := b"".join(map(vocabulary.piece, group)):
            yield text.decode()


def _marked(parts: list[int | str]) -> list[str]:
    """Rules for the trigger with its control tokens; text after one ends as soon as it is complete."""
    sequence, rules = [], []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            sequence.append(f"<[{part}]>")
        elif i == 0:
            sequence.append("BEFORE")
            rules.append(f"BEFORE: /(?s:.*)/ {json.dumps(part)}")
        else:
            sequence.append(f"text{i}")
            rules.append(f"text{i}[lazy]: {json.dumps(part)}")
    start = "" if "BEFORE" in sequence else "free "
    return [f"marked: {start}{' '.join(sequence)}", *rules]


def _ranges(tokens: Iterable[int]) -> str:
    """Token ids as ranges: 1-3,7-7."""
    runs = groupby(enumerate(sorted(tokens)), key=lambda entry: entry[1] - entry[0])
    ids = ([token for _, token in run] for _, run in runs)
    return ",".join(f"{run[0]}-{run[-1]}" for run in ids)
