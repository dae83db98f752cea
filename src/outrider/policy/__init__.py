"""From whom to draft, and how far: the one place that decides.

A sampled token is never removed from a draft: the tokens that remain would no longer follow the
distributions that the draft claims, and the output would be biased. Whether another token is sampled may
depend on those before it, never on what it is itself. Point-mass tokens can be cut and dropped freely.
"""
