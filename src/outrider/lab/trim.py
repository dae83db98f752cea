"""A draft made cheaper without training: fewer tokens, and types of weights that are fast here. The tokens
are counted, the file written, and measured before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType
from gguf.constants import Keys
from pydantic_core import to_jsonable_python

from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.quantizer import quantize
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request
from outrider.core.errors import BackendError, ModelFileError, PromptError, SettingError
from outrider.core.notices import collect_notices, notify
from outrider.core.params import SamplingParams
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.costs.expected_speed import StepCosts
from outrider.engine import Engine
from outrider.lab.check import SHOWN_CALLS, DraftReport, judge, opened, record_within
from outrider.lab.loaded import LoadedTarget, Loader
from outrider.lab.model_file import Tensor, check_tokens, read_tensors, write_model_file
from outrider.lab.models import ModelFacts, ModelFile, find_models
from outrider.lab.prompts import Prompt, Workload, conversation_hash, is_held_out
from outrider.lab.record import MAX_ANSWERS, answered
from outrider.lab.rows import AnswerRow
from outrider.lab.subject import Subject
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written import written_prompts
from outrider.models.gguf import read_card
from outrider.models.header import Field, fields_of
from outrider.models.hub import HubOptions, file_sha256
from outrider.models.vocab import Alignment, align
from outrider.models.vocab.subset import (
    TARGET_TOKENS,
    Ids,
    Subset,
    needed_tokens,
    part_fields,
    ranked,
    tokenizer_fields,
)
from outrider.policy.state import CALIBRATION_KEY
from outrider.session.loading import load_draft, why_no_draft
from outrider.session.options import Progress, no_progress

# Which tokens matter: how often each is used in prompts and the target's answers

_BUNDLED = 1200
"""bundled prompts that are counted; the order is always the same"""
_HELD_OUT_SHARE = 0.25
"""of prompts of the user's own"""
_MIN_HELD_OUT = 4
ANSWER_TOKENS = 96
"""of an answer: many short ones tell more about others than few long ones"""
_TOP = 64
"""tokens of each place that are counted, by their probability"""

Uses = npt.NDArray[np.float64]
"""how often each token is used, or how likely it was, added up"""


class Prompts(NamedTuple):
    """Prompts whose tokens and answers are counted, and workloads with which a draft is measured; the two
    have no conversation in common. `origin`: the first, in words."""

    counted: tuple[Prompt, ...]
    measured: tuple[Workload, ...]
    origin: str


