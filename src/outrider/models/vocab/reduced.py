"""Is the map right that a draft with a reduced vocabulary brings along?

The map is verified before it is used: a wrong one would make a draft that offers other tokens than it
means, which is only slow, and would look like a bad draft for ever.
"""

from __future__ import annotations

import numpy as np

from outrider.core.contracts import PartOf, Vocabulary
from outrider.models.vocab.alignment import Ids, describe
from outrider.models.vocab.cutting import tokenizer_id


def fault_of(target: Vocabulary, draft: Vocabulary, part: PartOf, ids: Ids) -> str | None:
    """Why the map cannot be used; None if it can."""
    if part.target_tokenizer and part.target_tokenizer != tokenizer_id(target):
        return f"its reduced vocabulary was made for another tokenizer than the target's, {target.kind}"
    damage = _broken_map(target, draft, part, ids) or _unlike(target, draft, ids)
    return None if damage is None else f"the map of its reduced vocabulary is damaged: {damage}"


def _broken_map(target: Vocabulary, draft: Vocabulary, part: PartOf, ids: Ids) -> str | None:
    """What is wrong with the numbers of a map, whatever they refer to."""
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
    return None


def _unlike(target: Vocabulary, draft: Vocabulary, ids: Ids) -> str | None:
    """The first token whose counterpart is not the same; None if there is none."""
    for token, counterpart in enumerate(ids.tolist()):
        if counterpart >= 0 and _traits(draft, token) != _traits(target, counterpart):
            ours, theirs = describe(draft, token), describe(target, counterpart)
            return f"{token} is {ours}, its counterpart {counterpart} is {theirs}"
    return None


def _traits(vocabulary: Vocabulary, token: int) -> tuple[bytes, bool, bool]:
    return vocabulary.spelling(token), vocabulary.is_control(token), vocabulary.ends_generation(token)
