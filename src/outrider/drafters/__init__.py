"""Sources of drafts, one module each (and what only that one needs)."""
