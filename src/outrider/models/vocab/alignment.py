"""What lining up two vocabularies comes to: the map, and how far they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import PartOf, Vocabulary
from outrider.core.data import Row

Ids = npt.NDArray[np.int64]

MIN_TEXT_RATIO = 0.98
"""Share of the smaller vocabulary's text tokens that the other must hold."""

MIN_CUT_RATIO = 0.9
"""Share of the sample pieces that both tokenizers must cut alike.

Not all of them: tokenizers that differ in how they group digits reach 0.98 here and still
agree on prose. Ones that differ in how they group indentation stay below 0.9, which on
source code is every fifth piece: few drafts of usual length would be accepted whole.
"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How two tokenizers cut the sample texts: pieces of the finer cut, and those in both."""

    common_pieces: int
    pieces: int

    @property
    def ratio(self) -> float:
        """Common pieces / pieces, 0-1; 1 where nothing was cut."""
        return self.common_pieces / self.pieces if self.pieces else 1.0


@dataclass(frozen=True, slots=True)
class AlignmentReport:
    """How far two vocabularies agree. Counts are tokens unless the name says otherwise."""

    target_kind: str
    draft_kind: str
    target_tokens: int
    draft_tokens: int
    common_tokens: int
    """tokens that have a counterpart, control tokens included"""
    same_id_tokens: int
    """common tokens that also have the same id"""
    text_tokens: int
    """text tokens of the side that has fewer of them"""
    common_text_tokens: int
    cuts: Cuts = Cuts(0, 0)
    differences: tuple[str, ...] = ()
    """the first tokens of the smaller vocabulary without a counterpart, text before control: what each side
    has at that id, for people"""
    is_reduced: bool = False
    """the draft knows a part of some target's tokens, by a map of its own"""
    map_fault: str | None = None
    """why that map cannot be used for this target"""

    @property
    def text_ratio(self) -> float:
        """Common text tokens / text tokens of the smaller vocabulary, 0-1."""
        return self.common_text_tokens / max(self.text_tokens, 1)

    @property
    def usable(self) -> bool:
        """Whether one model can draft for the other."""
        agrees = self.text_ratio >= MIN_TEXT_RATIO and self.cuts.ratio >= MIN_CUT_RATIO
        return agrees and self.map_fault is None


@dataclass(frozen=True)
class Alignment:
    """Which token of the draft is which of the target.

    A mapped token is the same on both sides: spelling, bytes, control, end. The map is
    one to one, so probabilities carry over without being added up; -1 marks a token that
    the other side lacks or that could be several of its tokens.
    """

    to_target: Ids
    """draft id -> target id, or -1"""
    to_draft: Ids
    """target id -> draft id, or -1"""
    identical: bool
    """both sides have the same tokens under the same ids: nothing needs mapping"""
    report: AlignmentReport
    other_token: int | None = None
    """the draft's token that represents every token of the target that it does not know"""
    window: int = 0
    """the last tokens of a text that are enough for the draft; 0: it reads all"""
    pieces: Pieces | None = None
    """how the draft reads tokens that it lacks, where not as `other_token`"""

    @cached_property
    def common(self) -> Ids:
        """The target's ids of the tokens that both have, ascending."""
        return np.flatnonzero(self.to_draft >= 0)

    @cached_property
    def foreign(self) -> Ids:
        """The draft's ids of the tokens that the target lacks, ascending."""
        return np.flatnonzero(self.to_target < 0)

    @cached_property
    def _common_in_draft(self) -> Ids | slice:
        """The draft's ids of `common`, in its order; a slice, which copies nothing, where they are
        consecutive."""
        ids = self.to_draft[self.common]
        first = int(ids[0]) if len(ids) else 0
        is_run = np.array_equal(ids, np.arange(first, first + len(ids)))
        return slice(first, first + len(ids)) if is_run else ids

    @cached_property
    def _read_as(self) -> Ids:
        """`to_draft`, with the token that represents all others where there is one."""
        return np.where(
            self.to_draft >= 0, self.to_draft, -1 if self.other_token is None else self.other_token
        )

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens as the draft reads them, in its ids. One that it lacks is read as several
        (`pieces`), is `other_token`, or is left out where there is none: that costs acceptance after it,
        never correctness."""
        if self.identical:
            return list(tokens)
        ids: list[int] = self._read_as[np.asarray(tokens, dtype=np.int64)].tolist()
        if self.other_token is None:
            return [i for i in ids if i >= 0]
        if self.pieces is None or self.other_token not in ids:
            return ids
        read: list[int] = []
        for token, i in zip(tokens, ids, strict=True):
            read += (i,) if i != self.other_token else self.pieces.of(token) or (i,)
        return read

    def common_part(self, row: Row) -> Row:
        """The draft's logits of the tokens in `common`, in its order; a view of the row where it can be."""
        part: Row = row[self._common_in_draft]
        return part

    def in_target(self, row: Row, into: Row | None = None) -> Row:
        """The draft's logits over the target's vocabulary; -inf for tokens that the draft lacks. `into` is
        what an earlier call returned, to be written over.

        Restricting what can be drawn, instead of giving up on a draw that the target lacks, keeps
        what is offered distributed as it claims.
        """
        if self.identical:
            return row
        if into is None:
            into = np.full(len(self.to_draft), -np.inf, dtype=np.float32)
        into[self.common] = self.common_part(row)
        return into


