"""The requests of llama-server's own endpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider.server.protocol.base import WHOLE, Many, NumLogprobs, Shape
from outrider.server.protocol.requests import REFUSED, Text, TextRequest, Token

MAX_FIELDS = 64
_TEXT_ALONE = "this server reads text alone. Leave it out"
_Mixed = Annotated[Many[Token | Text], Field(min_length=1)]


class SlotRequest(Shape):
    """Which file of the server's folder a slot is saved to, or restored from."""

    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")] | None = None
    model: str | None = None


class LlamaFields(TextRequest):
    """What both endpoints for text have in common."""

    renamed: ClassVar = {"max_tokens": "n_predict", "n_cmpl": "n"}
    refused: ClassVar = {name: why for name, why in REFUSED.items() if name != "n_probs"} | {
        "post_sampling_probs": "probabilities are the model's, before any sampler. Leave it out",
        "lora": "adapters are chosen when the server is started (--lora). Leave it out",
        "multimodal_data": _TEXT_ALONE,
        "image_data": _TEXT_ALONE,
    }

    n_predict: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="-1: no limit but the server's. 0: the prompt is read, and kept."
    )
    n_probs: NumLogprobs | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[Many[str], Field(max_length=MAX_FIELDS)] | None = Field(
        None, description="What the answer is to have: fields, and those of objects as object/field."
    )
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="After so long the answer ends, if it has begun a new line. 0, -1: off."
    )
    t_max_prompt_ms: Any = Field(None, description="Accepted, without effect: a prompt is read whole.")
    n_indent: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        None, description="Not enforced; the answer's notices say so."
    )
    min_keep: Any = Field(None, description="Accepted, without effect: filters keep a token at least.")
    sse_ping_interval: Any = Field(None, description="Accepted, without effect: comments come after 15 s.")


class LlamaRequest(LlamaFields):
    """Texts to be continued as they stand: a text, tokens, both mixed, or a list of these."""

    prompt: Text | Annotated[Many[Token | Text | _Mixed], Field(min_length=1)]


class ExtraFile(Shape):
    """Text of another file."""

    text: str
    filename: str | None = None
    time: Any = Field(None, description="Accepted, without effect.")


class InfillRequest(LlamaFields):
    """A gap to be filled, between `input_prefix` and `input_suffix`. `prompt` is how its text begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Many[ExtraFile], Field(max_length=1_000)] | None = None
    prompt: str | None = None
