"""Records that every part shares, in seconds, tokens and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from outrider.core.errors import OutriderError, SettingError
from outrider.core.params import Drafting, FastForward, GrammarKind, JsonStyle, SamplingParams, Verification

Logits = npt.NDArray[np.float32]
"""Rows of logits, shape (rows, vocabulary size): views of the backend's buffer, valid until the model's next
`decode`."""

Row = npt.NDArray[np.float32]
"""One row of logits, shape (vocabulary size,)."""

Mask = npt.NDArray[np.bool_]
"""Allowed tokens, shape (vocabulary size,). Read-only; valid until tokens are committed."""


class TopLogits(NamedTuple):
    """The most likely tokens of a row, best first (ties: the lower id), instead of the whole row."""

    tokens: npt.NDArray[np.int64]
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
"""Why a generation ended: at an end token, a stop string or a fulfilled constraint; at `max_tokens`; with a
full context; cancelled by the caller; or because the constraint allowed no token."""

TARGET = "target"
"""The source of the target's own tokens, recovered or bonus."""


class Span(NamedTuple):
    """One sequence's share of a model call.

    Args:
        tokens: Evaluated at positions `start`, `start + 1`, …
        start: The sequence's stored length.
        rows: Logits are returned for so many of the last tokens.
        checkpoint: The sequence may have to go back to `start` after this call. A model that copies its state
            keeps one copy for this, and several for `is_turn`.
        top: Only so many of each row's most likely tokens are needed (ties: the lower id), so the model may
            return TopLogits; 0: whole rows are needed.
        is_turn: Other texts may continue from `start` later.
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
    """A probability distribution over token ids: its support, strictly ascending, and positive probabilities
    that sum to 1. Greedy decoding is a point mass, with one entry."""

    tokens: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


class DraftToken(NamedTuple):
    """One token of a draft."""

    token: int
    source: str
    """the name of the drafter that offered it"""
    acceptance: float
    """the probability that it is accepted if all before it are, as the drafter estimates or the policy
    calibrates it"""
    evidence: tuple[float, ...] = ()
    """features for calibrating the estimate, equally many for all tokens of a drafter"""
    drawn_from: Distribution | None = None
    """the distribution it was sampled from; None for a point mass"""
    mode_of: Distribution | None = None
    """the distribution whose most likely token this point mass is, if the drafter was asked for it. Not used
    in
    verification: it shows how often a token sampled from it would have been accepted."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow the committed text."""

    items: tuple[DraftToken, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __add__(self, other: Draft) -> Draft:
        return Draft(self.items + other.items)

    def first(self, length: int) -> Draft:
        return self if length >= len(self.items) else Draft(self.items[:length])

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple([item.token for item in self.items])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple([item.source for item in self.items])

    @property
    def acceptance(self) -> tuple[float, ...]:
        return tuple([item.acceptance for item in self.items])

    @property
    def probs(self) -> tuple[Distribution, ...] | None:
        """The distribution of each token, point masses included; None if all are point masses."""
        if all(item.drawn_from is None for item in self.items):
            return None
        return tuple(item.drawn_from or point_mass(item.token) for item in self.items)

    @property
    def compared_probs(self) -> tuple[Distribution, ...]:
        """The drafters' distributions, of sampled and of most likely tokens; a point mass where one is
        unknown, and empty if all are."""
        found = [item.drawn_from or item.mode_of for item in self.items]
        if not any(found):
            return ()
        return tuple(probs or point_mass(item.token) for probs, item in zip(found, self.items, strict=True))


_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


@lru_cache(maxsize=4096)
def point_mass(token: int) -> Distribution:
    """All probability on one token. Shared, and therefore read-only."""
    tokens = np.array([token], dtype=np.int64)
    tokens.flags.writeable = False
    return Distribution(tokens, _CERTAIN)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The cost of one round of drafting, over all its sequences.

    `calls`, `model_s` and `call_tokens` (tokens of each call) are of the draft model's decoding calls; the
    `prefill_` fields are of its calls that only read prompts.
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
    """The outcome of verifying a draft: its first `num_accepted` tokens, then `token`.

    A "recovered" token replaces a rejected one; a "bonus" token follows a draft that was accepted whole, or
    an empty one; a "deferred" verdict has none, since none may follow.
    """

    num_accepted: int
    token: int | None
    kind: Literal["recovered", "bonus", "deferred"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output is limited to, as the user wrote it.

    Args:
        kind: What `text` is: a JSON schema, "json" (any JSON value; no text), a regular expression, a JSON
            list of strings to choose from, a GBNF grammar (llama.cpp's) or a Lark one (llguidance's).
        style: The white space of JSON.
        lenient: Ignore schema keywords that cannot be enforced.
        after: The constraint starts after this text, such as a closing </think>; before it anything may come.
        fast_forward: What to do with text that the grammar leaves no choice about: draft it ("exact"), allow
            only its usual tokens ("canonical"), or nothing ("off").
        content: The grammar of what comes before `after`, if any.
    """

    kind: GrammarKind
    text: str = ""
    style: JsonStyle = "spaced"
    lenient: bool = False
    after: str | None = None
    fast_forward: FastForward = "exact"
    content: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """How an answer's reasoning is recognized, and how long it may get.

    It stands between `opener` and `closer`, at the start of the answer or, if it `reopens`, anywhere; the
    prompt may already have `opened` it. After `budget` tokens (None: no limit) the text `closing`, which
    contains the closer, is forced; after `reopens` no opener may then follow.
    """

    opener: str
    closer: str
    closing: str
    opened: bool = False
    reopens: str = ""
    budget: int | None = None


Kind = Literal["content", "reasoning", "call"]


class Character(NamedTuple):
    """Generated text: one character, or several of one token. `tokens` are the indices of its tokens among
    those generated, several for a character that is split into bytes. The text of a control token is
    empty."""

    text: str
    tokens: tuple[int, ...]


class Part(NamedTuple):
    """Characters classified as content, reasoning, or the arguments of the `call`-th call, whose first part
    has its `name`. A part without text holds the tokens of a marker, which is not shown."""

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    call: int = -1
    name: str = ""


class AnswerReader(Protocol):
    """Tells content, reasoning and calls apart while an answer is being written. Every token that it is given
    ends up in one part, except hidden tokens of the content."""

    is_forced: bool
    """whether the end of the reasoning was forced: the model may then repeat it"""

    def push(self, *characters: Character) -> list[Part]:
        """The parts that these characters make certain."""

    def end(self) -> list[Part]:
        """The parts that were held back, now that no text follows."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    Args:
        max_tokens: None: until an end token, a stop string or the end of the context.
        stop: Strings that end the content; elsewhere they mean nothing.
        ignore_end: Continue after end tokens.
        speculate: Let drafters take part; otherwise decode plainly.
        logprobs: Return the log probability of every token, and of so many of the most likely ones; None: of
            none.
        prediction: Tokens that the answer is expected to resemble.
        scope: The cache namespace: KV and text are reused by requests of the same one only.
        visible: Control tokens whose spelling belongs to the text.
        cache_prompt: Reuse KV; otherwise the whole prompt is read.
        from_text: The prompt is a tokenized text, so tokens that were generated for the same text may replace
            its own.
        respelled_tokens: How many did.
        reader: Makes what tells content from reasoning and calls; None: all of it is content.
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
    """The model's own log probability of an emitted token: the natural logarithm of the softmax of its
    logits, before bias, penalties, temperature and filters, as llama.cpp's server has it. `top` are the most
    likely tokens, best first; `forced`: no other token was allowed."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    forced: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence: the only source of counts and times.

    A "prefill" step evaluates prompt tokens and emits nothing. A "decode" step is one target call over the
    last committed token and the draft; the first one also reads the last chunk of the prompt. Times are
    wall-clock seconds. All `num_sequences` of a step share its calls, so their times must not be added up.
    """

    request: int
    step: int
    kind: Literal["prefill", "decode"]
    position: int
    """committed tokens before the step (prompt included)"""
    num_evaluated: int
    """tokens of this sequence in the target call, without `read_tokens`"""
    draft: Draft
    num_accepted: int
    """drafted tokens that were emitted"""
    tokens: tuple[int, ...]
    """tokens committed by this step, the accepted ones first"""
    work: DraftWork
    draft_s: float
    """drafting, with the draft model's calls but without its prefill"""
    verify_s: float
    """the target call, without `read_s`"""
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
    """prompt tokens before the last one that a "decode" step also read"""
    read_s: float = 0.0
    """their share of the target call, by number of tokens"""
    constraint_s: float = 0.0
    """the part of the other times spent on masks and forced tokens"""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """one for each of `tokens`, if requested"""

    @property
    def total_s(self) -> float:
        calls_s = self.work.prefill_s + self.draft_s + self.read_s + self.verify_s
        return calls_s + self.sampling_s + self.other_s


class Piece(NamedTuple):
    """A bit of an answer and its source, `TARGET` or a drafter's name. The pieces in order are the answer.

    A call comes as a piece with its name, then its arguments. Each token belongs to the piece that shows it
    first, with its logprob if requested; end tokens, markers and text cut off by a stop string are in none.
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
    """What one step adds to a request: its record, and the text that can now be shown. The last update has
    the `completion`, and the `error` if it ended with one."""

    record: StepRecord
    pieces: tuple[Piece, ...]
    error: OutriderError | None = None
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return content_of(self.pieces)


def content_of(pieces: Iterable[Piece]) -> str:
    """The content of these pieces."""
    return "".join(piece.text for piece in pieces if piece.kind == "content")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. `tokens` include the end token; `text`, the content, does not."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    """prompt tokens whose KV an earlier request left"""
    seed: int
    rule: str
    """the verification rule, for people"""
    records: tuple[StepRecord, ...]
    is_complete: bool = True
    """whether the text is all that its grammar asks for; True without a grammar"""
    parsed: Any = None
    """a complete text as an object of the caller's schema"""
    stop: str | None = None
    respelled_tokens: int = 0
    """prompt tokens kept as they were generated, where the tokenizer would split their text differently"""
    kinds: tuple[Kind, ...] = ()
    """what each of `tokens` belongs to, markers included"""
    rest: tuple[Piece, ...] = ()
    """text that was still held back when the request was cancelled"""

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each of `tokens`, if requested."""
        return tuple(scored for record in self.records for scored in record.logprobs)
