"""llama.cpp's `--spec-*` options that say together who drafts and how far: one of the policies here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.core.errors import SettingError
from outrider.core.schema import Setting

_MODELS = ("draft-simple", "draft-mtp", "draft-eagle3")
_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_NOT_RUN = ("draft-dflash", "draft-dspark")
_DEFAULT = "ngram-mod"
"""what --spec-default comes to"""

_LOOKUP_LENGTHS = {
    "--spec-ngram-mod-n-max": "ngram-mod",
    "--spec-ngram-simple-size-m": "ngram-simple",
    "--spec-ngram-map-k-size-m": "ngram-map-k",
    "--spec-ngram-map-k4v-size-m": "ngram-map-k4v",
}
"""Options for the most tokens that a lookup drafts, and the type that each belongs to."""
_SAMPLING = {"greedy": "greedy", "probabilistic": "sampled"}

_MODEL_LENGTHS = ("draft_min", "draft_p_min")
"""Settings of drafts of fixed lengths, which llama.cpp has for draft models alone."""
_MODEL_CAP = "--spec-draft-n-max"

Words = list[tuple[str, list[str]]]
"""Options with their values, in order."""


def drafting_options(
    asked: Sequence[tuple[str, str]], given: Words, settings: Mapping[str, Setting]
) -> tuple[Words, list[str]]:
    """What a command line says here of who drafts, and a notice for each option that changes nothing.

    Args:
        asked: llama.cpp's options of this kind, each with its value.
        given: The command's own options that are on the line.
        settings: Those of the command.

    Returns:
        The options of the whole line.

    Raises:
        SettingError: For a type that is not known or not run, and where --policy is given too.
    """
    types = _types(asked)
    added: Words = []
    for name, value in asked:
        if name == "--spec-draft-sampling":
            if value not in _SAMPLING:
                raise SettingError(
                    f"{name} {value}", "it is not known", f"Choose one of {', '.join(_SAMPLING)}."
                )
            added.append(("--draft-sampling", [_SAMPLING[value]]))
    if types and (policy := _given("policy", given, settings)):
        raise SettingError("--spec-type", f"{policy} says who drafts, too", "Give one of them.")
    with_models = any(name in _MODELS for name in types)
    with_lookups = any(name in _LOOKUPS for name in types)
    notices: list[str] = []
    if types and not with_models:
        given, notices = _without_lengths(given, settings)
    added += _policy(given, settings, with_models=with_models, with_lookups=with_lookups) if types else []
    lengths = [(name, value) for name, value in asked if name in _LOOKUP_LENGTHS]
    counted = [value for name, value in lengths if _LOOKUP_LENGTHS[name] in types]
    is_cap = not with_models and not _given("draft_max", given, settings)
    if is_cap and counted:
        added.append(("--draft-max", [max(counted, key=lambda text: (len(text), text))]))
    notices += [
        f"{name} changes nothing here: how far a lookup drafts is chosen at every step."
        for name, _ in lengths
        if not is_cap or _LOOKUP_LENGTHS[name] not in types
    ]
    return [*added, *given], notices


def _types(asked: Sequence[tuple[str, str]]) -> list[str]:
    """All types that are named, or none where nothing says so."""
    lists = [value for name, value in asked if name == "--spec-type"]
    types = [name for names in lists for name in names.split(",")]
    for name in types:
        if name in _NOT_RUN:
            why = "files of this kind are not run here"
            raise SettingError(f"--spec-type {name}", why, "Leave it out; -md takes a draft model.")
        if name not in ("none", *_MODELS, *_LOOKUPS):
            known = ", ".join(("none", *_MODELS, *_LOOKUPS))
            raise SettingError(f"--spec-type {name}", "it is not known", f"Choose among {known}.")
    return types + [_DEFAULT for name, _ in asked if name == "--spec-default"]


def _policy(given: Words, settings: Mapping[str, Setting], *, with_models: bool, with_lookups: bool) -> Words:
    """Who drafts. Lengths that are given for a draft model are kept, and are those of every draft then."""
    if not with_models:
        return [("--policy", ["lookup" if with_lookups else "plain"])]
    if any(_given(name, given, settings) for name in _MODEL_LENGTHS):
        return [("--policy", ["fixed"]), *([] if with_lookups else [("--no-lookup", [])])]
    return [("--policy", ["auto" if with_lookups else "model"])]


def _without_lengths(given: Words, settings: Mapping[str, Setting]) -> tuple[Words, list[str]]:
    """The options without those that llama.cpp has for a draft model, where none is to draft."""
    flags = [_MODEL_CAP, *(flag for name in _MODEL_LENGTHS for flag in settings[name].flags)]
    left_out = [name for name, _ in given if name.partition("=")[0] in flags]
    kept = [word for word in given if word[0] not in left_out]
    return kept, [f"{name} changes nothing here: --spec-type names no draft model." for name in left_out]


def _given(setting: str, given: Words, settings: Mapping[str, Setting]) -> str:
    """What a setting is called on the line; empty where it is not there."""
    flags = settings[setting].flags
    return next((name for name, _ in given if name.partition("=")[0] in flags), "")
