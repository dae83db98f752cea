"""The settings of `bench` and its subcommands, by the names of a plan's settings (`outrider.lab.bench.plan`).

What is not given leaves what the plan's file says, or the plan's defaults.
"""

from __future__ import annotations

from pathlib import Path

from outrider.cli.settings import OnMachines
from outrider.core.schema import MACHINE, MODELS, SAMPLING, Group, setting
from outrider.core.settings import Hub, Verbose


class SummaryOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(
        False, "--json", help="A summary as one JSON object on standard output, no table."
    )


class Models(Group):
    """What is compared."""

    panel = MODELS
    targets: list[str] = setting(
        [],
        "-m",
        "--target",
        "--model",
        metavar="MODEL",
        help="Target: a file, a quoted glob, hf:OWNER/REPO[:QUANT], or default (repeatable).",
    )
    drafts: list[str] = setting(
        [],
        "-md",
        "--draft",
        "--model-draft",
        metavar="MODEL",
        help="Draft model, named likewise, or mtp: a target's own head; each is tried with every target "
        "(repeatable).",
    )
    lookup_only: bool = setting(True, help="Try targets without a draft too (default).")


class Swept(Group):
    """Workloads, and the settings that are tried on them."""

    panel = "What is swept"
    workload: list[str] = setting(
        [],
        metavar="NAME",
        help="chat, code, edits, json, summaries, agent, reasoning, or a file of JSON lines; "
        "file.jsonl#coding takes one category (repeatable).",
    )
    prompts: int | None = setting(None, help="At most N prompts of each workload, evenly spread.")
    max_tokens: int | None = setting(None, "--max-tokens", "-n", help="Tokens of an answer. Default: 128.")
    drafters: str | None = setting(
        None, metavar="WHO", help="Who drafts: some of lookup,model,both. Default: all."
    )
    draft_lengths: str | None = setting(None, metavar="N", help="Draft lengths: 0-16 (the default) or 2,4,8.")
    p_mins: str | None = setting(
        None, metavar="P", help="Ends of drafts: below these probabilities. Default: 0,0.5,0.75."
    )


class Precision(Group):
    """How often and how long it is run."""

    panel = "How precisely"
    finalists: int | None = setting(None, help="Best settings of a cell to run for real. Default: 2.")
    controls: list[str] = setting(
        [],
        "--control",
        metavar="SETTING",
        help='A setting to run for real in any case: "model 3", "both 8/0.75", "auto" (repeatable).',
    )
    repetitions: int | None = setting(None, help="How often each real run is repeated. Default: 4.")
    minutes: float | None = setting(
        None, metavar="M", help="For everything: real runs are cut to what fits. Default: no limit."
    )
    costs: Path | None = setting(None, help="Take what calls cost from this file; do not measure it.")


class SweepSampling(Group):
    """How the next token is chosen."""

    panel = SAMPLING
    temperature: float | None = setting(
        None, "--temp", "--temperature", metavar="T", help="Temperature. Default: 0."
    )
    seed: int | None = setting(None, "-s", help="Of the sampling, and of the order of runs.")


class SweepLoading(Group):
    """How models are loaded."""

    panel = MACHINE
    context: int | None = setting(
        None, "-c", "--ctx-size", help="Context in tokens. Default: what is needed."
    )
    threads: int | None = setting(None, "-t", help="Threads; default: the physical cores.")
    threads_batch: int | None = setting(None, "-tb", help="Threads of calls over several tokens.")
    gpu_layers: str | None = setting(
        None, "-ngl", metavar="N", help="Layers on the GPU, or all (the default)."
    )
    flash_attention: str | None = setting(
        None, "-fa", "--flash-attn", metavar="WHEN", help="Flash attention: on, off or auto."
    )
    backend: str | None = setting(
        None, metavar="NAME", help="Native library: llama.cpp, ik, or auto (the default): the faster one."
    )
    library: Path | None = setting(None, "--llama-library", help="A build of your own: libllama of either.")


class SweepOutput(Group):
    """The plan, and where the run is kept."""

    plan: Path | None = setting(
        None,
        metavar="PLAN.toml",
        argument=True,
        help="What to sweep; flags override it. Default: flags alone.",
    )
    out: Path | None = setting(
        None, "-o", metavar="FOLDER", help="Folder of the run. Default: the plan's name."
    )


class BenchSettings(
    SweepOutput,
    Models,
    Hub,
    Swept,
    Precision,
    SweepSampling,
    SummaryOutput,
    Verbose,
    SweepLoading,
    OnMachines,
):
    """Those of `bench`."""


class InitSettings(Group):
    """Those of `bench init`."""

    file: Path = setting(Path("bench.toml"), argument=True, help="The file to write.")
    force: bool = setting(False, help="Replace the file if there is one.")


class ReportSettings(SummaryOutput):
    """Those of `bench report`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    html: Path | None = setting(None, help="Write the HTML report there too.")


class ExportSettings(Group):
    """Those of `bench export`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    to: Path = setting(..., help="A file that ends in .csv or .jsonl.")
