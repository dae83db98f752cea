"""The seams between the parts: what a model, a vocabulary, a drafter and a policy promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, cast

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
from outrider.core.params import Drafting, SamplingParams

UNLIMITED = 2**31 - 1

RewindKind = Literal["free", "window", "snapshots", "checkpoints", "none"]
"""A name for each row of `REWINDING`, for people and for what is stored."""


@dataclass(frozen=True, slots=True)
class Rewinding:
    """How far a model goes back to fewer tokens, and what has to be evaluated again then.

    Attributes:
        kind: its name.
        max_rejected: tokens of a call, its first one not among them, that it forgets right after the call.
        is_free: it forgets any number of tokens at any time, and copies any beginning of a text.
        outlasts_calls: it forgets tokens of earlier calls, too.
        max_recomputed: None where accepted tokens stay. Else the tokens of a call that are to stay are lost
            with those that are rejected, and are evaluated again with the next call. Where that is more than
            `max_recomputed` nothing is drafted: a rejection would lose all of them once more.
    """

    kind: RewindKind = "free"
    max_rejected: int = UNLIMITED
    is_free: bool = False
    outlasts_calls: bool = True
    max_recomputed: int | None = None

    @property
    def is_possible(self) -> bool:
        """Whether rejected tokens can be forgotten at all."""
        return self.max_rejected > 0

    @property
    def recomputes(self) -> bool:
        """Whether a rejection loses the accepted tokens of its call."""
        return self.max_recomputed is not None

    def max_draft(self, num_missing: int, *, in_prompt: bool = False) -> int:
        """The longest draft of a sequence in a call that evaluates `num_missing` of its tokens besides the
        last one: again, or for the first time where that is `in_prompt`."""
        if self.max_recomputed is None:
            return self.max_rejected
        most = 0 if in_prompt else self.max_recomputed
        return self.max_rejected - num_missing if num_missing <= most else 0

    @property
    def keeps_turns(self) -> bool:
        """Whether it goes back in earlier calls only to where a call began for which that was asked
        (`Span.is_turn`)."""
        return self.recomputes or self.kind == "window"

    @property
    def copies_beginnings(self) -> bool:
        """Whether another sequence can take over a beginning of a text: any that it goes back to."""
        return self.is_free or self.recomputes


FREE = Rewinding(is_free=True)
"""of attention"""
WINDOW = Rewinding("window")
"""of attention that keeps a sliding window alone: as far back as the window still holds"""
CHECKPOINTS = Rewinding("checkpoints", max_rejected=63, max_recomputed=8)
"""of a recurrent state: back to where a span began for which that was asked (`Span.checkpoint`)"""
UNABLE = Rewinding("none", max_rejected=0, outlasts_calls=False)
"""of a recurrent state that cannot be copied"""


def snapshots(count: int) -> Rewinding:
    """Of a recurrent state of which the library keeps so many: once, right after a call, all but the first of
    its tokens."""
    return Rewinding("snapshots", max_rejected=count, outlasts_calls=False) if count else UNABLE


@dataclass(frozen=True, slots=True)
class PartOf:
    """What a vocabulary knows of another, larger one, its target's.

    `target_tokens` holds the target's id for each of its tokens, -1 for `other_token`: the one token
    that represents every token of the target that it does not know. `target_tokenizer` is the target's
    `vocab.tokenizer_id`, `name` what people call the model. Nothing of it has been verified.
    `window`: the last tokens of a text that are enough for the model to draft from; 0: it reads all.
    `reads_pieces`: text that it does not know as one token it reads as several, not as `other_token`.
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
        """What the model's file says of a larger vocabulary that this one is a part of; None for a whole
        one."""

    @property
    def size(self) -> int:
        """Number of token ids, padding included."""

    @property
    def kind(self) -> str:
        """The tokenizer's family and pre-tokenizer, for people: "bpe (qwen2)"."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of `text`. `add_special` puts the model's own start (and end) tokens around
        it; `parse_special` reads control tokens that are spelled out in it."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""

    def spelling(self, token: int) -> bytes:
        """How the vocabulary spells the token, control tokens included: what is compared
        between two vocabularies."""

    def is_control(self, token: int) -> bool:
        """Whether the token marks structure rather than text (or is unused)."""

    def ends_generation(self, token: int) -> bool:
        """Whether the model says with this token that it has finished."""


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
        """Evaluate one span per sequence in a single call and store their KV.

        Returns the wanted rows of each span, in the order of the spans. They are views that
        the next call overwrites; of spans with `top` they may be sequences of TopLogits. Raises BackendError;
        then no span is stored.
        """

    def length(self, sequence: int) -> int:
        """Tokens stored for a sequence; 0 for one that was never used."""

    def reach(self, sequence: int, length: int) -> int:
        """The most tokens, `length` at most, that a sequence can be truncated to, or copied with."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence.

        Forgetting everything (0) and nothing always works. Raises RewindUnsupported where
        the model cannot; its state is unchanged then.
        """

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let an empty sequence hold the first `length` tokens of another, without evaluating them.

        Raises RewindUnsupported where the model cannot; nothing is changed then.
        """

    def close(self) -> None:
        """Free the native memory. Closing twice is harmless."""


