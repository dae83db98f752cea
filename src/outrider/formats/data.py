"""What a client says about tools, and what a reader finds in an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    `parameters` is the JSON schema of its arguments, an object; empty: any object. A schema that cannot be
    enforced is an error where the tool is `strict`; otherwise what can be of it is, and a notice says so.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """The choice of one tool, which has to be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | Named


class ReasoningMarkers(NamedTuple):
    """How reasoning begins and ends."""

    opener: str
    closer: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text. `source` is who drafted it, here and in every event."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call has begun: the `index`-th of the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str
    source: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta
