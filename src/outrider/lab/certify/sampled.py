"""Sampling with speculation, against the distribution that plain decoding samples from: the real engine
generates a few tokens of an answer thousands of times, on the models' cached logits, and the counts of the
texts are tested against their exact probabilities. A text of several tokens tells apart decisions within a
draft, recovered and bonus tokens, and penalties that must see the drafted prefix.

A free answer is tested at its beginning. That of a constrained one is often all but certain (`{"name": "`),
so its greedy text is followed, and the test begins where text is forced and the entropy of the tokens is
highest. The statistic is chi-square. Its distribution under the null comes from multinomial draws, so a
p-value holds for small counts, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import FREE, Constraint, Drafter, Model, Vocabulary
from outrider.core.data import Grammar, Logits, Request, Row, Span
from outrider.core.errors import ConstraintError, RewindUnsupported, SettingError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.core.sequences import common_prefix
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.certify.decisions import (
    KINDS,
    RULES,
    Counts,
    Decisions,
    DecisionTest,
    MakeVerifier,
    Probs,
    ScoreTest,
    ScoreTests,
)
from outrider.lab.certify.drafts import model_drafter
from outrider.lab.certify.faults import MASK_FAULT, break_masks, check_fault, verifier_with
from outrider.lab.certify.texts import after, generate
from outrider.lab.comparison import teacher_forced
from outrider.lab.statistics import holm
from outrider.models.vocab import compare
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import RequestSampler
from outrider.session.options import Progress

_CANDIDATES = 24
"""Prompts among which those of the highest entropy are chosen."""
LENGTH = 3
"""Tokens of a short continuation: room for a draft of two."""

SEARCHED_TOKENS = 32
"""Tokens of a constrained answer among which the start is chosen."""

_MIN_EXPECTED = 50
"""A text is extended while at least this many samples are expected to begin with it."""
MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled: a single stray there would decide the statistic."""
_CHUNK = 10_000
_DRAWS_PER_LEVEL = 4
"""Null draws times the level of a test: p-values reach this far below it."""
_CALL_TOKENS = 256

Text = tuple[int, ...]
MakeConstraint = Callable[[], Constraint] | None
"""Makes the constraint after a prompt; None where nothing limits the answer."""


# How much is tested


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


