"""The settings of `bench` and its subcommands, by the names of a plan's settings (`outrider.bench.plan`).

What is not given leaves what the plan's file says, or the plan's defaults.
"""

from __future__ import annotations

from pathlib import Path

from outrider.core.settings import MACHINE, MODELS, OUTPUT, SAMPLING, Group, Hub, Verbose, setting

_SWEPT = "What is swept"
_PRECISION = "How precisely"


class SummaryOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(
        False, "--json", help="A summary as one JSON object on standard output, no table."
    )


class BenchSettings(Hub, SummaryOutput, Verbose):
    """Those of `bench`."""

    plan: Path | None = setting(
        None,
        metavar="PLAN.toml",
        argument=True,
        help="What to sweep; flags override it. Default: flags alone.",
    )
    targets: list[str] = setting(
        [],
        "-m",
        "--target",
        "--model",
        metavar="MODEL",
        panel=MODELS,
        help="Target: a file, a quoted glob, hf:OWNER/REPO[:QUANT], or default (repeatable).",
    )
    drafts: list[str] = setting(
        [],
        "-md",
        "--draft",
        "--model-draft",
        metavar="MODEL",
        panel=MODELS,
        help="Draft model, named likewise; tried with every target (repeatable).",
    )
    lookup_only: bool = setting(True, panel=MODELS, help="Try targets without a draft too (default).")
    workload: list[str] = setting(
        [],
        metavar="NAME",
        panel=_SWEPT,
        help="chat, code, edits, json, summaries, agent, reasoning, or a file of JSON lines; "
        "file.jsonl#coding takes one category (repeatable).",
    )
    prompts: int | None = setting(
        None, panel=_SWEPT, help="At most N prompts of each workload, evenly spread."
    )
    max_tokens: int | None = setting(
        None, "--max-tokens", "-n", panel=_SWEPT, help="Tokens of an answer. Default: 128."
    )
    drafters: str | None = setting(
        None,
        metavar="WHO",
        panel=_SWEPT,
        help="Who drafts: some of lookup,model,both. Default: all.",
    )
    draft_lengths: str | None = setting(
        None, metavar="N", panel=_SWEPT, help="Draft lengths: 0-16 (the default) or 2,4,8."
    )
    p_mins: str | None = setting(
        None,
        metavar="P",
        panel=_SWEPT,
        help="Ends of drafts: below these probabilities. Default: 0,0.5,0.75.",
    )
    contestant: list[str] = setting(
        [],
        metavar="NAME=…",
        panel=_SWEPT,
        help="Another engine: NAME=http://HOST:PORT/v1, or NAME=COMMAND with {target}, {draft} and {port} "
        "(repeatable).",
    )
    quality: bool = setting(
        True, panel=_SWEPT, help="Score quantizations of a model against the best (default)."
    )
    finalists: int | None = setting(
        None, panel=_PRECISION, help="Best settings of a cell to run for real. Default: 2."
    )
    controls: list[str] = setting(
        [],
        "--control",
        metavar="SETTING",
        panel=_PRECISION,
        help='A setting to run for real in any case: "model 3", "both 8/0.75", "auto" (repeatable).',
    )
    repetitions: str | None = setting(
        None, metavar="A-B", panel=_PRECISION, help="Repetitions, from A up to B. Default: 3-8."
    )
    interval_ratio: float | None = setting(
        None,
        "--interval",
        metavar="R",
        panel=_PRECISION,
        help="Repeat until half the 95 % interval is R of the speed-up. Default: 0.03.",
    )
    minutes: float | None = setting(
        None, metavar="M", panel=_PRECISION, help="End the real runs after M minutes."
    )
    costs: Path | None = setting(
        None, panel=_PRECISION, help="Take what calls cost from this file; do not measure it."
    )
    temperature: float | None = setting(
        None, "--temp", "--temperature", metavar="T", panel=SAMPLING, help="Temperature. Default: 0."
    )
    seed: int | None = setting(None, "-s", panel=SAMPLING, help="Of the sampling, and of the order of runs.")
    context: int | None = setting(
        None, "-c", "--ctx-size", panel=MACHINE, help="Context in tokens. Default: what is needed."
    )
    threads: int | None = setting(None, "-t", panel=MACHINE, help="Threads; default: the physical cores.")
    threads_batch: int | None = setting(
        None, "-tb", panel=MACHINE, help="Threads of calls over several tokens."
    )
    gpu_layers: str | None = setting(
        None, "-ngl", metavar="N", panel=MACHINE, help="Layers on the GPU, or all (the default)."
    )
    flash_attention: str | None = setting(
        None,
        "-fa",
        "--flash-attn",
        metavar="WHEN",
        panel=MACHINE,
        help="Flash attention: on, off or auto.",
    )
    backends: str | None = setting(
        None,
        "--backend",
        "--backends",
        metavar="NAMES",
        panel=MACHINE,
        help="Native library: llama.cpp, ik, both (llama.cpp,ik: each target under each, and which to take), "
        "or auto (the default): the faster one for each target.",
    )
    library: Path | None = setting(
        None, "--llama-library", panel=MACHINE, help="A build of your own: libllama of either."
    )
    out: Path | None = setting(
        None, "-o", metavar="FOLDER", panel=OUTPUT, help="Folder of the run. Default: the plan's name."
    )


class InitSettings(Group):
    """Those of `bench init`."""

    file: Path = setting(Path("bench.toml"), argument=True, help="The file to write.")
    force: bool = setting(False, help="Replace the file if there is one.")


class ReportSettings(SummaryOutput):
    """Those of `bench report`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    html: Path | None = setting(None, help="Write the HTML report there too.")


class CompareSettings(Group):
    """Those of `bench compare`."""

    before: Path = setting(..., metavar="A", argument=True, help="The folder of a run.")
    after: Path = setting(..., metavar="B", argument=True, help="That of a later one.")


class ExportSettings(Group):
    """Those of `bench export`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    to: Path = setting(..., help="A file that ends in .csv or .parquet.")
