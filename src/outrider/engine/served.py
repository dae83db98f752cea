"""Text that was generated, found again in the next turn's prompt.

A client sends an answer back as text. Its tokenization need not be the one that was generated: a constraint
forces other splits, and a sampled one may be any. Where both spell the same, the tokens that were served are
the ones whose KV is stored, and what the model itself said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Request
from outrider.core.sequences import common_prefix


def as_served(request: Request, texts: Sequence[Sequence[int]], target: Model) -> Request:
    """A request whose prompt is text with the tokens that were served for it, as far as one of the stored
    `texts` has them."""
    prompt = request.prompt
    equal = [common_prefix(text, prompt) for text in texts]
    longest = max(equal, default=0)
    alike = [text for text, length in zip(texts, equal, strict=True) if length == longest]
    found = [respelled(prompt, text, target.vocabulary) for text in alike]
    prompt, reached, num_other = max(found, key=lambda one: one[1], default=(prompt, 0, 0))
    if reached <= longest or len(prompt) >= target.context_length:
        return request
    return replace(request, prompt=prompt, from_text=False, respelled_tokens=num_other)


def respelled(
    prompt: Sequence[int], served: Sequence[int], vocabulary: Vocabulary
) -> tuple[tuple[int, ...], int, int]:
    """A prompt whose beginning has the tokens of a text that was `served`, as far as both spell the same; how
    many tokens of it that is, and how many of these are not the prompt's own."""
    at, served_at, num_other = 0, 0, 0
    while True:
        equal = common_prefix(prompt[at:], served[served_at:])
        at, served_at = at + equal, served_at + equal
        pair = _same_text(prompt, at, served, served_at, vocabulary)
        if pair is None:
            return (*served[:served_at], *prompt[at:]), served_at, num_other
        num_other += pair[1] - served_at
        at, served_at = pair


def _same_text(
    one: Sequence[int], at: int, other: Sequence[int], other_at: int, vocabulary: Vocabulary
) -> tuple[int, int] | None:
    """Where two texts that differ from here on have spelled the same again, in tokens of each; None where
    they do not. Control tokens spell nothing."""
    mine, its = bytearray(), bytearray()
    """what one of them has spelled beyond the other"""
    while True:
        if its:
            piece = vocabulary.piece(one[at]) if at < len(one) else b""
            mine += piece
            at += 1
        else:
            piece = vocabulary.piece(other[other_at]) if other_at < len(other) else b""
            its += piece
            other_at += 1
        shared = min(len(mine), len(its))
        if not piece or mine[:shared] != its[:shared]:
            return None
        del mine[:shared], its[:shared]
        if not (mine or its):
            return at, other_at
