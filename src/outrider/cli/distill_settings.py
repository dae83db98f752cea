"""The settings of `distill`: data, the draft's shape, its training."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.settings import OnRay
from outrider.core.loading_settings import Threads
from outrider.core.schema import MACHINE, Group, Natural, setting
from outrider.core.settings import (
    Hub,
    JsonOutput,
    Target,
    Verbose,
)
from outrider.lab.distill.plan import USUAL_VOCABULARY, DataPlan, DraftPlan, TrainingPlan

_USUAL_DATA, _USUAL_DRAFT, _USUAL_TRAINING = DataPlan(), DraftPlan(), TrainingPlan()


class Data(Group):
    """What the draft is trained on."""

    panel = "Data"
    prompts: list[str] = setting(
        [],
        metavar="FILE",
        help="Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.",
    )
    num_prompts: int | None = setting(None, help="At most so many prompts.")
    temps: str = setting(
        ",".join(f"{t:g}" for t in _USUAL_DATA.temperatures),
        metavar="LIST",
        help="Temperatures of the answers, which take turns.",
    )
    max_tokens: int = setting(_USUAL_DATA.max_tokens, help="The longest answer that is asked for.")
    answers: Path | None = setting(
        None,
        metavar="FOLDER",
        help="Where the answers are, or will be, for other runs too. Default: in --out.",
    )
    more_answers: list[Path] = setting(
        [], metavar="FOLDER", help="Answers that another run recorded, to train on too (repeatable)."
    )
    answers_only: bool = setting(False, help="Record the answers and end: train on them later, or elsewhere.")
    teacher: str = setting(
        _USUAL_DATA.teacher, metavar="WHO", help="Who makes the target's calls: torch, llama.cpp or auto."
    )
    parallel: int | None = setting(None, help="Answers under way at once. Default: what suits.")


class Draft(Group):
    """The draft's shape, and its file."""

    panel = "Draft"
    kind: str = setting(
        _USUAL_DRAFT.kind,
        metavar="KIND",
        help="A model, or a head that reads states of its target: model or eagle3.",
    )
    layers: int | None = setting(
        None, help=f"Layers that are kept, those that agree most. Default: {_USUAL_DRAFT.layers}."
    )
    feed_forward: int | None = setting(None, help="Units of each feed-forward layer. Default: as they are.")
    vocabulary: int | None = setting(
        None,
        help="Tokens that it knows, by frequency; 0: all. Default: "
        f"{USUAL_VOCABULARY}, or those of --continue.",
    )
    window: int = setting(
        _USUAL_DRAFT.window, help="Tokens of a prompt's end that it reads; 0: all. Not with --vocabulary 0."
    )
    base: str | None = setting(
        None, metavar="MODEL", help="Take the layers of this relative instead of the target's."
    )
    random: bool = setting(False, help="Begin with random weights of that shape.")
    go_on: str | None = setting(
        None,
        "--continue",
        metavar="DRAFT",
        help="Go on with this draft as it is: a GGUF file, or a folder in Hugging Face's layout.",
    )
    quant: str = setting(_USUAL_DRAFT.quantization, metavar="TYPE", help="Quantization of the draft's file.")
    embedding_quant: str = setting(
        _USUAL_DRAFT.embedding_quantization, metavar="TYPE", help="That of its embedding and output layer."
    )
    safetensors: bool = setting(False, help="Write it for other engines too; needs --vocabulary 0.")


class Training(Group):
    """How long and how it is trained."""

    panel = "Training"
    minutes: float | None = setting(
        None,
        metavar="M",
        help=f"How long to train, the answers not counted. Default: {_USUAL_TRAINING.minutes:g}.",
    )
    steps: int | None = setting(None, help="Steps to train, instead of --minutes.")
    loss: str = setting(
        _USUAL_TRAINING.loss, metavar="NAME", help="kl, tv, or hybrid: from the one to the other."
    )
    learning_rate: float = setting(
        _USUAL_TRAINING.learning_rate, metavar="R", help="The highest, after a short warm-up."
    )
    batch_tokens: int = setting(_USUAL_TRAINING.batch_tokens, help="Tokens of a step, prompts included.")
    on_policy: float = setting(
        _USUAL_TRAINING.on_policy,
        metavar="SHARE",
        help="Share of the later steps that train on the draft's own text.",
    )
    seed: Natural = setting(_USUAL_TRAINING.seed, help="Of sampling, weights and order.")


class Written(Group):
    """What is written where."""

    out: Path | None = setting(
        None,
        "-o",
        metavar="FOLDER",
        help="Where everything goes, and a stopped run goes on. Default: ./distilled-NAME.",
    )
    name: str | None = setting(None, metavar="NAME", help="Of the draft's file. Default: MODEL-draft.")
    no_report: bool = setting(False, help="Do not measure it on held-out prompts.")
    learning_curve: bool = setting(False, help="Train on parts of the data too: what would more of it bring?")


class TrainingContext(Group):
    """Room for a prompt with its answer."""

    panel = MACHINE
    ctx_size: int = setting(1024, "-c", help="Tokens of the longest prompt with its answer.")


class DistillSettings(
    Target, Hub, Data, Draft, Training, Written, JsonOutput, Verbose, TrainingContext, Threads, OnRay
):
    """Those of `distill`; `go_on` is --continue."""
