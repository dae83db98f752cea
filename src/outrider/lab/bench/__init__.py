"""The sweep: which pairing and which settings win on this machine, for these prompts."""
