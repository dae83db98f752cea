"""Which drafted tokens the target keeps: rules over distributions, and one request's use of them."""

from outrider.verify.rules import (
    accept_probability,
    block_accept,
    block_ratios,
    excess,
    pick,
    residual,
    scores,
    verify_block,
    verify_choices,
    verify_tokens,
)
from outrider.verify.verifier import Verifier

__all__ = [
    "Verifier",
    "accept_probability",
    "block_accept",
    "block_ratios",
    "excess",
    "pick",
    "residual",
    "scores",
    "verify_block",
    "verify_choices",
    "verify_tokens",
]
