"""Prompts of a model that fills in the middle, as long as the context has room for."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.infill import Infill
from outrider.server.errors import invalid_field
from outrider.server.service import Service

_REPOSITORY = "repository\n"
_FILE = "filename\n"
"""what both are called: clients give neither name"""
_MIN_ANSWER = 16
"""Tokens that are left for an answer of no certain length, at least; else an eighth of the context."""


def infill_prompt(
    service: Service,
    before: str,
    after: str,
    *,
    field: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> tuple[int, ...]:
    """The tokens of a prompt for what is between two texts, after `begun`; other `files` (name and text) come
    first. Of a text that is too long the part next to the gap is taken, of files the last ones. Raises
    Problem in terms of `field` where the model cannot do it, or nothing has room."""
    tokens = service.infill
    if tokens is None:
        why = f"{service.name} has no tokens for filling in a middle. Load a model that has, or leave it out."
        raise invalid_field(field, why, code="unsupported")
    start = service.vocabulary.tokenize("", add_special=True)[:1]
    middle = _tokens(service, begun)
    most = min(service.context_tokens - 1, service.settings.max_prompt_tokens or service.context_tokens)
    answer = max_tokens or max(service.context_tokens // 8, _MIN_ANSWER)
    room = min(most, service.context_tokens - answer) - len(start) - len(middle) - 3
    if room < 1:
        return service.check_prompt([0] * (service.context_tokens + max(1 - room, 0)), field)
    suffix = _tokens(service, after[: service.max_characters])
    prefix = _tokens(service, before[-service.max_characters :] if before else "")
    suffix = suffix[: max(room // 4, room - len(prefix))]
    prefix = prefix[len(prefix) - min(len(prefix), room - len(suffix)) :]
    extra = _extra(service, tokens, files, room - len(prefix) - len(suffix))
    prompt = tokens.prompt(prefix, suffix, suffix_first=service.settings.spm_infill)
    return service.check_prompt([*start, *extra, *prompt, *middle], field)


def _extra(service: Service, tokens: Infill, files: Sequence[tuple[str, str]], room: int) -> list[int]:
    """The last of the files that have room, each whole, and the name of the one that is written."""
    if not files:
        return []
    head = [] if tokens.repository is None else [tokens.repository, *_tokens(service, _REPOSITORY)]
    last = [] if tokens.file is None else [tokens.file, *_tokens(service, _FILE)]
    kept: list[list[int]] = []
    room -= len(head) + len(last)
    for name, text in reversed(files):
        mark = [] if tokens.file is None else [tokens.file, *_tokens(service, f"{name}\n")]
        part = [*mark, *_tokens(service, text[: service.max_characters])]
        room -= len(part)
        if room < 0:
            break
        kept.insert(0, part)
    return [*head, *(token for part in kept for token in part), *last] if kept else []


def _tokens(service: Service, text: str) -> list[int]:
    """The tokens of a client's text, whatever it spells."""
    return service.vocabulary.tokenize(text, add_special=False) if text else []
