"""Weights of a target and its draft, named or found (`-md auto`), loaded with options that work here and suit
the machine, and aligned; chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.backends.gguf.guard import check_build, check_head
from outrider.backends.gguf.head_model import HeadWeights
from outrider.backends.gguf.heads import MAX_STATES_BYTES, why_no_heads
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.memory import Contexts, check_memory, free_memory, place_layers
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import ALL_LAYERS, LoadOptions
from outrider.backends.tuning import choose_options
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory, OutriderError, VocabularyMismatch
from outrider.core.notices import notify
from outrider.models.chat import ChatTemplate
from outrider.models.finding import AUTO_DRAFT, Found, FoundFile, check_tokenizers, find_drafts
from outrider.models.gguf import HEADS, ModelCard, check_whole, read_card
from outrider.models.heads import read_head
from outrider.models.hub import HubOptions
from outrider.models.reference import resolve, resolve_pair
from outrider.models.vocab import Alignment, align
from outrider.policy.auto import LONGEST_DRAFT
from outrider.session.options import Progress, SessionOptions, no_progress

_MAX_TRIED = 3
"""drafts that are loaded in turn until one fits the target"""
_MAX_NAMED = 3
"""other drafts that are mentioned besides the one taken"""


# Files, and the room for them


@dataclass(frozen=True, slots=True)
class Named:
    """The files of a pair: a draft that is named, or what was found where one is looked for."""

    target: ModelCard
    draft: ModelCard | None
    found: Found | None


def resolve_models(model: str | None, draft: str | None, hub: HubOptions) -> Named:
    """The files that two references mean. `AUTO_DRAFT` looks for a draft; the embedded default has its own.

    Raises HubError, ModelFileError, or VocabularyMismatch for a draft with another tokenizer.
    """
    if draft != AUTO_DRAFT or model is None:
        target, own = resolve_pair(model, None if draft == AUTO_DRAFT else draft, hub)
        card, of_draft = read_card(target), None if own is None else read_card(own)
        check_whole(card)
        if of_draft is not None and of_draft.kind != "model":
            read_head(of_draft, card)  # refused before anything is loaded
        elif of_draft is not None:
            check_tokenizers(card, of_draft)
        return Named(card, of_draft, None)
    card = read_card(resolve(model, hub=hub))
    check_whole(card)
    return Named(card, None, find_drafts(card, hub, model))


@dataclass(frozen=True, slots=True)
class Room:
    """What a target and perhaps a draft take, loaded with these options for a session to come."""

    target: ModelCard
    draft: ModelCard | None
    loading: LoadOptions
    draft_loading: LoadOptions
    options: SessionOptions

    def placed(self) -> LoadOptions:
        """The target's load options, with as many layers on GPUs as fit where that is left open."""
        library = next(candidates(self.loading))
        return place_layers(library, self.target.path, self.contexts(library))

    def check(self) -> None:
        """Raise OutOfMemory where weights and contexts cannot fit, before they are loaded."""
        library = next(candidates(self.loading))
        models = self.contexts(library)
        check_memory(models, free_memory(library, [model.options for model in models]))

    def contexts(self, library: Library) -> list[Contexts]:
        target, draft, options = self.target, self.draft, self.options
        trained = target.context_length or 0
        capacity = options.capacity(trained)
        drafted = capacity + options.max_running * LONGEST_DRAFT
        has_head = self.loading.heads and target.mtp_layers > 0 and not why_no_heads(library)
        models = [Contexts(target.layout, self.loading, capacity, drafted if has_head else 0)]
        if draft is not None:
            length = min(options.length(trained), draft.context_length or 0)
            of_model = max(length, min(drafted, length * options.num_sequences)), 0
            # Heads go along with the target, in whose KV an assistant reads.
            along = {"mtp": (0, drafted), "eagle3": (drafted, 0), "dflash": (drafted, 0), "assistant": (0, 1)}
            kept = 0
            if draft.kind != "model":
                values = (target.embedding_length or 0) * max(len(read_head(draft, target).target_layers), 1)
                kept = min(4 * values * capacity, MAX_STATES_BYTES * options.num_sequences)
            models.append(Contexts(draft.layout, self.draft_loading, *along.get(draft.kind, of_model), kept))
        return models


