"""A sweep over exact fake models: no file is read, and what calls cost is given."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import RewindKind
from outrider.core.data import Row as LogitsRow
from outrider.core.errors import BackendError, ModelFileError
from outrider.costs import CallCosts, CallPoint
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import LoadedDraft, LoadedTarget, Loader, pair_row
from outrider.lab.models import ModelFile
from outrider.lab.rows import (
    BlockRow,
    CaseOutcome,
    CostsRow,
    HeadRow,
    ModelRow,
    PairRow,
    PredictionRow,
    Role,
    Row,
    RunRow,
)
from outrider.models.gguf import ModelCard
from outrider.models.hub import HubOptions
from outrider.models.vocab import align
from recordings import FLAT, SMALL, curve

VOCABULARY = FakeVocabulary("abcdefgh .")
END = VOCABULARY.size - 1


def language(seed: int, order: int = 2) -> NextLogits:
    """A rather sure language that never ends by itself."""
    logits = random_logits(VOCABULARY.size, seed=seed, order=order, scale=6.0)

    def endless(tokens: Sequence[int]) -> LogitsRow:
        row = logits(tokens)
        row[END] = -50.0
        return row

    return endless


SPOKEN = {"target": language(1), "twin": language(1), "stranger": language(2)}
"""The draft "twin" speaks as the target does, "stranger" does not."""


class FakeLoader(Loader):
    """The models of a sweep, made up; `loaded` are those that it was asked for. Every backend is here but
    those that are `missing`, and every file whole but those that are `damaged`."""

    def __init__(
        self, missing: Sequence[str] = (), damaged: Sequence[str] = (), rewind: RewindKind = "free"
    ) -> None:
        super().__init__(LoadOptions(), LoadOptions(), HubOptions())
        self.loaded: list[str] = []
        self._missing, self._damaged, self._rewind = missing, damaged, rewind

    def _load(self, file: ModelFile) -> None:
        if file.name in self._damaged:
            raise ModelFileError(str(file.path), "it is damaged")
        self.loaded.append(file.name)

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        del taken
        return [ModelFile(name, Path(f"{name}.gguf"), card(name), name) for name in references]

    def check_backend(self, backend: str) -> None:
        if backend in self._missing:
            raise BackendError(f"backend {backend}", "it is not installed")

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        self._load(file)
        model = FakeModel(VOCABULARY, SPOKEN["target"], rewind=self._rewind)
        return LoadedTarget(file.name, model), row(file, "target")

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        self._load(file)
        alignment = align(VOCABULARY, VOCABULARY)
        if file.name == "foreign":
            return pair_row(target.name, file.name, alignment.report, why_not="it speaks otherwise")
        return LoadedDraft(file.name, FakeModel(VOCABULARY, SPOKEN[file.name]), alignment), row(file, "draft")

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        del model
        return curve(FLAT, 0.1) if role == "target" else curve(SMALL, 0.02)


def card(name: str) -> ModelCard:
    """A made-up card."""
    return ModelCard(
        path=Path(f"{name}.gguf"), name=name, architecture="fake", parameters=1000, active_parameters=1000,
        bytes_per_token=4000, quantization="F32", num_tokens=VOCABULARY.size, context_length=512,
        chat_template=None, tokenizer="characters", block_count=1, embedding_length=8, sliding_window=None,
        expert_count=0, expert_used_count=0, file_bytes=4000,
    )  # fmt: skip


def row(file: ModelFile, role: Role) -> ModelRow:
    """What is written down about it."""
    return ModelRow(
        model=file.name, role=role, path=str(file.path), fingerprint=file.fingerprint, architecture="fake",
        quantization="F32", parameters=1000, active_parameters=1000, file_bytes=4000, trained_context=512,
        effective={}, backend=file.backend,
    )  # fmt: skip


def plan(folder: Path, **changes: Any) -> SweepPlan:
    """Two workloads of two prompts each, with costs that are given."""
    files = []
    for name, texts in {"letters": ("abc abc", "dd ef"), "words": ("gab hag. gab", "a.b.c.")}.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
        files.append(str(path))
    values: dict[str, Any] = {
        "targets": ["target"],
        "drafts": ["twin", "stranger", "foreign"],
        "workload": files,
        "max_tokens": 24,
        "draft_lengths": "2,4,6",
        "p_mins": "0,0.5",
        "repetitions": 2,
        "costs": folder / "given.json",
    }
    return SweepPlan(**(values | changes))


# A run of a sweep that was never made: rows whose speed-ups are given, with some noise

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
        for workload in workloads:
            names = [f"{workload}-{number}" for number in range(cases)]
            where: dict[str, Any] = {"target": target, "workload": workload}
            for draft in drafts:
                for setting, speedup in SPEEDUPS[draft].items():
                    cases_ = tuple(_outcome(target, setting, speedup, workload, case) for case in names)
                    rows.append(PredictionRow(draft=draft, setting=setting, cases=cases_, **where))
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


def _outcome(target: str, setting: str, speedup: float, workload: str, case: str) -> CaseOutcome:
    tokens = 80 + crc32(case.encode()) % 50
    if setting != "plain":
        speedup *= (1.25 if workload == "edits" else 1.0) * (0.97 + 0.01 * (crc32(case.encode()) % 7))
    return CaseOutcome(
        case=case, tokens=tokens, seconds=tokens * CALL_S[target] / speedup, plain_s=tokens * CALL_S[target],
        target_calls=tokens // 2, draft_calls=tokens, drafted=(9, 9), accepted=(7, 5),
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
