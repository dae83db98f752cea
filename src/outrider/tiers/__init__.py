"""KV that leaves a model: kept in memory and on disk, and restored where that is faster than reading."""

from outrider.tiers.counts import TierCounts
from outrider.tiers.disk import Disk, SavedText
from outrider.tiers.folder import Folder, Unusable
from outrider.tiers.store import KvTiers
from outrider.tiers.texts import RememberedTexts

__all__ = ["Disk", "Folder", "KvTiers", "RememberedTexts", "SavedText", "TierCounts", "Unusable"]
