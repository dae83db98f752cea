"""One recorded answer predicts every setting: policies run over recordings, against any cost curve."""

from outrider.lab.replay.bound import hindsight_bound
from outrider.lab.replay.run import ForcedDrafter, RecordedDrafter, Replayed, replay

__all__ = ["ForcedDrafter", "RecordedDrafter", "Replayed", "hindsight_bound", "replay"]
