"""KV that leaves a model: kept in memory and on disk, and restored where that is faster than reading."""

from outrider.engine.tiers.disk import Disk, SavedText
from outrider.engine.tiers.folder import Folder, Unusable
from outrider.engine.tiers.store import KvTiers, Reading, TierCounts
from outrider.engine.tiers.texts import RememberedTexts

__all__ = ["Disk", "Folder", "KvTiers", "Reading", "RememberedTexts", "SavedText", "TierCounts", "Unusable"]
