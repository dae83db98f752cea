"""All drafters, and those that a session's settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.core.contracts import Drafter, Model
from outrider.core.notices import notify
from outrider.drafters.corpus import CorpusDrafter, Progress, open_corpus
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.models.vocab import Alignment


class DrafterKind(NamedTuple):
    """The `name` of its drafts, and its name and colour for people."""

    name: str
    title: str
    color: str


DRAFTERS = (
    DrafterKind("prediction", "prediction", "yellow"),
    DrafterKind("lookup", "lookup", "cyan"),
    DrafterKind("earlier", "earlier", "blue"),
    DrafterKind("corpus", "corpus", "magenta"),
    DrafterKind("draft", "draft model", "green"),
)


def build_drafters(
    target: Model,
    *,
    lookup: bool = True,
    corpus: Sequence[Path] = (),
    progress: Progress = lambda _what: None,
    draft: tuple[Model, Alignment] | None = None,
    recall: Callable[[str], Iterable[Sequence[int]]] = lambda _scope: (),
) -> list[Drafter]:
    """Drafters in the order in which they are asked, the most often correct first.

    `lookup` is about the text so far and the session's earlier ones; `corpus` are files and folders, which
    are indexed first (`progress` is called). `draft` is a draft model and how its vocabulary maps to the
    target's. `recall`: earlier texts of a cache namespace. Raises SettingError for an unusable corpus.
    """
    can_rewind = target.rewinding.is_possible
    built: list[Drafter] = [PredictionDrafter()] if can_rewind else []
    if lookup:
        built += [SuffixDrafter(), EarlierDrafter(recall=recall)]
    if corpus and can_rewind:
        built.append(CorpusDrafter(open_corpus(corpus, target.vocabulary, progress)))
    elif corpus:
        notify(f"the corpus is not used: {target.name} cannot take rejected drafts back")
    if draft is not None:
        built.append(ModelDrafter(*draft))
    return built
