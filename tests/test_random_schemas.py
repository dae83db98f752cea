"""Random schemas: what is written under them is valid. The official suite tells what may be written."""

import json
import random

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from examples import examples
from json_schema_suite import byte_vocabulary
from outrider.constraints.compiler import Compiled, Compiler
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import JsonStyle
from random_schemas import Schema, read, schemas, validator, walk

VOCABULARY = byte_vocabulary()
COMPILER = Compiler(VOCABULARY)
STYLES: tuple[JsonStyle, ...] = ("spaced", "compact")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def compiled(schema: Schema, style: JsonStyle = "spaced") -> Compiled | None:
    """The schema, ready to use; None where it is refused."""
    try:
        return COMPILER.compile(Grammar("json_schema", json.dumps(schema), style))
    except GrammarError as error:
        event(f"refused: {error.why[:60]}")
        return None


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(schemas(), st.sampled_from(STYLES), st.integers(0, 2**32))
def test_a_random_text_under_the_masks_is_valid(schema: Schema, style: JsonStyle, seed: int) -> None:
    ready, rng = compiled(schema, style), random.Random(seed)
    for _ in range(3 if ready else 0):
        assert ready is not None
        text = walk(ready.start(), VOCABULARY, rng)
        event("given up" if text is None else "written")
        if text is not None:
            assert validator(schema).is_valid(read(text)), text
