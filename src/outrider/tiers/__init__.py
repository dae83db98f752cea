"""KV that leaves a model: kept in memory and on disk, and restored where that is faster than reading."""

from outrider.tiers.disk import Disk, SavedText
from outrider.tiers.folder import Folder, Unusable
from outrider.tiers.store import KvTiers, TierCounts

__all__ = ["Disk", "Folder", "KvTiers", "SavedText", "TierCounts", "Unusable"]
