"""Weights, loaded with options that work here and suit the machine; chat templates."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.backends.gguf.heads import MAX_STATES_BYTES, why_no_heads
from outrider.backends.gguf.libraries import candidates, refusals
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.memory import Contexts, check_memory, free_memory, place_layers, total_bytes
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import ALL_LAYERS, LoadOptions
from outrider.backends.tuning.options import checked_options, choose_options
from outrider.core.errors import BackendCrash, ModelFileError, OutriderError
from outrider.core.notices import notify
from outrider.models.chat import ChatTemplate
from outrider.models.gguf import ModelCard
from outrider.models.heads import read_head
from outrider.policy.auto import LONGEST_DRAFT
from outrider.session.options import Progress, SessionOptions, no_progress


def why_no_draft(target: Weights, draft: Weights) -> str | None:
    """Why the target cannot use this draft model; None if it can."""
    if not target.rewinding.is_possible:
        return f"{draft.name} is not used: {target.name} cannot take rejected drafts back"
    if not draft.rewinding.is_possible:
        why = "cannot forget tokens (recurrent or hybrid state), so rejected drafts could not be taken back"
        return f"{draft.name} {why}: it is not used"
    return None


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
        return place_layers(library, self.target.path, self._contexts(library))

    def check(self) -> None:
        """Raise OutOfMemory where weights and contexts cannot fit, before they are loaded."""
        library = next(candidates(self.loading))
        models = self._contexts(library)
        check_memory(models, free_memory(library, [model.options for model in models]))

    @property
    def total_bytes(self) -> int:
        """All of it, wherever it is put. Mapped weights count as if they were read."""
        return total_bytes(self._contexts(next(candidates(self.loading))))

    def _contexts(self, library: Library) -> list[Contexts]:
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


def load_weights(
    card: ModelCard,
    options: LoadOptions,
    *,
    draft: bool = False,
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

    chosen = choose_options(card.path, options, draft=draft, measure=measure, progress=trying)
    failure: OutriderError | None = None
    for library in candidates(chosen.options):
        try:
            checked, notice = checked_options(card, chosen.options, library)
            notify(notice)
            weights = Weights(card.path, checked)
        except (BackendCrash, ModelFileError) as error:
            failure = error
            continue
        weights.compared = chosen.compared
        notify(*refusals(), *_about_placement(weights))
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


def in_same_library(target: LoadOptions, options: LoadOptions) -> LoadOptions:
    """A draft's options, in its target's library unless another was asked for."""
    if options.backend != "auto" or options.library:
        return options
    return replace(options, backend=target.backend, library=target.library)


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
    same = in_same_library(target.options, options)
    if same != options:
        with suppress(BackendCrash, ModelFileError):
            return load_weights(card, same, draft=True, measure=measure, progress=progress)
    return load_weights(card, options, draft=True, measure=measure, progress=progress)


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
