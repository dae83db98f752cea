"""The data that every part shares. Seconds, tokens and bytes; nothing here computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from outrider.core.errors import OutriderError, SettingError
from outrider.core.params import Drafting, FastForward, GrammarKind, JsonStyle, SamplingParams, Verification

Logits = npt.NDArray[np.float32]
"""Rows of logits, shape (rows, vocabulary size). Backends hand out views of their own
buffer: a row is valid only until the next `decode` of the same model."""

Row = npt.NDArray[np.float32]
"""One row of logits, shape (vocabulary size,)."""

Mask = npt.NDArray[np.bool_]
"""Which tokens are allowed, shape (vocabulary size,). Read-only, and valid until tokens become final."""


class TopLogits(NamedTuple):
    """The most likely tokens of a row, in place of the whole one."""

    tokens: npt.NDArray[np.int64]
    """ids, ascending"""
    logits: Row


@dataclass(frozen=True, slots=True)
class Block:
    """What a block drafter says of the places after a token, in place of rows.

    `rows` are logits, shape (places, vocabulary size). Where there are `candidates`, shape (places, k), they
    are theirs alone, after each of the candidates at the place before: shape (places, k, k). `confidence`:
    its own estimates of acceptance, shape (places,), if it has any.
    """

    rows: npt.NDArray[np.float32]
    candidates: npt.NDArray[np.int64] | None = None
    confidence: Row | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, place: int, before: int, size: int) -> Row:
        """Logits over a vocabulary of `size` tokens at a place, where `before` is the token before it."""
        if self.candidates is None:
            found: Row = self.rows[place]
            return found
        known = np.flatnonzero(self.candidates[max(place - 1, 0)] == before) if place else np.zeros(0)
        scores: Row = self.rows[place][int(known[0]) if len(known) else 0]
        row = np.full(size, -np.inf, dtype=np.float32)
        row[self.candidates[place]] = scores
        return row


FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
"""Why a generation ended: an end token, stop string or a constraint that is fulfilled; `max_tokens`;
the context is full; the caller gave up; no token was left that the constraint allows."""

TARGET = "target"
"""The source of a token that no drafter offered: the target's own recovered or bonus token."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a model call.

    `tokens` are evaluated at positions `start`, `start + 1`, …, where `start` must be the
    sequence's stored length. Logits are returned for the last `rows` tokens (0: none).
    `checkpoint`: the sequence may have to be taken back to `start` after this call. `is_turn`: other texts
    may go on from there later. A model that copies its state keeps one copy for the former, and several for
    the latter.
    `top`: each row is asked for its so many most likely tokens alone, ties by the lower id; a model may hand
    out TopLogits that show these, so that no whole row has to be copied. 0: whole rows are needed.
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    rows: int
    checkpoint: bool = False
    top: int = 0
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability distribution over token ids, stored by its support.

    `tokens` is strictly ascending (int64), `probs` (float64) is positive and sums to 1.
    A point mass has one entry: greedy decoding needs no other representation.
    """

    tokens: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


class DraftToken(NamedTuple):
    """One token of a draft."""

    token: int
    source: str
    """the name of the drafter that offered it"""
    acceptance: float
    """the probability that it is accepted if all before it are: the drafter's own estimate, until a policy
    calibrates it"""
    evidence: tuple[float, ...] = ()
    """numbers that the estimate is calibrated by, always as many for one drafter"""
    drawn_from: Distribution | None = None
    """the distribution that it was sampled from; None for a point mass"""
    mode_of: Distribution | None = None
    """the distribution whose most likely token this point mass is, where the drafter was asked for it: it
    plays no part in verification, but shows how often a token sampled from it would have been accepted"""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens offered for the positions that follow the committed text."""

    items: tuple[DraftToken, ...] = ()

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        source: str,
        acceptance: float = 0.5,
        probs: Sequence[Distribution] | None = None,
    ) -> Draft:
        """A draft of one source, whose tokens are alike."""
        drawn_from = [None] * len(tokens) if probs is None else probs
        return cls(
            tuple(
                DraftToken(token, source, acceptance, (), drawn)
                for token, drawn in zip(tokens, drawn_from, strict=True)
            )
        )

    def __len__(self) -> int:
        return len(self.items)

    def __add__(self, other: Draft) -> Draft:
        return Draft(self.items + other.items)

    def first(self, length: int) -> Draft:
        """Its first tokens."""
        return self if length >= len(self.items) else Draft(self.items[:length])

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids."""
        return tuple([item.token for item in self.items])

    @property
    def sources(self) -> tuple[str, ...]:
        """Who offered each token."""
        return tuple([item.source for item in self.items])

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The estimate of each token's acceptance."""
        return tuple([item.acceptance for item in self.items])

    @property
    def probs(self) -> tuple[Distribution, ...] | None:
        """What each token was sampled from, point masses included; None where all are point masses."""
        if all(item.drawn_from is None for item in self.items):
            return None
        return tuple(item.drawn_from or point_mass(item.token) for item in self.items)

    @property
    def compared_probs(self) -> tuple[Distribution, ...]:
        """The drafters' distributions, whether a token was sampled or the most likely one; a point mass where
        there is none, and empty where there are none at all."""
        found = [item.drawn_from or item.mode_of for item in self.items]
        if not any(found):
            return ()
        return tuple(probs or point_mass(item.token) for probs, item in zip(found, self.items, strict=True))


