"""KV that leaves a model: kept in memory and on disk, and restored where that is faster than reading."""
