"""The parts of the measurement, each a list of plain rows: whole texts, and short ones by the hundred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from draft_influence import texts
from draft_influence.subjects import FILTERS, Candidate, Sizes, Tokens, engine_of
from draft_influence.two_samples import two_samples
from outrider.core.contracts import Model
from outrider.core.data import Completion, Request
from outrider.core.params import SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.certify.certificate import reasons, totals
from outrider.lab.certify.checks import certify
from outrider.lab.certify.exact_distribution import LENGTH, CachedModel, LogitsCache
from outrider.lab.certify.plan import CertifyPlan, Subject
from outrider.lab.certify.text_equality import compare_texts
from outrider.policy import FixedPolicy

Cell = dict[str, Any]

_GREEDY = SamplingParams(temperature=0)


# Greedy texts


def plain_greedy(target: Model, prompts: Sequence[Tokens], sizes: Sizes) -> list[Tokens]:
    """What the target says by itself."""
    engine = engine_of(target, None, 0)
    return [_greedy(engine, prompt, sizes, 1.0).tokens for prompt in prompts]


def greedy(
    target: Model, candidate: Candidate, prompts: Sequence[Tokens], plain: Sequence[Tokens], sizes: Sizes
) -> Iterator[Cell]:
    """Every prompt with drafts of every length under the exact rule, then under each lenience."""
    runs = [(length, 1.0) for length in sizes.lengths]
    runs += [(sizes.length, lenience) for lenience in sizes.leniences]
    for length, lenience in runs:
        engine = engine_of(target, candidate, length)
        for number, prompt in enumerate(prompts):
            run = _greedy(engine, prompt, sizes, lenience)
            parts_at = _parting(run.tokens, plain[number])
            cell: Cell = {"prompt": number, "length": length, "lenience": lenience, "parts_at": parts_at}
            if parts_at is not None and lenience == 1:
                audited = compare_texts(engine, _request(prompt, _GREEDY, sizes, 1.0), number)
                cell["near_tie"] = audited.holds
            yield cell | _counts(run)


def _greedy(engine: Engine, prompt: Tokens, sizes: Sizes, lenience: float) -> Completion:
    engine.reset()
    return engine.generate(_request(prompt, _GREEDY, sizes, lenience))


def _request(prompt: Tokens, sampling: SamplingParams, sizes: Sizes, lenience: float) -> Request:
    return Request(prompt, sampling, sizes.tokens, verification=Verification(lenience=lenience))


def _parting(tokens: Tokens, others: Tokens) -> int | None:
    """The first token that differs; an end before the other's counts."""
    if tokens == others:
        return None
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def _counts(run: Completion) -> Cell:
    decoding = [record for record in run.records if record.kind == "decode"]
    return {
        "tokens": len(run.tokens),
        "calls": len(decoding),
        "drafted": sum(len(record.draft) for record in decoding),
        "accepted": sum(record.num_accepted for record in decoding),
    }


# The certificate


def certificate(
    target: Model, candidate: Candidate, prompts: Sequence[Tokens], sizes: Sizes
) -> Iterator[Cell]:
    """The tests of `outrider verify`, of a smaller number."""
    plan = CertifyPlan(
        num_tokens=sizes.tokens, num_seeded=sizes.tokens, num_repeated=1, num_sampled=1,
        samples=sizes.certificate_samples, seed=sizes.seed,
    )  # fmt: skip
    policy = FixedPolicy(sizes.length, p_min=0, hand_over=0)
    subject = Subject(target, (candidate.drafter(),), policy, candidate.model, candidate.alignment)
    findings = certify(subject, prompts, plan)
    compared = [*findings.greedy, *findings.stable]
    shifts = [test.detectable_shift for test in findings.sampled]
    yield {
        "holds": findings.holds,
        "reasons": reasons(findings),
        "texts": len(compared),
        "compared_tokens": sum(part.tokens for part in compared),
        "near_ties": sum(len(part.differences) for part in compared),
        "tests": len(findings.sampled),
        "rejected": sum(test.rejected for test in findings.sampled),
        "least_p": min((test.p_value for test in findings.sampled), default=None),
        "significance": plan.significance,
        "detectable_shift": max((shift for shift in shifts if shift is not None), default=None),
        "drafted": totals(findings).drafted_tokens + sum(t.drafted_tokens for t in findings.sampled),
        "accepted": totals(findings).accepted_tokens + sum(t.accepted_tokens for t in findings.sampled),
    }


