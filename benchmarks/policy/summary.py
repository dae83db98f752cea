"""What rows of live.py and server.py come to: speeds of each prompt, means, intervals, noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from harness import Row, geometric_mean


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt of live.py. Times are seconds per token, since texts may part and differ in length."""

    id: str
    category: str
    token_s: Mapping[str, float]
    """of each way to decode, the median of its repetitions"""
    plain_token_s: tuple[float, ...]
    """of each repetition of plain decoding"""
    bound_token_s: float
    replayed_token_s: Mapping[str, float]
    estimate: tuple[float, float, float] | None
    """its own, of its speed-up: that of the middle repetition, and from where to where it may lie"""
    equal: bool

    @property
    def speedup(self) -> float:
        """Of the automatic choice over plain decoding."""
        return self.token_s["plain"] / self.token_s["auto"]

    @property
    def share(self) -> float:
        """The hindsight bound's time over that of the automatic choice, as it ran."""
        return self.bound_token_s / self.token_s["auto"]

    @property
    def speedup_share(self) -> float:
        """Speed-up over that of the bound, each over plain decoding in its own world."""
        return self.speedup / self.bound_speedup

    @property
    def replayed_share(self) -> float:
        """The same in replay, where costs do not vary."""
        return self.bound_token_s / self.replayed_token_s["auto"]

    @property
    def bound_speedup(self) -> float:
        """Of the bound over plain decoding."""
        return self.replayed_token_s["plain"] / self.bound_token_s

    @property
    def regret(self) -> float:
        """How much longer the automatic choice takes, in replay, than the best setting for this prompt."""
        return self.replayed_token_s["auto"] / min(self.replayed_token_s[s] for s in self.settings) - 1

    @property
    def real_regret(self) -> float:
        """The same against the settings that ran, plain decoding among them."""
        return self.token_s["auto"] / min(s for name, s in self.token_s.items() if name != "auto") - 1

    @property
    def settings(self) -> list[str]:
        """The replayed choices that somebody would have to fix."""
        return [name for name in self.replayed_token_s if not name.startswith("auto")]

    @property
    def lost(self) -> bool:
        """Slower than 0.95x plain, and than the slowest repetition of plain decoding too."""
        return self.speedup < 0.95 and self.token_s["auto"] > max(self.plain_token_s)

    @property
    def estimate_error(self) -> float | None:
        """Estimated over measured speed-up, less 1."""
        return None if self.estimate is None else self.estimate[0] / self.speedup - 1

    @property
    def estimate_holds(self) -> bool:
        """Whether the measured speed-up lies in the interval that was given."""
        return self.estimate is not None and self.estimate[1] <= self.speedup <= self.estimate[2]


def token_s(run: Row) -> float:
    """Seconds per token of a run in a row."""
    return float(run["decode_s"]) / int(run["tokens"])


def measured(row: Row) -> Measured:
    """The figures of a row of live.py."""
    each = {name: [token_s(run) for run in runs] for name, runs in row["runs"].items()}
    estimates = [(e["speedup"], e["low"], e["high"]) for run in row["runs"]["auto"] if (e := run["estimate"])]
    length = row["text_tokens"]
    return Measured(
        id=str(row["id"]),
        category=row["category"],
        token_s={name: median(times) for name, times in each.items()},
        plain_token_s=tuple(each["plain"]),
        bound_token_s=row["bound_s"] / length,
        replayed_token_s={name: seconds / length for name, seconds in row["replayed_s"].items()},
        estimate=sorted(estimates)[len(estimates) // 2] if estimates else None,
        equal=row["equal"],
    )


def plain_noise(prompts: Iterable[Measured]) -> tuple[float, float]:
    """Between which speed-ups 90 % of plain decoding's repetitions lie against each other."""
    ratios = [a / b for p in prompts for a, b in combinations(p.plain_token_s, 2)]
    low, high = np.quantile(ratios + [1 / ratio for ratio in ratios] or [1.0], [0.05, 0.95])
    return float(low), float(high)


def by_category(prompts: Iterable[Measured]) -> dict[str, list[Measured]]:
    """The prompts of each category, in the order in which they come first; "all" of them last."""
    groups: dict[str, list[Measured]] = {}
    everything = list(prompts)
    for prompt in sorted(everything, key=lambda prompt: prompt.category):
        groups.setdefault(prompt.category, []).append(prompt)
    return groups | {"all": everything}


def best_single(times: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """Of settings, each with the time of every prompt, the one of least geometric mean, and that."""
    means = {name: geometric_mean(seconds) for name, seconds in times.items()}
    name = min(means, key=means.__getitem__)
    return name, means[name]


def server_times(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Seconds per token by setting and prompt, from rows of server.py: medians of the rounds. The
    server's clock starts when the first token is there."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["tokens"] > 1:
            times = found.setdefault((row["setting"], str(row["id"])), [])
            times.append(row["decode_s"] / (row["tokens"] - 1))
    settings: dict[str, dict[str, float]] = {}
    for (setting, prompt), times in found.items():
        settings.setdefault(setting, {})[prompt] = median(times)
    return settings
