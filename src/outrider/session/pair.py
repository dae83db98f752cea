"""Weights of a target and its draft, and the sessions that are opened on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.backends.bitwise import Price
from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.backends.gguf.head_model import HeadModel, HeadWeights
from outrider.backends.tuning.equality import open_target
from outrider.backends.tuning.scoring import Loaded, native_of
from outrider.core.contracts import Policy
from outrider.drafters.corpus import Progress
from outrider.drafters.registry import DrafterSettings, build_drafters
from outrider.models.chat import ChatTemplate
from outrider.models.gguf import HEADS, ModelCard
from outrider.models.hub import HubOptions
from outrider.models.vocab import Alignment, align
from outrider.policy.auto import LONGEST_DRAFT
from outrider.session.drafts import for_heads, load_found, load_named, resolve_models
from outrider.session.keeping import Keeping, open_texts, open_tiers
from outrider.session.learned import AutoSettings, Learned, Measuring
from outrider.session.loading import Room, check_fit, load_weights, template_of
from outrider.session.session import DEFAULT_CONTEXT_TOKENS, Message, Session, encode


@dataclass(frozen=True, slots=True)
class Pair:
    """Loaded weights of a target and, possibly, of a draft whose tokenizer lines up.

    Sessions that are opened on a pair share its weights: closing one of them closes the pair.
    """

    target: Weights
    draft: Weights | None
    alignment: Alignment | None
    target_card: ModelCard
    draft_card: ModelCard | None
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
        room: Room | None = None,
        measuring: Measuring | None = None,
    ) -> Pair:
        """Resolve the references, load the files, and align the tokenizers. A draft of `AUTO_DRAFT` is looked
        for among the files that are here. Which native library is the faster one for a file is measured once,
        in a few seconds (`measuring` is called meanwhile). `template` is a chat template (Jinja) in
        place of the target's own. What is needed for `room` is counted before anything is loaded.

        Raises HubError, ModelFileError, OutOfMemory or VocabularyMismatch.
        """
        notices: list[str] = []
        options = options or LoadOptions()
        target_name, draft_name = (None if name is None else str(name) for name in (model, draft))
        named = resolve_models(target_name, draft_name, hub or HubOptions())
        if draft is not None and named.found is None:  # one that is looked for does not take their place
            options = replace(options, heads=False)
        if named.draft is not None and named.draft.kind != "model":
            options = for_heads(options, named.draft, notices)
        if room is not None:
            check_fit(named.target, named.draft, options, draft_options or options, room)
        with ExitStack() as undo:
            target = load_weights(named.target.path, named.target, options, notices, measuring=measuring)
            undo.callback(target.close)
            chat = template_of(target, template or named.target.chat_template)
            loaded, of_draft = None, draft_options or options
            if named.draft is not None:
                loaded = load_named(target, named.target, named.draft, of_draft, notices, measuring)
            elif named.found is not None and not (target.num_heads and named.target.mtp_layers):
                loaded = load_found(target, named, of_draft, notices, measuring)
            undo.pop_all()
        weights, alignment, card = (
            (None, None, None) if loaded is None else (loaded.weights, loaded.alignment, loaded.card)
        )
        return cls(target, weights, alignment, named.target, card, chat, tuple(notices))

    def close(self) -> None:
        """Free the weights, and the KV caches of sessions on them. Closing twice is harmless."""
        for weights in (self.draft, self.target):
            if weights is not None:
                weights.close()

    @property
    def draft_name(self) -> str | None:
        """What drafts beside the target, by its name; None where no model does."""
        if self.draft is not None:
            return self.draft.name
        return "its own MTP head" if self._drafts_with_head(None) else None

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a text as it is, or of a conversation under the chat template."""
        return encode(self.target, self.template, prompt)

    def open(
        self,
        context_length: int = DEFAULT_CONTEXT_TOKENS,
        draft_context_length: int = 0,
        *,
        lookup: bool = True,
        corpus: Sequence[str | Path] = (),
        progress: Progress | None = None,
        policy: Policy | AutoSettings | None = None,
        measuring: Measuring | None = None,
        max_running: int = 1,
        kept_sequences: int = 0,
        capacity_tokens: int = 0,
        max_gap_s: float | None = None,
        bitwise: bool | None = None,
        keeping: Keeping | None = None,
    ) -> Session:
        """Give the models KV caches and the session its drafters.

        Without a policy, or with AutoSettings, drafting is automatic: what calls cost is looked up, or
        measured once in a few seconds (`measuring` is called meanwhile). Contexts are in tokens per
        sequence: 0 takes what the target was trained with, and for the draft the target's. `lookup` is about
        the text so far and the session's earlier ones, `corpus` are files and folders, which are indexed
        first (`progress` is called meanwhile). Up to `max_running` requests run at once; the KV of
        `kept_sequences` more is kept for others that begin alike, and all together hold `capacity_tokens`
        (0: enough for those that run). Where several run, no step is longer than `max_gap_s` (None: five
        plain ones) if it can be helped. `keeping`: where KV goes that leaves the target, and is found again.
        `bitwise`: greedy and seed-stable texts are those of plain decoding under the same setting, bit for
        bit, whatever is drafted and whatever else runs; None: where a single request runs at once and it
        costs next to nothing. Each sequence then has a context of its own. Raises OutOfMemory, and
        SettingError for a corpus that cannot be used, or where `bitwise` is asked for and the native library
        cannot give equal bits.
        """
        notices = list(self.notices)
        context_length = self._context(context_length, notices)
        capacity_tokens = capacity_tokens or context_length * max_running
        drafting = self._drafter_settings(lookup, corpus, progress, notices, keeping)
        drafters = build_drafters(drafting, is_free=True)
        target, price = self._open_target(
            context_length, max_running, kept_sequences, capacity_tokens, bitwise, measuring, notices
        )
        try:
            draft_tokens = capacity_tokens + max_running * LONGEST_DRAFT
            drafting.draft = draft = self._open_draft(target, draft_context_length, draft_tokens, bitwise)
            policy, learned = _policy_for(target, draft, policy, measuring, notices)
            return Session(
                target,
                [*drafters, *build_drafters(drafting, is_free=False)],
                policy,
                template=self.template,
                learned=learned,
                max_running=max_running,
                max_gap_s=max_gap_s,
                bitwise_price=price,
                kv_tiers=open_tiers(target, keeping, notices),
                notices=notices,  # what is opened above adds to them
            )
        except BaseException:
            target.close()
            raise

    def _context(self, context_length: int, notices: list[str]) -> int:
        trained = self.target.trained_context
        if context_length > trained:
            notices.append(
                f"{self.target.name} was trained with a context of {trained} tokens, not {context_length}"
            )
        return context_length or trained

    def _open_target(
        self,
        context_length: int,
        max_running: int,
        kept_sequences: int,
        capacity_tokens: int,
        bitwise: bool | None,
        measuring: Measuring | None,
        notices: list[str],
    ) -> tuple[Loaded, Price | None]:
        target, equal_calls = open_target(
            self.target,
            context_length,
            max_sequences=max_running + kept_sequences,
            capacity_tokens=capacity_tokens,
            bitwise=False if self._drafts_with_head(bitwise) else bitwise,
            measuring=measuring,
        )
        notices += self._about_head(bitwise)
        if equal_calls is not None and bitwise:
            line = f"bit-equal text: calls of {equal_calls.sizes} tokens; {equal_calls.price}"
            apart = "; requests that run at once share no calls" if max_running > 1 else ""
            notices.append(line + apart)
        notices += self.target.rewind_support.notices(
            self.target.name, target.rewinding, target.max_sequences
        )
        return target, None if equal_calls is None else equal_calls.price

    def _drafter_settings(
        self,
        lookup: bool,
        corpus: Sequence[str | Path],
        progress: Progress | None,
        notices: list[str],
        keeping: Keeping | None,
    ) -> DrafterSettings:
        return DrafterSettings(
            self.target.name,
            self.target.vocabulary,
            can_rewind=self.target.rewinding.is_possible,
            lookup=lookup,
            corpus=[Path(path) for path in corpus],
            progress=progress,
            notices=notices,
            kept_texts=open_texts(self.target.path, keeping),
        )

    def _drafts_with_head(self, bitwise: bool | None) -> bool:
        """Whether the target drafts with a head, its own or one of a file, under this setting of `open`."""
        has_file = isinstance(self.draft, HeadWeights)
        return (has_file or (self._has_head and self.target.num_heads > 0)) and not bitwise

    @property
    def _has_head(self) -> bool:
        asked = self.target.options.heads and self.target.rewinding.is_possible
        return asked and self.target_card.mtp_layers > 0

    def _about_head(self, bitwise: bool | None) -> list[str]:
        name, title = self.target.name, self.target.library.title
        if isinstance(self.draft, HeadWeights):
            what = f"{self.draft.name} ({HEADS[self.draft.head.kind]})"
            used = f"{name} drafts with {what}"
            return [f"{what} is not used: text is to be bit-equal" if bitwise else used]
        if not self._has_head:
            return []
        if self._drafts_with_head(bitwise):
            first = f", the first of {self.target.num_heads}" if self.target.num_heads > 1 else ""
            return [f"{name} drafts with its own MTP head{first}"]
        count, arch = self.target_card.mtp_layers, self.target_card.architecture
        why = f"{title} as it is here lacks the calls for it"
        if bitwise:
            why = "text is to be bit-equal"
        elif count > 1:
            why = f"it is one of {count}, and {title} runs no more than one in a model of kind {arch}"
        return [f"{name} has an MTP head, which is not used: {why}"]

    def _open_draft(
        self, target: Loaded, context_length: int, capacity_tokens: int, bitwise: bool | None
    ) -> tuple[GgufModel, Alignment] | None:
        """The draft's context beside the target's, or that of a head, for as many sequences, of up to
        `capacity_tokens` over all of them; None where there is neither."""
        if isinstance(self.draft, HeadWeights):
            assert self.alignment is not None, "a draft is lined up"
            opened = None if bitwise else self.draft.open_beside(native_of(target), capacity_tokens)
            return None if opened is None else (opened, self.alignment)
        if self._drafts_with_head(bitwise):
            vocabulary = target.vocabulary
            return HeadModel(native_of(target), capacity_tokens), align(vocabulary, vocabulary)
        if self.draft is None or self.alignment is None:
            return None
        size = target.max_sequences
        length = context_length or min(target.context_length, self.draft.trained_context)
        capacity = max(length, min(capacity_tokens, length * size))
        return self.draft.open(length, max_sequences=size, capacity_tokens=capacity), self.alignment


def _policy_for(
    target: Loaded,
    draft: tuple[GgufModel, Alignment] | None,
    policy: Policy | AutoSettings | None,
    measuring: Measuring | None,
    notices: list[str],
) -> tuple[Policy | None, Learned | None]:
    """The policy in force and, where it is the automatic one, what is known about the pair. A target that
    cannot rewind is decoded plainly."""
    if policy is not None and not isinstance(policy, AutoSettings):
        return policy, None
    if not target.rewinding.is_possible:
        return None, None
    if draft is None and policy is not None and not policy.free:
        notices.append("no draft model is loaded, and the policy asks for one alone: nothing is drafted")
    learned = Learned(policy or AutoSettings(), target, draft and draft[0], measuring)
    return learned.policy, learned
