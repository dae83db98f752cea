"""A run of a sweep that was never made: plausible rows from a small model of costs and acceptance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from zlib import crc32

from outrider.costs import CallCosts, CallPoint
from outrider.lab.rows import (
    AnswerRow,
    BlockRow,
    CaseOutcome,
    CostsRow,
    HeadRow,
    ModelRow,
    OffersRow,
    PairRow,
    PredictionRow,
    QualityRow,
    Row,
    RunRow,
    SkippedRow,
)
from outrider.lab.settings import Setting, grid

TARGETS = ("big-Q8_0", "big-Q4_K_M")
DRAFTS = ("small-Q8_0", "tiny-Q4_K_M")
WORKLOADS = ("chat", "edits", "json")
LENGTHS = range(1, 17)

PLAIN_S = {"big-Q8_0": 0.060, "big-Q4_K_M": 0.040}
DRAFT_S = {"small-Q8_0": 0.018, "tiny-Q4_K_M": 0.006}
ACCEPTANCE = {
    ("small-Q8_0", "chat"): 0.62,
    ("small-Q8_0", "edits"): 0.86,
    ("small-Q8_0", "json"): 0.80,
    ("tiny-Q4_K_M", "chat"): 0.42,
    ("tiny-Q4_K_M", "edits"): 0.70,
    ("tiny-Q4_K_M", "json"): 0.60,
}
LOOKUP = {"chat": 0.12, "edits": 0.74, "json": 0.40}
OWN_S = 0.0008
PROMPT_TOKENS = 120


def call_s(target: str, num_tokens: int) -> float:
    """A target call over so many tokens: a slope, and a stair at every fourth token."""
    return PLAIN_S[target] * (1 + 0.07 * (num_tokens - 1) + 0.16 * ((num_tokens - 1) // 4))


def costs_row(model: str, role: str) -> CostsRow:
    target = role == "target"
    points = [
        CallPoint(n, call_s(model, n) if target else DRAFT_S[model] * (1 + 0.05 * (n - 1)), spread_ratio=0.02)
        for n in (*range(1, 18), 24, 32, 64)
    ]
    curve = CallCosts(points, prefill_token_s=points[0].seconds / 8)
    own_s = {"plain": OWN_S / 2, "lookup": OWN_S, "auto": 2 * OWN_S, "draft": OWN_S}
    return CostsRow(model=model, role="target" if target else "draft", curve=curve.as_json(), own_s=own_s)


@dataclass(frozen=True)
class Cell:
    """A target with a draft or none under one workload."""

    target: str
    draft: str | None
    workload: str

    @property
    def settings(self) -> list[Setting]:
        """Those that need no draft model stand in the cell without one."""
        return list(_settings(self.draft is not None))

    def outcome(self, setting: Setting, case: str, tokens: int) -> CaseOutcome:
        """What the setting makes of a case: expected counts, rounded."""
        return _outcome(self, setting, case, tokens)

    def _worked_out(self, setting: Setting, case: str, tokens: int) -> CaseOutcome:
        if setting.is_auto:
            like = [s for s in self.settings if s.draft_max and s.drafters == setting.drafters]
            best = min((self.outcome(s, case, tokens) for s in like), key=lambda o: o.seconds)
            share = 0.97 if best.seconds < best.plain_s else best.plain_s / best.seconds
            parts = ("seconds", "verify_s", "draft_s")
            return best.model_copy(update={part: share * getattr(best, part) for part in parts})
        plain_s = tokens * (call_s(self.target, 1) + OWN_S / 2)
        if setting.draft_max is None:
            return self._case(case, tokens, plain_s, plain_s, tokens, 0, (), (), 0.0)
        rate, length = self._acceptance(setting, case), setting.draft_max
        reach = [rate**i for i in range(length + 1)]
        steps = max(1, round(tokens / sum(reach)))
        cut = [(0.55 if setting.p_min else 1.0) ** i for i in range(length)]
        drafted = tuple(round(steps * c) for c in cut)
        accepted = tuple(round(steps * c * r) for c, r in zip(cut, reach[1:], strict=True))
        calls = sum(drafted) // (2 if setting.uses_lookup else 1) if setting.uses_model else 0
        draft_s = calls * DRAFT_S[self.draft] if self.draft and setting.uses_model else 0.0
        verify_s = steps * call_s(self.target, 1 + round(sum(drafted) / steps))
        seconds = verify_s + draft_s + steps * OWN_S
        made = self._case(case, tokens, seconds, plain_s, steps, calls, drafted, accepted, draft_s)
        return made.model_copy(update={"verify_s": verify_s})

    def _case(
        self,
        case: str,
        tokens: int,
        seconds: float,
        plain_s: float,
        target_calls: int,
        draft_calls: int,
        drafted: tuple[int, ...],
        accepted: tuple[int, ...],
        draft_s: float,
    ) -> CaseOutcome:
        return CaseOutcome(
            case=case, tokens=tokens, seconds=seconds, plain_s=plain_s, target_calls=target_calls,
            draft_calls=draft_calls, drafted=drafted, accepted=accepted, draft_s=draft_s,
            verify_s=tokens * call_s(self.target, 1),
        )  # fmt: skip

    def _acceptance(self, setting: Setting, case: str) -> float:
        model = ACCEPTANCE[self.draft, self.workload] if self.draft and setting.uses_model else 0.0
        lookup = LOOKUP[self.workload] if setting.uses_lookup else 0.0
        return max(model, lookup, 0.9 * (model + lookup * (1 - model))) * (
            0.94 + 0.01 * (crc32(case.encode()) % 7)
        )


@cache
def _settings(has_model: bool) -> tuple[Setting, ...]:
    found = grid(LENGTHS, (0.0, 0.75), ("lookup", "model", "both"), has_model=has_model)
    return tuple(setting for setting in found if setting.uses_model == has_model)


@cache
def _outcome(cell: Cell, setting: Setting, case: str, tokens: int) -> CaseOutcome:
    """Asked for again and again: by each repetition, and for the automatic choice by each of its kind."""
    return cell._worked_out(setting, case, tokens)


def bench_rows(
    targets: Sequence[str] = TARGETS,
    drafts: Sequence[str | None] = (*DRAFTS, None),
    workloads: Sequence[str] = WORKLOADS,
    *,
    cases: int = 3,
    repetitions: int = 3,
    quality: bool = True,
    seed: int = 0,
) -> list[Row]:
    """The rows of a whole run; none ran for real with `repetitions` 0.

    `drafts` may be fewer or none but None; names other than the constants' need an entry in the tables above.
    """
    rows: list[Row] = [head_row(targets, drafts, workloads, repetitions)]
    rows += [model_row(name, "target") for name in targets]
    rows += [model_row(name, "draft") for name in drafts if name]
    rows += [costs_row(name, "draft") for name in drafts if name]
    for target in targets:
        rows += _recorded(target, drafts, workloads, cases, quality and target != targets[0], targets[0])
        cells = [Cell(target, draft, workload) for workload in workloads for draft in drafts]
        rows += [row for cell in cells for row in _predicted(cell, cases)]
        for workload in workloads:
            mine = [cell for cell in cells if cell.workload == workload]
            for repetition in range(repetitions):
                rows += _block(
                    mine, cases, repetition, random.Random(f"{seed} {target} {workload} {repetition}")
                )
    return rows


def head_row(
    targets: Sequence[str], drafts: Sequence[str | None], workloads: Sequence[str], repetitions: int
) -> HeadRow:
    machine = {
        "cpu": "Example CPU",
        "physical_cores": 8,
        "devices": [],
        "memory_bytes": 32 << 30,
        "python": "3.12.1",
        "outrider": "0.1.0",
        "commit": "0123abc",
        "llama_cpp": "0.3.36",
    }
    plan = {
        "name": "example",
        "targets": [f"{name}.gguf" for name in targets],
        "drafts": [f"{name}.gguf" for name in drafts if name],
        "drafters": ["lookup", "model", "both"],
        "draft_lengths": list(LENGTHS),
        "p_mins": [0.0, 0.75],
        "workloads": [{"name": name, "temperature": 0, "max_tokens": 128} for name in workloads],
        "repetitions": repetitions,
        "seed": 0,
    }
    return HeadRow(started="2025-01-02T03:04:05Z", machine=machine, plan=plan)


def model_row(name: str, role: str) -> ModelRow:
    target = role == "target"
    size = round((PLAIN_S[name] if target else DRAFT_S[name] * 1.5) * 30e9)
    return ModelRow(
        model=name, role="target" if target else "draft", path=f"models/{name}.gguf",
        fingerprint=f"{crc32(name.encode()):08x}" * 8, architecture="llama",
        quantization=name.rpartition("-")[2], parameters=1_500_000_000 if target else 300_000_000,
        active_parameters=1_500_000_000 if target else 300_000_000, file_bytes=size, trained_context=8192,
        effective={"threads": 8, "gpu_layers": 0}, memory_bytes=size + (200 << 20),
    )  # fmt: skip


def case_names(workload: str, cases: int) -> list[str]:
    return [f"{workload}-{number}" for number in range(cases)]


def answer_tokens(case: str) -> int:
    return 80 + crc32(case.encode()) % 50


def _recorded(
    target: str,
    drafts: Sequence[str | None],
    workloads: Sequence[str],
    cases: int,
    quality: bool,
    reference: str,
) -> Iterator[Row]:
    """Answers, costs, offers and quality of a target."""
    yield costs_row(target, "target")
    for draft in filter(None, drafts):
        yield PairRow(
            target=target, draft=draft, usable=True, identical=True, common_tokens=32_000, text_ratio=1.0,
            cut_ratio=1.0,
        )  # fmt: skip
    for workload in workloads:
        for case in case_names(workload, cases):
            length = answer_tokens(case)
            yield AnswerRow(
                target=target, workload=workload, case=case, prompt=tuple(range(PROMPT_TOKENS)),
                tokens=tuple(range(length)), text=f"The answer to {case}.", finish_reason="length",
                prefill_s=PROMPT_TOKENS * PLAIN_S[target] / 8,
                decode_s=length * (PLAIN_S[target] + OWN_S / 2), own_s=length * OWN_S / 2, seed=0,
            )  # fmt: skip
            if quality:
                yield QualityRow(
                    target=target, reference=reference, workload=workload, case=case, num_tokens=length,
                    mean_kl=0.02 + 0.001 * (length % 5), top1_agreement=0.95 - 0.002 * (length % 5),
                )  # fmt: skip
            for draft in filter(None, drafts):
                yield OffersRow(
                    target=target, draft=draft, workload=workload, case=case, tokens=tuple(range(length)),
                    confidence=(0.5,) * length, departures={}, seconds=0.6,
                )  # fmt: skip


def _predicted(cell: Cell, cases: int) -> Iterator[Row]:
    """Every setting replayed."""
    names = case_names(cell.workload, cases)
    for setting in cell.settings:
        outcomes = tuple(cell.outcome(setting, case, answer_tokens(case)) for case in names)
        yield PredictionRow(
            target=cell.target, draft=cell.draft, workload=cell.workload, setting=setting.name, cases=outcomes
        )


def _finalists(cell: Cell, totals: dict[str, float]) -> list[str]:
    auto = "auto" if cell.draft else "auto lookup"
    fixed = min((name for name in totals if Setting.of(name).draft_max), key=lambda name: totals[name])
    return [auto, fixed]


def _block(cells: Sequence[Cell], cases: int, repetition: int, rng: random.Random) -> Iterator[Row]:
    """One repetition of everything that a target runs under one workload, with noise of 1 %."""
    target, workload = cells[0].target, cells[0].workload
    block = f"{target} {workload} {repetition}"
    plain = Cell(target, None, workload)
    planned = [(plain, Setting("none"))]
    for cell in cells:
        names = case_names(workload, cases)
        totals = {
            s.name: sum(cell.outcome(s, case, answer_tokens(case)).seconds for case in names)
            for s in cell.settings
        }
        chosen = dict.fromkeys([*_finalists(cell, totals), "model 3" if cell.draft else "lookup 8"])
        planned += [(cell, Setting.of(name)) for name in chosen]
    for place, case in enumerate(case_names(workload, cases)):
        rng.shuffle(planned)
        for order, (cell, setting) in enumerate(planned):
            yield _run(cell, setting, case, block, repetition, place * len(planned) + order, rng)
    yield BlockRow(block=block, target=target, workload=workload, repetition=repetition, hiccups=1, calls=400)


def _run(
    cell: Cell, setting: Setting, case: str, block: str, repetition: int, order: int, rng: random.Random
) -> RunRow:
    outcome = cell.outcome(setting, case, answer_tokens(case))
    noise = rng.gauss(1.02, 0.01)
    return RunRow(
        block=block, target=cell.target, draft=cell.draft if setting.uses_model else None,
        setting=setting.name, workload=cell.workload, case=case, repetition=repetition, order=order,
        tokens=outcome.tokens, prefill_s=PROMPT_TOKENS * PLAIN_S[cell.target] / 8,
        decode_s=outcome.seconds * noise, target_calls=outcome.target_calls,
        draft_calls=outcome.draft_calls, drafted=outcome.drafted, accepted=outcome.accepted,
        draft_s=outcome.draft_s * noise, verify_s=outcome.verify_s * noise, equal=True,
        finish_reason="length", seed=0, started_s=0.5 * order,
    )  # fmt: skip


def skipped(target: str, draft: str) -> list[Row]:
    """A pair that takes no part: its own row, and the line that says so."""
    why = "the tokenizers share 12 % of their tokens"
    return [
        PairRow(
            target=target,
            draft=draft,
            usable=False,
            identical=False,
            common_tokens=4_000,
            text_ratio=0.12,
            cut_ratio=0.6,
            why_not=why,
        ),
        SkippedRow(what=f"{target} with {draft}", why=why),
    ]
