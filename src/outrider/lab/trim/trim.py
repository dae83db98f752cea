"""A draft trimmed for a target: tokens counted, types timed, written, and measured before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from outrider.backends.gguf import GgufModel, LoadOptions
from outrider.backends.gguf.retyping import row_bytes
from outrider.core.errors import BackendError, ModelFileError, PromptError, SettingError
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.judged import SHOWN_CALLS, judge, replayed
from outrider.lab.loaded import Loaded, LoadedTarget, Progress
from outrider.lab.models import ModelFile, find_models
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import as_text, questions_of, record_answers
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN
from outrider.lab.subject import Subject, offers_along
from outrider.lab.trim.counting import Answered, Mass, answer_prompts
from outrider.lab.trim.cut import Cut, outer_layers, write_trimmed
from outrider.lab.trim.material import Counted, Prompts, prompts_of, recorded_answers, texts_in, texts_of
from outrider.lab.trim.report import Choice, Measured, Report
from outrider.lab.trim.source import OUTPUT, Source, read_source
from outrider.lab.trim.tokens import Answer, Usage, floor_of
from outrider.lab.trim.types import Speeds, Type, measure_types
from outrider.lab.verdict import best_draft_speedup
from outrider.models.hub import HubOptions, file_sha256
from outrider.models.vocab import Alignment, align
from outrider.models.vocab.subset import Ids, Subset
from outrider.session import DEFAULT_CONTEXT_TOKENS
from outrider.session.loading import why_no_draft

COUNTING_SECONDS = 90.0
_COSTS_SECONDS = 3.0
"""for what each draft's calls cost"""
_AT_ONCE = 8
_PROMPT_TOKENS = 512
"""of prompts that are answered at once: longer ones are passed over"""
_SIZES = tuple(round(4096 * 2 ** (step / 2)) // 256 * 256 for step in range(12))
_MIN_KEPT_RATIO = 0.97
"""of the agreement: where faster types leave less, the draft is measured with its own types too"""


@dataclass(frozen=True, slots=True)
class TrimRequest:
    """What is to be trimmed, for whom, and how. `vocabulary` None is chosen, 0 all tokens; `layers` None all.
    `workloads`, files of `corpora` and `recordings` are what tokens are counted in, beside the target's
    answers of `seconds`."""

    small: ModelFile
    target: ModelFile
    out: Path
    vocabulary: int | None = None
    layers: int | None = None
    workloads: tuple[Workload, ...] = ()
    corpora: tuple[Path, ...] = ()
    recordings: tuple[Path, ...] = ()
    seconds: float = COUNTING_SECONDS
    measuring_seconds: float = 20.0
    """for the answers that drafts are measured on, and for each draft on them"""
    keep_types: bool = False
    context_length: int | None = None
    options: LoadOptions = field(default_factory=LoadOptions)
    draft_options: LoadOptions | None = None


def trim(asked: TrimRequest, progress: Progress = lambda _what, _part: None) -> Report:
    """Trim a draft, write it, and say what came of it.

    Raises ModelFileError, SettingError, PromptError, VocabularyMismatch and what loading raises; nothing is
    written then.
    """
    started = perf_counter()
    source = read_source(asked.small.path)
    layers = outer_layers(source.layers, asked.layers) if asked.layers else tuple(range(source.layers))
    source.check_layers(len(layers))
    prompts, notices = prompts_of(asked.workloads), list[str]()
    with Loaded(asked.target, asked.options, notices, progress) as target:
        usual = min(DEFAULT_CONTEXT_TOKENS, target.weights.trained_context)
        model = target.open(usual if asked.context_length is None else asked.context_length)
        draft = _line_up(asked, model, notices, progress)
        loaded = LoadedTarget(asked.target.name, model, target.template)
        usage, origins = _count(asked, loaded, prompts, draft, notices, progress)
        seconds = asked.measuring_seconds
        costs = target.costs("all", min(DEFAULT_SECONDS, seconds))
        subject = Subject(loaded, target.facts(), costs, ())
        subject = _answered(subject, prompts.measured, seconds, notices, progress)
        held_out = [_in_draft(answer.row.tokens, None, draft.alignment) for answer in subject.answers]
        run = _Run(asked, source, subject, draft, layers, origins, notices, progress)
        before = run.measure(asked.small)
        speeds = run.speeds(before.step_s)
        types = {} if asked.keep_types else speeds.fastest(source)
        sizes = run.sizes(usage, held_out, before, speeds, types)
        size = max(sizes, key=lambda c: c.speedup).tokens if asked.vocabulary is None else asked.vocabulary
        subset = Subset.whole(source.vocabulary)
        if 0 < size < source.vocabulary:
            subset = Subset.of(usage.order()[: size - 1].tolist(), source.vocabulary)
        cut, after = run.make(subset, types, before)
        return run.report(cut, sizes, speeds, before, after, perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Draft:
    """The draft beside its target: how they line up, tokens that it cannot do without, and how it loads."""

    alignment: Alignment
    floor: Ids
    options: LoadOptions


def _line_up(asked: TrimRequest, target: GgufModel, notices: list[str], progress: Progress) -> _Draft:
    options = asked.draft_options or asked.options
    with Loaded(asked.small, options, notices, progress, beside=target) as draft:
        alignment = align(target.vocabulary, draft.weights.vocabulary)
        if why := why_no_draft(target.weights, draft.weights):
            raise ModelFileError(str(asked.small.path), why, "Take another pair of models.")
        floor = floor_of(draft.weights.vocabulary)
        floor = floor[alignment.to_target[floor] >= 0]
        if asked.vocabulary and asked.vocabulary <= len(floor) + 1:
            reason = f"{len(floor) + 2} are needed in any case: bytes, digits, white space, control tokens"
            way_out = "Give more, or 0: all tokens."
            raise SettingError(f"--vocabulary {asked.vocabulary}", reason, way_out)
        return _Draft(alignment, floor, draft.weights.options)


def _answered(
    subject: Subject,
    workloads: Sequence[Workload],
    seconds: float,
    notices: list[str],
    progress: Progress,
) -> Subject:
    """With the target's answers to prompts that nothing is counted in."""
    questions, lines = questions_of(workloads, subject.target)
    answers, _ = record_answers(
        subject.target,
        questions,
        subject.costs,
        seconds=seconds,
        progress=partial(progress, "the target answers prompts to measure with"),
        left_out=notices.append,
    )
    notices += lines
    if not answers:
        raise PromptError("prompts", "the target says next to nothing to them", "Give others (--prompts).")
    return subject.corrected(answers)


def _count(
    asked: TrimRequest,
    target: LoadedTarget,
    prompts: Prompts,
    draft: _Draft,
    notices: list[str],
    progress: Progress,
) -> tuple[Usage, list[str]]:
    """How the draft's tokens are used, and what that was counted in."""
    model, to_target = target.model, draft.alignment.to_target
    progress("counting tokens", None)
    counted = Counted(np.zeros(model.vocabulary.size))
    counted.add(model.vocabulary, texts_of(prompts.counted), prompts.origin)
    if asked.corpora:
        names = ", ".join(map(str, asked.corpora))
        counted.add(model.vocabulary, texts_in(asked.corpora, notices.append), names)
    found = [Answered(None, list(tokens)) for tokens in recorded_answers(asked.recordings, model.vocabulary)]
    if asked.seconds:
        report = partial(progress, "the target answers prompts to count in")
        made = _ask(target, prompts.counted, asked.seconds, report)
        found += made
        total = sum(len(answer.tokens) for answer in made)
        counted.origins.append(f"{len(made)} answers of the target ({total:,} tokens)")
    if asked.recordings:
        counted.origins.append(f"recordings in {', '.join(map(str, asked.recordings))}")
    usable = to_target >= 0
    answers = [_in_draft(answer.tokens, answer.mass, draft.alignment) for answer in found if answer.tokens]
    uses = np.where(usable, counted.uses[to_target], 0)
    return Usage(tuple(answers), uses, usable, draft.floor), counted.origins


def _in_draft(tokens: Sequence[int], mass: Mass | None, alignment: Alignment) -> Answer:
    """An answer of the target's in the draft's ids."""
    known = alignment.to_target >= 0
    found = None if mass is None else np.where(known, mass[alignment.to_target], np.float32(0))
    return Answer(alignment.to_draft[np.asarray(tokens)], found)


def _ask(
    target: LoadedTarget, prompts: Sequence[Prompt], seconds: float, report: Callable[[float], None]
) -> list[Answered]:
    asked: list[tuple[int, ...]] = []
    for prompt in prompts:
        with suppress(PromptError):
            asked.append(target.encode(as_text(prompt) if target.template is None else prompt))
    asked = [tokens for tokens in asked if len(tokens) <= _PROMPT_TOKENS]
    assert isinstance(target.model, GgufModel), "it was loaded from a file"
    length = min(2 * _PROMPT_TOKENS, target.model.weights.trained_context)
    with closing(target.model.weights.open(length, max_sequences=_AT_ONCE)) as model:
        return answer_prompts(model, asked, seconds, report)


@dataclass(frozen=True, slots=True)
class _Run:
    """A trim whose target has answered, and whose tokens are counted."""

    asked: TrimRequest
    source: Source
    subject: Subject
    draft: _Draft
    layers: tuple[int, ...]
    origins: list[str]
    notices: list[str]
    progress: Progress

    def measure(self, file: ModelFile) -> Measured:
        """A draft on the held-out answers. Raises ModelFileError for one that cannot work."""
        offers = offers_along(
            self.subject,
            file,
            self.asked.draft_options or self.asked.options,
            self.notices,
            self.progress,
            seconds=self.asked.measuring_seconds,
            costs_s=min(_COSTS_SECONDS, self.asked.measuring_seconds),
        )
        found = replayed(self.subject, offers, (PLAIN, AUTO, AUTO_LOOKUP, AUTO_MODEL))
        judged = judge(self.subject, offers, found)
        if found is None or judged.acceptance is None or judged.calls is None:
            raise ModelFileError(str(file.path), judged.verdict.sentence, "Take another draft.")
        return Measured(
            step_s=judged.calls.call_s,
            agreement=judged.acceptance.rate,
            with_lookup=found.over(AUTO.name, PLAIN.name),
            without_lookup=found.over(AUTO_MODEL.name, PLAIN.name),
            lookup_alone=found.over(AUTO_LOOKUP.name, PLAIN.name),
            judged=judged,
        )

    def speeds(self, step_s: float) -> Speeds:
        """What weights of each type cost here; where that cannot be measured, all alike."""
        if not (self.asked.keep_types and self.asked.vocabulary is not None):
            report = partial(self.progress, "timing types of weights")
            try:
                folder, seconds = self.asked.out.resolve().parent, self.asked.measuring_seconds
                return measure_types(self.source, self.draft.options, folder, report, seconds / 4)
            except (ModelFileError, BackendError) as error:
                self.notices.append(f"types are left as they are: {error.why}")
        kinds = {t.kind: 0.0 for t in self.source.tensors.values() if t.is_matrix}
        weights = sum(t.weights for t in self.source.tensors.values() if t.is_matrix)
        return Speeds(dict.fromkeys(kinds, step_s / weights), self.draft.options)

    def sizes(
        self,
        usage: Usage,
        held_out: Sequence[Answer],
        before: Measured,
        speeds: Speeds,
        types: Mapping[str, Type],
    ) -> tuple[Choice, ...]:
        """What vocabularies of several sizes lose, and what they save."""
        whole = self.source.vocabulary
        wanted = {whole, *_SIZES, *([self.asked.vocabulary] if self.asked.vocabulary else [])}
        sizes = sorted(n for n in wanted if len(usage.floor) + 1 < n <= whole)
        found = []
        for size, lost in zip(sizes, usage.lost(sizes, held_out), strict=True):
            lost = 0.0 if size == whole else lost
            step_s = speeds.step_s(self.source, before.step_s, size, self.layers, types)
            right = before.agreement.value * (1 - lost)
            found.append(Choice(size, lost, step_s, self._best(step_s, right)))
        return tuple(found)

    def make(self, subset: Subset, types: Mapping[str, Type], before: Measured) -> tuple[Cut, Measured]:
        """Write the draft; where faster types cost much of its agreement, the best of it, one where only
        rows that fit no K-quant change, and one whose types are as they were."""
        whole = Cut(subset, self.layers, {})
        tried: list[tuple[Cut, Measured]] = []
        with TemporaryDirectory(prefix=".trim-", dir=self.asked.out.resolve().parent) as folder:
            for cut in (replace(whole, types=kinds) for kinds in self._fewer(types)):
                path = Path(folder) / str(len(tried)) / self.asked.out.name
                path.parent.mkdir()
                self.progress(f"writing {self.asked.out.name}", None)
                self.notices.extend(self._write(cut, path))
                [file] = find_models([str(path)], hub=HubOptions())
                tried.append((cut, self.measure(file)))
                if tried[0][1].agreement.value >= _MIN_KEPT_RATIO * before.agreement.value:
                    break
            best = max(range(len(tried)), key=lambda i: self._speedup(tried[i][1]))
            (Path(folder) / str(best) / self.asked.out.name).replace(self.asked.out.resolve())
        return tried[best]

    def _fewer(self, types: Mapping[str, Type]) -> list[Mapping[str, Type]]:
        """Fewer and fewer changes of types, to none."""
        tensors = self.source.tensors
        narrow = {
            name: kind
            for name, kind in types.items()
            if name in tensors and name != OUTPUT and not row_bytes(Type.Q4_K, tensors[name].columns)
        }
        return list({tuple(kinds.items()): kinds for kinds in (types, narrow, {})}.values())

    def _speedup(self, measured: Measured) -> float:
        """Of the best draft length, by the draft model alone: what lookup finds is the same for all."""
        return self._best(measured.step_s, measured.agreement.value)

    def _best(self, step_s: float, agreement: float) -> float:
        calls_s = self.subject.costs.calls_s(SHOWN_CALLS, context=0).tolist()
        return best_draft_speedup([s / calls_s[0] for s in calls_s], step_s / calls_s[0], agreement)

    def _write(self, cut: Cut, path: Path) -> tuple[str, ...]:
        origin = {
            "source": self.asked.small.card.name,
            "source_sha256": file_sha256(self.source.path),
            "target": self.asked.target.card.name,
            "counts": "; ".join(self.origins),
            "version": version("outrider"),
        }
        target = self.subject.target.model.vocabulary
        return write_trimmed(self.source, cut, path, target, self.draft.alignment.to_target, origin)

    def report(
        self,
        cut: Cut,
        sizes: tuple[Choice, ...],
        speeds: Speeds,
        before: Measured,
        after: Measured,
        seconds: float,
    ) -> Report:
        """What came of it."""
        [made] = find_models([str(self.asked.out)], hub=HubOptions())
        if len(self.layers) < self.source.layers:
            self.notices.append(
                "layers were dropped: the agreement falls until it is trained again (`outrider distill "
                f"--continue {self.asked.out}`)"
            )
        return Report(
            path=str(self.asked.out),
            file_bytes=made.card.file_bytes,
            source=before.judged.model,
            target=self.subject.facts,
            source_sha256=file_sha256(self.source.path),
            counted=tuple(self.origins),
            known_tokens=cut.subset.size - cut.subset.has_other,
            source_tokens=self.source.vocabulary,
            layers=len(self.layers),
            source_layers=self.source.layers,
            sizes=sizes,
            types=_changes(self.source, cut),
            weight_s={kind.name: seconds for kind, seconds in speeds.weight_s.items()},
            before=before,
            after=after,
            verdict=after.judged.verdict.sentence,
            advice=after.judged.verdict.advice,
            is_useful=after.judged.verdict.pays,
            notices=tuple(dict.fromkeys(self.notices)),
            seconds=seconds,
        )


def _changes(source: Source, cut: Cut) -> dict[str, float]:
    """Each change of a type with its share of the weights that are multiplied with."""
    found: Counter[str] = Counter()
    for name, tensor, layer in source.multiplied():
        if layer is None or layer in cut.layers:
            rows = cut.subset.size if layer is None else tensor.data.shape[0]
            to = cut.types.get(name, tensor.kind)
            changed = tensor.kind.name if to == tensor.kind else f"{tensor.kind.name} to {to.name}"
            found[changed] += rows * tensor.columns
    return {change: count / found.total() for change, count in found.most_common()}
