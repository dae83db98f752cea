"""A run of a sweep that was never made: rows whose speed-ups are given, with some noise."""

import random
from collections.abc import Iterator, Sequence
from typing import Any
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
    Role,
    Row,
    RunRow,
    SkippedRow,
)
from outrider.lab.settings import Setting

TARGETS = ("big-Q8_0", "big-Q4_K_M")
DRAFTS = ("small-Q8_0", "tiny-Q4_K_M")
WORKLOADS = ("chat", "edits", "json")

CALL_S = {"big-Q8_0": 0.060, "big-Q4_K_M": 0.040, "small-Q8_0": 0.018, "tiny-Q4_K_M": 0.006}
"""of a call over one token"""
PLAIN = ("plain", 1.0)
SPEEDUPS: dict[str | None, dict[str, float]] = {
    None: {"auto lookup": 1.3, "lookup 8": 1.2, "lookup 4": 1.1, "lookup 8/0.75": 1.0},
    "small-Q8_0": {"auto": 2.0, "model 3": 1.7, "model 6": 1.8, "both 4": 1.9, "auto model": 1.8},
    "tiny-Q4_K_M": {"auto": 1.5, "model 3": 1.3, "model 6": 1.4, "both 4": 1.4, "auto model": 1.4},
}
"""of every setting, the first three of which ran for real; edits gain a quarter more"""
PROMPT_TOKENS = 120


def bench_rows(
    targets: Sequence[str] = TARGETS,
    drafts: Sequence[str | None] = (*DRAFTS, None),
    workloads: Sequence[str] = WORKLOADS,
    *,
    cases: int = 3,
    repetitions: int = 3,
) -> list[Row]:
    """The rows of a whole run; none ran for real with `repetitions` 0."""
    rows: list[Row] = [head_row(targets, drafts, workloads, repetitions)]
    named = [name for name in drafts if name]
    rows += [model_row(name, "target") for name in targets]
    rows += [model_row(name, "draft") for name in named]
    rows += [costs_row(name, "target") for name in targets]
    rows += [costs_row(name, "draft") for name in named]
    for target in targets:
        rows += [pair(target, draft) for draft in named]
        for workload in workloads:
            names = [f"{workload}-{number}" for number in range(cases)]
            rows += [row for case in names for row in _recorded(target, named, workload, case)]
            for draft in drafts:
                settings = SPEEDUPS[draft] | ({} if draft else dict([PLAIN]))
                for setting, speedup in settings.items():
                    outcomes = tuple(_outcome(target, setting, speedup, workload, case) for case in names)
                    rows.append(
                        PredictionRow(
                            target=target, draft=draft, workload=workload, setting=setting, cases=outcomes
                        )
                    )
            for repetition in range(repetitions):
                rows += _block(target, drafts, workload, names, repetition)
    return rows


def head_row(
    targets: Sequence[str], drafts: Sequence[str | None], workloads: Sequence[str], repetitions: int
) -> HeadRow:
    machine = {"cpu": "Example CPU", "physical_cores": 8, "devices": [], "memory_bytes": 32 << 30}
    plan = {
        "name": "example",
        "targets": [f"{name}.gguf" for name in targets],
        "drafts": [f"{name}.gguf" for name in drafts if name],
        "workloads": [{"name": name, "temperature": 0, "max_tokens": 128} for name in workloads],
        "repetitions": repetitions,
    }
    return HeadRow(started="2025-01-02T03:04:05Z", machine=machine, plan=plan)


def model_row(name: str, role: Role) -> ModelRow:
    size = round(CALL_S[name] * 30e9)
    return ModelRow(
        model=name, role=role, path=f"models/{name}.gguf", fingerprint=f"{crc32(name.encode()):08x}" * 8,
        architecture="llama", quantization=name.rpartition("-")[2], parameters=size, active_parameters=size,
        file_bytes=size, trained_context=8192, effective={"threads": 8, "gpu_layers": 0},
    )  # fmt: skip


