"""Contracts between the parts: models, vocabularies, constraints, samplers, drafters and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from outrider.core.data import (
    Distribution,
    Draft,
    DraftToken,
    DraftWork,
    Logits,
    Mask,
    Request,
    Row,
    Span,
    StepRecord,
    TopLogits,
)
from outrider.core.errors import BackendError, OutOfMemory
from outrider.core.params import Drafting

UNLIMITED = 2**31 - 1

RewindKind = Literal["free", "window", "checkpoints", "none"]
"""Names of the kinds below, for people and for stored files"""


@dataclass(frozen=True, slots=True)
class Rewinding:
    """How a model goes back to fewer tokens, and what it must then evaluate again.

    Attributes:
        kind: its name.
        max_rejected: so many tokens of a call, not counting its first one, can be removed right after it.
        is_free: any number of tokens can be removed at any time, and any prefix copied.
        max_recomputed: None if accepted tokens stay. Otherwise a rejection loses the accepted tokens of its
            call, which the next call evaluates again; with more than `max_recomputed` of them nothing is
            drafted, or a rejection would lose them once more.
    """

    kind: RewindKind = "free"
    max_rejected: int = UNLIMITED
    is_free: bool = False
    max_recomputed: int | None = None

    @property
    def is_possible(self) -> bool:
        """Whether rejected tokens can be removed at all."""
        return self.max_rejected > 0

    @property
    def recomputes(self) -> bool:
        return self.max_recomputed is not None

    def max_draft(self, num_missing: int, *, in_prompt: bool = False) -> int:
        """The longest draft in a call that also evaluates `num_missing` tokens before the last one: again, or
        for the first time if they are `in_prompt`."""
        if self.max_recomputed is None:
            return self.max_rejected
        most = 0 if in_prompt else self.max_recomputed
        return self.max_rejected - num_missing if num_missing <= most else 0

    @property
    def keeps_turns(self) -> bool:
        """Whether it can go back, beyond the last call, only to spans that were marked (`Span.is_turn`)."""
        return self.recomputes or self.kind == "window"

    @property
    def copies_beginnings(self) -> bool:
        """Whether another sequence can copy a prefix, of any length that this one can go back to."""
        return self.is_free or self.recomputes


FREE = Rewinding(is_free=True)
"""attention"""
WINDOW = Rewinding("window")
"""attention that stores only a sliding window: as far back as the window reaches"""
CHECKPOINTS = Rewinding("checkpoints", max_rejected=63, max_recomputed=8)
"""a recurrent state: back to spans that were marked (`Span.checkpoint`)"""
UNABLE = Rewinding("none", max_rejected=0)
"""a recurrent state that cannot be copied"""


@dataclass(frozen=True, slots=True)
class PartOf:
    """What a reduced vocabulary's file says about its target's; nothing of it is verified.

    Args:
        target_tokens: The target's id of each token, -1 for `other_token`.
        other_token: Stands for every token of the target that this vocabulary lacks.
        target_tokenizer: The target's `vocab.tokenizer_id`.
        window: So many last tokens of a text are enough to draft from; 0: all are read.
        reads_pieces: Text without a token of its own is read as several tokens, not as `other_token`.
    """

    target_tokens: tuple[int, ...]
    other_token: int | None
    target_tokenizer: str
    name: str = field(default="", compare=False)
    window: int = 0
    reads_pieces: bool = False


class Vocabulary(Protocol):
    """A tokenizer and its tokens."""

    @property
    def part_of(self) -> PartOf | None:
        """What the file of a reduced vocabulary says about the whole one; None for a whole one."""

    @property
    def size(self) -> int:
        """Number of token ids, with padding."""

    @property
    def kind(self) -> str:
        """The tokenizer's family and pre-tokenizer, for people: "bpe (qwen2)"."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of `text`, with `add_special` between the model's start and end tokens; `parse_special`
        reads control tokens that are spelled out."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""

    def spelling(self, token: int) -> bytes:
        """The token as the vocabulary spells it, control tokens included; used to compare vocabularies."""

    def is_control(self, token: int) -> bool:
        """Whether the token marks structure, not text, or is unused."""

    def ends_generation(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""


class Model(Protocol):
    """A model with KV state for several sequences, numbered from 0."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def context_length(self) -> int:
        """Tokens that one sequence can hold."""

    @property
    def max_sequences(self) -> int: ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all sequences together can hold."""

    @property
    def max_batch_tokens(self) -> int:
        """Tokens that one call can take, over all sequences."""

    @property
    def max_rows(self) -> int:
        """Rows of logits that one call can give, over all sequences."""

    @property
    def rewinding(self) -> Rewinding: ...

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        """Evaluate one span per sequence in a single call, and store their KV.

        Returns the requested rows of each span, in order: views that the next call overwrites, or for spans
        with `top` perhaps sequences of TopLogits. Raises BackendError; then nothing is stored.
        """

    def length(self, sequence: int) -> int:
        """Tokens stored for a sequence."""

    def reach(self, sequence: int, length: int) -> int:
        """The longest prefix, of `length` tokens at most, that a sequence can be truncated to or copied
        with."""

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence; none and all always work. Raises
        RewindUnsupported if the model cannot, and changes nothing then."""

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Copy the first `length` tokens to an empty sequence, without evaluating them. Raises
        RewindUnsupported if the model cannot, and changes nothing then."""

    def close(self) -> None:
        """Free the native memory; can be repeated."""


# Copies of a sequence's KV and state

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a copy: `length` tokens. A sequence restored from it can be truncated to any length from
    `any_from` on, and to its `checkpoints`."""

    length: int
    any_from: int
    checkpoints: tuple[int, ...] = ()

    def reach(self, length: int) -> int:
        """The longest prefix of `length` tokens that a restored sequence can be truncated to."""
        if length >= self.any_from:
            return min(length, self.length)
        return max((at for at in self.checkpoints if at <= length), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A copy of one sequence, for models of the same kind: the parts of the sequence itself, then its states
    at the extent's checkpoints."""

    extent: Extent
    parts: tuple[Bytes, ...]

    @property
    def copies(self) -> tuple[Bytes, ...]:
        return self.parts[: len(self.parts) - len(self.extent.checkpoints)]

    @property
    def states(self) -> tuple[Bytes, ...]:
        return self.parts[len(self.parts) - len(self.extent.checkpoints) :]


@runtime_checkable
class SavingModel(Model, Protocol):
    """A Model whose sequences can be saved and restored."""

    @property
    def attends_to_all(self) -> bool:
        """Whether every stored sequence slows down the calls of all others."""

    def save(self, sequence: int) -> SavedState:
        """A copy of a sequence of at least one token. Raises RewindUnsupported if there can be none."""
        ...

    def restore(self, sequence: int, state: SavedState) -> None:
        """Restore an empty sequence from a copy made by a model with the same weights, library and options.
        Raises BackendError; the sequence then stays empty."""
        ...


# Checks of model calls before anything is computed: a native library may end the process, or lose other
# sequences' KV, when a call breaks its rules.


def check_spans(model: Model, spans: Sequence[Span]) -> None:
    """Raise BackendError for spans that break the contract or a limit, OutOfMemory for one that does not fit
    the context."""
    if not spans:
        raise BackendError("span", "a call needs at least one")
    if len(spans) > 1 and len({span.sequence for span in spans}) < len(spans):
        raise BackendError("span", "a call takes one for each sequence")
    num_tokens = num_rows = 0
    for span in spans:
        if why := _fault(model, span):
            raise BackendError("span", why)
        num_tokens, num_rows = num_tokens + len(span.tokens), num_rows + span.rows
        if span.start + len(span.tokens) > model.context_length:
            used = f"a context of {model.context_length}, of which {span.start} are in use"
            why = f"{len(span.tokens)} more tokens do not fit {used}"
            raise OutOfMemory("span", why, "Give a larger context (-c).")
    if num_tokens > model.max_batch_tokens:
        raise BackendError("span", f"a call takes at most {model.max_batch_tokens} tokens")
    if num_rows > model.max_rows:
        raise BackendError("span", f"a call gives at most {model.max_rows} rows", "Raise max_rows.")


def _fault(model: Model, span: Span) -> str:
    tokens, rows = span.tokens, span.rows
    if not 0 <= span.sequence < model.max_sequences:
        return f"there is no sequence {span.sequence}"
    if not tokens:
        return "it has no tokens"
    if not 0 <= rows <= len(tokens):
        return f"{len(tokens)} tokens cannot give {rows} rows"
    if span.start != (stored := model.length(span.sequence)):
        return f"it starts at {span.start}, but {stored} tokens are stored"
    if min(tokens) < 0 or max(tokens) >= model.vocabulary.size:
        return f"a token is outside the vocabulary of {model.vocabulary.size}"
    return ""


def check_copy(model: Model, source: int, sequence: int, length: int) -> None:
    """Raise BackendError if `sequence` cannot take the first `length` tokens of `source`."""
    if not 0 < length <= model.length(source):
        raise BackendError("copy", f"sequence {source} does not hold {length} tokens")
    if model.length(sequence):
        raise BackendError("copy", f"sequence {sequence} is not empty")


def check_restore(model: Model, sequence: int, state: SavedState) -> None:
    """Raise BackendError if `sequence` cannot hold `state`."""
    if model.length(sequence):
        raise BackendError("restore", f"sequence {sequence} is not empty")
    if not 0 < state.extent.length <= model.context_length:
        raise BackendError("restore", f"a context does not hold {state.extent.length} tokens")


class Constraint(Protocol):
    """What one request's output may be, token by token.

    Its state is the committed tokens. Queries may look beyond them at `drafted` tokens, and change nothing;
    after a drafted token that was not allowed, `allowed` raises ConstraintError. After an end token
    everything is allowed, since nothing there is emitted.
    """

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        """The tokens that may follow; None: all.

        Raises ConstraintError if none may, or if working it out exceeded a limit.
        """

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow one after the other; none after an end token."""

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """The canonical tokens of the text that must follow; empty if there is a choice, if nothing is to be
        forced, or if the text so far is tokenized differently."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens. Raises ConstraintError for one that may not follow."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may follow."""

    @property
    def is_accepted(self) -> bool:
        """Whether the text may end here."""


class Sampler(Protocol):
    """From logits to the distribution that one request samples from.

    It knows the committed tokens; `drafted` are those between them and the position in question. Rows are
    logits over the target's vocabulary, and are never changed.
    """

    @property
    def top(self) -> int:
        """How many of a row's most likely tokens are enough where nothing `adjusts` it; 0: all are needed."""

    def adjusts(self, drafted: Sequence[int]) -> bool:
        """Whether bias, bans, penalties or a constraint apply at this position. If not, `look` also takes the
        logits of a part of the vocabulary, and returns indices into that part."""

    def adjust(self, row: Row, drafted: Sequence[int]) -> Row:
        """The logits after bias, bans and penalties; the row itself if none applies."""

    def distribution(self, row: Row | TopLogits, drafted: Sequence[int]) -> Distribution:
        """The distribution that plain decoding would sample from here; of TopLogits (of `top`) only where
        nothing `adjusts` it."""

    def look(
        self, row: Row | TopLogits, *, with_distribution: bool
    ) -> tuple[int, float, Distribution | None]:
        """The most likely token of logits as `adjust` gives them, an estimate of its probability before
        temperature and filters, and the distribution if asked for."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a sequence asks for in this step.

    Args:
        max_tokens: The most drafted tokens that can be of use (at least 1); the request's own cap is
            respected.
        sampler: The way from logits to the request's distribution.
        draw: Samples a draft model's token, given its distribution (after `sampler`) and its index in the
            draft.
            None: a draft model drafts its most likely tokens, as point masses.
        with_mode_of: Whether the distributions of point-mass tokens are asked for too (`DraftToken.mode_of`).
        recomputed: None where rejected tokens are forgotten at no cost. Else the call evaluates so many
            tokens again; after a rejection the next one evaluates these, the last token and the accepted ones
            again.
        max_step_s: The step's calls, a draft model's included, should take no longer, since others wait for
            their next tokens. None: nobody does.
        num_unread: Prompt tokens that the target's call reads besides.
    """

    sequence: int
    max_tokens: int
    sampler: Sampler
    draw: Callable[[Distribution, int], int] | None = None
    with_mode_of: bool = False
    constraint: Constraint | None = None
    drafting: Drafting = field(default_factory=Drafting)
    recomputed: int | None = None
    max_step_s: float | None = None
    num_unread: int = 0


class Drafter(Protocol):
    """A source of drafts for many sequences.

    It observes committed tokens and drafts what may come next. It never sees a token that could still be
    rejected.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """Whether a draft takes no model call, so that asking costs next to nothing: a `Lookup`. Else it is a
        `DraftModel`."""

    def begin(self, sequence: int, request: Request) -> None:
        """A request starts on `sequence`. What the drafter still knows of the sequence's earlier
        tokens it may keep, and use for requests of the same cache namespace (`Request.scope`)."""

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """These tokens were committed."""

    def end(self, sequence: int) -> None:
        """The request on `sequence` is over; nothing more will be observed for it."""

    def reset(self) -> None:
        """Forget every sequence."""


class Lookup(Drafter, Protocol):
    """A model-free drafter. Its tokens are point masses."""

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        """What follows the committed text and `prefix`, one token after the other, each as if all before it
        were accepted. The caller stops where it has enough: work is done only for what is taken."""


class DraftInput(NamedTuple):
    """What a draft model reads of one sequence in a call: all that is drafted so far, and what lookups say
    comes next, which the same call checks."""

    drafted: tuple[int, ...]
    guess: tuple[int, ...] = ()


class DraftRound(Protocol):
    """A draft model's part in one step, for all sequences that ask it."""

    @property
    def work(self) -> DraftWork:
        """What it has cost so far."""

    def step(self, inputs: Mapping[int, DraftInput]) -> Mapping[int, Iterable[DraftToken]]:
        """One call of the model. Gives by sequence what it says comes after the drafted tokens, and after
        each of the guessed ones (as a target checks a draft); good until the next call. A sequence for which
        it says nothing is not to be asked again in this round."""


class DraftProgress(NamedTuple):
    """How far a draft model is with a sequence's committed text.

    `held` are the tokens that it holds once it has read what it needs. Of these it has yet to evaluate
    `unread_prompt` of the prompt and, with its next call, `unread` others.
    """

    held: int = 0
    unread: int = 1
    unread_prompt: int = 0


class DraftModel(Drafter, Protocol):
    """A drafter whose tokens take calls of a model."""

    def progress(self, sequence: int) -> DraftProgress:
        """How far it is with a sequence that has begun."""

    @property
    def block(self) -> int:
        """Tokens that its first call of a round offers, one a step: the steps after it cost nothing, and none
        offers more. 1: every step takes a call."""

    @property
    def reads_ahead(self) -> bool:
        """Whether its calls check guessed tokens (`DraftInput`); else these are ignored."""

    def start(self, requests: Sequence[DraftRequest]) -> DraftRound:
        """Begin a round for these sequences."""


class Drafters(NamedTuple):
    """Who can be asked: model-free drafters, and one draft model at most."""

    lookups: tuple[Lookup, ...] = ()
    model: DraftModel | None = None

    @classmethod
    def of(cls, drafters: Iterable[Drafter]) -> Drafters:
        """Sorted by kind. Raises ValueError for a second draft model."""
        found = list(drafters)
        models = [cast(DraftModel, drafter) for drafter in found if not drafter.is_free]
        if len(models) > 1:
            raise ValueError("at most one draft model can be asked")
        lookups = tuple(cast(Lookup, drafter) for drafter in found if drafter.is_free)
        return cls(lookups, models[0] if models else None)

    def for_request(self, drafting: Drafting) -> Drafters:
        """Those that the request lets draft."""
        if drafting.policy == "lookup":
            return Drafters(self.lookups)
        if drafting.policy == "model":
            return Drafters((), self.model)
        return self


class Policy(Protocol):
    """The one place that decides from whom to draft, and how far."""

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts on `sequence`; `max_tokens` is the most it will generate, None for no limit."""

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request, possibly empty, and what they cost together. The target's call will evaluate
        `others` tokens besides these drafts and the last token of each request's sequence."""

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """What became of a step, by sequence: those that decoded and those that read their prompt."""
