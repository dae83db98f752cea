"""A draft trimmed for a target: tokens counted, the file written, measured before and after."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.quantizer import quantize
from outrider.core.errors import BackendError, ModelFileError, PromptError, SettingError
from outrider.core.notices import collect_notices, notify
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.costs.expected_speed import StepCosts
from outrider.engine import Engine
from outrider.lab.check import SHOWN_CALLS, DraftReport, judge, record_within
from outrider.lab.loaded import Loaded, LoadedTarget, Loader, Progress
from outrider.lab.models import ModelFacts, ModelFile, find_models
from outrider.lab.prompts import Workload
from outrider.lab.record import MAX_ANSWERS
from outrider.lab.rows import AnswerRow, Row
from outrider.lab.subject import Subject
from outrider.lab.trim.counting import (
    ANSWER_TOKENS,
    Answer,
    Prompts,
    Usage,
    answer_prompts,
    prompts_of,
    texts_of,
    uses_in,
)
from outrider.lab.trim.source import Cut, Source, read_source, write_trimmed
from outrider.models.hub import HubOptions, file_sha256
from outrider.models.vocab import Alignment, align
from outrider.models.vocab.subset import Ids, needed_tokens
from outrider.session.loading import why_no_draft

SCHEMA = "outrider.trim/1"
COUNTING_SECONDS = 90.0
_COSTS_SECONDS = 3.0
"""for what each draft's calls cost"""
_AT_ONCE = 8
_PROMPT_TOKENS = 512
"""of prompts that are answered at once: longer ones are passed over"""
_SIZES = tuple(round(4096 * 2 ** (step / 2)) // 256 * 256 for step in range(12))
_TYPES = ("Q4_K_M", "Q4_0")
"""that are tried beside the draft's own, where they make it smaller: the usual mixture, and the type whose
repacked rows are fastest on most processors"""


@dataclass(frozen=True, slots=True)
class TrimRequest:
    """What is to be trimmed, for whom, and how.

    Args:
        small: The draft.
        out: The file of the trimmed draft.
        vocabulary: Tokens that are kept; None: as many as pay, 0: all.
        workloads: Prompts whose tokens and answers are counted; none: the bundled ones.
        seconds: For the target's answers that are counted.
        measuring_seconds: For the answers that drafts are measured on, and for each draft on them.
        keep_types: Whether weights stay of the types that they are.
        context_length: Of target and draft, in tokens; None: the usual one.
        draft_options: How the draft is loaded; None: as the target.
    """

    small: ModelFile
    target: ModelFile
    out: Path
    vocabulary: int | None = None
    workloads: tuple[Workload, ...] = ()
    seconds: float = COUNTING_SECONDS
    measuring_seconds: float = 20.0
    keep_types: bool = False
    context_length: int | None = None
    options: LoadOptions = field(default_factory=LoadOptions)
    draft_options: LoadOptions | None = None


def step_s_of(report: DraftReport) -> float:
    """Seconds of a step of a draft that was measured."""
    assert report.step_s is not None
    return report.step_s


def agreement_of(report: DraftReport) -> float:
    """How often its most likely token is the target's."""
    assert report.agreement is not None
    return report.agreement


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of the vocabulary: the share of the answers' tokens that it lacks, the time of a step, and the
    expected speed-up of the best draft length."""

    tokens: int
    lost_ratio: float
    step_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Tried:
    """The trimmed draft in one quantization; `speedup` is that of the best draft length without lookup."""

    quantization: str
    file_bytes: int
    step_s: float
    agreement: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a trim made and found; of the `types` that were tried that of `after` was kept.
    `before` and `after` are the draft as `outrider check` judges it, on held-out answers."""

    path: str
    target: ModelFacts
    counted: tuple[str, ...]
    known_tokens: int
    source_tokens: int
    sizes: tuple[Choice, ...]
    types: tuple[Tried, ...]
    before: DraftReport
    after: DraftReport
    notices: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON: an unknown end of an interval is None."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def trim(asked: TrimRequest, progress: Progress = lambda _what, _part: None) -> Report:
    """Trim a draft, write it, and say what came of it.

    Raises ModelFileError, SettingError, PromptError, VocabularyMismatch and what loading raises; nothing is
    written then.
    """
    started = perf_counter()
    source = read_source(asked.small.path)
    prompts = prompts_of(asked.workloads)
    options, seconds, rows = asked.options, asked.measuring_seconds, list[Row]()
    draft_options, costs_s = asked.draft_options or options, min(DEFAULT_SECONDS, seconds)
    loader = Loader(options, draft_options, HubOptions(), asked.context_length, costs_s=costs_s)
    file = replace(asked.target, backend=options.backend)
    progress(f"loading {file.name}", None)
    with collect_notices() as notices, closing(loader.target(file)[0]) as target:
        assert isinstance(target.model, GgufModel), "it was loaded from a file"
        alignment, floor = _line_up(asked, target.model)
        usage, origins = _count(asked, target, prompts, alignment, floor, progress)
        subject = Subject(file, target, prompts.measured, loader, rows, rows.append)
        record_within(subject, seconds, MAX_ANSWERS, progress)
        loader.costs_s = min(_COSTS_SECONDS, seconds)
        held_out = [_in_draft(Answer(np.array(row.tokens)), alignment) for row in subject.of(AnswerRow)]
        run = _Run(asked, source, subject, alignment, origins, progress)
        before = run.measure(asked.small)
        sizes = run.sizes(usage, held_out, before)
        size = max(sizes, key=lambda c: c.speedup).tokens if asked.vocabulary is None else asked.vocabulary
        cut = Cut(usage.order(), size or source.vocabulary)
        tried, after = run.make(cut)
    return Report(
        path=str(asked.out),
        target=ModelFacts.of(file),
        counted=tuple(origins),
        known_tokens=cut.subset.size - cut.subset.has_other,
        source_tokens=source.vocabulary,
        sizes=sizes,
        types=tried,
        before=before,
        after=after,
        notices=tuple(notices),
        seconds=perf_counter() - started,
    )


def _line_up(asked: TrimRequest, target: GgufModel) -> tuple[Alignment, Ids]:
    """How the draft and its target line up, and tokens that it cannot do without."""
    options = asked.draft_options or asked.options
    with Loaded(asked.small, options, beside=target) as draft:
        alignment = align(target.vocabulary, draft.weights.vocabulary)
        if why := why_no_draft(target.weights, draft.weights):
            raise ModelFileError(str(asked.small.path), why, "Use another pair of models.")
        floor = needed_tokens(draft.weights.vocabulary)
        floor = floor[alignment.to_target[floor] >= 0]
        if asked.vocabulary and asked.vocabulary <= len(floor) + 1:
            reason = f"{len(floor) + 2} are needed in any case: bytes, digits, white space, control tokens"
            way_out = "Give more, or 0: all tokens."
            raise SettingError(f"--vocabulary {asked.vocabulary}", reason, way_out)
        return alignment, floor


def _count(
    asked: TrimRequest,
    target: LoadedTarget,
    prompts: Prompts,
    alignment: Alignment,
    floor: Ids,
    progress: Progress,
) -> tuple[Usage, list[str]]:
    """How the draft's tokens are used, and in words what was counted."""
    progress("counting tokens", None)
    uses = uses_in(target.model.vocabulary, texts_of(prompts.counted))
    origins = [f"{prompts.origin} ({int(uses.sum()):,} tokens)"]
    answers = _answers(asked, target, prompts, progress) if asked.seconds else []
    if asked.seconds:
        total = sum(len(answer.tokens) for answer in answers)
        origins.append(f"{len(answers)} answers of the target ({total:,} tokens)")
    usable = alignment.to_target >= 0
    own_uses = np.where(usable, uses[alignment.to_target], 0)
    return Usage(tuple(_in_draft(one, alignment) for one in answers), own_uses, usable, floor), origins


def _in_draft(answer: Answer, alignment: Alignment) -> Answer:
    known, mass = alignment.to_target >= 0, answer.mass
    found = None if mass is None else np.where(known, mass[alignment.to_target], np.float32(0))
    return Answer(alignment.to_draft[answer.tokens], found)


def _answers(asked: TrimRequest, target: LoadedTarget, prompts: Prompts, progress: Progress) -> list[Answer]:
    encoded: list[tuple[int, ...]] = []
    for prompt in prompts.counted:
        with suppress(PromptError):
            encoded.append(target.encode(prompt))
    assert isinstance(target.model, GgufModel), "it was loaded from a file"
    length = min(_PROMPT_TOKENS + ANSWER_TOKENS, target.model.weights.trained_context)
    report = partial(progress, "the target answers prompts to count in")
    with closing(target.model.weights.open(length, max_sequences=_AT_ONCE)) as model:
        return answer_prompts(Engine(model), encoded, asked.seconds, report)


@dataclass(frozen=True, slots=True)
class _Run:
    asked: TrimRequest
    source: Source
    subject: Subject
    alignment: Alignment
    origins: list[str]
    progress: Progress

    def measure(self, file: ModelFile) -> DraftReport:
        """A draft on the held-out answers. Raises ModelFileError for one that cannot work."""
        self.progress(f"measuring {file.name}", None)
        self.subject.score(file, self.asked.measuring_seconds)
        judged = judge(self.subject, file)
        if judged.agreement is None:
            raise ModelFileError(str(file.path), judged.verdict.sentence, "Use another draft.")
        return judged

    def sizes(self, usage: Usage, held_out: Sequence[Answer], before: DraftReport) -> tuple[Choice, ...]:
        """What vocabularies of several sizes lose, and what they save: a step takes as long as the bytes that
        it reads."""
        whole, ratio = self.source.vocabulary, self.source.output_ratio
        wanted = {whole, *_SIZES, *([self.asked.vocabulary] if self.asked.vocabulary else [])}
        sizes = sorted(n for n in wanted if len(usage.floor) + 1 < n <= whole)
        found = []
        for size, lost in zip(sizes, usage.lost(sizes, held_out), strict=True):
            lost = 0.0 if size == whole else lost
            step_s = step_s_of(before) * (1 - ratio * (1 - size / whole))
            right = agreement_of(before) * (1 - lost)
            found.append(Choice(size, lost, step_s, self._best(step_s, right)))
        return tuple(found)

    def make(self, cut: Cut) -> tuple[tuple[Tried, ...], DraftReport]:
        """Write the draft in its own types and in others, measure each, and keep the best by the draft model
        alone: what lookup finds is the same for all."""
        found: list[tuple[Tried, DraftReport, Path]] = []
        with TemporaryDirectory(prefix=".trim-", dir=self.asked.out.resolve().parent) as folder:
            own = self.asked.small.card.quantization
            others = () if self.asked.keep_types else (name for name in _TYPES if name != own)
            for name in ("", *others):
                path = Path(folder) / name / self.asked.out.name
                path.parent.mkdir(exist_ok=True)
                self.progress(f"writing {self.asked.out.name} {name}".rstrip(), None)
                if not name:
                    self._write(cut, path)
                elif not self._quantized(found[0][2], name, path):
                    continue
                [file] = find_models([str(path)], hub=HubOptions())
                measured = self.measure(replace(file, name=f"{file.name} {name or own}"))
                step_s, agreement = step_s_of(measured), agreement_of(measured)
                speedup = self._best(step_s, agreement)
                kind = name or file.card.quantization
                tried = Tried(kind, path.stat().st_size, step_s, agreement, speedup)
                found.append((tried, measured, path))
            best = max(found, key=lambda one: one[0].speedup)
            best[2].replace(self.asked.out.resolve())
        return tuple(one[0] for one in found), best[1]

    def _quantized(self, source: Path, name: str, path: Path) -> bool:
        try:
            made = quantize(source, name, path, threads=self.asked.options.threads)
        except BackendError as error:
            notify(f"{name} is not tried: {error.why}")
            return False
        return made.file_bytes < source.stat().st_size

    def _best(self, step_s: float, agreement: float) -> float:
        calls_s = self.subject.prices(None).target.calls_s(SHOWN_CALLS, context=0).tolist()
        return StepCosts(calls_s, step_s).best_speedup(agreement)

    def _write(self, cut: Cut, path: Path) -> None:
        origin = {
            "source": self.asked.small.card.name,
            "source_sha256": file_sha256(self.source.path),
            "target": self.asked.target.card.name,
            "counts": "; ".join(self.origins),
            "version": version("outrider"),
        }
        target = self.subject.target.model.vocabulary
        write_trimmed(self.source, cut, path, target, self.alignment.to_target, origin)