def costs_row(model: str, role: Role) -> CostsRow:
    points = [CallPoint(n, CALL_S[model] * (0.9 + 0.1 * n), spread_ratio=0.02) for n in (1, 2, 4, 8, 16, 64)]
    curve = CallCosts(points, prefill_token_s=points[0].seconds / 8)
    return CostsRow(model=model, role=role, curve=curve.as_json(), own_s={"plain": 0.0004})


def pair(target: str, draft: str, **changes: Any) -> PairRow:
    given: dict[str, Any] = {"usable": True, "identical": True, "common_tokens": 32_000}
    given |= {"text_ratio": 1.0, "cut_ratio": 1.0}
    return PairRow(target=target, draft=draft, **(given | changes))


def _tokens(case: str) -> int:
    return 80 + crc32(case.encode()) % 50


def _recorded(target: str, drafts: Sequence[str], workload: str, case: str) -> Iterator[Row]:
    length = _tokens(case)
    place: dict[str, Any] = {"target": target, "workload": workload, "case": case}
    yield AnswerRow(
        prompt=tuple(range(PROMPT_TOKENS)), tokens=tuple(range(length)), text=f"The answer to {case}.",
        finish_reason="length", prefill_s=1.0, decode_s=length * CALL_S[target], seed=0, **place,
    )  # fmt: skip
    for draft in drafts:
        tokens, confidence = tuple(range(length)), (0.5,) * length
        yield OffersRow(
            draft=draft, tokens=tokens, confidence=confidence, departures={}, seconds=0.6, **place
        )


def _outcome(target: str, setting: str, speedup: float, workload: str, case: str) -> CaseOutcome:
    """Drafts as long as the setting's, of which each token is accepted with 0.8 after the one before it."""
    tokens, length = _tokens(case), Setting.of(setting).draft_max or 0
    gain = speedup if setting == "plain" else speedup * (1.25 if workload == "edits" else 1.0)
    gain *= 1 if setting == "plain" else 0.97 + 0.01 * (crc32(case.encode()) % 7)
    steps = round(tokens / sum(0.8**i for i in range(length + 1)))
    return CaseOutcome(
        case=case, tokens=tokens, seconds=tokens * CALL_S[target] / gain, plain_s=tokens * CALL_S[target],
        target_calls=steps, draft_calls=steps * length, drafted=(steps,) * length,
        accepted=tuple(round(steps * 0.8 ** (i + 1)) for i in range(length)), draft_s=0.1, verify_s=0.1,
    )  # fmt: skip


def _block(
    target: str, drafts: Sequence[str | None], workload: str, names: Sequence[str], repetition: int
) -> Iterator[Row]:
    """One repetition of everything that a target runs under one workload, with noise of 1 %."""
    block = f"{target} {workload} {repetition}"
    rng = random.Random(block)
    planned: list[tuple[str | None, str, float]] = [(None, *PLAIN)]
    planned += [(draft, *run) for draft in drafts for run in [*SPEEDUPS[draft].items()][:3]]
    for case in names:
        rng.shuffle(planned)
        for order, (draft, setting, speedup) in enumerate(planned):
            made = _outcome(target, setting, speedup, workload, case)
            fields = made.model_dump(exclude={"seconds", "plain_s", "case"})
            yield RunRow(
                block=block, target=target, draft=draft, setting=setting, workload=workload, case=case,
                repetition=repetition, order=order, prefill_s=1.0,
                decode_s=made.seconds * rng.gauss(1.02, 0.01), equal=True, finish_reason="length", seed=0,
                started_s=float(names.index(case) * len(planned) + order), **fields,
            )  # fmt: skip
    yield BlockRow(block=block, target=target, workload=workload, repetition=repetition)


def skipped(target: str, draft: str) -> list[Row]:
    """A pair that takes no part: its own row, and the line that says so."""
    why = "the tokenizers share 12 % of their tokens"
    unusable = pair(target, draft, usable=False, identical=False, why_not=why)
    return [unusable, SkippedRow(what=f"{target} with {draft}", why=why)]