class Pieces:
    """A target's tokens put together from a draft's: from the left always the longest that fits."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self._target = target
        self._draft = draft
        self._found: dict[int, tuple[int, ...]] = {}

    def of(self, token: int) -> tuple[int, ...]:
        """The draft's tokens with the bytes of one of the target's; empty where there are none."""
        if token not in self._found:
            self._found[token] = (
                () if self._target.is_control(token) else self._cut(self._target.piece(token))
            )
        return self._found[token]

    @cached_property
    def _known(self) -> dict[bytes, int]:
        draft = self._draft
        texts = {draft.piece(i): i for i in reversed(range(draft.size)) if not draft.is_control(i)}
        return {piece: i for piece, i in texts.items() if piece}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._known), default=0)

    def _cut(self, text: bytes) -> tuple[int, ...]:
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._known), None)
            if end is None:
                return ()
            found.append(self._known[text[at:end]])
            at = end
        return tuple(found)


def inverse(matches: Ids, size: int) -> Ids:
    """A map of ids turned round, for `size` ids on the other side; -1 where nothing leads."""
    inverse = np.full(size, -1, dtype=np.int64)
    mapped = np.flatnonzero(matches >= 0)
    inverse[matches[mapped]] = mapped
    return inverse


def describe(vocabulary: Vocabulary, token: int) -> str:
    """A token of a vocabulary, for people."""
    if token >= vocabulary.size:
        return "nothing"
    spelling, piece = vocabulary.spelling(token), vocabulary.piece(token)
    marks = ["control"] * vocabulary.is_control(token) + ["end"] * vocabulary.ends_generation(token)
    if piece not in (spelling, b""):
        marks.append(f"adds {piece.decode(errors='replace')!r}")
    quoted = repr(spelling.decode(errors="replace"))
    return f"{quoted} ({', '.join(marks)})" if marks else quoted


# How a tokenizer cuts text: what two of them have in common there, and a name for one of them.

_SAMPLES = (
    "The committee hadn't decided whether it's worth it; they'll meet again on Thursday, I'm told.",
    'Unbelievably, antidisestablishmentarianism re-emerged: "Why not?" she asked -- and left.',
    "def mean(xs: list[float]) -> float:\n    if not xs:\n        raise ValueError('empty')\n"
    "    return sum(xs) / len(xs)  # the average\n",
    "for (int i = 0; i < n; ++i) {\n\t\tbuf[i] ^= key[i % 16] << 3;\n\t}\r\n\r\n#include <stdio.h>\n",
    "In 1969, 600 million people watched; pi is 3.14159265, call +44 20 7946 0958 at 07:45.",
    '{"id": 40213, "tags": ["new", "sale"], "price": 19.90, "nested": {"ok": true, "none": null}}',
    "Der Straßenbahnfahrer grüßte höflich, ça va très bien, ¿qué pasó mañana? Zażółć gęślą jaźń.",
    "Съешь ещё этих мягких булок. Γρήγορη αλεπού πηδάει. מה שלומך היום? كيف حالك اليوم؟",
    "今天天气很好。我们去公园散步吧。吾輩は猫である。名前はまだ無い。 안녕하세요, 반갑습니다.",
    "नमस्ते दुनिया, สวัสดีชาวโลก, გამარჯობა",
    "Ship it 🚀🎉! Family 👨‍👩‍👧, flag 🇫🇷, thumbs 👍🏽 and a heart ❤️.",
    "a  b   c    d\n\n\n\te\t\tf   \n  g     \n\n    h",
    "<div class=\"row\"><a href='https://example.org/a_b?c=1&d=%20'>link</a></div> | **bold** | $x^2$",
)


def compare_cuts(target: Vocabulary, draft: Vocabulary) -> Cuts:
    """How two tokenizers cut some text of many kinds."""

    def pieces(vocabulary: Vocabulary, text: str) -> Iterator[tuple[int, bytes]]:
        """With the distance in bytes from the text's end: some tokenizers put a blank before its begin."""
        end = 0
        for token in reversed(vocabulary.tokenize(text, add_special=False)):
            piece = vocabulary.piece(token)
            yield end, piece
            end += len(piece)

    common = total = 0
    for text in _SAMPLES:
        ours, theirs = set(pieces(target, text)), set(pieces(draft, text))
        common += len(ours & theirs)
        total += max(len(ours), len(theirs))
    return Cuts(common, total)


