"""From logits to the distribution that plain decoding would sample from."""

from outrider.core.data import point_mass
from outrider.sampling.chain import draw, probability
from outrider.sampling.sampler import LazyDistributions, RequestSampler, score_tokens
from outrider.sampling.selection import argmax, most_likely

__all__ = [
    "LazyDistributions",
    "RequestSampler",
    "argmax",
    "draw",
    "most_likely",
    "point_mass",
    "probability",
    "score_tokens",
]
