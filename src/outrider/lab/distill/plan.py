"""The settings of a distillation, what they make together, and the folder that a run keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from outrider.backends.gguf.quantizer import read_type
from outrider.core.errors import InputError, SettingError
from outrider.core.files import reason_of, write_whole
from outrider.core.schema import Count, Group, Natural, Share, setting
from outrider.core.settings import Hub, JsonOutput, Target, Threads, Verbose
from outrider.lab.models import ModelFile

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TensorType = Annotated[str, AfterValidator(read_type)]

USUAL_LAYERS = 4
USUAL_MINUTES = 20.0
USUAL_VOCABULARY = 8192


class Data(Group, panel="Data"):
    """What the draft is trained on."""

    prompts: list[str] = setting(
        [], "Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.", "FILE"
    )
    num_prompts: Annotated[int, Field(ge=2)] | None = setting(None, "At most N prompts.")
    temps: str = setting("0,0,0.7", "Temperatures of the answers, which take turns.", "LIST")
    max_tokens: Count = setting(256, "The longest answer that is asked for.")
    answers: Path | None = setting(
        None, "Where the answers are, or will be, for other runs too. Default: in --out.", "FOLDER"
    )

    @field_validator("temps")
    @classmethod
    def _check_temperatures(cls, text: str) -> str:
        try:
            is_usable = all(0 <= float(part) < math.inf for part in text.split(","))
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ValueError("temperatures are numbers from 0 on, for instance 0,0.7")
        return text

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(float(part) for part in self.temps.split(","))


class Draft(Group, panel="Draft"):
    """The draft's shape, and its file."""

    layers: Count | None = setting(
        None, f"Layers that are kept, those that agree most. Default: {USUAL_LAYERS}."
    )
    vocabulary: Natural | None = setting(
        None,
        f"Tokens that it knows, by frequency; 0: all. Default: {USUAL_VOCABULARY}.",
    )
    window: Natural = setting(128, "Tokens of a prompt's end that it reads; 0: all. Not with --vocabulary 0.")
    base: str | None = setting(None, "Take the layers of this relative instead of the target's.", "MODEL")
    quant: TensorType = setting("Q4_0", "Quantization of the draft's file.", "TYPE")
    embedding_quant: TensorType = setting("Q8_0", "That of its embedding and output layer.", "TYPE")


class Training(Group, panel="Training"):
    """How long and how it is trained."""

    minutes: Positive | None = setting(
        None, f"How long to train, the answers not counted. Default: {USUAL_MINUTES:g}.", "M"
    )
    steps: Count | None = setting(None, "Steps to train, instead of --minutes.")
    learning_rate: Positive = setting(1e-3, "The highest, after a short warm-up.", "R")
    batch_tokens: Annotated[int, Field(ge=64)] = setting(6144, "Tokens of a step, prompts included.")
    on_policy: Share = setting(0.0, "Share of the later steps that train on the draft's own text.", "SHARE")
    seed: Natural = setting(0, "Of sampling and order.")


class DistillSettings(Target, Hub, Data, Draft, Training, Threads, JsonOutput, Verbose):
    """Those of `distill`."""

    out: Path | None = setting(
        None, "Where everything goes, and a stopped run goes on. Default: ./distilled-MODEL.", "-o FOLDER"
    )
    no_report: bool = setting(False, "Do not measure it on held-out prompts.")
    ctx_size: Count = setting(1024, "Tokens of the longest prompt with its answer.", "-c", panel="Machine")


@dataclass(frozen=True, slots=True)
class DistillPlan:
    """What a run is to do: `file` is the target, `out` the folder of the run, `base` the file that
    `settings.base` names."""

    file: ModelFile
    out: Path
    settings: DistillSettings
    base: Path | None = None

    @property
    def threads(self) -> int:
        """Of llama.cpp and PyTorch; 0: the physical cores."""
        return max(self.settings.threads, 0)

    @property
    def answers_folder(self) -> Path:
        return self.settings.answers or self.out / "answers"

    @property
    def first(self) -> Path:
        return self.out / "first.gguf"

    @property
    def report(self) -> Path:
        return self.out / "report.json"

    def as_json(self) -> dict[str, Any]:
        """Every setting by its path; where the run lies says nothing about what it does."""
        found: dict[str, Any] = {
            "target": str(self.file.path),
            "context": self.settings.ctx_size,
            "base": None if self.base is None else str(self.base),
        }
        for kind in (Data, Draft, Training):
            values = self.settings.model_dump(mode="json", include=set(kind.model_fields))
            found |= {f"{kind.__name__.lower()}.{key}": value for key, value in values.items()}
        return found


_ANSWER_KEYS = ("target", "data.max_tokens")
"""what answers depend on besides their questions"""


def claim(plan: DistillPlan) -> None:
    """Make the folder this plan's own, and that of the answers one for answers of this target, which later
    runs go on with.

    Raises SettingError when one cannot be made, InputError when it holds what was made otherwise.
    """
    wanted = plan.as_json()
    of_answers = {key: wanted[key] for key in _ANSWER_KEYS}
    _claim(plan.answers_folder, "answers.json", of_answers, "answers that were made otherwise")
    _claim(plan.out, "plan.json", wanted, "a run with another plan")


def _claim(folder: Path, name: str, wanted: Mapping[str, Any], holds: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"it cannot be made ({reason_of(error)})"
        raise SettingError(str(folder), reason, "Name another folder.") from error
    path = folder / name
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n", "plan")
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        way_out = "Remove it, or name another folder."
        raise InputError(str(path), f"it is damaged ({error})", way_out) from error
    if changed := [key for key in wanted if found.get(key) != wanted[key]]:
        reason = f"it holds {holds} ({', '.join(changed)} differ)"
        raise InputError(str(folder), reason, "Give the same options, or name another folder.")