def prompts_of(own: Sequence[Workload]) -> Prompts:
    """Those of the user's own workloads, a part of which measures; without any the bundled ones, and the
    built-in workloads to measure with."""
    built_in = tuple(map(load_workload, BUILT_IN))
    if not own:
        counted = tuple(written.prompt for written in written_prompts(_BUNDLED))
        return Prompts(counted, built_in, "the bundled prompts")
    held_out = [tuple(p for p in w.prompts if is_held_out(p, _HELD_OUT_SHARE)) for w in own]
    measured = tuple(replace(w, prompts=some) for w, some in zip(own, held_out, strict=True) if some)
    if sum(map(len, held_out)) < _MIN_HELD_OUT:
        measured = built_in
    never = {conversation_hash(prompt) for workload in measured for prompt in workload.prompts}
    counted = tuple(p for w in own for p in w.prompts if conversation_hash(p) not in never)
    return Prompts(counted, measured, ", ".join(workload.name for workload in own))


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Every text of some prompts, each once: templates share long ones."""
    found: dict[str, None] = {}
    for prompt in prompts:
        if isinstance(prompt.messages, str):
            found[prompt.messages] = None
        else:
            found |= dict.fromkeys(str(message["content"]) for message in prompt.messages)
        found |= dict.fromkeys(prompt.follow_ups)
    return found


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = perf_counter,
) -> list[Completion]:
    """The target's most likely answers to as many prompts as the time allows, as many at
    once as it has sequences; those that leave no room are passed over. The engine stores nothing before and
    after. Raises BackendError when a call fails."""
    started, greedy = clock(), SamplingParams(temperature=0)
    room = engine.target.capacity_tokens // engine.target.max_sequences - ANSWER_TOKENS
    fitting = (tuple(prompt) for prompt in prompts if 0 < len(prompt) <= room)

    def following() -> tuple[None, Request] | None:
        prompt = next(fitting, None)
        return None if prompt is None else (None, Request(prompt, greedy, ANSWER_TOKENS, logprobs=_TOP))

    def is_over() -> bool:
        spent = clock() - started
        progress(min(spent / seconds, 1.0))
        return spent >= seconds

    with closing(answered(engine, following, is_over)) as ended:
        return [found for _, found in ended if isinstance(found, Completion) and found.tokens]


def count_uses(vocabulary: Vocabulary, texts: Iterable[str], answers: Iterable[Completion]) -> Uses:
    """How often each token is used in texts and answers, and how likely it was at each place of these."""
    uses = np.zeros(vocabulary.size)
    for text in texts:
        np.add.at(uses, np.asarray(vocabulary.tokenize(text, add_special=False), dtype=np.int64), 1)
    for answer in answers:
        np.add.at(uses, np.array(answer.tokens), 1)
        for scored in answer.logprobs:
            tokens, log_probs = zip(*scored.top, strict=True)
            uses[list(tokens)] += np.exp(log_probs)
    return uses


def order_of(uses: Uses, alignment: Alignment, floor: Ids) -> Ids:
    """The draft's tokens in the order in which they are kept, by the uses of the target's: those of `floor`
    first, those that the target lacks last."""
    known = alignment.to_target >= 0
    return ranked(np.where(known, uses[alignment.to_target], -1), floor)


def lost_ratios(order: Ids, sizes: Sequence[int], tokens: Ids) -> list[float]:
    """For vocabularies of each size the share, 0-1, of these tokens that they lack (-1: the draft itself)."""
    places = np.full(len(order) + 1, len(order))
    places[order] = np.arange(len(order))
    return [float((places[tokens] >= size - 1).mean()) for size in sizes]


# The model that is trimmed, row by row, and the file that is made of some rows

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
BY_TOKEN = (EMBEDDING, OUTPUT, "output.bias", "per_layer_token_embd.weight")
"""Tensors with a row for each token."""
_OF_THE_FILE = (Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT, CALIBRATION_KEY)
"""Fields that the writer makes itself, or that are no longer true"""


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be trimmed."""

    path: Path
    architecture: str
    vocabulary: int
    fields: dict[str, Field]
    tensors: dict[str, Tensor]


def read_source(path: Path) -> Source:
    """Read a model in all its parts; the weights are mapped, not read.

    Raises ModelFileError for a file that is missing, damaged, trimmed already, or without what is trimmed.
    """
    card, (header, tensors) = read_card(path), read_tensors(path)
    fields, size, name = fields_of(card.path, header), card.num_tokens or 0, str(card.path)
    if TARGET_TOKENS in fields:
        raise ModelFileError(name, "it is trimmed already", "Trim the file that it was made of.")
    if EMBEDDING not in tensors or Keys.Tokenizer.LIST not in fields:
        lacking = "a tokenizer" if Keys.Tokenizer.LIST not in fields else EMBEDDING
        raise ModelFileError(name, f"it lacks {lacking}", "Name a whole model.")
    for part, tensor in tensors.items():
        has_token_rows = tensor.shape[0] == size
        if part in BY_TOKEN and not has_token_rows:
            why = f"its {part} has {tensor.shape[0]:,} rows, and its tokenizer {size:,} tokens"
            raise ModelFileError(name, why, "Download it again.")
        if has_token_rows and part not in BY_TOKEN:
            why = f"its {part} has a row for each token, and how it is used is not known here"
            raise ModelFileError(name, why, "Use another draft.")
    return Source(card.path, card.architecture, size, fields, tensors)


def subset_of(kept: Ids, total: int) -> Subset:
    """The tokens that are kept: all of them, or one token for all others in the place of the last one."""
    return Subset.whole(total) if len(kept) >= total else Subset.of(kept[:-1].tolist(), total)


def write_trimmed(
    source: Source, kept: Ids, path: Path, target: Vocabulary, to_target: Ids, origin: Mapping[str, str]
) -> None:
    """Write a draft of the tokens that are `kept`, the most used first, which llama.cpp reads and which lines
    up with `target`; rows are copied as they are, and where writing fails, a part of the file is left.

    An untrained model has no row for "all others". It takes that of the last token: a draft ends where that
    one would have been drafted. `to_target` are the target's ids of the source's tokens, `origin` says by
    name how the draft was made. Raises SettingError (no room) and VocabularyMismatch.
    """
    subset, tensors = subset_of(kept, source.vocabulary), dict(source.tensors)
    fields = tokenizer_fields(source.fields, subset, source.vocabulary)
    if subset.has_other:
        rows = np.append(subset.to_target[:-1], kept[-1])
        for name in tensors.keys() & set(BY_TOKEN):
            whole = tensors[name]
            tensors[name] = replace(whole, shape=(len(rows), *whole.shape[1:]), rows=whole.rows[rows])
        ids = np.append(to_target[subset.to_target[:-1]], -1)
        fields |= part_fields(ids.tolist(), target, reads_pieces=True)
    fields |= {f"outrider.trim.{name}": Field(text, GGUFValueType.STRING) for name, text in origin.items()}
    write_model_file(path, source.architecture, _own_fields(source, subset.size) | fields, tensors)
    if subset.has_other:
        check_tokens(path, target, ids)


