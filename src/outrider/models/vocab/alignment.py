"""Do the tokenizers of target and draft line up, and which token of one is which of the other.

The vocabularies must hold the same tokens: compared by what each token is (its spelling, the bytes it adds,
whether it is control, whether it ends the text), never by the model's name or the vocabulary's size. And the
tokenizers must cut text alike: after another pre-tokenizer or other merges a draft keeps offering the right
text in the wrong pieces. A draft with a reduced vocabulary cuts text in its own way: it is aligned by the map
in its file (`subset`). A pair that lines up badly would only be slow: the target verifies every draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import PartOf, Vocabulary
from outrider.core.data import Row
from outrider.core.errors import VocabularyMismatch

Ids = npt.NDArray[np.int64]

_Name = tuple[bytes, bool]
"""Spelling, and whether the token is control."""

MIN_TEXT_RATIO = 0.98
"""Share of the smaller vocabulary's text tokens that the other must hold."""
MIN_CUT_RATIO = 0.9
"""Share of the sample pieces that both tokenizers must cut alike. Those that differ in how they group digits
reach 0.98 and agree on prose; those that group indentation otherwise stay below 0.9, which on source code is
every fifth piece: few drafts of usual length would be accepted whole."""


@dataclass(frozen=True, slots=True)
class AlignmentReport:
    """How far two vocabularies agree. Counts are tokens unless the name says otherwise."""

    target_kind: str
    draft_kind: str
    target_tokens: int
    common_tokens: int
    """tokens that have a counterpart, control tokens included"""
    text_tokens: int
    """text tokens of the side that has fewer of them"""
    common_text_tokens: int
    cut_ratio: float = 1.0
    """share of the pieces of sample text that are the same on both sides"""
    is_reduced: bool = False
    """the draft knows a part of some target's tokens, by a map of its own"""
    map_fault: str = ""
    """why that map cannot be used for this target"""

    @property
    def text_ratio(self) -> float:
        return self.common_text_tokens / max(self.text_tokens, 1)

    @property
    def fault(self) -> str:
        """Why the draft's tokenizer does not do for the target; empty where it does."""
        if self.map_fault:
            return self.map_fault
        if self.text_ratio < MIN_TEXT_RATIO:
            counts = self.common_text_tokens, self.text_tokens
            return too_few_in_common(self.target_kind, self.draft_kind, *counts)
        if self.cut_ratio >= MIN_CUT_RATIO:
            return ""
        kinds = f"the tokenizers do not line up ({self.target_kind}; {self.draft_kind})"
        return f"{kinds}: {self.cut_ratio:.0%} of sample text is cut alike ({MIN_CUT_RATIO:.0%} are needed)"


@dataclass(frozen=True)
class Alignment:
    """Which token of the draft is which of the target. A mapped token is the same on both sides: spelling,
    bytes, control, end. The map is one to one, so probabilities carry over without being added up; -1 marks a
    token that the other side lacks or that could be several of its tokens."""

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
        return np.flatnonzero(self.to_draft >= 0)

    @cached_property
    def foreign(self) -> Ids:
        return np.flatnonzero(self.to_target < 0)

    @cached_property
    def _common_in_draft(self) -> Ids | slice:
        """The draft's ids of `common`; a slice, which copies nothing, where they are consecutive."""
        ids = self.to_draft[self.common]
        first = int(ids[0]) if len(ids) else 0
        is_run = np.array_equal(ids, np.arange(first, first + len(ids)))
        return slice(first, first + len(ids)) if is_run else ids

    @cached_property
    def _read_as(self) -> Ids:
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
        what an earlier call returned, to be written over. Restricting what can be drawn, instead of giving up
        on a draw that the target lacks, keeps what is offered distributed as it claims."""
        if self.identical:
            return row
        if into is None:
            into = np.full(len(self.to_draft), -np.inf, dtype=np.float32)
        into[self.common] = self.common_part(row)
        return into


class Pieces:
    """A target's tokens put together from a draft's: from the left always the longest that fits."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        texts = {draft.piece(i): i for i in reversed(range(draft.size)) if not draft.is_control(i)}
        self._target, self._known = target, {piece: i for piece, i in texts.items() if piece}
        self._longest = max(map(len, self._known), default=0)
        self.of = cache(self._of)
        """the draft's tokens with the bytes of one of the target's; empty where there are none"""

    def _of(self, token: int) -> tuple[int, ...]:
        text = b"" if self._target.is_control(token) else self._target.piece(token)
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._known), None)
            if end is None:
                return ()
            found.append(self._known[text[at:end]])
            at = end
        return tuple(found)


