"""The tests of sampling on a subject's own logits, each asked for once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from outrider.certify.faults import judge_with
from outrider.certify.masks import behind, break_masks
from outrider.certify.memo import Disturbed, Memory, RememberedModel
from outrider.certify.plan import Plan, Progress, Subject
from outrider.certify.sampled import (
    LENGTH,
    Exact,
    SampledTest,
    Setting,
    exact_distribution,
    sample,
    settings_under_test,
)
from outrider.certify.starts import Start, find_start
from outrider.core.contracts import Constraint, Drafter
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.policy import FixedPolicy
from outrider.vocab import compare

__all__ = ["sampled_tests"]

_CANDIDATES = 24
"""Prompts that are looked at when those that leave most to chance are chosen."""

_REPORT_EVERY = 50


def sampled_tests(
    subject: Subject, prompts: Sequence[tuple[int, ...]], plan: Plan, progress: Progress
) -> tuple[list[SampledTest], int]:
    """Test every setting on the prompts that leave most to chance.

    Returns the tests, and how many calls of the real models all of them took. Without a draft model
    the target itself, disturbed, stands in for one.
    """
    remembered = _Remembered(subject, plan)
    forces = plan.grammar is not None and plan.grammar.fast_forward != "off"
    settings = settings_under_test(plan.rule, plan.lenience, forces=forces)
    try:
        chosen = remembered.most_uncertain(prompts)
        level = plan.significance / (len(chosen) * len(settings))
        step = _steps(progress, len(chosen) * len(settings) * plan.samples)
        tests: list[SampledTest] = []
        for index, start in chosen:
            tests += remembered.test(index, start, settings, level, len(tests), step)
            remembered.forget()
        return tests, remembered.calls
    finally:
        remembered.forget()


def _steps(progress: Progress, total: int) -> Callable[[], None]:
    """Counts samples, and reports some of them."""
    done = 0

    def step() -> None:
        nonlocal done
        if done % _REPORT_EVERY == 0:
            progress("sampled", done, total)
        done += 1

    return step


class _Remembered:
    """A subject's models behind memories, and engines on them."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self._plan = plan
        self._target = subject.target
        self._constrain = subject.constrain
        self._draft = subject.draft or subject.target
        self._memories = [Memory(subject.target)]
        if subject.draft is None:
            self._draft_rows: Disturbed | Memory = Disturbed(self._memories[0], plan.seed)
        else:
            self._draft_rows = Memory(subject.draft)
            self._memories.append(self._draft_rows)
        self._alignment = subject.alignment or compare(subject.target.vocabulary, self._draft.vocabulary)

    @property
    def calls(self) -> int:
        """Calls of the real models so far."""
        return sum(memory.calls for memory in self._memories)

    def forget(self) -> None:
        """Free all rows, and the models' sequences."""
        self._draft_rows.forget()
        for memory in self._memories:
            memory.forget()

    def most_uncertain(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, Start]]:
        """The prompts whose samples leave most to chance, of the first few, and where these start."""
        vocabulary, rows = self._target.vocabulary, self._memories[0]
        starts = [find_start(rows, vocabulary, prompt, self._sound()) for prompt in prompts[:_CANDIDATES]]
        ranked = sorted(enumerate(starts), key=lambda entry: entry[1].worth, reverse=True)
        return sorted(ranked[: self._plan.num_sampled], key=lambda entry: entry[0])

    def _sound(self, said: Sequence[int] = ()) -> Callable[[], Constraint] | None:
        """Makes the constraint of an answer that begins with these tokens; None where nothing limits it."""
        make, grammar = behind(self._constrain, said), self._plan.grammar
        if make is None or grammar is None:
            return None
        return partial(make, grammar)

    def test(
        self,
        index: int,
        start: Start,
        settings: Sequence[Setting],
        level: float,
        num_before: int,
        step: Callable[[], None],
    ) -> list[SampledTest]:
        """All settings on one prompt. Seeds belong to the number of the test and of the sample."""
        plan, vocabulary = self._plan, self._target.vocabulary
        exact: dict[SamplingParams, Exact] = {}
        tests = []
        for number, setting in enumerate(settings, num_before):
            if setting.sampling not in exact:
                rng = np.random.default_rng((plan.seed, number))
                exact[setting.sampling] = exact_distribution(
                    self._memories[0],
                    vocabulary,
                    start.prompt,
                    setting.sampling,
                    plan.samples,
                    level,
                    rng,
                    self._sound(start.said),
                )
            # A stream of its own: the null distribution must not be made of the samples' seeds.
            seeds = np.random.SeedSequence((plan.seed, number, 1)).generate_state(plan.samples, np.uint64)
            engine = self._engine(setting, start)
            tests.append(
                sample(
                    engine,
                    start.prompt,
                    setting,
                    exact[setting.sampling],
                    seeds.tolist(),
                    index=index,
                    behind_tokens=len(start.said),
                    grammar=plan.grammar,
                    on_sample=step,
                )
            )
        return tests

    def _engine(self, setting: Setting, start: Start) -> Engine:
        drafters: list[Drafter] = []
        if setting.drafter == "lookup":
            drafters.append(SuffixDrafter(min_match=1))
        elif setting.drafter == "model":
            model = RememberedModel(self._draft, self._draft_rows)
            drafters.append(ModelDrafter(model, self._alignment))
        # Drafts as long as the text, however doubtful: what is rarely offered is rarely tested.
        policy = FixedPolicy(draft_max=LENGTH, p_min=0, hand_over=0)
        target = RememberedModel(self._target, self._memories[0])
        fault = self._plan.fault
        constrain = break_masks(fault, behind(self._constrain, start.said))
        return Engine(target, drafters, policy, verifier=judge_with(fault), constrain=constrain)
