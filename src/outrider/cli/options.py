"""The options of `run` and `chat`: llama.cpp's names, and long ones that explain themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODELS = "Models"
TEXT = "Prompt and text"
SAMPLING = "Sampling"
SPECULATION = "Speculation"
OUTPUT = "Output"
MACHINE = "Machine"


def option(panel: str, *names: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    """An option with a value, or without `metavar` a switch; the help shows its first long name."""
    made: typer.models.OptionInfo = typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=panel, show_default=metavar is not None
    )
    return made


PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The prompt; else -p, -f, standard input or a question."),
]

# Models
Model = Annotated[
    str | None,
    option(
        MODELS,
        "-m",
        "--model",
        metavar="MODEL",
        help="Target: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. None: the embedded default.",
    ),
]
DraftModel = Annotated[
    str | None,
    option(
        MODELS,
        "-md",
        "--model-draft",
        metavar="MODEL",
        help="Draft model with the same tokenizer; none: no draft model. The embedded default has its own, "
        "default-draft, which other files of it take too.",
    ),
]
HubModel = Annotated[
    str | None,
    option(MODELS, "-hf", "--hf-repo", metavar="REPO", help="Target from the hub: OWNER/REPO[:QUANT]."),
]
HubDraft = Annotated[
    str | None,
    option(MODELS, "-hfd", "--hf-repo-draft", metavar="REPO", help="Draft from the hub: OWNER/REPO[:QUANT]."),
]
HubToken = Annotated[
    str | None, option(MODELS, "-hft", "--hf-token", metavar="TOKEN", help="Hub token. Default: $HF_TOKEN.")
]
Offline = Annotated[bool, option(MODELS, "--offline", help="Use only what is in the hub's cache.")]

# Prompt and text
Prompt = Annotated[str | None, option(TEXT, "-p", "--prompt", metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    option(TEXT, "-f", "--file", metavar="FILE", help="Read the prompt from a file (- for stdin)."),
]
System = Annotated[
    str | None,
    option(TEXT, "-sys", "--system", metavar="TEXT", help="System message of the chat template."),
]
Raw = Annotated[bool, option(TEXT, "--raw", help="Continue the prompt as it stands, without chat template.")]
Escape = Annotated[
    bool,
    option(TEXT, "--escape/--no-escape", "-e", help=r"Read \n, \t and the like in -p (the default)."),
]
MaxTokens = Annotated[
    int,
    option(
        TEXT, "-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate; -1: until it ends."
    ),
]
Stop = Annotated[
    list[str] | None,
    option(
        TEXT, "-r", "--stop", "--reverse-prompt", metavar="TEXT", help="End before this text (repeatable)."
    ),
]
IgnoreEnd = Annotated[bool, option(TEXT, "--ignore-eos", help="Go on behind end-of-generation tokens.")]
Interactive = Annotated[
    bool, option(TEXT, "-i", "--interactive", help="Hold a conversation (what `outrider chat` does).")
]

# Sampling
Seed = Annotated[int, option(SAMPLING, "-s", "--seed", metavar="N", help="Random seed; -1: a fresh one.")]
Temperature = Annotated[
    float, option(SAMPLING, "--temp", "--temperature", metavar="T", help="Temperature; 0 is greedy.")
]
TopK = Annotated[int, option(SAMPLING, "--top-k", metavar="K", help="Keep the K most likely tokens; 0: all.")]
TopP = Annotated[float, option(SAMPLING, "--top-p", metavar="P", help="Keep the nucleus of mass P; 1: all.")]
MinP = Annotated[
    float,
    option(SAMPLING, "--min-p", metavar="P", help="Keep tokens of at least P times the top's probability."),
]
TypicalP = Annotated[
    float,
    option(SAMPLING, "--typical", "--typical-p", metavar="P", help="Typical tokens of mass P; 1: all."),
]
TopNSigma = Annotated[
    float,
    option(
        SAMPLING,
        "--top-n-sigma",
        "--top-nsigma",
        metavar="N",
        help="Keep logits within N standard deviations of the top; 0: all.",
    ),
]
XtcProbability = Annotated[
    float,
    option(SAMPLING, "--xtc-probability", metavar="P", help="How often XTC drops top tokens; 0: never."),
]
XtcThreshold = Annotated[
    float, option(SAMPLING, "--xtc-threshold", metavar="P", help="XTC: what probability makes a top token.")
]
DynatempRange = Annotated[
    float,
    option(SAMPLING, "--dynatemp-range", metavar="R", help="Temperature ±R by entropy; 0: constant."),
]
DynatempExponent = Annotated[float, option(SAMPLING, "--dynatemp-exp", metavar="E", help="Exponent of that.")]
RepeatPenalty = Annotated[
    float,
    option(SAMPLING, "--repeat-penalty", metavar="X", help="Divide logits of repeated tokens; 1: off."),
]
PresencePenalty = Annotated[
    float, option(SAMPLING, "--presence-penalty", metavar="X", help="Subtract X from repeated tokens.")
]
FrequencyPenalty = Annotated[
    float,
    option(SAMPLING, "--frequency-penalty", metavar="X", help="Subtract X for each repetition."),
]
RepeatLastN = Annotated[
    int,
    option(SAMPLING, "--repeat-last-n", metavar="N", help="Tokens that penalties look at; -1: all."),
]
DryMultiplier = Annotated[
    float,
    option(SAMPLING, "--dry-multiplier", metavar="X", help="DRY: penalise going on as before; 0: off."),
]
DryBase = Annotated[float, option(SAMPLING, "--dry-base", metavar="X", help="DRY: its growth per token.")]
DryAllowedLength = Annotated[
    int, option(SAMPLING, "--dry-allowed-length", metavar="N", help="DRY: repetitions this short are free.")
]
DryLastN = Annotated[
    int,
    option(SAMPLING, "--dry-penalty-last-n", metavar="N", help="DRY: tokens looked at; -1: all."),
]
DryBreaker = Annotated[
    list[str] | None,
    option(
        SAMPLING,
        "--dry-sequence-breaker",
        metavar="TEXT",
        help="DRY: ends a repetition (repeatable; replaces the usual ones; none: no breakers).",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    option(
        SAMPLING,
        "-l",
        "--logit-bias",
        metavar="ID±BIAS",
        help="Add to a logit: 15043+1 (repeatable).",
    ),
]
Ban = Annotated[
    list[str] | None,
    option(SAMPLING, "--ban", metavar="TOKEN", help="Never this token: its id, or its text (repeatable)."),
]
MinTokens = Annotated[
    int, option(SAMPLING, "--min-tokens", metavar="N", help="No end token before N tokens.")
]

# Output

ShowSource = Annotated[bool, option(OUTPUT, "--show-source", help="Colour each token by who produced it.")]
Compare = Annotated[
    bool, option(OUTPUT, "--compare", help="Decode plainly too: how much faster, and is the text the same?")
]
Repetitions = Annotated[
    int, option(OUTPUT, "--repetitions", metavar="N", help="Runs of each kind that --compare makes.")
]
Json = Annotated[bool, option(OUTPUT, "--json", help="One JSON object on standard output, and nothing else.")]
Trace = Annotated[
    Path | None, option(OUTPUT, "--trace", metavar="FILE", help="Write every step's record as JSON lines.")
]
Explain = Annotated[
    bool,
    option(OUTPUT, "--explain", help="Say what was chosen, why, and what would help."),
]
Quiet = Annotated[bool, option(OUTPUT, "-q", "--quiet", help="The text alone, without a readout.")]
Smooth = Annotated[
    bool,
    option(OUTPUT, "--smooth", help="Let the text out evenly, not in bursts; it waits for one step at most."),
]
Verbose = Annotated[bool, option(OUTPUT, "-v", "--verbose", help="Let llama.cpp's own log through.")]
Logprobs = Annotated[
    int | None,
    option(
        OUTPUT,
        "--logprobs",
        metavar="N",
        help="With --json: log probabilities, with the N likeliest.",
    ),
]

# Machine
Context = Annotated[
    int | None,
    option(
        MACHINE,
        "-c",
        "--ctx-size",
        metavar="N",
        help="Context in tokens; 0: as trained. Default: what fits.",
    ),
]
DraftContext = Annotated[
    int,
    option(MACHINE, "-cd", "--ctx-size-draft", metavar="N", help="Context of the draft; 0: the target's."),
]
GpuLayers = Annotated[
    str,
    option(MACHINE, "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", help="Layers on the GPU, or all."),
]
DraftGpuLayers = Annotated[
    str | None,
    option(
        MACHINE,
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        metavar="N",
        help="The draft's layers there; default: as -ngl.",
    ),
]
SplitMode = Annotated[
    str,
    option(
        MACHINE, "-sm", "--split-mode", metavar="MODE", help="How GPUs share the model: none, layer or row."
    ),
]
MainGpu = Annotated[int, option(MACHINE, "-mg", "--main-gpu", metavar="N", help="The GPU for -sm none.")]
Threads = Annotated[
    int, option(MACHINE, "-t", "--threads", metavar="N", help="Threads; default: the physical cores.")
]
ThreadsBatch = Annotated[
    int,
    option(MACHINE, "-tb", "--threads-batch", metavar="N", help="Threads of calls over several tokens."),
]
BatchTokens = Annotated[
    int, option(MACHINE, "-b", "--batch-size", metavar="N", help="Most tokens of a call.")
]
MicroBatchTokens = Annotated[
    int, option(MACHINE, "-ub", "--ubatch-size", metavar="N", help="Tokens computed at once.")
]
FlashAttention = Annotated[
    str,
    option(
        MACHINE,
        "-fa",
        "--flash-attn",
        metavar="WHEN",
        help="Flash attention: on, off, or auto: by model and device.",
    ),
]
CacheTypeK = Annotated[
    str,
    option(MACHINE, "-ctk", "--cache-type-k", metavar="TYPE", help="Type of the cached keys: f16, q8_0, …"),
]
CacheTypeV = Annotated[
    str, option(MACHINE, "-ctv", "--cache-type-v", metavar="TYPE", help="Type of the cached values.")
]
Mmap = Annotated[
    bool, option(MACHINE, "--mmap/--no-mmap", help="Map the file instead of reading it (the default).")
]
Mlock = Annotated[bool, option(MACHINE, "--mlock", help="Keep the weights in memory.")]
FullWindow = Annotated[
    bool,
    option(
        MACHINE,
        "--swa-full/--no-swa-full",
        help="Keep all KV of sliding-window layers, to be able to rewind (the default).",
    ),
]
Repack = Annotated[
    bool,
    option(
        MACHINE, "--repack/--no-repack", help="Repacked weights: often faster, sometimes not. On by default."
    ),
]
Backend = Annotated[
    str,
    option(
        MACHINE,
        "--backend",
        metavar="NAME",
        help="Native library: llama.cpp, ik (ik_llama.cpp), or auto: the faster one here for this model.",
    ),
]
LlamaLibrary = Annotated[
    Path | None,
    option(MACHINE, "--llama-library", metavar="FILE", help="A build of your own: libllama of either."),
]
