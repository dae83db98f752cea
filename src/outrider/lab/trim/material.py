"""What tokens are counted in: prompts, files, and the target's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.files import chunks, list_files
from outrider.core.notices import notify
from outrider.lab.prompts import Prompt, Workload, conversation_hash, is_held_out
from outrider.lab.workloads.lines import text_of
from outrider.lab.workloads.reading import BUILT_IN, WorkloadSpec, load_workload
from outrider.lab.written_prompts import written_prompts

_BUNDLED = 1200
"""bundled prompts that are counted; the order is always the same"""
_HELD_OUT_SHARE = 0.25
"""of prompts of the user's own"""
_MIN_HELD_OUT = 4

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts whose tokens and answers are counted, and workloads with which a draft is measured; the two
    have no conversation in common. `origin`: the first, in words."""

    counted: tuple[Prompt, ...]
    measured: tuple[Workload, ...]
    origin: str


def prompts_of(own: Sequence[Workload]) -> Prompts:
    """The prompts of the user's own workloads, a part of which measures; without any the bundled ones, and
    the built-in workloads to measure with."""
    built_in = tuple(load_workload(WorkloadSpec(name=name)) for name in BUILT_IN)
    if not own:
        counted = tuple(written.prompt for written in written_prompts(_BUNDLED))
        return Prompts(counted, built_in, "the bundled prompts")
    measured = []
    for workload in own:
        if held_out := tuple(p for p in workload.prompts if is_held_out(p, _HELD_OUT_SHARE)):
            measured.append(replace(workload, prompts=held_out))
    if sum(len(workload.prompts) for workload in measured) < _MIN_HELD_OUT:
        measured = list(built_in)
    never = {conversation_hash(prompt) for workload in measured for prompt in workload.prompts}
    counted = tuple(p for w in own for p in w.prompts if conversation_hash(p) not in never)
    return Prompts(counted, tuple(measured), ", ".join(workload.name for workload in own))


@dataclass(slots=True)
class Counted:
    """Uses of the target's tokens in texts that are not answers of its own, and in words what was counted."""

    uses: Counts
    origins: list[str] = field(default_factory=list)

    def add(self, vocabulary: Vocabulary, texts: Iterable[str], what: str) -> None:
        before = self.uses.sum()
        for text in texts:
            np.add.at(self.uses, np.asarray(vocabulary.tokenize(text, add_special=False), dtype=np.int64), 1)
        self.origins.append(f"{what} ({int(self.uses.sum() - before):,} tokens)")


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Every text of some prompts, each once: templates share long ones."""
    found: dict[str, None] = {}
    for prompt in prompts:
        if isinstance(prompt.messages, str):
            found[prompt.messages] = None
        else:
            found |= dict.fromkeys(text_of(message.get("content")) or "" for message in prompt.messages)
        found |= dict.fromkeys(prompt.follow_ups)
    return found


def texts_in(paths: Sequence[Path]) -> Iterable[str]:
    """The text of files, and of those in folders, a piece at a time; a notice names what is passed over.
    Raises SettingError for a path that does not exist."""
    for path in list_files(paths).sizes:
        try:
            yield from chunks(path)
        except OSError:
            notify(f"{path} is not counted: it cannot be read")
        except UnicodeDecodeError:
            notify(f"{path} is not counted: it is not UTF-8 text")
