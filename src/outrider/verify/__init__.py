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
    verify_lenient,
    verify_stable,
    verify_tokens,
)
from outrider.verify.verifier import VerificationRule, Verifier

__all__ = [
    "VerificationRule",
    "Verifier",
    "accept_probability",
    "block_accept",
    "block_ratios",
    "excess",
    "pick",
    "residual",
    "scores",
    "verify_block",
    "verify_lenient",
    "verify_stable",
    "verify_tokens",
]
