"""What an answer says of its cost: OpenAI's usage, and the `outrider` object."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Account", "Answer", "Usage"]


class Answer(BaseModel):
    """A JSON object of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptDetails(Answer):
    """`cached_tokens`: those whose KV was kept from earlier requests."""

    cached_tokens: int
    audio_tokens: int


class CompletionDetails(Answer):
    """Of all drafts, whoever made them: what stood, and what did not."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DrafterAccount(Answer):
    """What one drafter offered, how much of it stood, and the target calls that this saved."""

    drafted_tokens: int
    accepted_tokens: int
    calls_saved: int


class Speedup(Answer):
    """An estimate of plain decoding's time over this answer's, with an interval."""

    speedup: float
    low: float
    high: float


class ChoiceAccount(Answer):
    """What speculation did for one choice."""

    target_calls: int
    draft_calls: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    tokens_per_target_call: float
    drafters: dict[str, DrafterAccount]
    reused_prompt_tokens: int
    times: dict[str, float]
    estimated_speedup: Speedup | None
    estimated_speedup_unknown: str | None


class Account(ChoiceAccount):
    """What speculation did. Of several choices counts add up, and of times the longest holds."""

    policy: str
    rule: str
    lossy: bool
    bitwise: bool
    notices: list[str]
    choices: list[ChoiceAccount] | None = None
