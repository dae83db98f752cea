"""Free text up to a trigger, and the constrained text after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from outrider.core.contracts import Vocabulary
from outrider.core.errors import GrammarError


def after(trigger: str, vocabulary: Vocabulary, controls: Sequence[int], *, optional: bool) -> str:
    """A Lark grammar of free text, the trigger, and the grammar named `body`.

    The trigger is recognized where it is spelled out, also inside tokens that continue after it, and
    where the vocabulary has control tokens (`controls`) for parts of it. Its first occurrence counts. Raises
    GrammarError for a trigger that is empty or no Unicode.
    """
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
    start = f"({start} | free)" if optional else start
    if any(free):
        start = f"(free control)* {start}"
        rules.append(f"control: {' | '.join(f'<[{tokens}]>' for tokens in free if tokens)}")
    return "\n".join([f"start: {start}", "free: /(?s:.*)/", *rules, ""])


def _parts(trigger: str, vocabulary: Vocabulary, controls: Sequence[int]) -> Iterator[int | str]:
    """The trigger as control tokens and the text between them."""
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
