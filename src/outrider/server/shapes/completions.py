"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from outrider.server.shapes.base import WHOLE, Many, explained
from outrider.server.shapes.chat import refused_everywhere
from outrider.server.shapes.grammars import GrammarFields
from outrider.server.shapes.messages import Prediction
from outrider.server.shapes.sampling import Harmless, SamplingFields, StreamOptions

__all__ = ["CompletionRequest", "Tokens"]

Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[Many[Token], Field(min_length=1)]


class CompletionRequest(SamplingFields, GrammarFields, Harmless):
    """Texts to be continued as they stand, without a chat template."""

    refused: ClassVar = refused_everywhere | {
        "suffix": "text is not filled in between two others. Leave it out",
        "prompt_embeds": "prompts are text or tokens. Leave it out",
        "use_beam_search": "beam search is not supported. Leave it out",
    }

    prompt: (
        Text
        | Tokens
        | Annotated[Many[Text], Field(min_length=1)]
        | Annotated[Many[Tokens], Field(min_length=1)]
    )
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(
        None, description="Only as many as `n`: all that are generated are returned."
    )
    echo: bool | None = Field(None, description="The answer begins with the prompt; not with logprobs.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="16 unless the server is set otherwise, as OpenAI's."
    )
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    prediction: Prediction | None = None
    store: Annotated[
        Literal[False] | None, explained("nothing is stored here. Say false, or leave it out")
    ] = None
