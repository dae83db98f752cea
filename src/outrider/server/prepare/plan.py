"""What one HTTP request asks of the engine, and how its answers are to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.core.data import Request
from outrider.core.errors import InputError
from outrider.formats import Reader
from outrider.server.problems import problem_of
from outrider.server.service import Service
from outrider.server.shapes.messages import Prediction, text_of

__all__ = ["Plan", "choices_of", "is_bitwise", "policy_of", "prediction_of"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests, one for each choice, in the order of their indices.

    `policy` is who drafts, by name. `bitwise`: the texts are those of plain decoding, bit for bit.
    `notices` are lines that belong into the answer. `reader` makes what reads a choice's text; None: it is
    content from the first character to the last. `lead` is the text that each choice's begins with (an
    echoed prompt).
    """

    requests: tuple[Request, ...]
    policy: str
    notices: tuple[str, ...] = ()
    reader: Callable[[], Reader] | None = None
    lead: tuple[str, ...] = ()
    choices_per_prompt: int = 1
    show_sources: bool = False
    bitwise: bool = False


def choices_of(request: Request, number: int) -> tuple[Request, ...]:
    """The same request so many times, with seeds that follow each other where there is one."""
    seed = request.sampling.seed
    if seed is None:
        return (request,) * number
    return tuple(replace(request, sampling=replace(request.sampling, seed=seed + i)) for i in range(number))


def policy_of(service: Service, request: Request) -> str:
    """Who drafts for a request, by name."""
    if not request.speculate:
        return "plain"
    policy = request.drafting.policy
    return service.policy_name if policy == "auto" else policy


def is_bitwise(service: Service, request: Request) -> bool:
    """Whether a request's text is that of plain decoding, bit for bit."""
    keeps_text = request.verification.keeps_text(greedy=request.sampling.is_greedy)
    return service.session.bitwise and (keeps_text or not request.speculate)


def prediction_of(service: Service, asked: Prediction | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens that the answer is expected to be like, and notices. Raises Problem."""
    if asked is None:
        return (), ()
    try:
        return service.predicted(text_of(asked.content))
    except InputError as error:
        raise problem_of(error, "prediction") from None