def _inverse(matches: Ids, size: int) -> Ids:
    inverse = np.full(size, -1, dtype=np.int64)
    mapped = np.flatnonzero(matches >= 0)
    inverse[matches[mapped]] = mapped
    return inverse


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


def _compare_cuts(target: Vocabulary, draft: Vocabulary) -> float:
    """The share of the finer cut's pieces that are in both."""

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
    return common / total if total else 1.0


def tokenizer_id(vocabulary: Vocabulary) -> str:
    """A name for a tokenizer: a hash of its kind, the spelling of all its tokens and how it cuts some text.
    Files hold such names: indexed corpora, and drafts with a reduced vocabulary."""
    digest = sha256(vocabulary.kind.encode())
    for token in range(vocabulary.size):
        spelling = vocabulary.spelling(token)
        digest.update(b"%d:" % len(spelling) + spelling)
    for text in _SAMPLES:
        digest.update(repr(list(vocabulary.tokenize(text, add_special=False))).encode())
    return digest.hexdigest()


# Is the map right that a draft with a reduced vocabulary brings along?


def _fault_of(target: Vocabulary, draft: Vocabulary, part: PartOf, ids: Ids) -> str:
    if part.target_tokenizer and part.target_tokenizer != tokenizer_id(target):
        why = "its reduced vocabulary was made for another tokenizer than the target's"
        return f"{why}, {target.kind}"
    known, unknown = ids[ids != -1], [] if part.other_token is None else [part.other_token]
    is_map = len(ids) == draft.size and np.flatnonzero(ids == -1).tolist() == unknown
    is_map = is_map and known.min(initial=0) >= 0 and known.max(initial=0) < target.size
    is_sound = (
        is_map
        and bool(part.target_tokenizer)
        and len(np.unique(known)) == len(known)
        and all(map(draft.is_control, unknown))
        and all(_traits(draft, i) == _traits(target, j) for i, j in enumerate(ids.tolist()) if j >= 0)
    )
    return "" if is_sound else "the map of its reduced vocabulary is damaged"


def _traits(vocabulary: Vocabulary, token: int) -> tuple[bytes, bool, bool]:
    return vocabulary.spelling(token), vocabulary.is_control(token), vocabulary.ends_generation(token)


# Lining up