class Constraint(Protocol):
    """What one request's output may be, token by token.

    Its state is the committed tokens. `drafted` are the tokens of a draft after them: every query may be made
    there too, and changes nothing. After drafted tokens that were all allowed every query is answered;
    after any other, `allowed` raises ConstraintError. After an end token everything is allowed, since
    nothing there is ever emitted.
    """

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        """The tokens that may follow; None: all of them.

        Raises ConstraintError when none may, or when working it out went beyond its limits.
        """

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow in turn; none after an end token."""

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """The canonical tokens of the text that must follow. Empty where the next text is open, where
        nothing is to be forced, and for texts that were tokenized in another way."""

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens were committed. Raises ConstraintError for one that may not follow."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may follow: the text is finished."""

    @property
    def is_accepted(self) -> bool:
        """Whether the text so far is a whole one, though more may follow."""


class Sampler(Protocol):
    """One request's way from logits to the distribution that a token is sampled from.

    It knows the committed tokens; `drafted` are those that a draft puts between them and the
    position in question. Rows are logits over the target's vocabulary and are never changed.
    """

    @property
    def params(self) -> SamplingParams: ...

    @property
    def top(self) -> int:
        """Of how many of a row's most likely tokens the distribution is made, where nothing `adjusts` it; 0:
        of all."""

    def adjusts(self, drafted: Sequence[int]) -> bool:
        """Whether the request has bias, bans, penalties or a constraint to apply at this position. Where not,
        `distribution` depends on the logits alone: it may be given those of a part of the vocabulary, and
        then returns indices into that part."""

    def adjust(self, row: Row, drafted: Sequence[int]) -> Row:
        """The logits after bias, bans and penalties; the row itself where none applies."""

    def distribution(self, row: Row | TopLogits, drafted: Sequence[int]) -> Distribution:
        """The distribution that plain decoding would sample from at this position; from TopLogits (of `top`)
        only where nothing `adjusts` it."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a sequence asks for in this step.

    Args:
        sequence: The sequence's number.
        max_tokens: The most drafted tokens that can be of use (at least 1); the request's own cap is
            respected.
        sampler: The way from logits to the request's distribution.
        draw: Samples a draft model's token, given its distribution (after `sampler`) and its index in the
            draft.
            None: a draft model drafts its most likely tokens, as point masses.
        with_mode_of: Whether the distributions of point-mass tokens are asked for too (`DraftToken.mode_of`).
        constraint: What the output may be, if it is limited.
        drafting: What the request asked for: who drafts, and how far.
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


class DraftModel(Drafter, Protocol):
    """A drafter whose tokens take calls of a model."""

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
