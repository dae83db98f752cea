"""What a distillation is to do: whose answers, what draft, how long to train, what to write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from outrider.core.errors import InputError, SettingError
from outrider.core.files import reason_of, write_whole
from outrider.core.invalid import invalid

_Read = TypeVar("_Read")
Loss = Literal["kl", "tv", "hybrid"]
LOSSES: tuple[Loss, ...] = ("kl", "tv", "hybrid")
Kind = Literal["model", "eagle3"]
KINDS: tuple[Kind, ...] = ("model", "eagle3")
Start = Literal["prune", "random", "continue"]
TeacherKind = Literal["auto", "torch", "llama.cpp"]

USUAL_VOCABULARY = 8192
"""tokens of a draft"""


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The target's answers. `prompts`: JSON-lines files or logs of a server; none: the bundled prompts, of
    which `num_prompts` are asked (of files: all, or so many). `temperatures` take turns.
    `folder`: where the answers are kept (None: in the plan's own); another run may use them."""

    prompts: tuple[str, ...] = ()
    num_prompts: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    max_tokens: int = 256
    top: int = 64
    folder: Path | None = None
    more: tuple[Path, ...] = ()
    """folders with answers that other runs recorded, to train on too"""
    parallel: int | None = None
    """answers under way at once; None: what suits the teacher"""
    teacher: TeacherKind = "auto"

    def __post_init__(self) -> None:
        _at_least("--num-prompts", self.num_prompts, 2)
        _at_least("--max-tokens", self.max_tokens, 1)
        _at_least("--parallel", self.parallel, 1)
        _at_least("--top", self.top, 1)
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise SettingError("--temps", "temperatures are 0 or more", "Give for instance 0,0.7.")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The draft: a model, or a head that reads states of its target and is trained to predict at so many
    `places` of a draft; `vocabulary` and quantizations alone shape that.

    `start` "prune": `layers` of the target (or of `base`, a model with the same tokenizer),
    with `feed_forward` units a layer; "random": the same shape with random weights; "continue": `base`
    as it is. `vocabulary`: tokens that it knows, 0 all; None: those that a continued one knows, else
    `USUAL_VOCABULARY`. `window`: it is trained on the last tokens of a prompt, so many, and reads no more of
    it; 0: all. One that knows all tokens reads all: other engines would not know better."""

    kind: Kind = "model"
    places: int = 5
    start: Start = "prune"
    base: Path | None = None
    layers: int = 4
    feed_forward: int | None = None
    vocabulary: int | None = None
    window: int = 128
    quantization: str = "Q4_0"
    embedding_quantization: str = "Q8_0"
    safetensors: bool = False

    def __post_init__(self) -> None:
        _at_least("--layers", self.layers, 1)
        _at_least("--feed-forward", self.feed_forward, 1)
        _at_least("--vocabulary", self.vocabulary, 0)
        _at_least("--window", self.window, 0)
        if self.kind not in KINDS:
            raise SettingError(f"--kind {self.kind}", "it is not known", f"Choose one of {', '.join(KINDS)}.")
        if self.start == "continue" and self.base is None:
            raise SettingError("--continue", "it names no draft", "Give a GGUF file or a folder.")


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and by what. `steps` None: as many as fit `minutes`, by the time of the first few."""

    steps: int | None = None
    minutes: float = 20.0
    batch_tokens: int = 6144
    learning_rate: float = 3e-3
    loss: Loss = "hybrid"
    on_policy: float = 0.0
    """share of the steps, all in the second half, that train on the draft's own text"""
    patience: int = 5
    evaluations: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("--steps", self.steps, 1)
        _at_least("--batch-tokens", self.batch_tokens, 64)
        _at_least("--patience", self.patience, 1)
        _at_least("--evaluations", self.evaluations, 1)
        if self.loss not in LOSSES:
            raise SettingError("--loss", f"{self.loss!r} is none of {', '.join(LOSSES)}", "Name one of them.")
        if not 0 <= self.on_policy <= 1:
            raise SettingError("--on-policy", f"{self.on_policy:g} is no share", "Give 0 to 1.")
        if not (0 < self.minutes < math.inf and 0 < self.learning_rate < math.inf):
            raise SettingError("--minutes, --learning-rate", "both must be above 0", "Give more.")


