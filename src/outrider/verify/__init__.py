"""Which drafted tokens the target keeps: rules over distributions, and one request's use of them."""

from outrider.verify.verifier import Verifier

__all__ = ["Verifier"]
