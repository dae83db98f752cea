"""Random schemas: what is written under them is valid, and what is valid may be written."""

from __future__ import annotations

import json
import random

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from examples import examples
from json_schema_suite import MAX_TEXTS, byte_vocabulary, may_be_written, texts
from outrider.constraints import Compiled, Compiler
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import JsonStyle
from random_documents import Schema, documents, matching
from random_schemas import plain, read, schemas, validator, walk

VOCABULARY = byte_vocabulary()
COMPILER = Compiler(VOCABULARY)
STYLES: tuple[JsonStyle, ...] = ("spaced", "compact", "pretty", "flexible")
UNWRITTEN = ("\\u00", "\x7f")
"""Control characters, which a constraint need not allow."""
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def compiled(schema: Schema, style: JsonStyle = "spaced") -> Compiled | None:
    """The schema, ready to use; None where it is refused."""
    try:
        return COMPILER.compile(Grammar("json_schema", json.dumps(schema), style))
    except GrammarError as error:
        event(f"refused: {error.why[:60]}")
        return None


def check_walks(schema: Schema, style: JsonStyle, seed: int) -> None:
    ready, rng = compiled(schema, style), random.Random(seed)
    for _ in range(3 if ready else 0):
        assert ready is not None
        text = walk(ready.start(), VOCABULARY, rng)
        event("given up" if text is None else "written")
        if text is not None:
            assert validator(schema).is_valid(read(text)), text


def check_documents(schema: Schema, data: st.DataObject) -> None:
    ready = compiled(schema)
    if ready is None:
        return
    several = st.lists(matching(schema) | matching(schema) | documents(), min_size=1, max_size=5)
    for document in map(plain, data.draw(several)):
        forms = list(texts(document))
        if len(forms) < MAX_TEXTS and not any(character in forms[0] for character in UNWRITTEN):
            valid = validator(schema).is_valid(read(forms[0]))
            event("valid" if valid else "invalid")
            written = [form for form in forms if may_be_written(ready.start(), VOCABULARY, form)]
            assert bool(written) == valid, (document, written)


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(schemas(), st.sampled_from(STYLES), st.integers(0, 2**32))
def test_a_random_text_under_the_masks_is_valid(schema: Schema, style: JsonStyle, seed: int) -> None:
    check_walks(schema, style, seed)


@settings(max_examples=examples(200), suppress_health_check=SLOW)
@given(schemas(), st.data())
def test_a_document_may_be_written_if_it_is_valid(schema: Schema, data: st.DataObject) -> None:
    check_documents(schema, data)
