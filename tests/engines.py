"""What the tests of the engine and of its drafters share: scripted drafters, and an engine run
that checks the invariants after every step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.contracts import Drafter, DraftInput, DraftRequest
from outrider.core.data import Completion, DraftToken, Request, StepRecord
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import Alignment, align, compare
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import RequestSampler
from vocabularies import ReducedVocabulary

VOCABULARY = FakeVocabulary("abcd ")
GREEDY = SamplingParams(temperature=0)
LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3)
END = VOCABULARY.size - 1
PROMPT = (0, 1, 2, 0, 1)


def asked(tokens: Sequence[int], **settings: Any) -> Request:
    """A request with this prompt."""
    return Request(tuple(tokens), **settings)


def request(prompt: Sequence[int], scope: str = "", max_tokens: int = 4) -> Request:
    """One that no end token ends."""
    return Request(tuple(prompt), GREEDY, max_tokens=max_tokens, ignore_end=True, scope=scope)


Guess = Callable[[Sequence[int], int], Sequence[int]]
"""What a scripted drafter offers after these tokens, at most so many."""


class ScriptedDrafter:
    """Offers what `guess` says, and remembers what it observed."""

    def __init__(self, guess: Guess, name: str = "scripted", acceptance: float = 0.9) -> None:
        self.name = name
        self.is_free = True
        self.texts: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self._guess = guess
        self._acceptance = acceptance

    def begin(self, sequence: int, request: Request) -> None:
        self.texts[sequence] = list(request.prompt)

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        self.texts[sequence].extend(tokens)

    def end(self, sequence: int) -> None:
        self.ended.append(sequence)

    def reset(self) -> None:
        self.texts.clear()

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        text = [*self.texts[sequence], *prefix]
        for token in self._guess(text, _MAX_GUESS):
            yield DraftToken(token, self.name, self._acceptance, (1.0, 1.0, 1.0))


_MAX_GUESS = 64
"""tokens that a scripted drafter is asked for at most"""


@dataclass(slots=True)
class Extending:
    """A draft that goes on as long as it may, and the drafter is sure enough."""

    request: DraftRequest
    prefix: Sequence[int] = ()
    p_min: float = 0.0
    tokens: list[DraftToken] = field(default_factory=list)
    guess: Sequence[int] = ()
    """of the tokens to come"""

    def next_input(self) -> DraftInput:
        drafted = (*self.prefix, *(token.token for token in self.tokens))
        return DraftInput(drafted, tuple(self.guess[len(self.tokens) :]))

    def take(self, offers: Iterable[DraftToken]) -> bool:
        num_before, expected = len(self.tokens), list(self.guess[len(self.tokens) :])
        for place, offer in enumerate(offers):
            if [token.token for token in self.tokens[num_before:]] != expected[:place]:
                break
            if len(self.tokens) == self.request.max_tokens or offer.acceptance < self.p_min:
                return False
            self.tokens.append(offer)
        return num_before < len(self.tokens) < self.request.max_tokens


def greedy_continuation(next_logits: NextLogits, tokens: Sequence[int], length: int) -> list[int]:
    """What greedy decoding says next, worked out without an engine."""
    text = list(tokens)
    for _ in range(length):
        text.append(int(np.argmax(next_logits(text))))
    return text[len(tokens) :]


def oracle(next_logits: NextLogits, num_right: int = 1000, size: int = VOCABULARY.size) -> Guess:
    """Right for the first `num_right` tokens of each draft and wrong after them."""

    def guess(tokens: Sequence[int], length: int) -> list[int]:
        right = greedy_continuation(next_logits, tokens, length)
        return [t if i < num_right else (t + 1) % size for i, t in enumerate(right)]

    return guess


def random_guess(seed: int, size: int = VOCABULARY.size) -> Guess:
    """Any tokens, and any number of them."""
    rng = np.random.default_rng(seed)

    def guess(tokens: Sequence[int], length: int) -> list[int]:
        del tokens
        return [int(t) for t in rng.integers(0, size, rng.integers(0, length + 1))]

    return guess


def nothing(tokens: Sequence[int], length: int) -> list[int]:
    """No draft at all."""
    del tokens, length
    return []


def sampler(params: SamplingParams = GREEDY, vocabulary: FakeVocabulary = VOCABULARY) -> RequestSampler:
    """The sampler of a request whose prompt no penalty looks at."""
    return RequestSampler(params, vocabulary, ())


def same_vocabulary() -> Alignment:
    """The alignment of `VOCABULARY` with itself."""
    return align(VOCABULARY, VOCABULARY)


def language_model(**options: Any) -> FakeModel:
    """A model that speaks `LANGUAGE`."""
    return FakeModel(VOCABULARY, LANGUAGE, **options)


def other_vocabulary_drafter(**options: Any) -> ModelDrafter:
    """A draft whose ids are another order, which lacks a blank and has tokens of its own."""
    vocabulary = FakeVocabulary("xdcyba")
    logits = random_logits(vocabulary.size, seed=5, order=2)
    alignment = compare(VOCABULARY, vocabulary)
    assert not alignment.identical
    return ModelDrafter(FakeModel(vocabulary, logits, name="other", **options), alignment)


def reduced_drafter(logits: NextLogits | None = None, **options: Any) -> ModelDrafter:
    """A draft that knows three of the target's characters, and stands in for the others with a token."""
    vocabulary = ReducedVocabulary(VOCABULARY, "bd ")
    logits = logits or random_logits(vocabulary.size, seed=5, order=2)
    model = FakeModel(vocabulary, logits, name="reduced", **options)
    return ModelDrafter(model, align(VOCABULARY, vocabulary))


