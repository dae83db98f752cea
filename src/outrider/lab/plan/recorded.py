"""Recorded answers, replayed once at every draft length: the calls that each text takes, whatever they cost.

With a length that is fixed a replay's calls depend on the text alone, so one replay serves every curve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.core.errors import InputError
from outrider.costs import CallCosts, CallPoint
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.plan.acceptance import Acceptance, Drafting, Steps
from outrider.lab.recording import Recording
from outrider.lab.replay import Replayed, replay
from outrider.lab.settings import Drafters, Setting

LOOKUP_P_MIN = 0.5
"""A looked-up draft ends before a token that is less likely to be right than this, as estimated."""

_UNIT = CallCosts([CallPoint(1, 1.0), CallPoint(64, 1.0)])
"""A replay needs a curve; of fixed lengths its calls are the same at any."""
_KINDS: dict[Drafting, Drafters] = {"lookup": "lookup", "draft": "model", "both": "both"}


@dataclass(slots=True)
class Recorded:
    """Recorded answers of a target, with the offers of some of the drafts by their names here.

    `names` are the recordings' own names of the drafts. Raises InputError where a recording is empty or
    lacks one of them.
    """

    recordings: Sequence[Recording]
    names: dict[str, str]
    report: Callable[[str, float], None] = lambda _what, _part: None
    _known: dict[tuple[Drafting, str, int], list[Steps]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for recording in self.recordings:
            if not recording.tokens:
                raise InputError(f"recording {recording.id}", "its answer is empty", "Leave it out.")
            if lacking := [name for name in self.names.values() if name not in recording.offers]:
                has = ", ".join(recording.offers) or "none"
                reason = f"it has no offers of {lacking[0]} (but of {has})"
                raise InputError(f"recording {recording.id}", reason, "Record it again with this draft.")

    def counted(self, drafting: Drafting, draft: str, length: int) -> Sequence[Steps] | None:
        """The steps of each text; None for a draft whose offers were not recorded."""
        if draft and draft not in self.names:
            return None
        key = drafting, draft, length
        if key not in self._known:
            self.report(f"replaying {drafting} {length}", len(self._known) / 48)
            self._known[key] = [_steps(played) for played in self._replays(drafting, draft, length)]
        return self._known[key]

    def _replays(self, drafting: Drafting, draft: str, length: int) -> list[Replayed]:
        # What lookup finds is often wrong: only where it is likely to be right, as in other commands.
        setting = Setting(_KINDS[drafting], length, 0.0 if drafting == "draft" else LOOKUP_P_MIN)
        curves = {self.names[draft]: _UNIT} if setting.uses_model else {}
        return [
            replay(
                recording,
                setting.policy(_UNIT, curves),
                _UNIT,
                curves,
                free=[SuffixDrafter()] if setting.uses_lookup else [],
            )
            for recording in self.recordings
        ]

    def acceptance(self, drafting: Drafting, draft: str, length: int) -> Acceptance:
        """The table of one kind of drafter over all texts, from drafts of at most `length` tokens."""
        records = [record for played in self._replays(drafting, draft, length) for record in played.records]
        drafts = [record for record in records if len(record.draft)]
        return Acceptance(
            accepted=tuple(_share(record.num_accepted > i for record in drafts) for i in range(length)),
            drafted=tuple(_share(len(record.draft) > i for record in drafts) for i in range(length)),
            offered=len(drafts) / max(len(records), 1),
        )


def _share(those: Iterable[bool]) -> float:
    found = list(those)
    return sum(found) / max(len(found), 1)


def _steps(played: Replayed) -> Steps:
    target = Counter(record.num_evaluated for record in played.records)
    draft = Counter(size for record in played.records for size in record.work.call_tokens)
    return Steps(float(sum(len(record.tokens) for record in played.records)), target, draft)
