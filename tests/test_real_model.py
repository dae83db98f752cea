"""The embedded default model end to end: its own text, faster, the same."""

from collections.abc import Iterator

import pytest

from outrider.backends.gguf.c_types import functions
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Model
from outrider.core.data import Completion, Request
from outrider.core.params import SamplingParams
from outrider.lab.comparison import find_divergence
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.hub import cache_dir
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions
from outrider.session.readout import read_out

MODEL = cache_dir() / "models" / EMBEDDED_NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="`outrider run` fetches the model; tests do not"),
]

GREEDY = SamplingParams(temperature=0)
PROMPTS = [
    "Count from one to thirty in words, then count again.",
    "Repeat this line three times: The quick brown fox jumps over the lazy dog.",
    "Write a haiku about rain.",
    "def add(a, b):\n    return a + b\n\nRewrite this function with type hints.",
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """The model as its own draft, from two sets of weights."""
    pair = Pair.load(MODEL, MODEL, options=LoadOptions(threads=1))
    yield pair
    pair.close()


def complete(
    session: Session, prompt: str, sampling: SamplingParams, *, speculate: bool = True
) -> Completion:
    session.engine.reset()
    talk = [{"role": "user", "content": prompt}]
    return session.generate(talk, max_tokens=48, sampling=sampling, ignore_end=True, speculate=speculate)


def assert_same_but_for_ties(
    target: Model, prompt: tuple[int, ...], plain: Completion, other: Completion
) -> None:
    """A batch has other kernels than a single token: where two candidates are as good as level,
    either may come first. Any other difference is a fault."""
    divergence = find_divergence(target, Request(prompt, GREEDY), plain, other)
    if divergence is None:
        assert plain.tokens == other.tokens
    else:
        assert divergence.margin is not None and abs(divergence.margin) < 0.05, divergence


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculation_does_not_change_the_greedy_text(pair: Pair, prompt: str) -> None:
    policy = FixedPolicy(draft_max=6, p_min=0.3)
    with_draft = Session.open(pair, SessionOptions(512, lookup=False, policy=policy))
    plain = complete(with_draft, prompt, GREEDY, speculate=False)
    assert len(plain.tokens) == 48 and not any(record.draft.tokens for record in plain.records)
    drafted = complete(with_draft, prompt, GREEDY)
    tokens = pair.encode([{"role": "user", "content": prompt}])
    assert_same_but_for_ties(with_draft.target, tokens, plain, drafted)
    assert read_out(drafted).target_calls < 30
    with_lookup = Session.open(pair, SessionOptions(512, policy=policy))
    looked_up = complete(with_lookup, prompt, GREEDY)
    assert_same_but_for_ties(with_lookup.target, tokens, plain, looked_up)
    for session in (with_draft, with_lookup):
        session.target.close()


def test_a_model_is_its_own_best_draft(pair: Pair) -> None:
    session = Session.open(
        pair, SessionOptions(512, lookup=False, policy=FixedPolicy(draft_max=7, p_min=0.0))
    )
    readouts = [read_out(complete(session, prompt, GREEDY)) for prompt in PROMPTS]
    drafted = sum(readout.drafted_tokens for readout in readouts)
    accepted = sum(readout.accepted_tokens for readout in readouts)
    assert accepted / drafted > 0.9  # a call over several tokens rounds otherwise: near-ties may flip
    # 48 tokens are six calls of eight, were there no near-tie; each costs a call or two.
    assert 6 * len(PROMPTS) <= sum(readout.target_calls for readout in readouts) <= 8 * len(PROMPTS)


@pytest.mark.parametrize("text", ["🎉🎈🎂 🎉🎈🎂 🎉🎈🎂 🎉🎈", "你好，世界。你好，世界。你好，世界。你好，"])
def test_no_half_characters_are_shown(pair: Pair, text: str) -> None:
    session = Session.open(pair, SessionOptions(512))
    generation = session.stream(text, max_tokens=40, sampling=GREEDY, ignore_end=True)
    pieces = [update.text for update in generation]
    completion = generation.completion
    assert "".join(pieces) == completion.text
    bytes_of = [session.target.vocabulary.piece(token) for token in completion.tokens]
    raw = b"".join(bytes_of)
    assert any(len(character.encode()) > 2 for character in completion.text)
    # All that was generated is shown. What the model itself writes wrongly is replaced once and for
    # all: characters that come in parts would show more replacements than the whole has.
    assert completion.text == raw.decode(errors="replace")
    assert any("�" in piece.decode(errors="replace") for piece in bytes_of)


def test_the_vocabulary_agrees_with_the_c_api(pair: Pair) -> None:
    weights = Weights(MODEL, LoadOptions(backend="llama.cpp"))
    weights.library.declare(functions("bool llama_vocab_is_control (ptr i32)"))
    lib = weights.library.functions
    theirs = lib.llama_model_get_vocab(weights.handle)
    vocabulary = pair.target.vocabulary
    assert vocabulary.size == 49152 and vocabulary.kind.startswith("bpe")
    for token in range(0, vocabulary.size, 7):
        assert vocabulary.spelling(token) == lib.llama_vocab_get_text(theirs, token)
        assert vocabulary.is_control(token) == lib.llama_vocab_is_control(theirs, token)
        assert vocabulary.ends_generation(token) == lib.llama_vocab_is_eog(theirs, token)
    weights.close()
    end = vocabulary.tokenize("<|im_end|>", parse_special=True)
    assert len(end) == 1 and vocabulary.ends_generation(end[0]) and vocabulary.piece(end[0]) == b""
    assert len(vocabulary.tokenize("<|im_end|>")) > 1
    for text in ("  two spaces\n\n\ttab", "naïve 中文 🎉🏽 e\u0301", "x" * 3000):
        pieces = map(vocabulary.piece, vocabulary.tokenize(text, add_special=False))
        assert b"".join(pieces) == text.encode()