@dataclass(frozen=True, slots=True)
class DistillPlan:
    """All of it. `target`: the model file; `out`: the folder of the run."""

    target: Path
    out: Path
    name: str = "draft"
    """of the draft's file, without its ending"""
    data: DataPlan = field(default_factory=DataPlan)
    draft: DraftPlan = field(default_factory=DraftPlan)
    training: TrainingPlan = field(default_factory=TrainingPlan)
    threads: int = 0
    """of llama.cpp and PyTorch; 0: the physical cores"""
    context: int = 1024
    """tokens of the longest prompt with its answer; longer prompts are passed over"""

    def __post_init__(self) -> None:
        _at_least("--context", self.context, 64)

    @property
    def answers_folder(self) -> Path:
        """Where the target's answers are kept."""
        return self.data.folder or self.out / "answers"

    @property
    def continued_gguf(self) -> Path | None:
        """The draft that is gone on with, where it is a GGUF file."""
        base = self.draft.base if self.draft.start == "continue" else None
        return base if base is not None and base.suffix == ".gguf" else None


_ANSWER_KEYS = ("target", "data.max_tokens", "data.top")
"""what answers depend on besides their questions"""
_SHARED_KEYS = ("target", "data.top")
"""what answers of other runs must have in common with this one's"""


def claim(plan: DistillPlan) -> None:
    """Make the folder this plan's own, so that a run which was stopped goes on only as it was begun; and that
    of the answers one for answers of this target.

    Raises SettingError when a folder cannot be made, InputError when it holds a run with another plan, or
    answers that were made otherwise.
    """
    make_folder(plan.out)
    claim_answers(plan)
    _claim(plan.out / "plan.json", _as_json(plan), "a run with another plan")


def claim_answers(plan: DistillPlan) -> None:
    """Make the folder of the answers one for answers of this target; look into those of other runs.

    Raises SettingError when it cannot be made, InputError when one holds answers that were made otherwise.
    """
    own, wanted = plan.answers_folder, _as_json(plan)
    make_folder(own)
    for folder in (own, *plan.data.more):
        if folder != own and not (folder / "answers.json").is_file():
            raise InputError(str(folder), "it holds no answers", "Name the answers folder of another run.")
        kept = {key: wanted[key] for key in (_ANSWER_KEYS if folder == own else _SHARED_KEYS)}
        _claim(folder / "answers.json", kept, "answers that were made otherwise")


def make_folder(folder: Path, way_out: str = "Name another folder.") -> None:
    """Make a folder, and those that it lies in. Raises SettingError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"it cannot be made ({reason_of(error)})"
        raise SettingError(str(folder), reason, way_out) from error


def kept(path: Path, make: Callable[[], Any], read: Callable[[Any], _Read], what: str, way_out: str) -> _Read:
    """What `make` gives as plain data, read by `read`. It is made once and kept at `path` as JSON, so that a
    run that is resumed goes on as it began. Raises InputError with the way out when that file is damaged,
    SettingError, with `what` it was, when it cannot be written."""
    if not path.exists():
        write_whole(path, json.dumps(make(), indent=1) + "\n", what)
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise InputError(str(path), f"it is damaged ({invalid(error)})", way_out) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(path), f"it is damaged ({error})", way_out) from error


def _claim(path: Path, wanted: Mapping[str, Any], holds: str) -> None:
    found = kept(path, lambda: wanted, dict[str, Any], "plan", "Remove it, or name another folder.")
    if changed := [key for key in wanted if found.get(key) != wanted[key]]:
        reason = f"it holds {holds} ({', '.join(changed)} differ)"
        way_out = "Give the same options to go on with it, or name another folder."
        raise InputError(str(path.parent), reason, way_out)


def _as_json(plan: DistillPlan) -> dict[str, Any]:
    """Every setting by its path; where the run lies says nothing about what it does."""
    parts = asdict(plan) | {"out": None, "threads": None}
    flat = {key: value for key, value in parts.items() if not isinstance(value, dict)}
    for part in ("data", "draft", "training"):
        flat |= {f"{part}.{key}": value for key, value in parts[part].items()}
    return json.loads(json.dumps(flat, default=str))  # type: ignore[no-any-return]


def _at_least(flag: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise SettingError(f"{flag} {value}", f"it must be at least {minimum}", "Give more.")
