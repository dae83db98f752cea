"""A sweep over exact fake models: no file is read, and what calls cost is given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Row
from outrider.core.errors import BackendError
from outrider.costs import CallCosts
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import LoadedDraft, LoadedTarget, Loader, pair_row
from outrider.lab.models import ModelFile
from outrider.lab.rows import ModelRow, PairRow, Role
from outrider.models.gguf import ModelCard
from outrider.models.hub import HubOptions
from outrider.models.vocab import align
from recordings import FLAT, SMALL, curve

VOCABULARY = FakeVocabulary("abcdefgh .")
END = VOCABULARY.size - 1


def language(seed: int, order: int = 2) -> NextLogits:
    """A rather sure language that never ends by itself."""
    logits = random_logits(VOCABULARY.size, seed=seed, order=order, scale=6.0)

    def endless(tokens: Sequence[int]) -> Row:
        row = logits(tokens)
        row[END] = -50.0
        return row

    return endless


SPOKEN = {"target": language(1), "twin": language(1), "stranger": language(2)}
"""The draft "twin" speaks as the target does, "stranger" does not."""


class FakeLoader(Loader):
    """The models of a sweep, made up; `loaded` are those that it was asked for.
    Every backend is here but those that are `missing`."""

    def __init__(self, missing: Sequence[str] = ()) -> None:
        super().__init__(LoadOptions(), LoadOptions(), HubOptions())
        self.loaded: list[str] = []
        self._missing = missing

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        del taken
        return [ModelFile(name, Path(f"{name}.gguf"), card(name), name) for name in references]

    def check_backend(self, backend: str) -> None:
        if backend in self._missing:
            raise BackendError(f"backend {backend}", "it is not installed")

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        self.loaded.append(file.name)
        return LoadedTarget(file.name, FakeModel(VOCABULARY, SPOKEN["target"])), row(file, "target")

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        self.loaded.append(file.name)
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
        "draft_lengths": "0-6",
        "p_mins": "0,0.5",
        "repetitions": 2,
        "costs": folder / "given.json",
    }
    return SweepPlan(**(values | changes))
