"""The flags of `outrider bench`, by the names of a plan's settings.

Those that are not given leave what the file says, or the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.options import MACHINE, MODELS, OUTPUT, SAMPLING, option

__all__ = ["FLAGS", "SWITCHES", "Json"]

SWEPT = "What is swept"
PRECISION = "How precisely"

_Plan = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN.toml", help="What to sweep; flags override it. Default: flags alone."),
]
_Target = Annotated[
    list[str] | None,
    option(
        MODELS,
        "-m",
        "--target",
        "--model",
        metavar="MODEL",
        help="Target: a file, a quoted glob, hf:OWNER/REPO[:QUANT], or default (repeatable).",
    ),
]
_Draft = Annotated[
    list[str] | None,
    option(
        MODELS,
        "-md",
        "--draft",
        "--model-draft",
        metavar="MODEL",
        help="Draft model, named likewise; tried with every target (repeatable).",
    ),
]
_LookupOnly = Annotated[
    bool, option(MODELS, "--lookup-only/--no-lookup-only", help="Try targets without a draft too (default).")
]
_Workload = Annotated[
    list[str] | None,
    option(
        SWEPT,
        "--workload",
        metavar="NAME",
        help="chat, code, edits, json, summaries, agent, reasoning, or a file of JSON lines; "
        "file.jsonl#coding takes one category (repeatable).",
    ),
]
_Prompts = Annotated[
    int | None,
    option(SWEPT, "--prompts", metavar="N", help="At most N prompts of each workload, evenly spread."),
]
_MaxTokens = Annotated[
    int | None, option(SWEPT, "--max-tokens", "-n", metavar="N", help="Tokens of an answer. Default: 128.")
]
_Temperature = Annotated[
    float | None, option(SAMPLING, "--temp", "--temperature", metavar="T", help="Temperature. Default: 0.")
]
_Seed = Annotated[
    int | None,
    option(SAMPLING, "-s", "--seed", metavar="N", help="Of the sampling, and of the order of runs."),
]
_Drafters = Annotated[
    str | None,
    option(SWEPT, "--drafters", metavar="WHO", help="Who drafts: some of lookup,model,both. Default: all."),
]
_Lengths = Annotated[
    str | None,
    option(SWEPT, "--draft-lengths", metavar="N", help="Draft lengths: 0-16 (the default) or 2,4,8."),
]
_PMins = Annotated[
    str | None,
    option(
        SWEPT, "--p-mins", metavar="P", help="Ends of drafts: below these probabilities. Default: 0,0.5,0.75."
    ),
]
_Contestant = Annotated[
    list[str] | None,
    option(
        SWEPT,
        "--contestant",
        metavar="NAME=…",
        help="Another engine: NAME=http://HOST:PORT/v1, or NAME=COMMAND with {target}, {draft} and {port} "
        "(repeatable).",
    ),
]
_Quality = Annotated[
    bool,
    option(
        SWEPT, "--quality/--no-quality", help="Score quantizations of a model against the best (default)."
    ),
]
_Finalists = Annotated[
    int | None,
    option(
        PRECISION, "--finalists", metavar="N", help="Best settings of a cell to run for real. Default: 2."
    ),
]
_Control = Annotated[
    list[str] | None,
    option(
        PRECISION,
        "--control",
        metavar="SETTING",
        help='A setting to run for real in any case: "model 3", "both 8/0.75", "auto" (repeatable).',
    ),
]
_Repetitions = Annotated[
    str | None,
    option(PRECISION, "--repetitions", metavar="A-B", help="Repetitions, from A up to B. Default: 3-8."),
]
_Interval = Annotated[
    float | None,
    option(
        PRECISION,
        "--interval",
        metavar="R",
        help="Repeat until half the 95 % interval is R of the speed-up. Default: 0.03.",
    ),
]
_Minutes = Annotated[
    float | None, option(PRECISION, "--minutes", metavar="M", help="End the real runs after M minutes.")
]
_Costs = Annotated[
    Path | None,
    option(
        PRECISION, "--costs", metavar="FILE", help="Take what calls cost from this file; do not measure it."
    ),
]
_Context = Annotated[
    int | None,
    option(MACHINE, "-c", "--ctx-size", metavar="N", help="Context in tokens. Default: what is needed."),
]
_Threads = Annotated[
    int | None, option(MACHINE, "-t", "--threads", metavar="N", help="Threads; default: the physical cores.")
]
_ThreadsBatch = Annotated[
    int | None,
    option(MACHINE, "-tb", "--threads-batch", metavar="N", help="Threads of calls over several tokens."),
]
_GpuLayers = Annotated[
    str | None,
    option(MACHINE, "-ngl", "--gpu-layers", metavar="N", help="Layers on the GPU, or all (the default)."),
]
_Flash = Annotated[
    str | None,
    option(MACHINE, "-fa", "--flash-attn", metavar="WHEN", help="Flash attention: on, off or auto."),
]
_Backends = Annotated[
    str | None,
    option(
        MACHINE,
        "--backend",
        "--backends",
        metavar="NAMES",
        help="Native library: llama.cpp, ik, both (llama.cpp,ik: each target under each, and which to take), "
        "or auto (the default): the faster one for each target.",
    ),
]
_Out = Annotated[
    Path | None,
    option(OUTPUT, "-o", "--out", metavar="FOLDER", help="Folder of the run. Default: the plan's name."),
]
Json = Annotated[
    bool, option(OUTPUT, "--json", help="A summary as one JSON object on standard output, no table.")
]
FLAGS: Mapping[str, Any] = {
    "plan": _Plan,
    "targets": _Target,
    "drafts": _Draft,
    "lookup_only": _LookupOnly,
    "hf_token": options.HubToken,
    "offline": options.Offline,
    "workload": _Workload,
    "prompts": _Prompts,
    "max_tokens": _MaxTokens,
    "drafters": _Drafters,
    "draft_lengths": _Lengths,
    "p_mins": _PMins,
    "contestant": _Contestant,
    "quality": _Quality,
    "finalists": _Finalists,
    "controls": _Control,
    "repetitions": _Repetitions,
    "interval_ratio": _Interval,
    "minutes": _Minutes,
    "costs": _Costs,
    "temperature": _Temperature,
    "seed": _Seed,
    "context": _Context,
    "threads": _Threads,
    "threads_batch": _ThreadsBatch,
    "gpu_layers": _GpuLayers,
    "flash_attention": _Flash,
    "backends": _Backends,
    "library": options.LlamaLibrary,
    "out": _Out,
    "json": Json,
    "verbose": options.Verbose,
}
SWITCHES = {"lookup_only": True, "offline": False, "quality": True, "json": False, "verbose": False}
"""The defaults of those that are switches."""
