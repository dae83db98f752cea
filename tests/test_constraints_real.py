"""The embedded model's own vocabulary, and constraints over it."""

import json
import random
from collections.abc import Iterator

import jsonschema
import pytest

from grammars import walk, written
from outrider.backends.gguf.c_types import functions
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.params import FastForward
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.hub import cache_dir

MODEL = cache_dir() / "models" / EMBEDDED_NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="`outrider run` fetches the model; tests do not"),
]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "address": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Ulm", "Köln"]},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "address", "tags"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Albert", "address": {"city": "Ulm", "zip": "89073"}, "tags": ["physics", "violin"]}'


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    weights = Weights(MODEL, LoadOptions(threads=1))
    yield weights.vocabulary
    weights.close()


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Compiler:
    return Compiler(vocabulary)


def test_the_vocabulary_agrees_with_the_c_api(vocabulary: Vocabulary) -> None:
    weights = Weights(MODEL, LoadOptions(threads=1, backend="llama.cpp"))
    weights.library.declare(functions("bool llama_vocab_is_control (ptr i32)"))
    lib = weights.library.functions
    theirs = lib.llama_model_get_vocab(weights.handle)
    assert vocabulary.size == 49152 and vocabulary.kind.startswith("bpe")
    for token in range(0, vocabulary.size, 7):
        assert vocabulary.spelling(token) == lib.llama_vocab_get_text(theirs, token)
        assert vocabulary.is_control(token) == lib.llama_vocab_is_control(theirs, token)
        assert vocabulary.ends_generation(token) == lib.llama_vocab_is_eog(theirs, token)
    weights.close()
    [end] = vocabulary.tokenize("<|im_end|>", parse_special=True)
    assert vocabulary.ends_generation(end) and vocabulary.piece(end) == b""
    assert len(vocabulary.tokenize("<|im_end|>")) > 1
    for text in ("  two spaces\n\n\ttab", "naïve 中文 🎉🏽 e\u0301", "x" * 3000):
        pieces = map(vocabulary.piece, vocabulary.tokenize(text, add_special=False))
        assert b"".join(pieces) == text.encode()


def ends(vocabulary: Vocabulary) -> list[int]:
    return [token for token in range(vocabulary.size) if vocabulary.ends_generation(token)]


def person(compiler: Compiler, mode: FastForward, after: str | None = None) -> GrammarConstraint:
    return compiler.compile(
        Grammar("json_schema", json.dumps(PERSON), fast_forward=mode, after=after)
    ).start()


@pytest.mark.parametrize("mode", ["exact", "canonical", "off"])
def test_the_models_own_tokens_are_allowed_and_the_forced_ones_are_among_them(
    compiler: Compiler, vocabulary: Vocabulary, mode: FastForward
) -> None:
    walked = person(compiler, mode)
    tokens = walk(walked, random.Random(0), most=400, ends=ends(vocabulary))
    assert walked.is_complete
    jsonschema.validate(json.loads(written(tokens, vocabulary)), PERSON)
    constraint = person(compiler, mode)
    answer = ANSWER.replace("physics", "physic")
    tokens = vocabulary.tokenize(answer, add_special=False)
    num_forced = 0
    for i, token in enumerate(tokens):
        forced = constraint.forced(())
        assert list(forced) == tokens[i : i + len(forced)]
        num_forced += bool(forced)
        assert constraint.permits((), tokens[i:]) == len(tokens) - i
        constraint.accept([token])
    assert constraint.is_complete
    assert num_forced == 0 if mode == "off" else num_forced >= 10


@pytest.mark.parametrize("trigger", ["</think>", "<|im_start|>", "<|im_start|>tool\n", "\n\n"])
def test_triggers_are_recognized_as_tokens_and_as_text(
    compiler: Compiler, vocabulary: Vocabulary, trigger: str
) -> None:
    for parse_special in (True, False):
        lead = vocabulary.tokenize(f"I think so. {trigger}", add_special=False, parse_special=parse_special)
        constraint = person(compiler, "exact", trigger)
        assert constraint.permits((), lead) == len(lead)
        mask = constraint.allowed(lead)
        assert mask is not None and mask.sum() < 10
        before = constraint.allowed(())
        assert before is not None and before.sum() > 40_000 and not before[ends(vocabulary)].any()
        rest = vocabulary.tokenize(ANSWER.replace("physics", "p"), add_special=False)
        constraint.accept([*lead, *rest])
        assert constraint.is_complete
