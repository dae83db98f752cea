"""Sampling with speculation, against the distribution that plain decoding samples from.

The real engine generates the first tokens of an answer thousands of times, on the models' remembered
logits, and the counts of the texts are tested against their exact probabilities: the chain rule over
the same logits, through the same sampler. What a text of several tokens tells apart: decisions within
a draft, recovered and bonus tokens, and penalties that must see the drafted prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outrider.certify.memo import Rows
from outrider.certify.runs import generate
from outrider.certify.statistics import Null, pool, simulate_null
from outrider.core.contracts import Constraint, Vocabulary
from outrider.core.data import Grammar, Request
from outrider.core.errors import ConstraintError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.engine import Engine
from outrider.sampling import RequestSampler

__all__ = [
    "LENGTH",
    "Exact",
    "SampledTest",
    "Setting",
    "exact_distribution",
    "sample",
    "settings_under_test",
]

LENGTH = 3
"""Tokens of a short continuation: room for a draft of two."""

_EXPAND = 50
"""A text is followed further while so many samples are expected to begin with it."""

POWER_SHIFT = 0.05
"""Total variation of the shift that the stated power is about."""

_DRAWS_PER_LEVEL = 4
"""Null draws times the level of a test: p-values reach this far below it."""

_Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to sample that is put to the test. `drafter` is "model", "lookup" or "none": nothing is drafted
    but what a grammar forces."""

    drafter: str
    verification: Verification
    sampling: SamplingParams

    @property
    def name(self) -> str:
        """The setting, for people."""
        rule, drafts = self.verification.rule, self.verification.draft_sampling
        kinds = {"lookup": "lookup", "none": "forced text"}
        kind = kinds.get(self.drafter) or {"greedy": "likeliest", "sampled": "drawn"}.get(drafts)
        penalties = ", penalties" if self.sampling.repeat_penalty != 1 else ""
        return f"{rule}{f', {kind}' if kind else ''}, T={self.sampling.temperature:g}{penalties}"


def settings_under_test(rule: Rule = "auto", lenience: float = 1.0, *, forces: bool = False) -> list[Setting]:
    """Every rule with both kinds of draft at two temperatures, and one with penalties; of a rule
    that is asked for (not auto) only the settings with that rule. `forces`: also what a grammar forces
    alone, without a drafter."""
    kinds: list[tuple[str, Rule, DraftSampling]] = [
        ("model", "token", "sampled"),
        ("model", "token", "greedy"),
        ("model", "block", "sampled"),
        ("model", "block", "greedy"),
        ("model", "stable", "sampled"),
        ("model", "auto", "auto"),
        ("lookup", "auto", "auto"),
    ]
    if lenience < 1:
        kinds = [kind for kind in kinds if kind[1] in ("token", "auto")]
    if rule != "auto":
        kinds = [kind for kind in kinds if kind[1] == rule] + [("lookup", rule, "auto")]
    if forces:
        kinds.append(("none", rule, "auto"))
    plain = [SamplingParams(temperature=temperature) for temperature in (0.7, 1.0)]
    found = [
        Setting(drafter, Verification(rule, drafts, lenience), sampling)
        for sampling in plain
        for drafter, rule, drafts in kinds
    ]
    penalised = SamplingParams(
        temperature=1.0, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.4
    )
    last = replace(found[0].verification, rule="block" if rule == "auto" and lenience == 1 else kinds[0][1])
    return [*found, Setting("model", last, penalised)]


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact distribution over beginnings of a text: `cells` are texts of which none begins
    another, and every text begins with one of them. `pooled[i]` is the cell of the test that
    cell i belongs to."""

    cells: dict[_Text, int]
    pooled: tuple[int, ...]
    null: Null
    power: float
    detectable_shift: float | None

    def cell(self, tokens: Sequence[int]) -> int | None:
        """The test's cell of a text; None for one that plain decoding never gives."""
        for length in range(len(tokens) + 1):
            if (found := self.cells.get(tuple(tokens[:length]))) is not None:
                return self.pooled[found]
        return None


def exact_distribution(
    rows: Rows,
    vocabulary: Vocabulary,
    prompt: _Text,
    sampling: SamplingParams,
    num_samples: int,
    level: float,
    rng: np.random.Generator,
    constrain: Callable[[], Constraint] | None = None,
) -> Exact:
    """The distribution of the first `LENGTH` tokens by the chain rule, its null statistics, and the
    power of a test at `level`. `constrain` makes the constraint behind the prompt, if there is one."""
    cells = _chain_rule(rows, vocabulary, prompt, sampling, num_samples, constrain)
    probs = np.array(list(cells.values()))
    groups = pool(probs, num_samples)
    num_draws = math.ceil(_DRAWS_PER_LEVEL / level)
    masses = np.bincount(groups, weights=probs).astype(np.float64)
    null = simulate_null(masses, num_samples, num_draws, rng)
    return Exact(
        cells={text: i for i, text in enumerate(cells)},
        pooled=tuple(groups.tolist()),
        null=null,
        power=null.power(POWER_SHIFT, level, rng),
        detectable_shift=null.detectable_shift(level, rng),
    )


