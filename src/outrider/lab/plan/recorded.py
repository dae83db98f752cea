"""Tables of acceptance from recorded answers, each replayed once at the longest draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.core.errors import InputError
from outrider.costs import CallCosts, CallPoint
from outrider.lab.plan.acceptance import LONGEST, Acceptance
from outrider.lab.recording import Recording
from outrider.lab.replay import replay
from outrider.lab.settings import Setting

_LOOKUP = Setting("lookup", LONGEST, 0.5)
"""What lookup finds is often wrong: a draft ends before a token that is less likely to be right than this."""
_MODEL = Setting("model", LONGEST, 0.0)
_UNIT = CallCosts([CallPoint(1, 1.0), CallPoint(64, 1.0)])
"""A replay needs a curve; of fixed lengths its calls are the same at any."""


def tables_of(recordings: Sequence[Recording], offers: Mapping[str, str]) -> dict[str, Acceptance]:
    """The tables of lookup, and of drafts by their names here; `offers` has those in the recordings.

    Raises InputError where a recording is empty or lacks one of them.
    """
    for recording in recordings:
        if not recording.tokens:
            raise InputError(f"recording {recording.id}", "its answer is empty", "Leave it out.")
        if lacking := [name for name in offers.values() if name not in recording.offers]:
            has = ", ".join(recording.offers) or "none"
            reason = f"it has no offers of {lacking[0]} (but of {has})"
            raise InputError(f"recording {recording.id}", reason, "Record it again with this draft.")
    return {"lookup": _table(recordings), **{name: _table(recordings, own) for name, own in offers.items()}}


def _table(recordings: Sequence[Recording], draft: str | None = None) -> Acceptance:
    """Of a draft model, which has a draft of any length at every step, or of lookup."""
    setting, curves, free = (_MODEL, {draft: _UNIT}, ()) if draft else (_LOOKUP, {}, None)
    records = [
        record
        for recording in recordings
        for record in replay(recording, setting.policy(_UNIT, curves), _UNIT, curves, free=free).records
    ]
    drafts = [record for record in records if len(record.draft)]
    places = range(LONGEST)
    accepted = tuple(_share(record.num_accepted > i for record in drafts) for i in places)
    if draft:
        return Acceptance(accepted)
    drafted = tuple(_share(len(record.draft) > i for record in drafts) for i in places)
    return Acceptance(accepted, drafted, len(drafts) / max(len(records), 1))


def _share(those: Iterable[bool]) -> float:
    found = list(those)
    return sum(found) / max(len(found), 1)