def align(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Map the tokens of a draft's vocabulary to those of its target, and back. Raises VocabularyMismatch
    where `compare` finds a fault."""
    alignment = compare(target, draft)
    if fault := alignment.report.fault:
        what = f"draft {draft.part_of.name}" if draft.part_of else "draft"
        raise VocabularyMismatch(what, fault, _MAKE_ONE if alignment.report.map_fault else OTHER_DRAFT)
    return alignment


_MAKE_ONE = "Use a draft that was made for this target (`outrider distill` makes one), or fetch it again."
OTHER_DRAFT = "Use a draft of the target's own family, or none: lookup needs no draft."


def too_few_in_common(target_kind: str, draft_kind: str, num_common: int, num_texts: int) -> str:
    """Why a pair does not do that has so many of `num_texts` text tokens in common."""
    share = f"{num_common / max(num_texts, 1):.1%}; {MIN_TEXT_RATIO:.0%} are needed"
    agree = f"{num_common:,} of {num_texts:,} text tokens agree ({share})"
    return f"the tokenizers do not line up ({target_kind}; {draft_kind}): {agree}"


def compare(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Like `align`, for any pair: whether it is usable is in the report."""
    part = draft.part_of
    if part is not None and part != target.part_of:
        return _compare_by_map(target, draft, part)
    target_names, draft_names = _names(target), _names(draft)
    ids = _match(draft_names, target_names)
    ids[_unlike(target, draft, draft_names, ids)] = -1
    text_tokens = min(_count_text(target_names), _count_text(draft_names))
    report = _report(target, draft, draft_names, ids, text_tokens, cut_ratio=_compare_cuts(target, draft))
    identical = np.array_equal(ids, np.arange(target.size))
    return Alignment(_frozen(ids), _frozen(_inverse(ids, target.size)), identical, report)


def _compare_by_map(target: Vocabulary, draft: Vocabulary, part: PartOf) -> Alignment:
    ids, names = np.asarray(part.target_tokens, dtype=np.int64), _names(draft)
    if fault := _fault_of(target, draft, part, ids):
        ids = np.full(draft.size, -1, dtype=np.int64)
    report = _report(target, draft, names, ids, _count_text(names), is_reduced=True, map_fault=fault)
    other = None if fault else part.other_token
    pieces = Pieces(target, draft) if part.reads_pieces and other is not None else None
    to_draft = _frozen(_inverse(ids, target.size))
    return Alignment(_frozen(ids), to_draft, False, report, other, max(part.window, 0), pieces)


def _report(
    target: Vocabulary, draft: Vocabulary, names: list[_Name], ids: Ids, text_tokens: int, **more: Any
) -> AlignmentReport:
    common = [names[i] for i in np.flatnonzero(ids >= 0)]
    counts = target.size, len(common), text_tokens, _count_text(common)
    return AlignmentReport(target.kind, draft.kind, *counts, **more)


def _frozen(ids: Ids) -> Ids:
    ids.flags.writeable = False
    return ids


def _names(vocabulary: Vocabulary) -> list[_Name]:
    ids = range(vocabulary.size)
    return list(zip(map(vocabulary.spelling, ids), map(vocabulary.is_control, ids), strict=True))


def _count_text(names: list[_Name]) -> int:
    return sum(not control for _, control in names)


def _match(source: list[_Name], goal: list[_Name]) -> Ids:
    """The id in `goal` of each name in `source`, or -1. The same id wins. Elsewhere a name counts only if it
    occurs once on both sides: among doubles (padding, placeholders) there is no telling which is meant."""
    matches = np.full(len(source), -1, dtype=np.int64)
    same = [i for i, (ours, theirs) in enumerate(zip(source, goal, strict=False)) if ours == theirs]
    matches[same] = same
    if len(same) < len(source):
        source_counts, goal_counts = Counter(source), Counter(goal)
        goal_ids = {name: i for i, name in enumerate(goal)}
        for i in np.flatnonzero(matches < 0).tolist():
            if source_counts[source[i]] == 1 and goal_counts[source[i]] == 1:
                matches[i] = goal_ids[source[i]]
    return matches


def _unlike(target: Vocabulary, draft: Vocabulary, draft_names: list[_Name], to_target: Ids) -> list[int]:
    """Draft ids whose match has the same name but adds other bytes, or ends where it does not.

    Reading the bytes of every token would cost more than everything else. Within one kind of tokenizer the
    spelling fixes the bytes of ordinary text; what two files can type differently are bytes (<0x0A>), tags
    and control tokens. All of those are looked at, and every 16th of the others; one odd finding among these,
    and everything is."""

    def differ(i: int) -> bool:
        j = int(to_target[i])
        return target.piece(j) != draft.piece(i) or target.ends_generation(j) != draft.ends_generation(i)

    mapped = np.flatnonzero(to_target >= 0).tolist()
    if target.kind == draft.kind:
        special = [i for i in mapped if draft_names[i][1] or draft_names[i][0].startswith(b"<")]
        if not any(map(differ, mapped[::16])):
            return list(filter(differ, special))
    return list(filter(differ, mapped))
