"""One recorded answer predicts every setting: policies run over recordings, against any cost curve."""

from outrider.lab.replay.bound import hindsight_bound
from outrider.lab.replay.recording import Offers, Recording, TargetStates, read_recordings, record_offers
from outrider.lab.replay.run import ForcedDrafter, RecordedDrafter, Replayed, replay

__all__ = [
    "ForcedDrafter",
    "Offers",
    "RecordedDrafter",
    "Recording",
    "Replayed",
    "TargetStates",
    "hindsight_bound",
    "read_recordings",
    "record_offers",
    "replay",
]
