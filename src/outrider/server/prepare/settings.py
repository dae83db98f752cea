"""Sampling, speculation and limits of a request, in the engine's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.params import Drafting, FastForward, SamplingParams, Verification
from outrider.server.problems import problem_of, wrong
from outrider.server.shapes.sampling import SamplingFields, Speculation

__all__ = [
    "OPENAI_DEFAULTS",
    "Limits",
    "drafting_of",
    "fast_forward_of",
    "sampling_of",
    "stop_of",
    "verification_of",
]

OPENAI_DEFAULTS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
"""What is drawn from where neither the request nor the server says anything: the model's own distribution."""

_MIN_TEMPERATURE = 1e-4
"""Below it one token has all the weight: decoding is greedy, and no logit can become too large."""
_MIN_TOP_P = 1e-6
"""Keeps the most likely token alone, as 0 is meant to."""
_BARRED = -100.0
"""A bias that OpenAI's clients bar a token with."""
_NAMES = {
    "repetition_penalty": "repeat_penalty",
    "dry_penalty_last_n": "dry_last_n",
    "dry_sequence_breakers": "dry_breakers",
}
"""Fields that the engine has under another name."""
_SAMPLERS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "dynatemp_range"),
    *("dynatemp_exponent", "xtc_probability", "xtc_threshold", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "repetition_penalty", "repeat_last_n", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "logit_bias", "min_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for; None: no limit of its own. Tokens, bytes and numbers of choices."""

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    """of an answer; also where the request names none"""
    default_max_tokens: int | None = None
    """of an answer whose request names none"""
    max_choices: int = 8
    max_schema_bytes: int = 256 * 1024

    def answer_tokens(self, asked: int | None, default: int | None, field: str) -> int | None:
        """How long an answer may get. Raises Problem where more was asked for than is allowed."""
        if asked is not None and self.max_tokens is not None and asked > self.max_tokens:
            why = f"{asked} are more than this server gives, which is {self.max_tokens}. Ask for fewer."
            raise wrong(field, why)
        if asked is not None:
            return asked
        known = [n for n in (self.default_max_tokens or default, self.max_tokens) if n is not None]
        return min(known, default=None)

    def check_schema(self, size: int, field: str) -> None:
        """Raises Problem for a schema or grammar of so many bytes, if it is too large."""
        if size > self.max_schema_bytes:
            why = f"it has {size:,} bytes, and {self.max_schema_bytes:,} are the most. Shorten it."
            raise wrong(field, why, code="grammar_too_large")

    def check_choices(self, number: int, field: str) -> int:
        """The number of choices, if it is allowed. Raises Problem."""
        if number > self.max_choices:
            raise wrong(
                field, f"{number} choices are more than the {self.max_choices} of this server. Ask for fewer."
            )
        return number


def sampling_of(fields: SamplingFields, defaults: SamplingParams) -> SamplingParams:
    """How the next token is chosen. Raises Problem."""
    if fields.repeat_penalty is not None and fields.repetition_penalty is not None:
        raise wrong("repetition_penalty", "it is another name of repeat_penalty. Leave one of them out.")
    given: dict[str, Any] = {}
    for name in _SAMPLERS:
        value = getattr(fields, name)
        if value is not None:
            given[_NAMES.get(name, name)] = _READ[name](value) if name in _READ else value
    if fields.seed is not None and fields.seed >= 0:
        given["seed"] = fields.seed
    return replace(defaults, **given)


def _biases(asked: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), bias if bias > _BARRED else float("-inf")) for token, bias in asked.items())


_READ: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda value: value if value >= _MIN_TEMPERATURE else 0.0,
    "top_p": lambda value: max(value, _MIN_TOP_P),
    "top_k": lambda value: max(value, 0),
    "top_n_sigma": lambda value: max(value, 0.0),
    "dry_sequence_breakers": tuple,
    "logit_bias": _biases,
}
"""Fields whose values mean the same in other numbers."""


def stop_of(fields: SamplingFields) -> tuple[str, ...]:
    """Texts that end the answer."""
    if isinstance(fields.stop, str):
        return (fields.stop,)
    return tuple(fields.stop or ())


def verification_of(
    fields: SamplingFields, defaults: Verification, sampling: SamplingParams, *, bitwise: bool
) -> Verification:
    """How drafts are checked; `bitwise`: this server can give equal bits. Raises Problem."""
    verification = _verification(fields.speculation, defaults)
    if not fields.bitwise:
        return verification
    if not bitwise:
        why = "this server does not give equal bits. Start it with --bitwise, or leave it out."
        raise wrong("bitwise", why, code="unsupported")
    try:
        return verification.bitwise(greedy=sampling.is_greedy)
    except SettingError as error:
        raise problem_of(error, "bitwise") from None


def _verification(speculation: Speculation | None, defaults: Verification) -> Verification:
    if speculation is None:
        return defaults
    asked = {
        "rule": speculation.rule,
        "draft_sampling": speculation.draft_sampling,
        "lenience": speculation.lenience,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    try:
        return replace(defaults, **given)
    except SettingError as error:
        raise problem_of(error, "speculation") from None


def drafting_of(speculation: Speculation | None, *, has_model: bool) -> Drafting | None:
    """Who drafts; None: nobody. Raises Problem for a draft model that is not there."""
    policy = (speculation and speculation.policy) or "auto"
    longest = speculation.max_draft if speculation else None
    if policy == "model" and not has_model:
        why = "no draft model is loaded. Say auto or lookup, or start the server with one."
        raise wrong("speculation.policy", why)
    if policy == "plain":
        return None
    return Drafting(policy, longest)


def fast_forward_of(speculation: Speculation | None) -> FastForward:
    """What becomes of text that a grammar forces."""
    return (speculation and speculation.fast_forward) or "exact"
