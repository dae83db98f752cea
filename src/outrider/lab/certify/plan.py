"""What is tested, how much of it, and what came out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from outrider.core.data import Grammar
from outrider.core.errors import SettingError
from outrider.core.params import Rule
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.faults import MASK_FAULT, check_fault
from outrider.lab.certify.texts import Compared
from outrider.policy.fixed import FixedPolicy


def speculates(engine: Engine, grammar: Grammar | None) -> bool:
    """Whether an engine ever drafts anything: what a grammar forces needs no drafter."""
    off = isinstance(engine.policy, FixedPolicy) and engine.policy.draft_max == 0
    forces = grammar is not None and grammar.fast_forward != "off"
    return bool(engine.drafters or forces) and engine.target.rewinding.is_possible and not off


def model_drafter(engine: Engine) -> ModelDrafter | None:
    """The drafter of an engine that asks a model."""
    return next((drafter for drafter in engine.drafters if isinstance(drafter, ModelDrafter)), None)


def head_drafter(engine: Engine) -> ModelDrafter | None:
    """The drafter of a head that drafts whatever it read before: beside a target of checkpoints, which loses
    states of accepted tokens, none does."""
    drafter = model_drafter(engine)
    is_head = drafter is not None and getattr(drafter.model, "is_head", False)
    return drafter if is_head and not engine.target.rewinding.recomputes else None


@dataclass(frozen=True, slots=True)
class CertifyPlan:
    """How much is tested, and how: `num_tokens` of each prompt's greedy text; `num_seeded` of a text with a
    seed, on `num_repeated` prompts; so many `samples` for each setting on each of `num_sampled` prompts, and
    each decision about a draft so many more times. `significance`: the probability that sound sampling fails
    at all. A rule that is not auto is tested alone.

    Raises SettingError for a negative seed, and a fault that cannot show.
    """

    num_tokens: int = 128
    num_seeded: int = 64
    num_repeated: int = 3
    num_sampled: int = 3
    samples: int = 3_000
    repeats: int = 4
    significance: float = 0.001
    seed: int = 0
    rule: Rule = "auto"
    fault: str | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingError("seed", f"{self.seed} is negative", "Give 0 or more.")
        if self.fault is not None and check_fault(self.fault) == MASK_FAULT and self.grammar is None:
            why = "it breaks the masks of a grammar, and there is none"
            raise SettingError(f"--inject {MASK_FAULT}", why, "Add --json-schema or another kind.")


@dataclass(frozen=True, slots=True)
class SampledTest:
    """Did the texts of a setting follow their exact distribution? `statistic` is chi-square over `cells`;
    None where `impossible` samples, which plain decoding never gives, make it infinite. `behind_tokens` of a
    constrained answer came before the texts. `rejected`: after the correction for the number of all tests."""

    setting: str
    prompt: int
    behind_tokens: int
    samples: int
    cells: int
    impossible: int
    statistic: float | None
    p_value: float
    drafted_tokens: int
    accepted_tokens: int
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class DecisionTest:
    """Were the decisions of a rule made with its probabilities? `statistic` is the sum of the scores in
    standard deviations; None where one of `impossible` outcomes decides, or no outcome tells.
    `detectable_error` is the smallest error that these decisions show with probability 0.95: of the
    acceptance ratio, of what is subtracted after a rejection, of the temperature (None: none up to 30 %)."""

    rule: str
    kind: str
    decisions: int
    impossible: int
    statistic: float | None
    p_value: float
    detectable_error: float | None
    rejected: bool = False


_MIN_SAME = 0.9
"""of drafts: rounding changes some tokens"""


@dataclass(frozen=True, slots=True)
class DraftsTest:
    """How many drafts of a head were compared, and how many are as those of one that read the text afresh."""

    compared: int
    same: int

    @property
    def holds(self) -> bool:
        return self.same >= _MIN_SAME * self.compared


GREEDY = "greedy"
BESIDE = "greedy, beside another request"
"""where the target has room for two, and texts must be bit-equal"""
REPEATED = "same seed twice"
STABLE = "seed-stable"
"""with drafts and without"""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the tests found.

    Args:
        speculates: Whether anything was drafted at all.
        stand_in: Whether the draft model of the sampled tests was the target's own, disturbed.
        texts: What was compared token by token, by its name (`GREEDY` and so on).
        sampled_calls: Calls of the real models for all samples.
        bit_equal: Whether texts had to be equal without exception, and the bits of logits too.
        drafts: Of a head: whether its drafts are those of one that reads a text afresh.
    """

    speculates: bool
    stand_in: bool
    texts: Mapping[str, tuple[Compared, ...]]
    sampled: tuple[SampledTest, ...]
    decisions: tuple[DecisionTest, ...]
    sampled_calls: int
    bit_equal: bool = False
    drafts: DraftsTest | None = None

    @property
    def all_texts(self) -> list[Compared]:
        return [part for parts in self.texts.values() for part in parts]

    @property
    def counts(self) -> dict[str, int]:
        """What all runs on the real models took, those of the samples left out."""
        names = self.all_texts[0].counts
        return {name: sum(part.counts[name] for part in self.all_texts) for name in names}

    @property
    def compared_rows(self) -> int:
        return sum(part.rows.positions for part in self.all_texts if part.rows is not None)

    @property
    def power(self) -> float | None:
        """The error of the acceptance ratio that is found with probability 0.95, whichever rule has it; None
        where none up to 30 % is, or none was tested."""
        tests = [test for test in self.decisions if test.kind == "acceptance" and test.rule != "stable"]
        errors = [test.detectable_error for test in tests if test.detectable_error is not None]
        return max(errors) if errors and len(errors) == len(tests) else None

    @property
    def holds(self) -> bool:
        return (
            all(compared.holds for compared in self.all_texts)
            and (not self.bit_equal or self.compared_rows > 0)
            and not any(test.rejected for test in self.sampled)
            and not any(test.rejected for test in self.decisions)
            and (self.drafts is None or self.drafts.holds)
        )


BUILT_IN: tuple[str, ...] = tuple(
    tomllib.loads((files(__package__) / "prompts.toml").read_text(encoding="utf-8"))["prompts"]
)
"""The prompts of a certificate when none are given: one conversation's first message each."""