@lru_cache(maxsize=4096)
def point_mass(token: int) -> Distribution:
    """The distribution with all its mass on one token. It is shared, so its arrays cannot be written to."""
    tokens, probs = np.array([token], dtype=np.int64), np.ones(1)
    tokens.flags.writeable = probs.flags.writeable = False
    return Distribution(tokens, probs)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a round of proposals cost, over all sequences of the round.

    `calls` and `model_s` count the draft model's calls while decoding, and `call_tokens` the tokens
    that each of these evaluated; those that only caught up with a prompt are counted apart, and
    `prefill_tokens` are what they read of it.
    """

    calls: int = 0
    model_s: float = 0.0
    prefill_calls: int = 0
    prefill_s: float = 0.0
    call_tokens: tuple[int, ...] = ()
    prefill_tokens: int = 0

    def __add__(self, other: DraftWork) -> DraftWork:
        return DraftWork(
            self.calls + other.calls,
            self.model_s + other.model_s,
            self.prefill_calls + other.prefill_calls,
            self.prefill_s + other.prefill_s,
            self.call_tokens + other.call_tokens,
            self.prefill_tokens + other.prefill_tokens,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying a draft: its first `num_accepted` tokens are accepted, `token` follows.

    `kind` is "recovered" when `token` replaces a rejected one and "bonus" when it follows
    a draft that was accepted whole (an empty draft included). A "deferred" verdict has no token, since
    none may follow.
    """

    num_accepted: int
    token: int | None
    kind: Literal["recovered", "bonus", "deferred"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output is limited to, as the user wrote it.

    `kind` says what `text` is: a JSON schema (JSON text), "json" (any JSON value; no text), a regular
    expression, a JSON list of strings to choose from, a GBNF grammar (llama.cpp's) or a Lark one
    (llguidance's). `style` is the white space of JSON. `lenient` goes on without schema keywords that
    cannot be enforced. `after` is a text that has to come first: before it anything may be written,
    and the constraint starts after it (a closing </think>); `optional` lets the output end without it
    (a tool call). `fast_forward` is what becomes of text that has only one way to go on: "exact" offers
    it as a draft, "canonical" allows only its usual tokens, "off" does nothing about it.
    """

    kind: GrammarKind
    text: str = ""
    style: JsonStyle = "spaced"
    lenient: bool = False
    after: str | None = None
    optional: bool = False
    fast_forward: FastForward = "exact"
    content: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """How an answer's reasoning is recognized, and how much of it there may be.

    It is what comes between `opener` and `closer`, at the answer's start (after white space), or wherever
    they are if it `reopens`; `opened`: the prompt ends in it. After `budget` tokens (None: no limit) the text
    `closing`, which contains the closer, is forced; after `reopens` no opener may follow then.
    """

    opener: str
    closer: str
    closing: str
    opened: bool = False
    reopens: str = ""
    budget: int | None = None


Kind = Literal["content", "reasoning", "call"]
"""What a part of an answer is."""


class Character(NamedTuple):
    """Text as it was generated: a character, or several of one token. `tokens` are the places of its tokens
    among those generated: several for a character that is cut into bytes. One without text is a token that
    has none."""

    text: str
    tokens: tuple[int, ...]


class Part(NamedTuple):
    """What characters turn out to be: content, reasoning, or the arguments of a call. The `call`-th call
    begins with a part that has its `name`. Tokens of a part without text (a marker) are not shown, and are of
    its kind all the same."""

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    call: int = -1
    name: str = ""


class AnswerReader(Protocol):
    """What tells content, reasoning and calls of an answer apart while it is being written. Every token that
    it is given is in one of the parts, but for hidden ones of the content."""

    is_forced: bool
    """whether the end of the reasoning was forced: a model may write it once more"""

    def push(self, *characters: Character) -> list[Part]:
        """The parts that are certain now that these characters have come."""

    def end(self) -> list[Part]:
        """The parts of what was held back, when no text will follow."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to be made.

    `max_tokens` None runs until an end token, a stop string or the end of the context.
    `speculate` False decodes plainly: no drafter takes part. `logprobs` asks for the log probability of
    every token and of so many of the most likely beside it; None: for none. `grammar` limits what the
    output may be. `drafting` is who drafts. `prediction` are tokens that the answer probably resembles.
    KV and text that a request leaves are reused by requests of the same `scope` (cache namespace) alone.
    `visible` are control tokens whose spelling is a part of the text. `thought` is how the answer reasons,
    `reader` makes what tells its content from the rest (None: all of it is content). Stop strings end the
    content, wherever they are in it, and nothing else.
    `cache_prompt` False reads the whole prompt, whatever is stored of it. `from_text`: the prompt is the
    tokenization of a text, of which tokens that were generated for the same text may take the place;
    `respelled_tokens` is how many did.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    speculate: bool = True
    verification: Verification = field(default_factory=Verification)
    logprobs: int | None = None
    grammar: Grammar | None = None
    drafting: Drafting = field(default_factory=Drafting)
    prediction: tuple[int, ...] = ()
    scope: str = ""
    visible: tuple[int, ...] = ()
    thought: Thought | None = None
    cache_prompt: bool = True
    from_text: bool = False
    respelled_tokens: int = 0
    reader: Callable[[], AnswerReader] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise SettingError("prompt", "it has no tokens", "Give at least one.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingError("max tokens", f"{self.max_tokens} asks for nothing", "Give 1 or more.")
        if any(not stop for stop in self.stop):
            raise SettingError("stop", "an empty stop string ends every text at once", "Leave it out.")
        if self.logprobs is not None and self.logprobs < 0:
            raise SettingError("logprobs", f"{self.logprobs} is negative", "Give 0 or more.")
        if self.grammar is not None and self.ignore_end:
            why = "a constrained output is over when its grammar says so"
            raise SettingError("ignore end", why, "Leave one of the two out.")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself held an emitted token to be: natural logarithms of the softmax
    of its logits, before bias, penalties, temperature and filters, as in llama.cpp's server.

    `top` are the most likely tokens, best first. `forced` tokens were the only ones allowed.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    forced: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence, as it happened: the only source of every count and time.

    A "prefill" step evaluates prompt tokens and emits nothing; a "decode" step is one target
    call over the last committed token and the draft, and the first one also reads the last chunk of the
    prompt. Times are seconds of wall clock. Model
    calls are shared by all `num_sequences` of the step; for several sequences the times and
    calls of one step must not be added up.
    """

    request: int
    step: int
    kind: Literal["prefill", "decode"]
    position: int
    """committed tokens before the step (prompt included)"""
    num_evaluated: int
    """tokens of this sequence in the target call, `read_tokens` not among them"""
    draft: Draft
    """what was offered to the target"""
    num_accepted: int
    """drafted tokens that were emitted"""
    tokens: tuple[int, ...]
    """tokens committed by this step, the accepted ones first"""
    work: DraftWork
    draft_s: float
    """proposing, the draft model's calls included, its prefill not"""
    verify_s: float
    """the target call, but for `read_s`"""
    sampling_s: float
    """logits to distributions, and the verification rule"""
    other_s: float
    """everything else in the step"""
    end_s: float
    """when the step ended, since the request was submitted"""
    num_sequences: int = 1
    batch_tokens: int = 0
    """tokens of all sequences in the target call"""
    batch_drafted: int = 0
    """drafted ones among them"""
    read_tokens: int = 0
    """prompt tokens before the last one that a "decode" step read as well"""
    read_s: float = 0.0
    """what that took: their share, by number, of the target call"""
    constraint_s: float = 0.0
    """what working out masks and forced tokens took of the other times"""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """one for each of `tokens`, where the request asked for them"""

    @property
    def total_s(self) -> float:
        """Wall time of the step."""
        calls_s = self.work.prefill_s + self.draft_s + self.read_s + self.verify_s
        return calls_s + self.sampling_s + self.other_s


class Piece(NamedTuple):
    """A bit of an answer, and who produced it: `TARGET` or a drafter's name. All pieces of an answer, in
    their order, are the answer.

    Of a call there is first a piece with its name, then its arguments. `tokens` are those that are shown here
    first, so that each is in one piece, and `logprobs` theirs, where the request asked for them. End tokens,
    markers and what a stop string cuts off are in none.
    """

    text: str
    source: str
    kind: Kind = "content"
    call: int = -1
    """which call of the answer, from 0"""
    name: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What one step adds to one request: its record, and the text that may now be shown. The last one
    has the whole `completion`; `error` is why it ended with finish reason "error"."""

    record: StepRecord
    pieces: tuple[Piece, ...]
    error: OutriderError | None = None
    completion: Completion | None = None

    @property
    def text(self) -> str:
        """The content of all pieces."""
        return content_of(self.pieces)


def content_of(pieces: Iterable[Piece]) -> str:
    """The content of pieces."""
    return "".join(piece.text for piece in pieces if piece.kind == "content")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. `tokens` include the end token; `text`, its content, does not."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    """prompt tokens whose KV was kept from an earlier request"""
    seed: int
    """the seed in use"""
    rule: str
    """the verification rule in use, for people"""
    lossy: bool
    """whether the request allowed another text than plain decoding's"""
    records: tuple[StepRecord, ...]
    is_complete: bool = True
    """whether the text is all that its grammar asks for; without a grammar it always is"""
    parsed: Any = None
    """what the caller's schema made of a complete text; None where there was none"""
    stop: str | None = None
    """the stop string that ended it"""
    respelled_tokens: int = 0
    """prompt tokens that are as they were generated, where the tokenizer has others for their text"""
    kinds: tuple[Kind, ...] = ()
    """what each of `tokens` was generated for; a marker is of the kind that it marks"""
    rest: tuple[Piece, ...] = ()
    """what no update has: text that was held back when the request was cancelled"""

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each of `tokens`, where the request asked for them."""
        return tuple(scored for record in self.records for scored in record.logprobs)
