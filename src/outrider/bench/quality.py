"""What a smaller file costs in quality: every quantization of a target scored against the best one.

The reference's distributions at every position of the recorded answers are kept first
(`save_reference`); then each other quantization reads the same texts (`quality_of`). No two models are in
memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from outrider.bench.teacher import DEFAULT_TOP, Floats64, Teacher, log_softmax, score
from outrider.core.contracts import Model
from outrider.core.data import Row
from outrider.core.errors import InputError, SettingError, VocabularyMismatch
from outrider.core.files import parse_json, reason_of, write_whole
from outrider.lab.rows import AnswerRow, QualityRow
from outrider.models.gguf import ModelCard
from outrider.models.reference import without_quantization

_INDEX = "reference.json"
_MIN_LOG = -700.0
"""replaces the logarithm of a probability of nothing, so that a sum stays finite"""


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...


_File = TypeVar("_File", bound=_Named)


def families(models: Sequence[_File], references: Collection[str] = ()) -> list[tuple[_File, ...]]:
    """The models in groups that are quantizations of one: of one architecture, shape, tokenizer and name.

    The first of each group is its reference: the one whose name is among `references`, else the one with
    the most bits a weight. The order is otherwise that of `models`.
    Raises SettingError when a group has two named references.
    """
    groups: dict[tuple[object, ...], list[_File]] = {}
    for model in models:
        card = model.card
        shape = (card.parameters, card.block_count, card.embedding_length, card.expert_count)
        name = without_quantization(card.name)
        groups.setdefault((card.architecture, shape, card.num_tokens, card.tokenizer, name), []).append(model)
    found = []
    for group in groups.values():
        named = [model for model in group if model.name in references]
        if len(named) > 1:
            both = " and ".join(model.name for model in named)
            raise SettingError(both, "both are to be the reference of one model", "Name one of them.")
        best = max(named or group, key=lambda model: model.card.file_bytes / model.card.parameters)
        found.append((best, *(model for model in group if model is not best)))
    return found


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near a model's distributions are to the reference's, over the positions of a text."""

    num_tokens: int
    mean_kl: float
    """in nats; see `compare`"""
    top1_agreement: float
    """share of positions where both have the same most likely token"""


def compare(reference: Teacher, rows: Iterable[Row]) -> Agreement:
    """Mean KL(reference || model) over the positions, and how often both agree on the most likely token.

    `rows` are the model's logits at the same positions. All tokens but the reference's K most likely ones are
    merged into one. That can only lower the divergence (the data processing inequality): the figure is a
    lower bound of the one over the whole vocabulary, and equals it when K is the vocabulary. The reference
    is stored in 16 bits, so a model compared with itself comes out at some 1e-6 instead of 0.
    Raises VocabularyMismatch when the model has another number of tokens, ValueError when the rows are
    not as many as the positions.
    """
    divergences: list[float] = []
    same = 0
    for position, row in enumerate(rows):
        if len(row) != reference.vocabulary_size:
            reason = f"the reference has {reference.vocabulary_size} tokens, this model {len(row)}"
            raise VocabularyMismatch("quality", reason, "Compare quantizations of one model.")
        divergences.append(_divergence(reference, position, log_softmax(row)))
        same += int(np.argmax(row)) == int(reference.ids[position, 0])
    if len(divergences) != len(reference):
        raise ValueError(f"{len(divergences)} rows for {len(reference)} positions")
    count = len(divergences)
    return Agreement(count, float(np.mean(divergences)) if count else 0.0, same / count if count else 1.0)


def _divergence(reference: Teacher, position: int, log_probs: Floats64) -> float:
    ids = reference.ids[position]
    likely, rest = reference.probabilities(position)
    rest_of_model = float(np.exp(np.delete(log_probs, ids)).sum())
    mine = np.maximum(np.append(log_probs[ids], np.log(max(rest_of_model, 1e-300))), _MIN_LOG)
    theirs = np.append(likely, rest)
    held = theirs > 0
    return max(float((theirs[held] * (np.log(theirs[held]) - mine[held])).sum()), 0.0)


def save_reference(
    model: Model,
    folder: Path,
    answers: Sequence[AnswerRow],
    *,
    name: str | None = None,
    top: int = DEFAULT_TOP,
) -> None:
    """Keep the reference's distributions at every position of the answers in `folder`, a file a case.

    Cases that are there and whole are passed over, so that an interrupted run goes on where it was. `name`
    is what rows call the reference (None: the model's own name).
    Raises SettingError when the folder belongs to another reference or cannot be written, BackendError when
    a text does not fit the model's context.
    """
    name = name or model.name
    _claim(folder, name, top)
    for answer in answers:
        path = folder / _file_name(answer)
        with suppress(InputError):
            if len(Teacher.load(path)) == len(answer.tokens):
                continue
        with closing(score(model, answer.prompt, answer.tokens)) as rows:
            Teacher.of(rows, top).save(path)


def quality_of(
    model: Model, reference_folder: Path, answers: Sequence[AnswerRow], *, name: str | None = None
) -> Iterator[QualityRow]:
    """A row for each answer, as soon as it is worked out; none for an empty answer. Give those whose rows
    are not there yet. `name` is what rows call the model (None: its own name).

    Raises InputError when the folder lacks a case of the reference, BackendError when a text does not fit.
    """
    reference = str(_index(reference_folder)["reference"])
    for answer in answers:
        if not answer.tokens:
            continue
        teacher = Teacher.load(reference_folder / _file_name(answer))
        with closing(score(model, answer.prompt, answer.tokens)) as rows:
            found = compare(teacher, rows)
        yield QualityRow(
            target=name or model.name,
            reference=reference,
            workload=answer.workload,
            case=answer.case,
            **asdict(found),
        )


def _file_name(answer: AnswerRow) -> str:
    """Names the text, not only the case: a case that is answered again is another text."""
    text = repr((answer.workload, answer.case, answer.prompt, answer.tokens))
    return f"{blake2b(text.encode(), digest_size=12).hexdigest()}.npz"


def _claim(folder: Path, name: str, top: int) -> None:
    """Make the folder this reference's own."""
    wanted = {"reference": name, "top": top}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"it cannot be made ({reason_of(error)})"
        raise SettingError(str(folder), reason, "Name another folder.") from error
    if not (folder / _INDEX).exists():
        write_whole(folder / _INDEX, json.dumps(wanted) + "\n", "reference")
    elif (found := _index(folder)) != wanted:
        reason = f"it holds the {found['top']} most likely tokens of {found['reference']}"
        raise SettingError(str(folder), f"{reason}, not the {top} of {name}", "Name another folder.")


def _index(folder: Path) -> dict[str, object]:
    path = folder / _INDEX
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "it holds no reference's distributions"
        raise InputError(str(folder), reason, "Keep the reference's first (save_reference).") from error
    if not isinstance(found, dict) or not {"reference", "top"} <= found.keys():
        raise InputError(str(path), "it is damaged", "Remove the folder: it is made again.")
    return found