def fitting(named: Named, room: Room) -> Named:
    """The same, without a file of heads for which there is no room, as a notice says. Raises OutOfMemory
    where there is none for the rest."""
    draft = named.draft
    try:
        room.check()
    except OutOfMemory as error:
        if draft is None or draft.kind == "model":
            raise
        replace(room, draft=None).check()
        notify(f"{draft.path.name} is left out: {error.why}")
        return replace(named, draft=None)
    return named


# Weights


def load_weights(
    card: ModelCard,
    options: LoadOptions,
    *,
    measure: bool = False,
    progress: Progress = no_progress,
) -> Weights:
    """Load weights with the library and options that suit this machine: found earlier, or by a trial of a few
    seconds now (`measure`), or else the usual ones.

    A library that crashes at its first call, or cannot run the file, is skipped. Raises ModelFileError,
    OutOfMemory, BackendCrash or BackendError if none is left, SettingError for one that cannot be used.
    """

    def trying(what: str, part: float) -> None:
        progress(f"choosing the library, once ({what})", part)

    chosen = choose_options(card.path, options, measure=measure, progress=trying)
    failure: OutriderError | None = None
    for library in candidates(chosen):
        try:
            checked, notice = check_build(card, chosen, library)
            notify(notice)
            weights = Weights(card.path, checked)
        except (BackendCrash, ModelFileError) as error:
            failure = error
            continue
        notify(*_about_placement(weights))
        return weights
    assert failure is not None, "candidates raises where there is none"
    raise failure


_PLACING = {
    "gpu_layers": "-ngl",
    "tensor_split": "-ts",
    "split_mode": "-sm",
    "main_gpu": "-mg",
    "tensor_overrides": "-ot and the like",
    "kv_offload": "--no-kv-offload",
    "op_offload": "--no-op-offload",
}
"""Load options that only matter on a GPU"""


def _about_placement(weights: Weights) -> list[str]:
    usual, given = LoadOptions(), weights.options
    asked = [flag for name, flag in _PLACING.items() if getattr(given, name) != getattr(usual, name)]
    if given.gpu_layers in (0, ALL_LAYERS):
        asked.remove("-ngl")
    if not asked or weights.library.functions.llama_supports_gpu_offload():
        return []
    return [
        f"{', '.join(asked)} without effect: {weights.library.title} computes on the processor alone here "
        "(docs/gpu.md: how to get a build for a GPU; `outrider setup`: what there is)"
    ]


def load_draft(
    target: Weights,
    card: ModelCard,
    options: LoadOptions,
    *,
    measure: bool = False,
    progress: Progress = no_progress,
) -> Weights:
    """A draft's weights, if possible in its target's library: each library has its own pool of threads, and a
    waiting pool takes cores from a working one. Raises what `load_weights` raises."""
    if options.backend == "auto" and not options.library:
        same = replace(options, backend=target.options.backend, library=target.options.library)
        with suppress(BackendCrash, ModelFileError):
            return load_weights(card, same, measure=measure, progress=progress)
    return load_weights(card, options, measure=measure, progress=progress)


def template_of(weights: Weights, source: str | None) -> ChatTemplate | None:
    """The chat template of this source; None without one, as in base models."""
    if not source:
        return None
    vocabulary = weights.vocabulary
    spelled = [
        b"" if token is None else vocabulary.spelling(token) for token in (vocabulary.bos, vocabulary.eos)
    ]
    bos, eos = (spelling.decode("utf-8", errors="replace") for spelling in spelled)
    return ChatTemplate(source, bos=bos, eos=eos)


# Drafts, aligned with their target


