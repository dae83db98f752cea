"""What a user may set about sampling and verification, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from outrider.core.errors import SettingError

GrammarKind = str
"""A name in `constraints.sources.KINDS`."""


def grammar_kind(text: str) -> GrammarKind:
    """The kind of a grammar's text: GBNF, each rule of which has a `::=`, or llguidance's Lark."""
    return "gbnf" if "::=" in text else "lark"


JsonStyle = Literal["spaced", "compact", "pretty", "flexible"]
"""The white space of constrained JSON: `, ` and `: `; none; line breaks with indentation; as the model likes,
within bounds."""

FastForward = Literal["exact", "canonical", "off"]


_ABOVE_0 = math.nextafter(0.0, 1.0)


def _number(default: float, least: float, greatest: float, rule: str, name: str = "") -> Any:
    """A field of finite numbers from `least` to `greatest`, which is the `rule` in words; `name` is for
    people, where it is not the field's own."""
    return field(default=default, metadata={"range": (least, greatest), "rule": rule, "name": name})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen: llama.cpp's samplers, in its order, with its defaults.

    Temperature 0 is greedy. A neutral value switches a sampler off: 0 for `dynatemp_range`,
    `top_k`, `min_p`, `top_n_sigma`, `xtc_probability`, the presence and frequency penalties and
    `dry_multiplier`; 1 for `top_p`, `typical_p` and `repeat_penalty`. `repeat_last_n` and
    `dry_last_n` are windows in tokens, prompt included (0: off, -1: everything). `logit_bias`
    adds to single tokens' logits; `banned` tokens are never chosen, end tokens not before
    `min_tokens` were generated. `seed` None draws a fresh one.

    Raises SettingError for a value out of range.
    """

    temperature: float = _number(0.8, 0.0, math.inf, "be 0 or more")
    dynatemp_range: float = _number(0.0, 0.0, math.inf, "be 0 (off) or more")
    dynatemp_exponent: float = _number(1.0, -math.inf, math.inf, "be a number")
    top_k: int = _number(40, 0, math.inf, "be 0 (off) or more", "top-k")
    top_p: float = _number(0.95, _ABOVE_0, 1.0, "lie in (0, 1]; 1 is off", "top-p")
    min_p: float = _number(0.05, 0.0, 1.0, "lie in [0, 1]; 0 is off", "min-p")
    typical_p: float = _number(1.0, _ABOVE_0, 1.0, "lie in (0, 1]; 1 is off", "typical")
    top_n_sigma: float = _number(0.0, 0.0, math.inf, "be 0 (off) or more", "top-n-sigma")
    xtc_probability: float = _number(0.0, 0.0, 1.0, "lie in [0, 1]")
    xtc_threshold: float = _number(0.1, 0.0, 1.0, "lie in [0, 1]")
    repeat_penalty: float = _number(1.0, _ABOVE_0, math.inf, "be more than 0; 1 is off")
    presence_penalty: float = _number(0.0, -math.inf, math.inf, "be a number; 0 is off")
    frequency_penalty: float = _number(0.0, -math.inf, math.inf, "be a number; 0 is off")
    repeat_last_n: int = _number(64, -1, math.inf, "be a number of tokens, 0 (off) or -1 (everything)")
    dry_multiplier: float = _number(0.0, 0.0, math.inf, "be 0 (off) or more")
    dry_base: float = _number(1.75, 1.0, math.inf, "be 1 or more")
    dry_allowed_length: int = _number(2, 0, math.inf, "be 0 or more")
    dry_last_n: int = _number(64, -1, math.inf, "be a number of tokens, 0 (off) or -1 (everything)")
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    min_tokens: int = _number(0, 0, math.inf, "be 0 or more")
    seed: int | None = None

    def __post_init__(self) -> None:
        for given in fields(self):
            if given.metadata:
                value, (least, greatest) = getattr(self, given.name), given.metadata["range"]
                name = given.metadata["name"] or given.name.replace("_", " ")
                fits = least <= value <= greatest and abs(value) != math.inf
                _require(fits, name, value, given.metadata["rule"])
        for token, bias in self.logit_bias:
            is_number = not math.isnan(bias) and bias < math.inf
            _require(is_number, "logit bias", f"{bias} for token {token}", "be a number or -inf")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "be 0 or more, or absent")

    @property
    def is_greedy(self) -> bool:
        """Whether the same logits always give the same token: nothing is left to chance."""
        xtc = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return self.top_k == 1 or (self.temperature == 0 and self.dynatemp_range == 0 and not xtc)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise SettingError(name, f"{value} cannot be used", f"It must {rule}.")


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(name, f"{value!r} is not known", f"Choose one of {', '.join(known)}.")


Rule = Literal["auto", "token", "block", "stable"]
"""Which drafted tokens are kept (`outrider.verify`). "auto": block verification of whichever kind
of draft is measured to be accepted more. "token": one decision for each token. "block": one for
the whole draft, never fewer tokens. "stable": the text depends on the seed alone, not on drafts."""

DraftSampling = Literal["auto", "greedy", "sampled"]
"""A draft model's tokens: its most likely ones, sampled from its distribution, or what is accepted more."""


DraftingPolicy = Literal["auto", "lookup", "model", "fixed"]
"""Who drafts for a request, and how far: what pays; the same without the draft model, or without lookups;
drafts of a fixed length."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How one request is drafted for, where it is not to be as the engine's policy does by itself.

    `draft_max` caps the drafted tokens of a step, None leaves them to the policy.

    Raises SettingError for a value out of range.
    """

    policy: DraftingPolicy = "auto"
    draft_max: int | None = None

    def __post_init__(self) -> None:
        _require_known("drafting", self.policy, get_args(DraftingPolicy))
        if self.draft_max is not None:
            _require(self.draft_max >= 0, "draft max", self.draft_max, "be 0 (off) or more")


@dataclass(frozen=True, slots=True)
class Verification:
    """How drafts are checked.

    `lenience` below 1 accepts tokens up to 1 / lenience times as likely as the target has them:
    more tokens, other texts.

    Raises SettingError for a value out of range, or where two of them exclude each other.
    """

    rule: Rule = "auto"
    draft_sampling: DraftSampling = "auto"
    lenience: float = 1.0

    def __post_init__(self) -> None:
        _require_known("rule", self.rule, get_args(Rule))
        _require_known("draft sampling", self.draft_sampling, get_args(DraftSampling))
        _require(0 < self.lenience <= 1, "lenience", self.lenience, "lie in (0, 1]; 1 changes nothing")
        if self.lenience < 1 and self.rule not in ("auto", "token"):
            raise SettingError(
                "lenience", f"it is defined for the token rule, not for {self.rule}", "Choose --rule token."
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the output may differ from plain decoding's."""
        return self.lenience < 1

    def keeps_text(self, *, greedy: bool) -> bool:
        """Whether a text depends on the logits and the seed alone, whatever is drafted."""
        return not self.is_lossy and (greedy or self.rule == "stable")

    def bitwise(self, *, greedy: bool) -> Verification:
        """These settings where the text is to depend on nothing else: what is drawn is drawn by the
        seed-stable rule. Raises SettingError where they ask for another."""
        if self.is_lossy:
            raise SettingError("lenience", "it changes the text, bitwise keeps it", "Choose one of them.")
        if greedy or self.rule == "stable":
            return self
        if self.rule != "auto":
            why = f"under it what is drawn depends on drafts, under bitwise it does not ({self.rule})"
            raise SettingError("rule", why, "Choose --rule stable, or leave it out.")
        return replace(self, rule="stable")