def _own_fields(source: Source, size: int) -> dict[str, Field]:
    fields = {
        key: found
        for key, found in source.fields.items()
        if key not in _OF_THE_FILE and not key.startswith(("tokenizer.", "split."))
    }
    key = Keys.LLM.VOCAB_SIZE.format(arch=source.architecture)
    return fields | ({key: replace(fields[key], value=size)} if key in fields else {})


# All of it

SCHEMA = "outrider.trim/1"
COUNTING_SECONDS = 90.0
MEASURING_SECONDS = 20.0
"""for the answers that drafts are measured on, and for each draft on them"""
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
        keep_types: Whether weights stay of the types that they are.
    """

    small: ModelFile
    target: ModelFile
    out: Path
    loader: Loader
    vocabulary: int | None = None
    workloads: tuple[Workload, ...] = ()
    seconds: float = COUNTING_SECONDS
    keep_types: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of the vocabulary: the share of the answers' tokens that it lacks, the time of a step, and the
    expected speed-up of the best draft length."""

    tokens: int
    lost_ratio: float
    step_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a trim made and found. `before` is the draft and `types` the trimmed one in each of the
    quantizations that were tried, as `outrider check` judges them on held-out answers; `after` was kept."""

    path: str
    target: ModelFacts
    counted: tuple[str, ...]
    known_tokens: int
    source_tokens: int
    sizes: tuple[Choice, ...]
    types: tuple[DraftReport, ...]
    before: DraftReport
    after: DraftReport
    notices: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def trim(asked: TrimRequest, progress: Progress = no_progress) -> Report:
    """Trim a draft, write it, and say what came of it.

    Raises ModelFileError, SettingError, PromptError, VocabularyMismatch and what loading raises; nothing is
    written then.
    """
    started, seconds = perf_counter(), MEASURING_SECONDS
    source = read_source(asked.small.path)
    prompts = prompts_of(asked.workloads)
    loader = replace(asked.loader, costs_s=min(DEFAULT_SECONDS, seconds))
    reading = opened(asked.target, loader, prompts.measured, progress)
    with collect_notices() as notices, reading as subject:
        alignment, floor = _line_up(asked, subject.target)
        uses, origins = _count(asked, subject.target, prompts, progress)
        order = order_of(uses, alignment, floor)
        record_within(subject, seconds, MAX_ANSWERS, progress)
        loader.costs_s = min(_COSTS_SECONDS, seconds)
        held_out = alignment.to_draft[np.concatenate([row.tokens for row in subject.of(AnswerRow)])]
        run = _Run(asked, source, subject, alignment, origins, progress)
        before = run.measure(asked.small)
        sizes = run.sizes(order, len(floor), held_out, before)
        size = max(sizes, key=lambda c: c.speedup).tokens if asked.vocabulary is None else asked.vocabulary
        kept = order[: size or source.vocabulary]
        types, after = run.make(kept)
    subset = subset_of(kept, source.vocabulary)
    return Report(
        path=str(asked.out),
        target=ModelFacts.of(subject.file),
        counted=tuple(origins),
        known_tokens=subset.size - subset.has_other,
        source_tokens=source.vocabulary,
        sizes=sizes,
        types=types,
        before=before,
        after=after,
        notices=tuple(notices),
        seconds=perf_counter() - started,
    )


def _line_up(asked: TrimRequest, loaded: LoadedTarget) -> tuple[Alignment, Ids]:
    target, options = loaded.model, asked.loader.draft_options
    assert isinstance(target, GgufModel), "it was loaded from a file"
    with closing(load_draft(target.weights, asked.small.card, options, measure=True)) as weights:
        alignment = align(target.vocabulary, weights.vocabulary)
        if why := why_no_draft(target.weights, weights):
            raise ModelFileError(str(asked.small.path), why, "Use another pair of models.")
        floor = needed_tokens(weights.vocabulary)
        floor = floor[alignment.to_target[floor] >= 0]
        if asked.vocabulary and asked.vocabulary <= len(floor) + 1:
            reason = f"{len(floor) + 2} are needed in any case: bytes, digits, white space, control tokens"
            way_out = "Give more, or 0: all tokens."
            raise SettingError(f"--vocabulary {asked.vocabulary}", reason, way_out)
        return alignment, floor


def _count(
    asked: TrimRequest, target: LoadedTarget, prompts: Prompts, progress: Progress
) -> tuple[Uses, list[str]]:
    """How the target's tokens are used, and in words what was counted."""
    progress("counting tokens", None)
    vocabulary = target.model.vocabulary
    uses = count_uses(vocabulary, texts_of(prompts.counted), ())
    origins = [f"{prompts.origin} ({int(uses.sum()):,} tokens)"]
    if asked.seconds:
        answers = _answers(asked, target, prompts, progress)
        total = sum(len(answer.tokens) for answer in answers)
        origins.append(f"{len(answers)} answers of the target ({total:,} tokens)")
        uses += count_uses(vocabulary, (), answers)
    return uses, origins


