"""The options of `distill`: data, the draft's shape, its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from outrider.cli import options
from outrider.cli.options import MACHINE, OUTPUT, option
from outrider.distill.plan import USUAL_VOCABULARY, DataPlan, DraftPlan, TrainingPlan

__all__ = ["command"]

_INTERRUPTED = 130
_HELP = "Train a small draft on the target's own answers; say what it gained on prompts that it never saw."
_DATA, _DRAFT, _TRAINING = "Data", "Draft", "Training"
_USUAL_DATA, _USUAL_DRAFT, _USUAL_TRAINING = DataPlan(), DraftPlan(), TrainingPlan()
_TEMPERATURES = ",".join(f"{t:g}" for t in _USUAL_DATA.temperatures)

_Out = Annotated[
    Path | None,
    option(
        OUTPUT,
        "-o",
        "--out",
        metavar="FOLDER",
        help="Where everything goes, and a stopped run goes on. Default: ./distilled-NAME.",
    ),
]
_Name = Annotated[
    str | None, option(OUTPUT, "--name", metavar="NAME", help="Of the draft's file. Default: MODEL-draft.")
]
_NoReport = Annotated[bool, option(OUTPUT, "--no-report", help="Do not measure it on held-out prompts.")]
_Curve = Annotated[
    bool,
    option(OUTPUT, "--learning-curve", help="Train on parts of the data too: what would more of it bring?"),
]
_Json = Annotated[
    bool, option(OUTPUT, "--json", help="One JSON object on standard output, and nothing else.")
]
_Prompts = Annotated[
    list[str] | None,
    option(
        _DATA,
        "--prompts",
        metavar="FILE",
        help="Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.",
    ),
]
_NumPrompts = Annotated[
    int | None, option(_DATA, "--num-prompts", metavar="N", help="At most so many prompts.")
]
_Temps = Annotated[
    str, option(_DATA, "--temps", metavar="LIST", help="Temperatures of the answers, which take turns.")
]
_MaxTokens = Annotated[
    int, option(_DATA, "--max-tokens", metavar="N", help="The longest answer that is asked for.")
]
_Answers = Annotated[
    Path | None,
    option(
        _DATA,
        "--answers",
        metavar="FOLDER",
        help="Where the answers are, or will be, for other runs too. Default: in --out.",
    ),
]
_MoreAnswers = Annotated[
    list[Path] | None,
    option(
        _DATA,
        "--more-answers",
        metavar="FOLDER",
        help="Answers that another run recorded, to train on too (repeatable).",
    ),
]
_AnswersOnly = Annotated[
    bool,
    option(_DATA, "--answers-only", help="Record the answers and end: train on them later, or elsewhere."),
]
_Teacher = Annotated[
    str,
    option(_DATA, "--teacher", metavar="WHO", help="Who makes the target's calls: torch, llama.cpp or auto."),
]
_Parallel = Annotated[
    int | None,
    option(_DATA, "--parallel", metavar="N", help="Answers under way at once. Default: what suits."),
]
_Layers = Annotated[
    int | None,
    option(
        _DRAFT,
        "--layers",
        metavar="N",
        help=f"Layers that are kept, the first and the last. Default: {_USUAL_DRAFT.layers}.",
    ),
]
_FeedForward = Annotated[
    int | None,
    option(
        _DRAFT, "--feed-forward", metavar="N", help="Units of each feed-forward layer. Default: as they are."
    ),
]
_Vocabulary = Annotated[
    int | None,
    option(
        _DRAFT,
        "--vocabulary",
        metavar="N",
        help="Tokens that it knows, by frequency; 0: all. Default: "
        f"{USUAL_VOCABULARY}, or those of --continue.",
    ),
]
_Window = Annotated[
    int,
    option(
        _DRAFT,
        "--window",
        metavar="N",
        help="Tokens of a prompt's end that it reads; 0: all. Not with --vocabulary 0.",
    ),
]
_Base = Annotated[
    str | None,
    option(
        _DRAFT, "--base", metavar="MODEL", help="Take the layers of this relative instead of the target's."
    ),
]
_Random = Annotated[bool, option(_DRAFT, "--random", help="Begin with random weights of that shape.")]
_Continue = Annotated[
    str | None,
    option(
        _DRAFT,
        "--continue",
        metavar="DRAFT",
        help="Go on with this draft as it is: a GGUF file, or a folder in Hugging Face's layout.",
    ),
]
_Quant = Annotated[str, option(_DRAFT, "--quant", metavar="TYPE", help="Quantization of the draft's file.")]
_EmbeddingQuant = Annotated[
    str,
    option(_DRAFT, "--embedding-quant", metavar="TYPE", help="That of its embedding and output layer."),
]
_Safetensors = Annotated[
    bool,
    option(_DRAFT, "--safetensors", help="Write it for other engines too; needs --vocabulary 0."),
]
_Minutes = Annotated[
    float | None,
    option(
        _TRAINING,
        "--minutes",
        metavar="M",
        help=f"How long to train, the answers not counted. Default: {_USUAL_TRAINING.minutes:g}.",
    ),
]
_Steps = Annotated[
    int | None, option(_TRAINING, "--steps", metavar="N", help="Steps to train, instead of --minutes.")
]
_Loss = Annotated[
    str, option(_TRAINING, "--loss", metavar="NAME", help="kl, tv, or hybrid: from the one to the other.")
]
_Rate = Annotated[
    float, option(_TRAINING, "--learning-rate", metavar="R", help="The highest, behind a short warm-up.")
]
_BatchTokens = Annotated[
    int, option(_TRAINING, "--batch-tokens", metavar="N", help="Tokens of a step, prompts included.")
]
_OnPolicy = Annotated[
    float,
    option(
        _TRAINING,
        "--on-policy",
        metavar="SHARE",
        help="Share of the later steps that train on the draft's own text.",
    ),
]
_Seed = Annotated[int, option(_TRAINING, "--seed", metavar="N", help="Of sampling, weights and order.")]

_Context = Annotated[
    int,
    option(MACHINE, "-c", "--ctx-size", metavar="N", help="Tokens of the longest prompt with its answer."),
]


def command(cls: type[TyperCommand], _as_run: Callable[[dict[str, Any]], Any]) -> Any:
    """The command, of class `cls`."""
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command("distill", cls=cls, help=_HELP)(_distill)
    return get_command(program)


def _distill(
    model: options.Model = None,
    hf_repo: options.HubModel = None,
    hf_token: options.HubToken = None,
    offline: options.Offline = False,
    prompts: _Prompts = None,
    num_prompts: _NumPrompts = None,
    temps: _Temps = _TEMPERATURES,
    max_tokens: _MaxTokens = _USUAL_DATA.max_tokens,
    answers: _Answers = None,
    more_answers: _MoreAnswers = None,
    answers_only: _AnswersOnly = False,
    teacher: _Teacher = _USUAL_DATA.teacher,
    parallel: _Parallel = None,
    layers: _Layers = None,
    feed_forward: _FeedForward = None,
    vocabulary: _Vocabulary = None,
    window: _Window = _USUAL_DRAFT.window,
    base: _Base = None,
    random: _Random = False,
    go_on: _Continue = None,
    quant: _Quant = _USUAL_DRAFT.quantization,
    embedding_quant: _EmbeddingQuant = _USUAL_DRAFT.embedding_quantization,
    safetensors: _Safetensors = False,
    minutes: _Minutes = None,
    steps: _Steps = None,
    loss: _Loss = _USUAL_TRAINING.loss,
    learning_rate: _Rate = _USUAL_TRAINING.learning_rate,
    batch_tokens: _BatchTokens = _USUAL_TRAINING.batch_tokens,
    on_policy: _OnPolicy = _USUAL_TRAINING.on_policy,
    seed: _Seed = _USUAL_TRAINING.seed,
    out: _Out = None,
    name: _Name = None,
    no_report: _NoReport = False,
    learning_curve: _Curve = False,
    print_json: _Json = False,
    verbose: options.Verbose = False,
    ctx_size: _Context = 1024,
    threads: options.Threads = -1,
) -> None:
    given = dict(locals())
    from outrider.backends.gguf import show_log
    from outrider.cli.distill import distill
    from outrider.cli.distill_plan import DistillSettings

    show_log(given.pop("verbose"))
    try:
        status = distill(DistillSettings(**given))
    except KeyboardInterrupt:
        typer.echo("\ninterrupted", err=True)
        status = _INTERRUPTED
    raise typer.Exit(status)