def why_no_draft(target: Weights, draft: Weights) -> str | None:
    """Why the target cannot use this draft model; None if it can."""
    if not target.rewinding.is_possible:
        return f"{draft.name} is not used: {target.name} cannot take rejected drafts back"
    if not draft.rewinding.is_possible:
        why = "cannot forget tokens (recurrent or hybrid state), so rejected drafts could not be taken back"
        return f"{draft.name} {why}: it is not used"
    return None


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The weights of a draft or a head, aligned with the target."""

    weights: Weights
    alignment: Alignment
    card: ModelCard


def load_named(
    target: Weights,
    of_target: ModelCard,
    card: ModelCard,
    options: LoadOptions,
    progress: Progress = no_progress,
    *,
    measure: bool = False,
) -> LoadedDraft | None:
    """Load the draft of a card; None, with a notice, if the target cannot use it. Raises VocabularyMismatch
    and what `load_weights` raises."""
    if card.kind == "model":
        weights = load_draft(target, card, options, measure=measure, progress=progress)
    else:
        weights = load_head(target, of_target, card, options)
    try:
        alignment = align(target.vocabulary, weights.vocabulary)
        if isinstance(weights, HeadWeights) and not alignment.identical:
            why = "a head reads the target's own tokens, and these have other numbers"
            raise VocabularyMismatch(f"tokenizer of {card.path}", why, "Name the file made for this model.")
        useless = why_no_draft(target, weights)
    except BaseException:
        weights.close()
        raise
    if useless:
        notify(useless)
        weights.close()
        return None
    return LoadedDraft(weights, alignment, card)


def for_heads(options: LoadOptions, draft: ModelCard) -> LoadOptions:
    """A target's options beside a file of heads: the library that runs them, unless another was asked for."""
    if options.backend != "auto" or options.library:
        return options
    notify(f"{draft.path.stem} holds {HEADS[draft.kind]}, which llama.cpp alone runs: it is used for both")
    return replace(options, backend="llama.cpp")


def load_head(target: Weights, of_target: ModelCard, card: ModelCard, options: LoadOptions) -> HeadWeights:
    """The weights of a file of heads, in the target's library. Raises ModelFileError, OutOfMemory or
    BackendCrash."""
    head, path = read_head(card, of_target), str(card.path)
    if lacks := why_no_heads(target.library, of_layers=card.kind in ("eagle3", "dflash")):
        why = f"it holds {HEADS[card.kind]}, and {target.library.title} cannot run it here: {lacks}"
        raise ModelFileError(path, why, "Choose --backend llama.cpp, or another draft.")
    same = target.options.backend, target.options.library
    options = replace(options, backend=same[0], library=same[1], adapters=())
    check_head(target, head, options)
    return HeadWeights(head, options)


def load_found(
    target: Weights,
    named: Named,
    options: LoadOptions,
    progress: Progress = no_progress,
    *,
    opening: SessionOptions | None = None,
) -> LoadedDraft | None:
    """The first of the drafts found that loads, aligns and may pay; None if none does. Notices say which was
    taken, which were skipped and why, and what else there is."""
    found = named.found or Found()
    if not target.rewinding.is_possible:
        notify(f"-md auto: {target.name} cannot take rejected drafts back, so no draft is loaded")
        return None
    taken, measure = None, opening is not None and opening.measure
    for card in found.drafts[:_MAX_TRIED]:
        if taken is not None:
            break
        try:
            if opening is not None:
                Room(named.target, card, target.options, options, opening).check()
            taken = load_named(target, named.target, card, options, progress, measure=measure)
        except (BackendCrash, ModelFileError, OutOfMemory, VocabularyMismatch) as error:
            notify(f"-md auto skips {card.path.name}: {error.why}")
    here, others = found.files[: len(found.drafts)], found.files[len(found.drafts) :]
    notify(
        _nothing_found(named.target, found) if taken is None else _taken(taken.card, here), *map(str, others)
    )
    return taken


def _taken(card: ModelCard, here: Sequence[FoundFile]) -> str:
    [file] = [file for file in here if file.reference == str(card.path)]
    others = [other for other in here if other is not file]
    known = "" if file.note else ": `outrider check` says whether it pays"
    named = ", ".join(map(str, others[:_MAX_NAMED]))
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    return f"-md auto takes {file}{known}" + (f". Also here: {named}{more}" if others else "")


def _nothing_found(target: ModelCard, found: Found) -> str:
    if found.drafts:
        return "-md auto: no draft that was found can be used; lookup drafts alone"
    return (
        f"-md auto: no smaller file beside {target.path.name} or in the hub's cache has its tokenizer, "
        f"{target.tokenizer}; lookup drafts alone"
    )