def _answers(
    asked: TrimRequest, target: LoadedTarget, prompts: Prompts, progress: Progress
) -> list[Completion]:
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
        self.subject.score(file, MEASURING_SECONDS)
        judged = judge(self.subject, file)
        if judged.agreement is None:
            raise ModelFileError(str(file.path), judged.verdict.sentence, "Use another draft.")
        return judged

    def sizes(self, order: Ids, needed: int, held_out: Ids, before: DraftReport) -> tuple[Choice, ...]:
        """What vocabularies of several sizes lose, and what they save: a step takes as long as the bytes that
        it reads."""
        assert before.step_s is not None and before.agreement is not None
        whole, ratio = self.source.vocabulary, before.output_ratio
        calls_s = self.subject.prices(None).target.calls_s(SHOWN_CALLS, context=0).tolist()
        wanted = {whole, *_SIZES, *([self.asked.vocabulary] if self.asked.vocabulary else [])}
        sizes = sorted(n for n in wanted if needed + 1 < n <= whole)
        found = []
        for size, lost in zip(sizes, lost_ratios(order, sizes, held_out), strict=True):
            lost = 0.0 if size == whole else lost
            step_s = before.step_s * (1 - ratio * (1 - size / whole))
            costs, agreement = StepCosts(calls_s, step_s), before.agreement * (1 - lost)
            speedup = max(costs.speedup(n, agreement) for n in costs.lengths)
            found.append(Choice(size, lost, step_s, speedup))
        return tuple(found)

    def make(self, kept: Ids) -> tuple[tuple[DraftReport, ...], DraftReport]:
        """Write the draft in its own types and in others, measure each, and keep the one that is fastest
        without lookup, which finds the same for all."""
        found: list[tuple[DraftReport, Path]] = []
        with TemporaryDirectory(prefix=".trim-", dir=self.asked.out.resolve().parent) as folder:
            own = self.asked.small.card.quantization
            others = () if self.asked.keep_types else (name for name in _TYPES if name != own)
            for name in ("", *others):
                path = Path(folder) / name / self.asked.out.name
                path.parent.mkdir(exist_ok=True)
                self.progress(f"writing {self.asked.out.name} {name}".rstrip(), None)
                if not name:
                    self._write(kept, path)
                elif not self._quantized(found[0][1], name, path):
                    continue
                [file] = find_models([str(path)], hub=HubOptions())
                found.append((self.measure(replace(file, name=f"{file.name} {name or own}")), path))
            best, path = max(found, key=lambda one: one[0].alone.value if one[0].alone else 0.0)
            path.replace(self.asked.out.resolve())
        return tuple(report for report, _ in found), best

    def _quantized(self, source: Path, name: str, path: Path) -> bool:
        try:
            made = quantize(source, name, path, threads=self.asked.loader.options.threads)
        except BackendError as error:
            notify(f"{name} is not tried: {error.why}")
            return False
        return made.file_bytes < source.stat().st_size

    def _write(self, kept: Ids, path: Path) -> None:
        origin = {
            "source": self.asked.small.card.name,
            "source_sha256": file_sha256(self.source.path),
            "target": self.asked.target.card.name,
            "counts": "; ".join(self.origins),
            "version": version("outrider"),
        }
        target = self.subject.target.model.vocabulary
        write_trimmed(self.source, kept, path, target, self.alignment.to_target, origin)
