"""From logits to the distribution that plain decoding would sample from."""

from outrider.core.data import point_mass
from outrider.sampling.chain import argmax, draw, most_likely, probability
from outrider.sampling.sampler import LazyDistributions, RequestSampler, score_tokens

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