# Sampled texts


def sampled(
    target: Model, candidate: Candidate | None, prompts: Sequence[Tokens], sizes: Sizes
) -> Iterator[Cell]:
    """Whole texts under each filter and lenience; without a candidate plain ones."""
    engine = engine_of(target, candidate, sizes.length)
    leniences = (1.0, *sizes.leniences) if candidate else (1.0,)
    for filters, params in FILTERS.items():
        for number, prompt in enumerate(prompts):
            for lenience in leniences:
                for seed in range(sizes.seeds):
                    sampling = replace(params, seed=_seed(sizes, number, seed))
                    request = replace(_request(prompt, sampling, sizes, lenience), logprobs=0)
                    run = engine.generate(request)
                    cell = {"filters": filters, "prompt": number, "lenience": lenience, "seed": seed}
                    yield cell | _counts(run) | _said(run)
    engine.reset()


def _seed(sizes: Sizes, prompt: int, number: int) -> int:
    return int(np.random.SeedSequence((sizes.seed, prompt, number)).generate_state(1)[0])


def _said(run: Completion) -> Cell:
    return {
        "logprob": sum(scored.logprob for scored in run.logprobs),
        "words": texts.num_words(run.text),
        "style_words": texts.style_words(run.text),
        "phrases": texts.phrases(run.text),
    }


# The first tokens of many short texts


def first_tokens(
    target: Model, candidates: Sequence[Candidate], prompts: Sequence[Tokens], sizes: Sizes
) -> Iterator[Cell]:
    """Each draft's short texts against plain ones, by a two-sample test; and plain ones against other plain
    ones. The models' rows are remembered: what differs is the rule's doing alone."""
    memory = LogitsCache(target)
    for number, prompt in enumerate(prompts):
        source = _Short(memory, target, prompt, sizes, number)
        plain = source.counts(None, 1.0)
        yield source.compared("none", 1.0, plain, source.counts(None, 1.0))
        for candidate in candidates:
            rows = LogitsCache(candidate.model)
            remembered = replace(candidate, model=CachedModel(candidate.model, rows))
            for lenience in (1.0, *sizes.leniences):
                found = source.counts(remembered, lenience)
                yield source.compared(candidate.name, lenience, plain, found)
            rows.forget()
        memory.forget()


class _Short:
    """Short texts after one prompt; no two of them have the same seed."""

    def __init__(self, memory: LogitsCache, target: Model, prompt: Tokens, sizes: Sizes, number: int) -> None:
        self._target = CachedModel(target, memory)
        self._prompt = prompt
        self._sizes = sizes
        self._number = number
        self._seeds = np.random.default_rng((sizes.seed, number, 1))

    def counts(self, candidate: Candidate | None, lenience: float) -> Counter[Tokens]:
        engine = engine_of(self._target, candidate, LENGTH)
        sampling, verification = SamplingParams(temperature=1.0), Verification(lenience=lenience)
        request = Request(self._prompt, sampling, LENGTH, verification=verification)
        seeds = self._seeds.integers(2**63, size=self._sizes.samples).tolist()
        return Counter(
            engine.generate(replace(request, sampling=replace(sampling, seed=seed))).tokens for seed in seeds
        )

    def compared(self, draft: str, lenience: float, plain: Counter[Tokens], found: Counter[Tokens]) -> Cell:
        random = np.random.default_rng((self._sizes.seed, self._number, 2))
        test = two_samples(plain, found, self._sizes.draws, random)
        cell = {"draft": draft, "prompt": self._number, "lenience": lenience}
        return cell | {"samples": self._sizes.samples, "tokens": LENGTH} | asdict(test)
