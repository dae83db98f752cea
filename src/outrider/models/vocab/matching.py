"""Do the tokenizers of target and draft line up, and which token of one is which of the other.

Two things decide. The vocabularies must hold the same tokens: compared by what each token is
(its spelling, the bytes it adds, whether it is control, whether it ends the text), never by
the model's name or the vocabulary's size, so that padding and other special tokens do no
harm. And the tokenizers must cut text alike: the same tokens after another pre-tokenizer or
other merges make a draft that keeps offering the right text in the wrong pieces.

Nothing here touches exactness: the target judges every draft. A pair that lines up badly
would only be slow, which is reason enough to refuse it before anyone waits.

A draft with a reduced vocabulary cuts text in its own way, and need not cut it alike: it is
aligned by the map in its file (`reduced`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.core.contracts import PartOf, Vocabulary
from outrider.core.errors import VocabularyMismatch
from outrider.models.vocab.alignment import (
    MIN_CUT_RATIO,
    MIN_TEXT_RATIO,
    Alignment,
    AlignmentReport,
    Ids,
    Pieces,
    compare_cuts,
    describe,
    fault_of,
    inverse,
    other_tokenizer,
)

_Name = tuple[bytes, bool]
"""Spelling, and whether the token is control."""

SHOWN_DIFFERENCES = 2


def align(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Map the tokens of a draft's vocabulary to those of its target, and back.

    Raises VocabularyMismatch when too few text tokens are common (`MIN_TEXT_RATIO`) or the
    tokenizers cut text into other pieces (`MIN_CUT_RATIO`), or when the map of a reduced
    vocabulary was made for another target or is damaged.
    """
    alignment = compare(target, draft)
    report = alignment.report
    if report.usable:
        return alignment
    if draft.part_of is not None and report.map_fault is not None:
        raise VocabularyMismatch(f"draft {draft.part_of.name}", report.map_fault, _MAKE_ONE)
    kinds, common, total = (target.kind, draft.kind), report.common_text_tokens, report.text_tokens
    if report.text_ratio < MIN_TEXT_RATIO:
        raise too_few_in_common(*kinds, common, total, report.differences)
    cuts = report.cuts
    why = (
        f"they have {common:,} of {total:,} text tokens in common, but cut only {cuts.common_pieces} of "
        f"{cuts.pieces} pieces of sample text alike ({cuts.ratio:.0%}; {MIN_CUT_RATIO:.0%} are needed)"
    )
    raise VocabularyMismatch(_for_target(*kinds), why, _OTHER_DRAFT)


_MAKE_ONE = "Use a draft that was made for this target (`outrider distill` makes one), or fetch it again."
_OTHER_DRAFT = "Use a draft of the target's own family, or none: lookup needs no draft."


def _for_target(target_kind: str, draft_kind: str) -> str:
    return f"draft tokenizer {draft_kind} for target tokenizer {target_kind}"


def too_few_in_common(
    target_kind: str, draft_kind: str, num_common: int, num_texts: int, examples: Sequence[str]
) -> VocabularyMismatch:
    """The error for a pair that has so many of `num_texts` text tokens in common; `examples` are others."""
    why = (
        f"they have {num_common:,} of {num_texts:,} text tokens in common "
        f"({num_common / max(num_texts, 1):.1%}; {MIN_TEXT_RATIO:.0%} are needed)"
    )
    shown = f" For instance, {'; '.join(examples)}." if examples else ""
    return VocabularyMismatch(_for_target(target_kind, draft_kind), why, _OTHER_DRAFT + shown)


def made_for_another(draft: str, target_kind: str) -> VocabularyMismatch:
    """The error for a draft whose reduced vocabulary is not of the target's tokens."""
    return VocabularyMismatch(f"draft {draft}", other_tokenizer(target_kind), _MAKE_ONE)


def compare(target: Vocabulary, draft: Vocabulary) -> Alignment:
    """Like `align`, for any pair: whether it is usable is in the report."""
    part = draft.part_of
    if part is not None and part != target.part_of:
        return _compare_by_map(target, draft, part)
    target_names, draft_names = _names(target), _names(draft)
    to_target = _match(draft_names, target_names)
    to_target[_unlike(target, draft, draft_names, to_target)] = -1
    to_draft = inverse(to_target, target.size)
    names, found = (target_names, to_draft) if target.size < draft.size else (draft_names, to_target)
    lacking = sorted(np.flatnonzero(found < 0).tolist(), key=lambda i: names[i][1])
    report = _report(
        target,
        draft,
        draft_names,
        to_target,
        text_tokens=min(_count_text(target_names), _count_text(draft_names)),
        cuts=compare_cuts(target, draft),
        differences=tuple(
            f"token {i} is {describe(target, i)} in the target, {describe(draft, i)} in the draft"
            for i in lacking[:SHOWN_DIFFERENCES]
        ),
    )
    identical = report.same_id_tokens == report.target_tokens == report.draft_tokens
    return Alignment(_frozen(to_target), _frozen(to_draft), identical, report)


def _compare_by_map(target: Vocabulary, draft: Vocabulary, part: PartOf) -> Alignment:
    """Line up a draft by its own map of the target's tokens, `part`. Whether the map can be used is in the
    report; if not, nothing is mapped."""
    ids = np.asarray(part.target_tokens, dtype=np.int64)
    fault = fault_of(target, draft, part, ids)
    if fault is not None:
        ids = np.full(draft.size, -1, dtype=np.int64)
    report = _report(target, draft, _names(draft), ids, is_reduced=True, map_fault=fault)
    other = part.other_token if fault is None else None
    to_draft = _frozen(inverse(ids, target.size))
    pieces = Pieces(target, draft) if part.reads_pieces and other is not None else None
    return Alignment(_frozen(ids), to_draft, False, report, other, max(part.window, 0), pieces)


def _report(
    target: Vocabulary, draft: Vocabulary, draft_names: list[_Name], to_target: Ids, **more: Any
) -> AlignmentReport:
    """The counts of a map, and `more`; text is the draft's where nothing else is given."""
    mapped = np.flatnonzero(to_target >= 0)
    return AlignmentReport(
        target_kind=target.kind,
        draft_kind=draft.kind,
        target_tokens=target.size,
        draft_tokens=draft.size,
        common_tokens=len(mapped),
        same_id_tokens=int((to_target[mapped] == mapped).sum()),
        common_text_tokens=_count_text([draft_names[i] for i in mapped]),
        **({"text_tokens": _count_text(draft_names)} | more),
    )


def _frozen(ids: Ids) -> Ids:
    ids.flags.writeable = False
    return ids


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
    if len(same) < len(source):
        source_counts, goal_counts = Counter(source), Counter(goal)
        goal_ids = {name: i for i, name in enumerate(goal)}
        for i in np.flatnonzero(matches < 0).tolist():
            if source_counts[source[i]] == 1 and goal_counts[source[i]] == 1:
                matches[i] = goal_ids[source[i]]
    return matches


def _unlike(target: Vocabulary, draft: Vocabulary, draft_names: list[_Name], to_target: Ids) -> list[int]:
    """Draft ids whose match has the same name but adds other bytes, or ends where it does not.

    Reading the bytes of every token would cost more than everything else. Within one kind of
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
