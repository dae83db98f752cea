"""All drafters: one row each, and how a session's settings make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outrider.core.contracts import Drafter, Model, Vocabulary
from outrider.core.notices import notify
from outrider.drafters.corpus import CorpusDrafter, Progress, open_corpus
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.models.vocab import Alignment


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What drafters are built from. `can_rewind`: the target can forget rejected tokens. `lookup` is about
    the text so far and the session's earlier ones; `corpus` are files and folders, which are indexed first
    (`progress` is called). `draft` is a draft model and how its vocabulary maps to the target's.
    `recall`: earlier texts of a cache namespace that outlived the process."""

    target_name: str
    vocabulary: Vocabulary
    can_rewind: bool = True
    lookup: bool = True
    corpus: Sequence[Path] = ()
    progress: Progress = lambda _what: None
    draft: tuple[Model, Alignment] | None = None
    recall: Callable[[str], Iterable[Sequence[int]]] = lambda _scope: ()


class DrafterKind(NamedTuple):
    """The `name` of its drafts, its name and colour for people, and what makes it, or nothing where the
    settings do not ask for it."""

    name: str
    title: str
    color: str
    build: Callable[[DrafterSettings], Drafter | None]


def _corpus(settings: DrafterSettings) -> Drafter | None:
    if not settings.corpus:
        return None
    if not settings.can_rewind:
        notify(f"the corpus is not used: {settings.target_name} cannot take rejected drafts back")
        return None
    return CorpusDrafter(open_corpus(settings.corpus, settings.vocabulary, settings.progress))


DRAFTERS = (
    DrafterKind(
        "prediction", "prediction", "yellow", lambda s: PredictionDrafter() if s.can_rewind else None
    ),
    DrafterKind("lookup", "lookup", "cyan", lambda s: SuffixDrafter() if s.lookup else None),
    DrafterKind(
        "earlier", "earlier", "blue", lambda s: EarlierDrafter(recall=s.recall) if s.lookup else None
    ),
    DrafterKind("corpus", "corpus", "magenta", _corpus),
    DrafterKind("draft", "draft model", "green", lambda s: ModelDrafter(*s.draft) if s.draft else None),
)
"""In the order in which they are asked: the most often correct first."""


def build_drafters(settings: DrafterSettings) -> list[Drafter]:
    """The drafters that the settings ask for. Raises SettingError for a corpus that cannot be used."""
    built = (kind.build(settings) for kind in DRAFTERS)
    return [drafter for drafter in built if drafter is not None]
