"""An answer of the target's, and what each draft model offers at every position of it.

As long as a draft is accepted, what a draft model offers next depends on the target's text alone, so its
most likely token after every prefix of the answer says what any draft would have been worth. After a
wrong token the draft goes on by itself: `departures` keep those tokens, for their confidence decides
when a policy gives up. What lookups offer needs no recording: they are run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from outrider.core.data import FinishReason
from outrider.core.errors import InputError
from outrider.core.files import write_whole

SCHEMA = "outrider.recording/1"


@dataclass(frozen=True, slots=True)
class Offers:
    """A draft model's most likely token at each position of an answer, and its confidence in it.

    `departures[i]` are the tokens and confidences that it would go on with after its token at position
    i, where that is not the target's.
    """

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    departures: Mapping[int, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, the target's answer to it (token ids both), and the offers by drafter's name."""

    id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    offers: Mapping[str, Offers]


def as_json(recording: Recording) -> dict[str, Any]:
    """A recording as plain data."""
    return {"kind": "recording", "schema": SCHEMA, **asdict(recording)}


def from_json(data: Mapping[str, Any]) -> Recording:
    """The recording that `as_json` made plain data of. Raises KeyError, TypeError or ValueError."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    prompt, tokens = tuple(map(int, data["prompt"])), tuple(map(int, data["tokens"]))
    offers = {name: _offers(known, len(tokens)) for name, known in data["offers"].items()}
    reason = data["finish_reason"]
    if not prompt or reason not in get_args(FinishReason):
        raise ValueError("it needs a prompt and the reason why the answer ended")
    return Recording(str(data["id"]), str(data["category"]), prompt, tokens, reason, offers)


def _offers(data: Mapping[str, Any], length: int) -> Offers:
    tokens = tuple(map(int, data["tokens"]))
    confidence = tuple(map(float, data["confidence"]))
    if not len(tokens) == len(confidence) == length:
        raise ValueError("an offer for each token of the answer is needed")
    if not all(0 < p <= 1 for p in confidence):
        raise ValueError("a confidence is no probability")
    departures = {
        int(at): tuple((int(token), float(p)) for token, p in path) for at, path in data["departures"].items()
    }
    return Offers(tokens, confidence, departures)


def write_recordings(path: Path, recordings: Iterable[Recording]) -> None:
    """Write JSON lines: all of them or, with SettingError, nothing."""
    lines = (json.dumps(as_json(recording), separators=(",", ":")) + "\n" for recording in recordings)
    write_whole(path, "".join(lines), "recordings")


def read_recordings(path: Path) -> list[Recording]:
    """Read JSON lines; those of another kind (a machine's description) are passed over.

    Raises InputError for a file that cannot be read or holds a damaged recording.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(str(path), reason, "Name a file of recordings.") from error
    found = [_recording(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    return [recording for recording in found if recording is not None]


def _recording(line: str, where: str) -> Recording | None:
    try:
        data = json.loads(line)
        return from_json(data) if "prompt" in data else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"no recording ({type(error).__name__}: {error})"
        raise InputError(where, reason, "Record it anew.") from error


def common_prefix(drafted: Sequence[int], answer: Sequence[int]) -> int:
    """How many drafted tokens are correct."""
    pairs = zip(drafted, answer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