def model_drafter(logits: NextLogits, **options: Any) -> ModelDrafter:
    """A draft model over `VOCABULARY`."""
    return ModelDrafter(FakeModel(VOCABULARY, logits, **options), same_vocabulary())


@dataclass(slots=True)
class Outcome:
    """One request's way through the engine, collected from its updates."""

    prompt: tuple[int, ...]
    slot: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    records: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None


class CheckedEngine:
    """An engine whose invariants are asserted after each step, through a drafter that only listens."""

    def __init__(
        self, target: FakeModel, drafters: Sequence[Drafter] = (), policy: FixedPolicy | None = None
    ) -> None:
        self.target = target
        self.listener = ScriptedDrafter(nothing, "listener")
        self.engine = Engine(target, [self.listener, *drafters], policy or FixedPolicy(p_min=0, hand_over=0))
        self.outcomes: dict[int, Outcome] = {}

    def submit(self, request: Request) -> int:
        """Start a request (one that speculates, or the listener would hear nothing)."""
        known = {slot: list(text) for slot, text in self.listener.texts.items()}
        self.listener.texts.clear()
        request_id = self.engine.submit(request)
        [(slot, prompt)] = self.listener.texts.items()
        self.listener.texts = known | self.listener.texts
        assert tuple(prompt) == request.prompt
        self.outcomes[request_id] = Outcome(request.prompt, slot)
        return request_id

    def step(self) -> bool:
        """One step and its checks; whether anything is left to do."""
        for update in self.engine.step():
            record, outcome = update.record, self.outcomes[update.record.request]
            assert outcome.finish_reason is None, "a step after the end"
            assert record.position == len(outcome.prompt) + len(outcome.tokens)
            assert record.num_accepted <= len(record.draft) and record.num_accepted <= len(record.tokens)
            assert record.tokens[: record.num_accepted] == record.draft.tokens[: record.num_accepted]
            outcome.tokens += record.tokens
            outcome.text += update.text
            outcome.records.append(record)
            outcome.finish_reason = record.finish_reason
            outcome.error = update.error
            self.check(outcome, decoding=record.kind == "decode")
        return any(outcome.finish_reason is None for outcome in self.outcomes.values())

    def check(self, outcome: Outcome, *, decoding: bool) -> None:
        """The invariants of one sequence after a step."""
        committed = (*outcome.prompt, *outcome.tokens)
        stored = self.target.stored(outcome.slot)
        assert stored == committed[: len(stored)]
        if decoding:
            assert len(stored) == len(committed) - 1
        assert tuple(self.listener.texts[outcome.slot]) == committed

    def run(self, *requests: Request) -> list[Outcome]:
        """Run requests side by side to their ends."""
        ids = [self.submit(request) for request in requests]
        num_left = 100 + sum(
            len(r.prompt) + 2 * (r.max_tokens or self.target.context_length) for r in requests
        )
        while self.step():
            num_left -= 1
            assert num_left, "it goes on for ever"
        return [self.outcomes[request_id] for request_id in ids]


def plain(target: FakeModel, request: Request) -> tuple[tuple[int, ...], str, str]:
    """Tokens, text and end of a request, decoded one token a call by an engine of its own."""
    completion = Engine(target).generate(request)
    return completion.tokens, completion.text, completion.finish_reason


def result(outcome: Outcome) -> tuple[tuple[int, ...], str, str]:
    """An outcome in the form of `plain`."""
    return tuple(outcome.tokens), outcome.text, str(outcome.finish_reason)


def run(engine: Engine, *requests: Request) -> list[Completion]:
    """These requests, and what runs already, side by side."""
    for request in requests:
        engine.submit(request)
    found: dict[int, Completion] = {}
    while engine.num_running:
        found |= {u.record.request: u.completion for u in engine.step() if u.completion is not None}
    return [found[number] for number in sorted(found)]
