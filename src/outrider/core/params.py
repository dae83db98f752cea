"""The parameters of sampling and verification, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from outrider.core.errors import SettingError

GrammarKind = str
"""A name in `constraints.sources.KINDS`."""


def grammar_kind(text: str) -> GrammarKind:
    """GBNF, whose rules have a `::=`, or llguidance's Lark."""
    return "gbnf" if "::=" in text else "lark"


JsonStyle = Literal["spaced", "compact"]
"""White space in constrained JSON: `, ` and `: `, or none."""

FastForward = Literal["exact", "canonical", "off"]


def sampler(default: float, help: str, names: str = "", **bounds: float) -> Any:
    """A sampler's parameter, with llama.cpp's default: command line, server and API document are made of it.
    `help` and `names` are as in `core.schema.setting`, the bounds (ge, gt, le) as in pydantic."""
    return field(default=default, metadata={"help": help, "names": names, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen: llama.cpp's samplers, in its order, with its defaults.

    Settings and API requests are made from these fields. Windows count tokens, prompt included. `logit_bias`
    adds to single tokens' logits; `banned` tokens are never chosen. Without a `seed` a fresh one is drawn.
    Raises SettingError for a value out of range.
    """

    temperature: float = sampler(0.8, "Temperature; 0 is greedy.", "--temp --temperature T", ge=0)
    dynatemp_range: float = sampler(
        0.0, "Vary the temperature by ±R with the entropy; 0: constant.", "R", ge=0
    )
    dynatemp_exponent: float = sampler(1.0, "Exponent of that variation.", "--dynatemp-exp E")
    top_k: int = sampler(40, "Keep the K most likely tokens; 0 or -1: all.", "K", ge=-1)
    top_p: float = sampler(0.95, "Keep the nucleus of mass P; 1: all.", "P", ge=0, le=1)
    min_p: float = sampler(
        0.05, "Keep tokens of at least P times the top's probability; 0: all.", "P", ge=0, le=1
    )
    typical_p: float = sampler(
        1.0, "Keep typical tokens of mass P; 1: all.", "--typical --typical-p P", gt=0, le=1
    )
    top_n_sigma: float = sampler(
        0.0,
        "Keep logits within N standard deviations of the top; 0 or -1: all.",
        "--top-n-sigma --top-nsigma N",
        ge=-1,
    )
    xtc_probability: float = sampler(0.0, "How often XTC drops top tokens; 0: never.", "P", ge=0, le=1)
    xtc_threshold: float = sampler(0.1, "XTC: the probability of a top token.", "P", ge=0, le=1)
    repeat_penalty: float = sampler(1.0, "Divide the logits of repeated tokens by X; 1: off.", "X", gt=0)
    presence_penalty: float = sampler(0.0, "Subtract X from the logits of repeated tokens.", "X")
    frequency_penalty: float = sampler(0.0, "Subtract X for each repetition.", "X")
    repeat_last_n: int = sampler(64, "Penalise repetitions in the last N tokens; 0: off, -1: all.", ge=-1)
    dry_multiplier: float = sampler(0.0, "DRY: penalise repeated sequences; 0: off.", "X", ge=0)
    dry_base: float = sampler(1.75, "DRY: growth of the penalty per token.", "X", ge=1)
    dry_allowed_length: int = sampler(2, "DRY: repetitions of up to N tokens are free.", ge=0)
    dry_penalty_last_n: int = sampler(64, "DRY: look at the last N tokens; 0: off, -1: all.", ge=-1)
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    min_tokens: int = sampler(0, "No end token before N tokens.", ge=0)
    seed: int | None = None

    def __post_init__(self) -> None:
        for given in fields(self):
            if given.metadata:
                _check_bounds(given.name, getattr(self, given.name), given.metadata["bounds"])
        for token, bias in self.logit_bias:
            is_number = not math.isnan(bias) and bias < math.inf
            _require(is_number, "logit_bias", f"{bias} for token {token}", "be a number or -inf")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "be 0 or more, or absent")

    @property
    def is_greedy(self) -> bool:
        """Whether the same logits always give the same token."""
        xtc = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return self.top_k == 1 or (self.temperature == 0 and self.dynatemp_range == 0 and not xtc)


_IN_WORDS = {"ge": "{:g} or more", "gt": "more than {:g}", "le": "{:g} or less"}


def _check_bounds(name: str, value: float, bounds: Mapping[str, float]) -> None:
    least, above = bounds.get("ge", -math.inf), bounds.get("gt", -math.inf)
    if not (math.isfinite(value) and least <= value <= bounds.get("le", math.inf) and value > above):
        words = " and ".join(_IN_WORDS[kind].format(bound) for kind, bound in bounds.items())
        raise SettingError(name, f"{value} cannot be used", f"It must be {words or 'a finite number'}.")


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise SettingError(name, f"{value} cannot be used", f"It must {rule}.")


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(name, f"{value!r} is not known", f"Choose one of {', '.join(known)}.")


Rule = Literal["auto", "token", "block", "stable"]
"""Which drafted tokens are accepted (`outrider.verify`). "token": one decision per token. "block": one per
draft, which never accepts fewer. "stable": the text depends on the seed, not on drafts. "auto": stable for
requests with a seed, otherwise block."""

DraftSampling = Literal["auto", "greedy", "sampled"]
"""A draft model's tokens: its most likely ones, sampled ones, or whichever are accepted more."""

NO_DRAFT = "none"
"""As the draft's reference: no draft model, also not the one that comes with the default."""

PolicyName = Literal["auto", "lookup", "model", "fixed", "plain"]
"""Who drafts, and how far: whatever pays; the same without the draft model, or without lookups; fixed
lengths; nobody."""

DraftingPolicy = Literal["auto", "lookup", "model", "fixed"]
"""A request's own policy; `draft_max` 0 decodes plainly."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A request's limits on the engine's policy: who may draft, and at most `draft_max` tokens a step. Raises
    SettingError for a value out of range."""

    policy: DraftingPolicy = "auto"
    draft_max: int | None = None

    def __post_init__(self) -> None:
        _require_known("drafting", self.policy, get_args(DraftingPolicy))
        if self.draft_max is not None:
            _require(self.draft_max >= 0, "draft max", self.draft_max, "be 0 (off) or more")


@dataclass(frozen=True, slots=True)
class Verification:
    """How drafts are verified. Raises SettingError."""

    rule: Rule = "auto"
    draft_sampling: DraftSampling = "auto"

    def __post_init__(self) -> None:
        _require_known("rule", self.rule, get_args(Rule))
        _require_known("draft sampling", self.draft_sampling, get_args(DraftSampling))

    def keeps_text(self, *, greedy: bool) -> bool:
        """Whether the text depends only on the logits and the seed."""
        return greedy or self.rule == "stable"

    def seeded(self, sampling: SamplingParams) -> Verification:
        """These settings for a request: with a seed its text repeats, unless the chosen rule prevents it."""
        if self.rule != "auto" or sampling.seed is None or sampling.is_greedy:
            return self
        return replace(self, rule="stable")

    def unrepeatable(self, sampling: SamplingParams) -> str | None:
        """Why the text may not repeat despite a seed; None if it does, or there is no seed."""
        verification = self.seeded(sampling)
        if sampling.seed is None or verification.keeps_text(greedy=sampling.is_greedy):
            return None
        return f"under the rule {self.rule} the text depends on the drafts, too, and may not repeat"

    def bitwise(self, *, greedy: bool) -> Verification:
        """These settings for bit-equal text, which samples by the stable rule. Raises SettingError if they
        ask for another one."""
        if greedy or self.rule == "stable":
            return self
        if self.rule != "auto":
            why = f"under {self.rule} samples depend on the drafts, which bitwise excludes"
            raise SettingError("rule", why, "Choose --rule stable, or leave it out.")
        return replace(self, rule="stable")
