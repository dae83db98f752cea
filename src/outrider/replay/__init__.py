"""One recorded answer predicts every setting: policies run over recordings, against any cost curve."""

from outrider.replay.bound import hindsight_bound
from outrider.replay.drafter import ForcedDrafter, RecordedDrafter
from outrider.replay.recorder import record_offers
from outrider.replay.recording import Offers, Recording, read_recordings, write_recordings
from outrider.replay.run import Replayed, replay

__all__ = [
    "ForcedDrafter",
    "Offers",
    "RecordedDrafter",
    "Recording",
    "Replayed",
    "hindsight_bound",
    "read_recordings",
    "record_offers",
    "replay",
    "write_recordings",
]
