"""Sizes of calls that give a token's logits the same bits, and how any number of tokens is cut into them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class EqualSizes:
    """Numbers of tokens, ascending: in calls over any of them a token has the same logits, bit by bit.

    >>> sizes = EqualSizes((2, 3, 4, 8))
    >>> sizes.parts(1), sizes.parts(5), sizes.parts(20)
    ([(1, 2)], [(5, 8)], [(7, 8), (7, 8), (6, 8)])
    >>> sizes.padding
    3

    Raises ValueError where there are none, or where they do not ascend from 1 at least.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError(f"{self.sizes} are no sizes of calls")

    @property
    def most(self) -> int:
        """The largest call."""
        return self.sizes[-1]

    @property
    def padding(self) -> int:
        """The most filler tokens that a call ever needs."""
        return max(b - a for a, b in pairwise((0, *self.sizes))) - 1

    def padded(self, num_tokens: int) -> int:
        """The smallest of the sizes that so many tokens, `most` of them at most, fit in."""
        return self.sizes[bisect_left(self.sizes, num_tokens)]

    def parts(self, num_tokens: int) -> list[tuple[int, int]]:
        """The calls for so many tokens: how many of them each takes, and the size that it is padded to."""
        number = -(-num_tokens // self.most)
        share, remainder = divmod(num_tokens, number)
        counts = [share + 1] * remainder + [share] * (number - remainder)
        return [(count, self.padded(count)) for count in counts]

    def __str__(self) -> str:
        """As people write it: `2-9, 12, 16`."""
        runs: list[list[int]] = []
        for size in self.sizes:
            if runs and size == runs[-1][-1] + 1:
                runs[-1].append(size)
            else:
                runs.append([size])
        return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
