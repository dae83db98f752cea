"""Sampling with speculation, against the distribution that plain decoding samples from: the real engine
generates a few tokens of an answer thousands of times, on the models' cached logits, and the counts of the
texts are tested against their exact probabilities. A text of several tokens tells apart decisions within a
draft, recovered and bonus tokens, and penalties that must see the drafted prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from outrider.core.contracts import Drafter
from outrider.core.data import Grammar, Request
from outrider.core.errors import SettingError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.decisions import (
    KINDS,
    RULES,
    Decisions,
    DecisionTest,
    MakeVerifier,
    ScoreTest,
    ScoreTests,
)
from outrider.lab.certify.distribution import (
    LENGTH,
    CachedModel,
    DisturbedModel,
    Exact,
    MakeConstraint,
    Start,
    Text,
    exact_distribution,
    find_start,
)
from outrider.lab.certify.drafts import model_drafter
from outrider.lab.certify.faults import MASK_FAULT, break_masks, check_fault, verifier_with
from outrider.lab.certify.texts import after, generate
from outrider.lab.statistics import holm
from outrider.models.vocab import compare
from outrider.policy.fixed import FixedPolicy
from outrider.session.options import Progress

_CANDIDATES = 24
"""Prompts among which those of the highest entropy are chosen."""


@dataclass(frozen=True, slots=True)
class CertifyPlan:
    """How much is tested, and how: `num_tokens` of each prompt's greedy text; `num_seeded` of a text with a
    seed, on `num_repeated` prompts; so many `samples` for each setting on each of `num_sampled` prompts, and
    each decision about a draft so many more times. `significance`: the probability that sound sampling fails
    at all. A rule that is not auto is tested alone.

    Raises SettingError for a fault that cannot show.
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
        if self.fault is not None and check_fault(self.fault) == MASK_FAULT and self.grammar is None:
            why = "it breaks the masks of a grammar, and there is none"
            raise SettingError(f"--inject {MASK_FAULT}", why, "Add --json-schema or another kind.")


class Setting(NamedTuple):
    """One way to sample that is put to the test. `drafter` is "model", "lookup" or "forced text": nothing is
    drafted but what a grammar forces."""

    drafter: str
    verification: Verification
    sampling: SamplingParams

    @property
    def name(self) -> str:
        drafts = {"greedy": "most likely", "sampled": "drawn", "auto": ""}[self.verification.draft_sampling]
        kind = drafts if self.drafter == "model" else self.drafter
        heat = f"T={self.sampling.temperature:g}"
        penalties = "penalties" if self.sampling.repeat_penalty != 1 else ""
        return ", ".join(filter(None, [self.verification.rule, kind, heat, penalties]))


_KINDS: tuple[tuple[str, Rule, DraftSampling], ...] = (
    ("model", "token", "sampled"),
    ("model", "token", "greedy"),
    ("model", "block", "sampled"),
    ("model", "block", "greedy"),
    ("model", "stable", "sampled"),
    ("model", "auto", "auto"),
    ("lookup", "auto", "auto"),
)
_PENALISED = SamplingParams(temperature=1.0, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.4)


def settings_under_test(plan: CertifyPlan) -> list[Setting]:
    """Every rule with both kinds of draft at two temperatures, and one with penalties; of a rule
    that is asked for (not auto) only the settings with that rule. Under a grammar that forces text also
    what that does alone, without a drafter."""
    wanted, kinds = plan.rule, list(_KINDS)
    if wanted != "auto":
        kinds = [*(kind for kind in kinds if kind[1] == wanted), ("lookup", wanted, "auto")]
    if plan.grammar is not None and plan.grammar.fast_forward != "off":
        kinds.append(("forced text", wanted, "auto"))
    found = [
        Setting(drafter, Verification(rule, drafts), SamplingParams(temperature=temperature))
        for temperature in (0.7, 1.0)
        for drafter, rule, drafts in kinds
    ]
    last: Rule = "block" if wanted == "auto" else kinds[0][1]
    return [*found, Setting("model", replace(found[0].verification, rule=last), _PENALISED)]


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


class SampledTests(NamedTuple):
    """The tests of texts and of decisions, corrected for their number, and how many calls of the real models
    all of them took; `stand_in`: the target itself, disturbed, was in the place of a draft model."""

    sampled: tuple[SampledTest, ...] = ()
    decisions: tuple[DecisionTest, ...] = ()
    sampled_calls: int = 0
    stand_in: bool = False


