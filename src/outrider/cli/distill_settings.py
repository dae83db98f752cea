"""The settings of `distill`: data, the draft's shape, its training."""

from __future__ import annotations

from pathlib import Path

from outrider.core.settings import (
    MACHINE,
    OUTPUT,
    Hub,
    JsonOutput,
    Natural,
    Target,
    Threads,
    Verbose,
    setting,
)
from outrider.distill.plan import USUAL_VOCABULARY, DataPlan, DraftPlan, TrainingPlan

_DATA, _DRAFT, _TRAINING = "Data", "Draft", "Training"
_USUAL_DATA, _USUAL_DRAFT, _USUAL_TRAINING = DataPlan(), DraftPlan(), TrainingPlan()


class DistillSettings(Target, Hub, Threads, JsonOutput, Verbose):
    """Those of `distill`; `go_on` is --continue."""

    prompts: list[str] = setting(
        [],
        metavar="FILE",
        panel=_DATA,
        help="Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.",
    )
    num_prompts: int | None = setting(None, panel=_DATA, help="At most so many prompts.")
    temps: str = setting(
        ",".join(f"{t:g}" for t in _USUAL_DATA.temperatures),
        metavar="LIST",
        panel=_DATA,
        help="Temperatures of the answers, which take turns.",
    )
    max_tokens: int = setting(
        _USUAL_DATA.max_tokens, panel=_DATA, help="The longest answer that is asked for."
    )
    answers: Path | None = setting(
        None,
        metavar="FOLDER",
        panel=_DATA,
        help="Where the answers are, or will be, for other runs too. Default: in --out.",
    )
    more_answers: list[Path] = setting(
        [],
        metavar="FOLDER",
        panel=_DATA,
        help="Answers that another run recorded, to train on too (repeatable).",
    )
    answers_only: bool = setting(
        False, panel=_DATA, help="Record the answers and end: train on them later, or elsewhere."
    )
    teacher: str = setting(
        _USUAL_DATA.teacher,
        metavar="WHO",
        panel=_DATA,
        help="Who makes the target's calls: torch, llama.cpp or auto.",
    )
    parallel: int | None = setting(None, panel=_DATA, help="Answers under way at once. Default: what suits.")
    layers: int | None = setting(
        None,
        panel=_DRAFT,
        help=f"Layers that are kept, the first and the last. Default: {_USUAL_DRAFT.layers}.",
    )
    feed_forward: int | None = setting(
        None, panel=_DRAFT, help="Units of each feed-forward layer. Default: as they are."
    )
    vocabulary: int | None = setting(
        None,
        panel=_DRAFT,
        help="Tokens that it knows, by frequency; 0: all. Default: "
        f"{USUAL_VOCABULARY}, or those of --continue.",
    )
    window: int = setting(
        _USUAL_DRAFT.window,
        panel=_DRAFT,
        help="Tokens of a prompt's end that it reads; 0: all. Not with --vocabulary 0.",
    )
    base: str | None = setting(
        None,
        metavar="MODEL",
        panel=_DRAFT,
        help="Take the layers of this relative instead of the target's.",
    )
    random: bool = setting(False, panel=_DRAFT, help="Begin with random weights of that shape.")
    go_on: str | None = setting(
        None,
        "--continue",
        metavar="DRAFT",
        panel=_DRAFT,
        help="Go on with this draft as it is: a GGUF file, or a folder in Hugging Face's layout.",
    )
    quant: str = setting(
        _USUAL_DRAFT.quantization, metavar="TYPE", panel=_DRAFT, help="Quantization of the draft's file."
    )
    embedding_quant: str = setting(
        _USUAL_DRAFT.embedding_quantization,
        metavar="TYPE",
        panel=_DRAFT,
        help="That of its embedding and output layer.",
    )
    safetensors: bool = setting(
        False, panel=_DRAFT, help="Write it for other engines too; needs --vocabulary 0."
    )
    minutes: float | None = setting(
        None,
        metavar="M",
        panel=_TRAINING,
        help=f"How long to train, the answers not counted. Default: {_USUAL_TRAINING.minutes:g}.",
    )
    steps: int | None = setting(None, panel=_TRAINING, help="Steps to train, instead of --minutes.")
    loss: str = setting(
        _USUAL_TRAINING.loss,
        metavar="NAME",
        panel=_TRAINING,
        help="kl, tv, or hybrid: from the one to the other.",
    )
    learning_rate: float = setting(
        _USUAL_TRAINING.learning_rate,
        metavar="R",
        panel=_TRAINING,
        help="The highest, after a short warm-up.",
    )
    batch_tokens: int = setting(
        _USUAL_TRAINING.batch_tokens, panel=_TRAINING, help="Tokens of a step, prompts included."
    )
    on_policy: float = setting(
        _USUAL_TRAINING.on_policy,
        metavar="SHARE",
        panel=_TRAINING,
        help="Share of the later steps that train on the draft's own text.",
    )
    seed: Natural = setting(_USUAL_TRAINING.seed, panel=_TRAINING, help="Of sampling, weights and order.")
    out: Path | None = setting(
        None,
        "-o",
        metavar="FOLDER",
        panel=OUTPUT,
        help="Where everything goes, and a stopped run goes on. Default: ./distilled-NAME.",
    )
    name: str | None = setting(
        None, metavar="NAME", panel=OUTPUT, help="Of the draft's file. Default: MODEL-draft."
    )
    no_report: bool = setting(False, panel=OUTPUT, help="Do not measure it on held-out prompts.")
    learning_curve: bool = setting(
        False, panel=OUTPUT, help="Train on parts of the data too: what would more of it bring?"
    )
    ctx_size: int = setting(1024, "-c", panel=MACHINE, help="Tokens of the longest prompt with its answer.")
