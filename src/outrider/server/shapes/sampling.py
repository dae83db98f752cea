"""The fields that all endpoints of text share: sampling, speculation, and what clients send that means
nothing here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outrider.core.params import DraftSampling, FastForward, Rule
from outrider.server.shapes.base import WHOLE, Body, Many, Shape, explained, few

__all__ = ["Harmless", "PolicyName", "SamplingFields", "Speculation", "StreamOptions"]

PolicyName = Literal["auto", "lookup", "model", "fixed", "plain"]

Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]

_BIG = 2**31 - 1
_MAX_BIASES = 4_096
_MAX_METADATA = 64


class Speculation(Shape):
    """How this request is to be drafted for; what is absent stays as the server has it.

    None of these changes what the answer is drawn from, but `lenience` below 1: it accepts other tokens
    than plain decoding would, and the answer says so.
    """

    policy: PolicyName | None = Field(None, description="Who drafts; `plain`: nobody.")
    max_draft: Annotated[int, Field(ge=0, le=64), WHOLE] | None = Field(
        None, description="The most tokens that are drafted in one step."
    )
    fast_forward: FastForward | None = Field(None, description="What becomes of text that a grammar forces.")
    rule: Rule | None = Field(None, description="Which drafted tokens are kept.")
    draft_sampling: DraftSampling | None = None
    lenience: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Below 1: accept tokens up to 1 / lenience times as likely as the model has them."
    )
    show_sources: bool | None = Field(None, description="Tell, with every piece of the text, who drafted it.")


class StreamOptions(Shape):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Has no effect: nothing is obfuscated.")


class Harmless(Body):
    """Fields that clients send and that have nothing to act on here: accepted, without effect."""

    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA), few(_MAX_METADATA)] | None = None
    service_tier: Annotated[
        Literal["auto", "default"] | None,
        explained("there is one tier. Say auto or default, or leave it out"),
    ] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_prompt: Annotated[
        Literal[True] | None,
        explained("a prompt's beginning is always reused where it is kept. Say true, or leave it out"),
    ] = None


class SamplingFields(Shape):
    """How the next token is chosen: OpenAI's fields, and llama.cpp's samplers under its names."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=_BIG), WHOLE] | None = Field(None, description="0 or -1: off.")
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1_000)] | None = Field(None, description="0 or less: off.")
    dynatemp_range: Annotated[float, Field(ge=0, le=100)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0, le=100)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="vLLM's name of repeat_penalty."
    )
    repeat_last_n: Annotated[int, Field(ge=-1, le=_BIG), WHOLE] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, le=_BIG), WHOLE] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=_BIG), WHOLE] | None = None
    dry_sequence_breakers: Annotated[Many[StopText], Field(max_length=64)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MAX_BIASES), few(_MAX_BIASES)] | None = (
        Field(None, description="By token id; -100 bars a token.")
    )
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE] | None = Field(
        None, description="-1 draws a fresh one; the n-th of several answers has seed + n."
    )
    min_tokens: Annotated[int, Field(ge=0, le=_BIG), WHOLE] | None = None
    ignore_eos: bool | None = None
    stop: StopText | Annotated[Many[StopText], Field(max_length=32)] | None = None
    bitwise: bool | None = Field(
        None,
        description="True: the text of plain decoding bit for bit, whatever is drafted and whoever else "
        "asks; what is drawn is drawn by the seed-stable rule. An error where the server does not keep it.",
    )
    speculation: Speculation | None = None