def tokenizer_id(vocabulary: Vocabulary) -> str:
    """A name for a tokenizer: tokenizers of the same one give the same tokens for the same text.

    It is a hash of the tokenizer's kind, the spelling of all its tokens and how it cuts some text. Files hold
    such names: indexed corpora, and drafts with a reduced vocabulary.
    """
    digest = sha256(vocabulary.kind.encode())
    for token in range(vocabulary.size):
        spelling = vocabulary.spelling(token)
        digest.update(b"%d:" % len(spelling) + spelling)
    for text in _SAMPLES:
        digest.update(repr(list(vocabulary.tokenize(text, add_special=False))).encode())
    return digest.hexdigest()


# Is the map right that a draft with a reduced vocabulary brings along?


def other_tokenizer(target_kind: str) -> str:
    """What is wrong with a draft of another target."""
    return f"its reduced vocabulary was made for another tokenizer than the target's, {target_kind}"


def fault_of(target: Vocabulary, draft: Vocabulary, part: PartOf, ids: Ids) -> str | None:
    """Why the map cannot be used; None if it can."""
    if part.target_tokenizer and part.target_tokenizer != tokenizer_id(target):
        return other_tokenizer(target.kind)
    damage = _damage_of(target, draft, part, ids)
    return None if damage is None else f"the map of its reduced vocabulary is damaged: {damage}"


def _damage_of(target: Vocabulary, draft: Vocabulary, part: PartOf, ids: Ids) -> str | None:
    """What is wrong with the numbers of a map, or with what they refer to."""
    if not part.target_tokenizer:
        return "it does not say for which tokenizer it was made"
    if len(ids) != draft.size:
        return f"it has {len(ids):,} entries for {draft.size:,} tokens"
    unknown = [] if part.other_token is None else [part.other_token]
    if np.flatnonzero(ids == -1).tolist() != unknown:
        return "not exactly the token that represents all others has no counterpart"
    known = ids[ids != -1]
    outside = known[(known < 0) | (known >= target.size)]
    if len(outside):
        return f"it names token {outside[0]:,}, and the target has {target.size:,} tokens"
    if len(np.unique(known)) < len(known):
        return "two tokens have the same counterpart"
    if part.other_token is not None and not draft.is_control(part.other_token):
        return "the token that represents all others is text"
    for token, counterpart in enumerate(ids.tolist()):
        if counterpart >= 0 and _traits(draft, token) != _traits(target, counterpart):
            ours, theirs = describe(draft, token), describe(target, counterpart)
            return f"{token} is {ours}, its counterpart {counterpart} is {theirs}"
    return None


def _traits(vocabulary: Vocabulary, token: int) -> tuple[bytes, bool, bool]:
    return vocabulary.spelling(token), vocabulary.is_control(token), vocabulary.ends_generation(token)
