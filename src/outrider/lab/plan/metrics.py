"""What a running server's counters say of its drafts: vLLM's, llama-server's and Outrider's own."""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError
from outrider.core.files import read_text, reason_of
from outrider.core.numbers import counted
from outrider.costs.expected_speed import acceptance_for
from outrider.lab.plan.acceptance import LONGEST, Acceptance, Drafting
from outrider.lab.plan.plan import Asked, Way, plan_batch

_PATIENCE_S = 10.0
_MAX_BYTES = 64 * 2**20
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+.\deEInfNa]+)(?:\s+\d+)?\s*(?:#.*)?$")
_POSITION = re.compile(r'position="(\d+)"')
_PROGRAMS = {
    "vllm:": ("vLLM", "num_requests_running", "num_speculative_tokens"),
    "llamacpp:": ("llama-server", "requests_processing", "--spec-draft-n-max"),
    "outrider_": ("Outrider", "num_requests_running", "--draft-max"),
}
"""by the prefix of its metrics: a program's name, its gauge of running requests, its setting of the length"""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the counters of a server say since it started: drafts, their tokens, those accepted, and the
    shares of the drafts by position; `running` requests now, None if it does not say."""

    program: str
    setting: str
    drafts: float
    drafted: float
    accepted: float
    by_position: tuple[float, ...]
    running: float | None

    @property
    def length(self) -> float:
        """Tokens of a draft."""
        return self.drafted / self.drafts

    @property
    def tokens_per_call(self) -> float:
        """Of a call that checks a draft."""
        return 1 + self.accepted / self.drafts

    @property
    def acceptance(self) -> Acceptance:
        """By position; where the server does not count these, the one for every token that brings as many."""
        if self.by_position:
            return Acceptance.by_position(self.by_position)
        length = min(max(round(self.length), 1), LONGEST)
        return Acceptance.of(acceptance_for(length, self.tokens_per_call))

    @property
    def shares(self) -> list[float]:
        """The shares of the drafts by position, of as many as a draft has."""
        return list(self.acceptance.accepted[: max(round(self.length), 1)])

    def as_json(self, advised: Sequence[str]) -> dict[str, Any]:
        """The same as plain data, with what is advised."""
        return {
            "program": self.program,
            "drafts": self.drafts,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "draft_length": self.length,
            "tokens_per_call": self.tokens_per_call,
            "accepted_by_position": self.shares,
            "running": self.running,
            "advice": list(advised),
        }


def read_metrics(place: str) -> Observed:
    """The counters at an address, or in a file. Raises InputError where nothing answers, or where it is no
    server that counts its drafts."""
    text = _fetched(place) if "://" in place else read_text(Path(place), "Name an address.", InputError)
    values: dict[str, float] = defaultdict(float)
    positions: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        if found := _LINE.match(line):
            name, labels, value = found[1], found[2] or "", float(found[3])
            values[name] += value
            if position := _POSITION.search(labels):
                positions[name][int(position[1])] += value
    prefix = next((p for p in _PROGRAMS if any(name.startswith(p) for name in values)), None)
    if prefix is None:
        raise InputError(
            place, "these are not metrics of vLLM, llama-server or Outrider", "Name one of these."
        )
    program, gauge, setting = _PROGRAMS[prefix]
    counters = f"{prefix}spec_decode_num_"
    drafts, drafted, accepted = (
        values.get(f"{counters}{name}_total", 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not drafts > 0:
        reason = f"{program} has drafted nothing yet"
        raise InputError(place, reason, "Start it with drafts (--export says how), and ask it something.")
    # Where they are counted, over the drafts that had a token at a position, else over all.
    had = positions.get(f"{counters}draft_tokens_per_pos_total", {})
    accepted_at = sorted(positions.get(f"{counters}accepted_tokens_per_pos_total", {}).items())
    shares = [min(number / (had.get(place, drafts) or math.inf), 1.0) for place, number in accepted_at]
    by_position = tuple(accumulate(shares, min))
    return Observed(program, setting, drafts, drafted, accepted, by_position, values.get(prefix + gauge))


def _fetched(address: str) -> str:
    if address.count("/") == 2 or address.endswith("/"):
        address = f"{address.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE_S) as answer:
            return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(address, f"it answers {error.code} ({error.reason})", "Check the address.") from None
    except (OSError, ValueError) as error:
        reason = reason_of(getattr(error, "reason", error))
        raise InputError(address, f"it does not answer ({reason})", "Is the server running there?") from None


def advice(observed: Observed, asked: Asked) -> list[str]:
    """What the plan expected at the length in use, and what to change, a sentence each."""
    batch = max(round(observed.running or 0), 1)
    length = max(round(observed.length), 1)
    drafting: Drafting = "draft" if asked.drafts else "lookup"
    draft = asked.drafts[0].name if asked.drafts else ""

    def ways(asked: Asked) -> tuple[Way | None, Way | None]:
        """At the length in use, and at the best one."""
        plan = plan_batch(asked, batch)
        mine = [way for way in plan.ways if (way.drafting, way.draft) == (drafting, draft)]
        return min(mine, key=lambda way: abs(way.length - length), default=None), plan.best_of(
            drafting, draft
        )

    own = observed.acceptance
    drafts = [replace(model, acceptance=own) for model in asked.drafts[:1]]
    before, _ = ways(asked)
    now, best = ways(replace(asked, lookup=None if drafts else own, drafts=drafts))
    found = []
    if before is not None:
        found.append(f"the plan expected {before.tokens_per_call:.2f} tokens per call at this length")
    if now is None or best is None:
        return found
    where = f"at {counted(batch, 'sequence')} at once"
    if best.speedup.value <= 1:
        found.append(f"stop drafting: {where} the best length gives {best.speedup.value:.2f}x")
    elif best.speedup.value > 1.02 * now.speedup.value:
        change = f"{now.speedup.value:.2f}x to {best.speedup.value:.2f}x"
        found.append(f"set {observed.setting} to {best.length} (now {length}): from {change} {where}")
    else:
        found.append(f"keep {observed.setting}: {length} is within 2 % of the best length {where}")
    return found
