"""From whom to draft, and how far: the one place that decides.

A policy may look at anything that was known before a token was drawn. It must not drop or cut a
*sampled* draft for what its tokens turned out to be: the tokens that remain would no longer be
distributed as the draft claims, and the output would be biased. Drafts that are certain of their
tokens can be cut and dropped freely.
"""

from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy

__all__ = ["AutoPolicy", "FixedPolicy"]
