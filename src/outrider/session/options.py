"""The options of a session: contexts, drafters, and where its KV goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.contracts import Policy
from outrider.core.params import Drafting

DEFAULT_CONTEXT_TOKENS = 4096
_DRAFT_SHARE = 4
"""One part in so many of what KV may take is a draft model's."""

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the part of it that is done, 0 to 1 (None: unknown)."""


def no_progress(_what: str, _part: float | None) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where KV goes when it leaves the target or a draft model.

    Args:
        memory_bytes: at most kept in memory.
        folder: for files of KV; None: no files.
        disk_bytes: at most used by these files.
    """

    memory_bytes: int = 0
    folder: Path | None = None
    disk_bytes: int = 8 * 2**30

    def split(self) -> tuple[Keeping, Keeping]:
        memory, disk = self.memory_bytes // _DRAFT_SHARE, self.disk_bytes // _DRAFT_SHARE
        folder = None if self.folder is None else self.folder / "draft"
        target = replace(self, memory_bytes=self.memory_bytes - memory, disk_bytes=self.disk_bytes - disk)
        return target, Keeping(memory, folder, disk)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is opened on loaded models.

    Args:
        context_length: tokens that a sequence can hold; 0: as many as the target was trained with;
            None: 4096, or fewer where the target was trained with fewer.
        policy: who drafts and how far; None: automatic, Drafting: the same within limits.
        lookup: draft from the text so far and from the session's earlier ones.
        corpus: files and folders to look drafts up in.
        max_running: requests that run at once.
        kept_sequences: further sequences, which keep KV for requests that begin alike.
        capacity_tokens: tokens that all sequences together can hold; 0: enough for those that run.
        max_gap_s: the longest step in seconds where several requests run, if it can be helped; None: five
            plain steps.
        bitwise: greedy and seed-stable texts are those of plain decoding under the same setting, bit for
            bit, whatever is drafted and whatever else runs; None: where a single request runs at once and
            it costs next to nothing. Each sequence then has a context of its own.
        keeping: where KV goes that leaves the target, to be found again.
        measure: find out first what is not known of this machine yet: which native library is the faster one,
            what calls cost, where equal bits are free. Takes half a minute for a small model. Else a session
            begins at once, with estimates that every call corrects.
    """

    context_length: int | None = None
    policy: Policy | Drafting | None = None
    lookup: bool = True
    corpus: Sequence[str | Path] = ()
    max_running: int = 1
    kept_sequences: int = 0
    capacity_tokens: int = 0
    max_gap_s: float | None = None
    bitwise: bool | None = None
    keeping: Keeping = Keeping()
    measure: bool = False

    @property
    def num_sequences(self) -> int:
        return self.max_running + self.kept_sequences

    def length(self, trained_context: int) -> int:
        """Tokens of a sequence, of a target that was trained with so many."""
        if self.context_length is None:
            return min(DEFAULT_CONTEXT_TOKENS, trained_context)
        return self.context_length or trained_context

    def capacity(self, trained_context: int) -> int:
        return self.capacity_tokens or self.length(trained_context) * self.max_running
