"""The verdict before anyone waits: does this draft, or lookup alone, pay with this target on this machine."""
