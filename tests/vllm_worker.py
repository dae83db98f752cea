"""A vLLM worker as its proposer sees it: rows of tokens that come, go, and change places."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from outrider.core.sequences import common_prefix
from outrider.fleet.speculation import Tokens

MAX_LENGTH = 400
CHUNK = 16
"""prompt tokens that a step reads, of each request"""

Propose = Callable[[Sequence[Sequence[int]], Sequence[int], Tokens], list[list[int]]]


def config(max_draft: int = 8, **additional: Any) -> SimpleNamespace:
    """As much of a VllmConfig as a proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_draft),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        additional_config=additional,
    )


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and the answer that greedy decoding gives."""

    prompt: list[int]
    answer: list[int]
    done: int = 0
    unread: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer[: self.done]


class SimulatedWorker:
    """Steps of a batch. `call_s` is what a call over so many tokens takes on `clock`."""

    def __init__(self, max_requests: int, call_s: Callable[[int], float] = lambda _: 0.01) -> None:
        self.rows: list[Asked] = []
        self.away: list[Asked] = []
        self.now_s = 100.0
        self.num_calls = 0
        self.num_drafted = 0
        self.starts = 0
        """requests that were read from the start, those that came back included"""
        self._texts = np.zeros((max_requests, MAX_LENGTH), dtype=np.int32)
        self._call_s = call_s

    def clock(self) -> float:
        return self.now_s

    def arrive(self, asked: Asked) -> None:
        asked.unread, asked.draft = len(asked.text), []
        self.starts += 1
        self.rows.append(asked)

    def leave(self, row: int) -> Asked:
        """As `InputBatch.condense` does it: the last row takes the place of one that left."""
        asked, last = self.rows[row], self.rows.pop()
        if last is not asked:
            self.rows[row] = last
        return asked

    def swap(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def step(self, propose: Propose, cut: int | None = None) -> list[list[int]]:
        """One call, and the proposals for the next. The scheduler cuts drafts to `cut` tokens."""
        sampled, lengths, size = list[list[int]](), list[int](), 0
        for i, asked in enumerate(self.rows):
            asked.draft = asked.draft[:cut]
            size += min(asked.unread, CHUNK) or 1 + len(asked.draft)
            asked.unread = max(asked.unread - CHUNK, 0)
            sampled.append([] if asked.unread else self._verify(asked))
            text = asked.text
            lengths.append(len(text))
            self._texts[i] = 7  # what lies after a text may be anything
            self._texts[i, : len(text)] = text
        self.num_calls += 1
        self.now_s += self._call_s(size)
        drafts = propose(sampled, np.array(lengths, dtype=np.int32).tolist(), self._texts)
        assert len(drafts) == len(self.rows)
        for asked, draft in zip(self.rows, drafts, strict=True):
            asked.draft = draft
            self.num_drafted += len(draft)
        return drafts

    def _verify(self, asked: Asked) -> list[int]:
        accepted = common_prefix(asked.draft, asked.answer[asked.done :])
        tokens = asked.answer[asked.done : asked.done + accepted + 1]
        asked.done += len(tokens)
        return tokens

    def finished(self) -> list[int]:
        """Rows whose answer has come to its end, the last first."""
        return [i for i, asked in reversed(list(enumerate(self.rows))) if asked.done >= len(asked.answer)]
