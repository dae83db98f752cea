"""A model file's weights, with load options that this machine survives and that suit it; its template."""

from __future__ import annotations

from pathlib import Path

from outrider.backends.llama_cpp import LoadOptions, Weights, build_id, check_build
from outrider.chat import ChatTemplate
from outrider.models.cache import cache_dir
from outrider.models.gguf import ModelCard
from outrider.tuning import describe_tuned, tuned_options

__all__ = ["load_weights", "template_of", "why_no_draft"]


def why_no_draft(target: Weights, draft: Weights) -> str | None:
    """Why this draft model is of no use to this target; None when it is."""
    if target.rewind == "none":
        return f"{draft.name} is not used: {target.name} cannot take rejected drafts back"
    if draft.rewind == "none":
        return (
            f"{draft.name} cannot forget tokens (recurrent or hybrid state), so rejected drafts "
            "could not be taken back: it is not used"
        )
    return None


def load_weights(
    path: Path, card: ModelCard, options: LoadOptions, notices: list[str], *, draft: bool = False
) -> Weights:
    """Load weights with options that this build of llama.cpp survives, tuned ones where there are."""
    if tuned := tuned_options(path, options, draft=draft):
        notices.append(f"{path.stem} {describe_tuned(options, tuned)}")
        options = tuned
    options, notice = check_build(
        path,
        options,
        build=build_id(),
        model_kind=f"{card.architecture} {card.quantization}",
        memory=cache_dir() / "builds.json",
    )
    if notice and notice not in notices:
        notices.append(notice)
    return Weights(path, options)


def template_of(weights: Weights, card: ModelCard) -> ChatTemplate | None:
    """The model's own chat template; None for a base model."""
    if not card.chat_template:
        return None
    vocabulary = weights.vocabulary
    bos, eos = (
        "" if token is None else vocabulary.spelling(token).decode("utf-8", errors="replace")
        for token in (vocabulary.bos, vocabulary.eos)
    )
    return ChatTemplate(card.chat_template, bos=bos, eos=eos)