def sampled_tests(
    subject: Engine, prompts: Sequence[Text], plan: CertifyPlan, progress: Progress
) -> tuple[tuple[SampledTest, ...], tuple[DecisionTest, ...], bool]:
    """Test every setting on the prompts of the highest entropy. Gives the tests of texts and of decisions,
    corrected for their number, and whether the target itself, disturbed, was in the place of a draft model.
    Seeds belong to the number of the test and of the sample."""
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
    return (
        tuple(replace(test, rejected=next(rejected)) for test in tests),
        tuple(replace(test, rejected=next(rejected)) for test in decisions),
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


# The exact distribution


def pool(probs: Probs, num_samples: int) -> npt.NDArray[np.int64]:
    """The pooled cell of each cell: those with an expected count below `MIN_EXPECTED` share the
    last one, joined by the least likely of the others while it is still too small itself."""
    order = np.argsort(-probs, kind="stable")
    num_kept = int((probs * num_samples >= MIN_EXPECTED).sum())
    while 0 < num_kept < len(probs) and probs[order[num_kept:]].sum() * num_samples < MIN_EXPECTED:
        num_kept -= 1
    groups = np.full(len(probs), num_kept, dtype=np.int64)
    groups[order[:num_kept]] = np.arange(num_kept)
    return groups


@dataclass(frozen=True, slots=True)
class Null:
    """A known distribution over pooled cells, and the sorted statistics of multinomials of `num_samples` each
    that were drawn from it."""

    probs: Probs
    num_samples: int
    statistics: Probs

    def statistic(self, counts: Counts) -> float:
        return float(_chi_square(counts[None, :], self.probs, self.num_samples)[0])

    def p_value(self, statistic: float) -> float:
        """(1 + #{null statistics >= this one}) / (1 + #null statistics): never below the truth."""
        above = len(self.statistics) - int(np.searchsorted(self.statistics, statistic, side="left"))
        return (1 + above) / (1 + len(self.statistics))


def simulate_null(probs: Probs, num_samples: int, num_draws: int, rng: np.random.Generator) -> Null:
    """Draw the null distribution of the statistic."""
    probs = probs / probs.sum()
    statistics = []
    for start in range(0, num_draws, _CHUNK):
        draws = rng.multinomial(num_samples, probs, size=min(_CHUNK, num_draws - start))
        statistics.append(_chi_square(draws, probs, num_samples))
    return Null(probs, num_samples, np.sort(np.concatenate(statistics)))


def _chi_square(counts: Counts, probs: Probs, num_samples: int) -> Probs:
    expected = probs * num_samples
    statistics: Probs = ((counts - expected) ** 2 / expected).sum(axis=1)
    # Equal counts in another order must not differ in the last bits: p-values count ties.
    return np.round(statistics, 9)


@dataclass(frozen=True, slots=True)
class Start:
    """The prompt that samples are generated from; its last `num_answer` tokens begin the answer. `forced`:
    whether text is forced among the tokens ahead. `entropy` is that of the first token (of a constrained
    answer: the texts' tokens together), in nats."""

    prompt: Text
    num_answer: int
    forced: bool
    entropy: float

    @property
    def answer(self) -> Text:
        return self.prompt[len(self.prompt) - self.num_answer :]


def find_start(rows: CachedModel, prompt: Text, constrain: MakeConstraint) -> Start:
    """Where the answer to this prompt is tested."""
    vocabulary = rows.vocabulary
    constraint = constrain() if constrain is not None else None
    sampler = RequestSampler(SamplingParams(temperature=1.0), vocabulary, prompt, constraint)
    answer: list[int] = []
    places: list[tuple[bool, float]] = []
    """for each place, whether text is forced there, and its entropy"""
    while len(places) < SEARCHED_TOKENS:
        try:
            drawn = sampler.distribution(rows.after((*prompt, *answer), 1)[0], ())
        except ConstraintError:
            break
        entropy = float(-(drawn.probs * np.log(drawn.probs)).sum())
        places.append((constraint is not None and bool(constraint.forced(())), entropy))
        best = int(drawn.tokens[np.argmax(drawn.probs)])
        if constraint is None or vocabulary.ends_generation(best):
            break
        constraint.accept((best,))
        sampler.accept((best,))
        answer.append(best)
        if constraint.is_complete:
            break
    starts = []
    for i in range(len(places)):
        forced, entropies = zip(*places[i : i + LENGTH], strict=True)
        starts.append(Start((*prompt, *answer[:i]), i, any(forced), sum(entropies)))
    return max(starts, key=lambda start: (start.forced, start.entropy), default=Start(prompt, 0, False, 0.0))


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact distribution over beginnings of a text: `cells` maps texts, none of which is a prefix of
    another, and with one of which every text begins, to the test's cells; rare ones share one."""

    cells: dict[Text, int]
    null: Null

    def cell(self, tokens: Sequence[int]) -> int | None:
        """The test's cell of a text; None for one that plain decoding never gives."""
        beginnings = (tuple(tokens[:length]) for length in range(len(tokens) + 1))
        return next((self.cells[text] for text in beginnings if text in self.cells), None)

    def counts(self, texts: Counter[Text]) -> tuple[npt.NDArray[np.int64], int]:
        counts: Counter[int | None] = Counter()
        for text, count in texts.items():
            counts[self.cell(text)] += count
        return np.array([counts[cell] for cell in range(len(self.null.probs))]), counts[None]


def exact_distribution(
    rows: CachedModel,
    prompt: Text,
    sampling: SamplingParams,
    num_samples: int,
    level: float,
    rng: np.random.Generator,
    constrain: MakeConstraint = None,
) -> Exact:
    """The distribution of the first `LENGTH` tokens by the chain rule, and its null statistics for a test at
    `level`."""
    cells = _chain_rule(rows, prompt, sampling, num_samples, constrain)
    probs = np.array(list(cells.values()))
    groups = pool(probs, num_samples)
    masses = np.bincount(groups, weights=probs).astype(np.float64)
    null = simulate_null(masses, num_samples, math.ceil(_DRAWS_PER_LEVEL / level), rng)
    return Exact(dict(zip(cells, groups.tolist(), strict=True)), null)


def _chain_rule(
    rows: CachedModel, prompt: Text, sampling: SamplingParams, num_samples: int, constrain: MakeConstraint
) -> dict[Text, float]:
    vocabulary = rows.vocabulary
    sampler = RequestSampler(sampling, vocabulary, prompt, constrain() if constrain else None)

    def has_ended(text: Text) -> bool:
        if constrain is None or vocabulary.ends_generation(text[-1]):
            return vocabulary.ends_generation(text[-1])
        constraint = constrain()
        constraint.accept(text)
        return constraint.is_complete

    cells: dict[Text, float] = {}
    open_texts: list[tuple[Text, float]] = [((), 1.0)]
    while open_texts:
        text, mass = open_texts.pop()
        rare = len(text) == LENGTH or mass * num_samples < _MIN_EXPECTED
        if text and (rare or has_ended(text)):
            cells[text] = mass
            continue
        [row] = rows.after((*prompt, *text), 1)
        try:
            following = sampler.distribution(row, text)
        except ConstraintError:  # a dead end is an end
            cells[text] = mass
            continue
        for token, prob in zip(following.tokens.tolist(), following.probs.tolist(), strict=True):
            open_texts.append(((*text, token), mass * prob))
    return cells


class CachedModel:
    """A Model with one sequence that asks `inner`, in its sequence 0, once for the row after each prefix:
    thousands of engine runs at the cost of a few calls. It can always rewind: nothing is computed."""

    max_sequences = 1
    rewinding = FREE

    def __init__(self, inner: Model) -> None:
        self.name = inner.name
        self.vocabulary: Vocabulary = inner.vocabulary
        self.context_length = self.capacity_tokens = inner.context_length
        self.max_batch_tokens = self.max_rows = inner.context_length
        self._inner = inner
        self._rows: dict[Text, Row] = {}
        self._held: Text = ()
        """the inner model stores a prefix of this text"""
        self._stored: Text = ()

    def after(self, tokens: Sequence[int], count: int) -> list[Row]:
        """The rows after the last `count` prefixes of `tokens`, the whole of it included."""
        text = tuple(tokens)
        ends = range(len(text) - count + 1, len(text) + 1)
        missing = next((end for end in ends if text[:end] not in self._rows), None)
        if missing is not None:
            self._evaluate(text, missing - 1)
        return [self._rows[text[:end]] for end in ends]

    def _evaluate(self, text: Text, start: int) -> None:
        keep = min(start, common_prefix(self._held, text))
        if keep < self._inner.length(0):
            try:
                self._inner.truncate(0, keep)
            except RewindUnsupported:
                self._inner.truncate(0, 0)
        self._held = text
        for rows in teacher_forced(self._inner, text, start, chunk=_CALL_TOKENS):
            for row in rows:
                start += 1
                kept = self._rows.setdefault(text[:start], row.copy())
                kept.setflags(write=False)

    def forget(self) -> None:
        self._rows.clear()
        self._held = ()
        self._inner.truncate(0, 0)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        [span] = spans
        self._stored = (*self._stored[: span.start], *span.tokens)
        rows = self.after(self._stored, span.rows) if span.rows else []
        return [np.array(rows) if rows else np.empty((0, self.vocabulary.size), dtype=np.float32)]

    def length(self, sequence: int) -> int:
        return len(self._stored) if sequence == 0 else 0

    def reach(self, sequence: int, length: int) -> int:  # noqa: ARG002
        return length

    def truncate(self, sequence: int, length: int) -> None:  # noqa: ARG002
        self._stored = self._stored[:length]

    def copy(self, source: int, sequence: int, length: int) -> None:
        raise RewindUnsupported(self.name, f"{sequence} cannot take {length} tokens from {source}: it is one")

    def close(self) -> None: ...


class DisturbedModel(CachedModel):
    """Another one's rows, flattened and with normal noise of its own on every logit: a draft model that is
    right often enough to be accepted, and wrong often enough to be rejected. It makes no calls of its own."""

    SCALE = 0.8
    NOISE = 1.0

    def __init__(self, source: CachedModel, seed: int) -> None:
        super().__init__(source)
        self._source = source
        self._seed = seed

    def _evaluate(self, text: Text, start: int) -> None:
        for end in range(start + 1, len(text) + 1):
            if text[:end] not in self._rows:
                [row] = self._source.after(text[:end], 1)
                rng = np.random.default_rng((self._seed, *text[:end]))
                noise = rng.standard_normal(len(row), dtype=np.float32) * np.float32(self.NOISE)
                self._rows[text[:end]] = row * np.float32(self.SCALE) + noise

    def forget(self) -> None:
        self._rows.clear()