def sampled_tests(
    subject: Engine, prompts: Sequence[Text], plan: CertifyPlan, progress: Progress
) -> SampledTests:
    """Test every setting on the prompts of the highest entropy. Seeds belong to the number of the test and of
    the sample."""
    settings, sampler = settings_under_test(plan), _Sampler(subject, plan)
    scores: ScoreTests = {(rule, kind): ScoreTest() for rule in RULES for kind in KINDS}
    tests: list[SampledTest] = []
    progress("samples", 0.0)
    try:
        chosen = sampler.most_uncertain(prompts[:_CANDIDATES])
        total = len(chosen) * len(settings)
        level = plan.significance / (total + len(scores))
        for index, start in chosen:
            exact: dict[SamplingParams, Exact] = {}
            for setting in settings:
                number, sampling = len(tests), setting.sampling
                progress("samples", number / total)
                if sampling not in exact:
                    exact[sampling] = sampler.exact(start, sampling, level, number)
                tests.append(sampler.test(index, start, setting, exact[sampling], number, scores))
            sampler.forget()
    finally:
        sampler.forget()
    decisions = [
        DecisionTest(
            *of, test.outcomes, test.impossible, test.statistic, test.p_value(), test.detectable_error(level)
        )
        for of, test in scores.items()
        if test.outcomes
    ]
    values = [*(test.p_value for test in tests), *(test.p_value for test in decisions)]
    rejected = iter(holm(values, plan.significance))
    return SampledTests(
        tuple(replace(test, rejected=next(rejected)) for test in tests),
        tuple(replace(test, rejected=next(rejected)) for test in decisions),
        sampler.target.calls + sampler.draft.calls,
        isinstance(sampler.draft, DisturbedModel),
    )


class _Sampler:
    def __init__(self, subject: Engine, plan: CertifyPlan) -> None:
        self._plan, self._constrain = plan, subject.constrain
        self.target = CachedModel(subject.target)
        self.draft: CachedModel = DisturbedModel(self.target, plan.seed)
        self._alignment = compare(self.target.vocabulary, self.target.vocabulary)
        drafter = model_drafter(subject)
        if drafter is not None and getattr(drafter.model, "block", 1) == 1:  # a block has no single rows
            self.draft, self._alignment = CachedModel(drafter.model), drafter.alignment

    def forget(self) -> None:
        self.draft.forget()
        self.target.forget()

    def most_uncertain(self, prompts: Sequence[Text]) -> list[tuple[int, Start]]:
        starts = [(i, find_start(self.target, prompt, self._sound())) for i, prompt in enumerate(prompts)]
        starts.sort(key=lambda entry: (entry[1].forced, entry[1].entropy), reverse=True)
        return sorted(starts[: self._plan.num_sampled], key=lambda entry: entry[0])

    def _sound(self, answer: Sequence[int] = ()) -> MakeConstraint:
        make, grammar = after(self._constrain, answer), self._plan.grammar
        return None if make is None or grammar is None else partial(make, grammar)

    def exact(self, start: Start, sampling: SamplingParams, level: float, number: int) -> Exact:
        rng, sound = np.random.default_rng((self._plan.seed, number)), self._sound(start.answer)
        samples = self._plan.samples
        return exact_distribution(self.target, start.prompt, sampling, samples, level, rng, sound)

    def test(
        self, index: int, start: Start, setting: Setting, exact: Exact, number: int, scores: ScoreTests
    ) -> SampledTest:
        """Generate the texts of test `number`, one for each seed, test their counts, and add the decisions
        about drafts to the tests of these."""
        plan, rule = self._plan, setting.verification.rule
        rule = "block" if rule == "auto" else rule
        # A stream of its own: the null distribution must not be made of the samples' seeds.
        source = np.random.SeedSequence((plan.seed, number, 1))
        seeds = source.generate_state(plan.samples, np.uint64).tolist()
        decisions, make = Decisions(rule), verifier_with(plan.fault)
        engine = self._engine(setting, start, decisions.recorded(make))
        request = Request(
            start.prompt, setting.sampling, LENGTH, verification=setting.verification, grammar=plan.grammar
        )
        texts: Counter[Text] = Counter()
        drafted = accepted = 0
        for seed in seeds:
            done = generate(engine, replace(request, sampling=replace(setting.sampling, seed=seed)))
            texts[done.tokens] += 1
            drafted += sum(len(record.draft) for record in done.records)
            accepted += sum(record.num_accepted for record in done.records)
        engine.reset()
        decisions.repeat(make, request, plan.repeats, seeds[0])
        decisions.add_to(scores)
        counts, impossible = exact.counts(texts)
        statistic = None if impossible else exact.null.statistic(counts)
        return SampledTest(
            setting=setting.name,
            prompt=index,
            behind_tokens=start.num_answer,
            samples=len(seeds),
            cells=len(counts),
            impossible=impossible,
            statistic=statistic,
            p_value=exact.null.p_value(math.inf if statistic is None else statistic),
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )

    def _engine(self, setting: Setting, start: Start, make: MakeVerifier) -> Engine:
        drafters: dict[str, list[Drafter]] = {
            "lookup": [SuffixDrafter(min_match=1)],
            "model": [ModelDrafter(self.draft, self._alignment)],
            "forced text": [],
        }
        # Drafts as long as the text, however doubtful: what is rarely offered is rarely tested.
        policy = FixedPolicy(draft_max=LENGTH, p_min=0, hand_over=0)
        constrain = break_masks(self._plan.fault, after(self._constrain, start.answer))
        return Engine(self.target, drafters[setting.drafter], policy, verifier=make, constrain=constrain)
