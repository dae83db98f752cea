"""The weights of a target and its draft, and the contexts that a session opens on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.backends.gguf.head_model import HeadWeights, open_own
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import Loaded, native_of, open_target
from outrider.core.notices import collect_notices, notify
from outrider.models.chat import ChatTemplate
from outrider.models.gguf import HEADS, ModelCard
from outrider.models.heads import CHAINED
from outrider.models.hub import HubOptions
from outrider.models.vocab import Alignment, align
from outrider.policy.auto import LONGEST_DRAFT
from outrider.session.generation import Message, encode
from outrider.session.loading import (
    LoadedDraft,
    Room,
    fitting,
    for_heads,
    load_found,
    load_named,
    load_weights,
    resolve_models,
    template_of,
)
from outrider.session.options import Progress, SessionOptions, no_progress


@dataclass(frozen=True, slots=True)
class Pair:
    """Loaded weights of a target and perhaps a draft. Sessions opened on a pair (`Session.open`) share its
    weights: closing one closes the pair."""

    target: Weights
    draft: LoadedDraft | None
    target_card: ModelCard
    template: ChatTemplate | None
    notices: tuple[str, ...]

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        options: LoadOptions | None = None,
        draft_options: LoadOptions | None = None,
        hub: HubOptions | None = None,
        template: str | None = None,
        opening: SessionOptions | None = None,
        progress: Progress = no_progress,
    ) -> Pair:
        """Resolve the references, load the files, and align the tokenizers.

        Args:
            model: the target: a path or a hub reference; None: the embedded default.
            draft: likewise; None: the default's own or none, `AUTO_DRAFT`: one that is found here,
                `NO_DRAFT`: none.
            options: how the target is loaded.
            draft_options: how the draft is loaded; None: like the target.
            hub: how hub references are resolved.
            template: a chat template (Jinja) to use instead of the target's own.
            opening: the options of the session to come: whether it fits is checked before loading, and its
                `measure` finds the faster native library for each file.
            progress: called meanwhile.

        Raises HubError, ModelFileError, OutOfMemory or VocabularyMismatch.
        """
        options = options or LoadOptions()
        target_name, draft_name = (None if name is None else str(name) for name in (model, draft))
        with collect_notices() as notices, ExitStack() as undo:
            named = resolve_models(target_name, draft_name, hub or HubOptions())
            if draft is not None and named.found is None:  # one that is looked for does not take their place
                options = replace(options, heads=False)
            if named.draft is not None and named.draft.kind != "model":
                options = for_heads(options, named.draft)
            of_draft = draft_options or options
            if opening is not None:
                room = Room(named.target, named.draft, options, of_draft, opening)
                options = room.placed()
                named = fitting(named, replace(room, loading=options))
            measure = opening is not None and opening.measure
            target = load_weights(named.target, options, measure=measure, progress=progress)
            undo.callback(target.close)
            chat = template_of(target, template or named.target.chat_template)
            loaded = None
            if named.draft is not None:
                loaded = load_named(target, named.target, named.draft, of_draft, progress, measure=measure)
            elif named.found is not None and not (target.num_heads and named.target.mtp_layers):
                loaded = load_found(target, named, of_draft, progress, opening=opening)
            undo.pop_all()
        return cls(target, loaded, named.target, chat, tuple(notices))

    def close(self) -> None:
        """Free the weights, and the KV caches of sessions on them; can be repeated."""
        for weights in self.models:
            weights.close()

    @property
    def models(self) -> tuple[Weights, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft.weights)

    @property
    def draft_name(self) -> str | None:
        """The name of the model or head that drafts; None if there is none."""
        if self.draft is not None:
            return self.draft.weights.name
        return "its own MTP head" if self._drafts_with_head(None) else None

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return encode(self.target.vocabulary, self.template, prompt)

    def open_target(self, options: SessionOptions, progress: Progress = no_progress) -> Loaded:
        """KV caches for the target. Raises OutOfMemory, or SettingError if the native library cannot give the
        `bitwise` text that is asked for."""
        trained = self.target.trained_context
        length = options.length(trained)
        if length > trained:
            notify(f"{self.target.name} was trained with a context of {trained} tokens, not {length}")
        target, equal_calls = open_target(
            self.target,
            length,
            max_sequences=options.num_sequences,
            capacity_tokens=options.capacity(trained),
            bitwise=False if self._drafts_with_head(options.bitwise) else options.bitwise,
            measure=options.measure,
            measuring=progress,
        )
        notify(self._about_head(options.bitwise))
        if equal_calls is not None and options.bitwise:
            apart = "; requests that run at once share no calls" if options.max_running > 1 else ""
            notify(f"bit-equal text: calls of {equal_calls.sizes} tokens; {equal_calls.price}{apart}")
        notify(self.target.rewind_support.line(target))
        return target

    def open_draft(self, target: Loaded, options: SessionOptions) -> tuple[GgufModel, Alignment] | None:
        """A context for the draft, or the head, with as many sequences as the target, and the alignment of
        its tokens; None without a draft. Raises OutOfMemory."""
        capacity = options.capacity(self.target.trained_context) + options.max_running * LONGEST_DRAFT
        if self._drafts_with_head(options.bitwise):
            vocabulary = target.vocabulary
            if self.draft is None:
                return open_own(native_of(target), capacity), align(vocabulary, vocabulary)
            assert isinstance(self.draft.weights, HeadWeights)
            return self.draft.weights.open_beside(native_of(target), capacity), self.draft.alignment
        if self.draft is None or isinstance(self.draft.weights, HeadWeights):
            return None
        weights, size = self.draft.weights, target.max_sequences
        length = min(target.context_length, weights.trained_context)
        capacity = max(length, min(capacity, length * size))
        return weights.open(length, max_sequences=size, capacity_tokens=capacity), self.draft.alignment

    def _drafts_with_head(self, bitwise: bool | None) -> bool:
        """Whether a head drafts, the target's own or one from a file; its calls are not bit-equal."""
        if self.draft is not None:
            return isinstance(self.draft.weights, HeadWeights) and not bitwise
        return self._has_head and self.target.num_heads > 0 and not bitwise

    @property
    def _has_head(self) -> bool:
        asked = self.target.options.heads and self.target.rewinding.is_possible
        return asked and self.target_card.mtp_layers > 0

    def _about_head(self, bitwise: bool | None) -> str | None:
        name, title = self.target.name, self.target.library.title
        if self.draft is not None and isinstance(self.draft.weights, HeadWeights):
            head = self.draft.weights
            what = f"{head.name} ({HEADS[head.head.kind]})"
            used = f"{name} drafts with {what}"
            return f"{what} is not used: text is to be bit-equal" if bitwise else used
        if not self._has_head:
            return None
        if self._drafts_with_head(bitwise):
            count = self.target.num_heads
            return f"{name} drafts with its own MTP head" + (f", of {count} layers" if count > 1 else "")
        count, arch = self.target_card.mtp_layers, self.target_card.architecture
        why = f"{title} as it is here lacks the calls for it"
        if bitwise:
            why = "text is to be bit-equal"
        elif count > 1 and arch not in CHAINED:
            why = f"it is one of {count}, and {title} runs no more than one in a model of kind {arch}"
        return f"{name} has an MTP head, which is not used: {why}"