def _chain_rule(
    rows: Rows,
    vocabulary: Vocabulary,
    prompt: _Text,
    sampling: SamplingParams,
    num_samples: int,
    constrain: Callable[[], Constraint] | None,
) -> dict[_Text, float]:
    """The probability of every cell: of whole texts, and of beginnings too rare to tell apart."""
    sampler = RequestSampler(sampling, vocabulary, prompt, constrain() if constrain else None)
    cells: dict[_Text, float] = {}
    open_texts: list[tuple[_Text, float]] = [((), 1.0)]
    while open_texts:
        text, mass = open_texts.pop()
        rare = len(text) == LENGTH or mass * num_samples < _EXPAND
        if text and (rare or _has_ended(text, vocabulary, constrain)):
            cells[text] = mass
            continue
        [row] = rows.after((*prompt, *text), 1)
        try:
            following = sampler.distribution(row, text)
        except ConstraintError:  # a dead end is an end
            cells[text] = mass
            continue
        for token, chance in zip(following.tokens.tolist(), following.probs.tolist(), strict=True):
            open_texts.append(((*text, token), mass * chance))
    return cells


def _has_ended(text: _Text, vocabulary: Vocabulary, constrain: Callable[[], Constraint] | None) -> bool:
    """Whether the engine would end a text here: an end token, or nothing else may follow."""
    if vocabulary.ends_generation(text[-1]):
        return True
    if constrain is None:
        return False
    constraint = constrain()
    constraint.accept(text)
    return constraint.is_complete


@dataclass(frozen=True, slots=True)
class SampledTest:
    """One test: did the texts of a setting follow their exact distribution?

    `statistic` is chi-square over `cells`; None where `impossible` samples, which plain decoding never
    gives, make it infinite. `power` is the chance to find a shift of total variation 0.05 at the
    level of the corrected test, `detectable_shift` the least that is found with probability 0.95
    (None: no shift is), both in the direction that is hardest to find. `behind_tokens` of a constrained
    answer stood before the texts, the same for all of them.
    """

    setting: str
    prompt: int
    behind_tokens: int
    samples: int
    cells: int
    impossible: int
    statistic: float | None
    p_value: float
    power: float
    detectable_shift: float | None
    drafted_tokens: int
    accepted_tokens: int


def sample(
    engine: Engine,
    prompt: _Text,
    setting: Setting,
    exact: Exact,
    seeds: Sequence[int],
    *,
    index: int = 0,
    behind_tokens: int = 0,
    grammar: Grammar | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> SampledTest:
    """Generate one text for each seed, and test their counts; `index` is the prompt's number, and its last
    `behind_tokens` are part of the answer."""
    request = Request(
        prompt, setting.sampling, max_tokens=LENGTH, verification=setting.verification, grammar=grammar
    )
    texts: Counter[_Text] = Counter()
    drafted = accepted = 0
    for seed in seeds:
        done = generate(engine, replace(request, sampling=replace(setting.sampling, seed=seed)))
        texts[done.tokens] += 1
        drafted += sum(len(record.draft) for record in done.records)
        accepted += sum(record.num_accepted for record in done.records)
        on_sample()
    counts, impossible = _cell_counts(exact, texts)
    statistic = None if impossible else exact.null.statistic(counts)
    return SampledTest(
        setting=setting.name,
        prompt=index,
        behind_tokens=behind_tokens,
        samples=len(seeds),
        cells=len(counts),
        impossible=impossible,
        statistic=statistic,
        p_value=exact.null.p_value(math.inf if statistic is None else statistic),
        power=exact.power,
        detectable_shift=exact.detectable_shift,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )


def _cell_counts(exact: Exact, texts: Counter[_Text]) -> tuple[npt.NDArray[np.int64], int]:
    """Samples in each of the test's cells, and how many lie in none."""
    counts = np.zeros(len(exact.null.probs), dtype=np.int64)
    impossible = 0
    for text, count in texts.items():
        cell = exact.cell(text)
        if cell is None:
            impossible += count
        else:
            counts[cell] += count
    return counts, impossible
