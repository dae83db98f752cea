"""Do the tokenizers of target and draft line up, and which token of one is which of the other.

Two things decide. The vocabularies must hold the same tokens: compared by what each token is
(its spelling, the bytes it adds, whether it is control, whether it ends the text), never by
the model's name or the vocabulary's size, so that padding and other special tokens do no
harm. And the tokenizers must cut text alike: the same tokens behind another pre-tokenizer or
other merges make a draft that keeps offering the right text in the wrong pieces.

Nothing here touches exactness: the target judges every draft. A pair that lines up badly
would only be slow, which is reason enough to refuse it before anyone waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.errors import VocabularyMismatch

__all__ = ["Alignment", "AlignmentReport", "Cuts", "Difference", "align", "compare", "tokenizer_id"]

Ids = npt.NDArray[np.int64]

_Name = tuple[bytes, bool]
"""Spelling, and whether the token is control."""

MIN_TEXT_RATIO = 0.98
"""Share of the smaller vocabulary's text tokens that the other must hold."""

MIN_CUT_RATIO = 0.9
"""Share of the sample pieces that both tokenizers must cut alike.

Not all of them: tokenizers that differ in how they group digits reach 0.98 here and still
agree on prose. Ones that differ in how they group indentation stay below 0.9, which on
source code is every fifth piece: few drafts of usual length would survive.
"""

_SHOWN_DIFFERENCES = 5

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


@dataclass(frozen=True, slots=True)
class Difference:
    """An id whose token the other vocabulary lacks, and what each side has at that id, for people."""

    token: int
    target: str
    draft: str

    def __str__(self) -> str:
        return f"{self.token} is {self.target} in the target, {self.draft} in the draft"


@dataclass(frozen=True, slots=True)
class Cuts:
    """How two tokenizers cut the sample texts: pieces of the finer cut, and those in both."""

    common_pieces: int
    pieces: int

    @property
    def ratio(self) -> float:
        """Common pieces / pieces, 0-1."""
        return self.common_pieces / max(self.pieces, 1)

    @property
    def alike(self) -> bool:
        """Whether every sample text falls into the same pieces on both sides."""
        return self.common_pieces == self.pieces


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
    cuts: Cuts
    differences: tuple[Difference, ...]
    """the first tokens of the smaller vocabulary without a counterpart, text before control"""

    @property
    def text_ratio(self) -> float:
        """Common text tokens / text tokens of the smaller vocabulary, 0-1."""
        return self.common_text_tokens / max(self.text_tokens, 1)

    @property
    def usable(self) -> bool:
        """Whether one model can draft for the other."""
        return self.text_ratio >= MIN_TEXT_RATIO and self.cuts.ratio >= MIN_CUT_RATIO


@dataclass(frozen=True, slots=True)
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


def align(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Map the tokens of a draft's vocabulary to those of its target, and back.

    Raises VocabularyMismatch when too few text tokens are common (`MIN_TEXT_RATIO`) or the
    tokenizers cut text into other pieces (`MIN_CUT_RATIO`).
    """
    alignment = compare(target, draft)
    report = alignment.report
    if report.usable:
        return alignment
    raise VocabularyMismatch(
        f"draft tokenizer {report.draft_kind} for target tokenizer {report.target_kind}",
        _complaint(report),
        "Take a draft of the target's own model family, or draft by lookup, which needs no second model.",
    )


def compare(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Like `align`, for any pair: whether it is usable stands in the report."""
    target_names, draft_names = _names(target), _names(draft)
    to_target = _match(draft_names, target_names)
    to_target[_unlike(target, draft, draft_names, to_target)] = -1
    to_draft = _inverse(to_target, len(target_names))
    to_target.flags.writeable = to_draft.flags.writeable = False
    target_is_smaller = len(target_names) < len(draft_names)
    smaller = (target_names, to_draft) if target_is_smaller else (draft_names, to_target)
    report = AlignmentReport(
        target_kind=target.kind,
        draft_kind=draft.kind,
        target_tokens=len(target_names),
        draft_tokens=len(draft_names),
        common_tokens=int((to_target >= 0).sum()),
        same_id_tokens=int((to_target == np.arange(len(to_target))).sum()),
        text_tokens=min(_count_text(target_names), _count_text(draft_names)),
        common_text_tokens=_count_text([draft_names[i] for i in np.flatnonzero(to_target >= 0)]),
        cuts=_compare_cuts(target, draft),
        differences=_differences(target, draft, *smaller),
    )
    identical = report.same_id_tokens == report.target_tokens == report.draft_tokens
    return Alignment(to_target, to_draft, identical, report)


def _names(vocabulary: Vocabulary) -> list[_Name]:
    ids = range(vocabulary.size)
    return list(zip(map(vocabulary.spelling, ids), map(vocabulary.is_control, ids), strict=True))


def _count_text(names: list[_Name]) -> int:
    return sum(not control for _, control in names)


def _match(source: list[_Name], goal: list[_Name]) -> Ids:
    """The id in `goal` of each name in `source`, or -1.

    The same id wins. Elsewhere a name counts only if it occurs once on both sides: among
    doubles (padding, placeholders) there is no telling which is meant.
    """
    matches = np.full(len(source), -1, dtype=np.int64)
    same = [i for i, (ours, theirs) in enumerate(zip(source, goal, strict=False)) if ours == theirs]
    matches[same] = same
    rest = np.flatnonzero(matches < 0).tolist()
    if not rest:
        return matches
    source_counts, goal_counts = Counter(source), Counter(goal)
    goal_ids = {name: i for i, name in enumerate(goal)}
    for i in rest:
        if source_counts[source[i]] == 1 and goal_counts[source[i]] == 1:
            matches[i] = goal_ids[source[i]]
    return matches


def _unlike(target: Vocabulary, draft: Vocabulary, draft_names: list[_Name], to_target: Ids) -> list[int]:
    """Draft ids whose match has the same name but adds other bytes, or ends where it does not.

    Reading the bytes of every token would cost more than all the rest. Within one kind of
    tokenizer the spelling fixes the bytes of ordinary text; what two files can type
    differently are bytes (<0x0A>), tags and control tokens. All of those are looked at, and
    every 16th of the others; one odd finding among these, and everything is.
    """

    def differ(i: int) -> bool:
        j = int(to_target[i])
        return target.piece(j) != draft.piece(i) or target.ends_generation(j) != draft.ends_generation(i)

    mapped = np.flatnonzero(to_target >= 0).tolist()
    if target.kind == draft.kind:
        special = [i for i in mapped if draft_names[i][1] or draft_names[i][0].startswith(b"<")]
        if not any(map(differ, mapped[::16])):
            return list(filter(differ, special))
    return list(filter(differ, mapped))


def _inverse(matches: Ids, size: int) -> Ids:
    inverse = np.full(size, -1, dtype=np.int64)
    mapped = np.flatnonzero(matches >= 0)
    inverse[matches[mapped]] = mapped
    return inverse


def _differences(
    target: Vocabulary, draft: Vocabulary, names: list[_Name], matches: Ids
) -> tuple[Difference, ...]:
    """The first of these tokens that have no match, text before control."""
    lacking = sorted(np.flatnonzero(matches < 0).tolist(), key=lambda i: names[i][1])
    shown = lacking[:_SHOWN_DIFFERENCES]
    return tuple(Difference(i, _describe(target, i), _describe(draft, i)) for i in shown)


def _describe(vocabulary: Vocabulary, token: int) -> str:
    if token >= vocabulary.size:
        return "nothing"
    spelling, piece = vocabulary.spelling(token), vocabulary.piece(token)
    marks = ["control"] * vocabulary.is_control(token) + ["end"] * vocabulary.ends_generation(token)
    if piece not in (spelling, b""):
        marks.append(f"adds {piece.decode(errors='replace')!r}")
    quoted = repr(spelling.decode(errors="replace"))
    return f"{quoted} ({', '.join(marks)})" if marks else quoted


def _compare_cuts(target: Vocabulary, draft: Vocabulary) -> Cuts:
    common = total = 0
    for text in _SAMPLES:
        ours, theirs = set(_spans(target, text)), set(_spans(draft, text))
        common += len(ours & theirs)
        total += max(len(ours), len(theirs))
    return Cuts(common, total)


def _spans(vocabulary: Vocabulary, text: str) -> Iterator[tuple[int, bytes]]:
    """Each piece of a text with its distance in bytes from the text's end.

    From the end, because some tokenizers put a blank before the first word.
    """
    end = 0
    for token in reversed(vocabulary.tokenize(text, add_special=False)):
        piece = vocabulary.piece(token)
        yield end, piece
        end += len(piece)


def _complaint(report: AlignmentReport) -> str:
    agree = f"they have {report.common_text_tokens:,} of {report.text_tokens:,} text tokens in common"
    if report.text_ratio >= MIN_TEXT_RATIO:
        cuts = report.cuts
        return (
            f"{agree}, but cut only {cuts.common_pieces} of {cuts.pieces} pieces of sample text alike "
            f"({cuts.ratio:.0%}; {MIN_CUT_RATIO:.0%} are needed)"
        )
    shown = "; ".join(str(difference) for difference in report.differences)
    return f"{agree} ({report.text_ratio:.1%}; {MIN_TEXT_RATIO:.0%} are needed). Not in common: {shown}"


def tokenizer_id(vocabulary: Vocabulary) -> str:
    """A name for a tokenizer: tokenizers of the same one give the same tokens for the same text.

    It is a hash of the tokenizer's kind, the spelling of all its tokens and how it cuts some text.
    """
    digest = sha256(vocabulary.kind.encode())
    for token in range(vocabulary.size):
        spelling = vocabulary.spelling(token)
        digest.update(b"%d:" % len(spelling) + spelling)
    for text in _SAMPLES:
        digest.update(repr(list(vocabulary.tokenize(text, add_special=False))).encode())
    return digest.hexdigest()
