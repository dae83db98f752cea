"""The settings of commands: groups of `outrider.core.settings`, and their own."""

# Annotations are no strings here: pydantic would evaluate each of them at every start.

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from outrider.core.schema import Count, Group, Natural, NonEmpty, argument, setting
from outrider.core.settings import (
    Context,
    DraftSources,
    Hub,
    JsonOutput,
    Loading,
    Models,
    PairSettings,
    Reasoning,
    Sampling,
    Structure,
    Threads,
    Verbose,
)


class TextSettings(PairSettings, Reasoning, Sampling, Structure, DraftSources, panel="Prompt and text"):
    """Those of `run` and `chat`."""

    prompt_argument: str | None = argument(None, "The prompt; or give -p, -f or standard input.", "PROMPT")
    prompt: str | None = setting(None, "The prompt.", "-p")
    system: str | None = setting(None, "System message.", "-sys")
    escape: bool = setting(True, r"Interpret \n, \t and other escapes in -p.", "-e")
    predict: Annotated[int, Field(ge=-2)] = setting(
        -1, "Tokens to generate; -1: until the model ends.", "-n --predict --n-predict"
    )
    stop: list[NonEmpty] = setting([], "Stop before this text (repeatable).", "-r --stop --reverse-prompt")
    ignore_eos: bool = setting(False, "Continue after end-of-generation tokens.")
    history: bool = setting(True, "Remember what you type in a conversation.")
    show_source: bool = setting(False, "Colour each token by who drafted it.", panel="Output")
    explain: bool = setting(False, "Show what was chosen, and why.", panel="Output")
    quiet: bool = setting(False, "Print the text alone, without the readout.", "-q", panel="Output")


class RunSettings(TextSettings, JsonOutput, panel="Prompt and text"):
    """Those of `run`."""

    file: Path | None = setting(None, "Read the prompt from a file.", "-f")
    raw: bool = setting(False, "Continue the prompt as it is, without a chat template.")
    prediction: Path | None = setting(
        None,
        "Draft from this text, which the answer will resemble: a file to be edited.",
        panel="Speculation",
    )
    compare: bool = setting(
        False, "Decode plainly too, and show the speed-up and whether the text is the same.", panel="Output"
    )
    repetitions: Count = setting(3, "Runs of each kind for --compare.", panel="Output")


class VerifySettings(PairSettings, Structure, JsonOutput, panel="Prompt and text"):
    """Those of `verify`."""

    prompts: list[str] = setting([], "A prompt (repeatable). None: a built-in set.", "-p --prompt")
    prompts_file: Path | None = setting(None, "A file of prompts, one a line.", "-f --file")
    raw: bool = setting(False, "Continue the prompt as it is, without a chat template.")
    tokens: Count | None = setting(None, "Tokens to generate for each prompt.", "-n --predict --n-predict")
    quick: bool = setting(False, "Fewer prompts, tokens and samples: under a minute.")
    test_seed: Natural = setting(0, "Seed of all tests: the outcome repeats.", "-s --seed", panel="Sampling")
    inject: str | None = setting(
        None,
        "Break the rule, to see the tests fail: no-residual, argmax-draft, reused-random, kept-rejected "
        "or acceptance=1.03 (its acceptance ratio 3 % too large); or a grammar's masks: unmasked-drafts; "
        "or the calls of bit-equal text: unequal-calls; or what is stored after a rejection: "
        "short-rewind; or what heads read: stale-states, shifted-block.",
        "FAULT",
        panel="Speculation",
    )
    output: Path | None = setting(
        None, "The certificate. Default: outrider-verify.json.", "-o", panel="Output"
    )
    print_json: bool = setting(
        False, "Print the certificate; write it only where --output says so.", "--json", panel="Output"
    )


class CostsSettings(Models, JsonOutput, Verbose, Context, Loading):
    """Those of `costs`."""

    seconds: Annotated[float, Field(gt=0, le=3600)] = setting(
        20.0, "Time to measure each model for.", panel="Measuring"
    )
    costs: Path | None = setting(None, "Write the curves there, too, for outrider bench.", panel="Output")


class CheckSettings(Hub, JsonOutput, Verbose, Context, Loading, panel="Checking"):
    """Those of `check`."""

    target: str = argument(
        ...,
        "A GGUF file, hf:OWNER/REPO[:QUANT], hf:OWNER/REPO/FILE, or default: the embedded default.",
        "TARGET",
    )
    drafts: list[str] = argument(
        [],
        "Draft models to check, one after the other. None: up to three that are found for the target.",
        "[DRAFT]...",
    )
    prompts: list[str] = setting(
        [],
        "Your prompts: a JSON-lines file or a built-in workload (repeatable). Default: all of these.",
        "FILE",
    )
    seconds: Annotated[float, Field(ge=1, le=3600)] = setting(
        45.0, "Time for the target's answers, and again for each draft."
    )


class QuantizeSettings(Hub, JsonOutput, Threads):
    """Those of `quantize`."""

    model: str | None = argument(
        None, "A GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. None: the embedded default.", "MODEL"
    )
    to: list[str] = setting(..., "What to make: Q8_0,Q4_K_M,… (repeatable).", "TYPES", panel="Models")
    out: Path | None = setting(
        None, "Where the files go. Default: beside a local file; else the working folder.", "FOLDER"
    )
    force: bool = setting(False, "Replace files that exist.")


class TrimSettings(Hub, JsonOutput, Verbose, Context, Loading):
    """Those of `trim`."""

    small: str = argument(
        ..., "The model to trim: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE.", "DRAFT"
    )
    target: str = setting(
        ...,
        'The target that it drafts for: as DRAFT, or "default" for the embedded one.',
        "--for TARGET",
        panel="Models",
    )
    vocabulary: Natural | None = setting(
        None,
        "Tokens that it keeps, by use; 0: all. Default: as many as pay on this machine.",
        panel="Trimming",
    )
    keep_types: bool = setting(False, "Leave the types of its weights as they are.", panel="Trimming")
    prompts: list[str] = setting(
        [],
        "Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.",
        "FILE",
        panel="Counting",
    )
    seconds: Annotated[float, Field(ge=0, le=3600)] = setting(
        90.0, "Time for the target's answers that are counted; 0: none.", panel="Counting"
    )
    out: Path | None = setting(
        None,
        "The trimmed draft. Default: DRAFT.trimmed.gguf, beside a local file; else in the working folder.",
        "-o FILE",
    )
    force: bool = setting(False, "Replace a file that exists.")


class SetupSettings(Group, panel="Libraries"):
    """Those of `setup`."""

    native: bool = setting(
        False, "Compile ik_llama.cpp for this CPU into the cache. Takes a C++ compiler and some minutes."
    )
    cuda: bool = setting(
        False,
        "Compile llama.cpp for this machine's NVIDIA cards. Takes a C++ compiler, 3.5 GB of disk and "
        "minutes to hours, by the cores; CUDA's own compiler is fetched where it is not installed.",
    )
    cuda_arch: str | None = setting(
        None, "With --cuda: for cards of this compute capability instead (86, or 86,90).", "KINDS"
    )
    force: bool = setting(False, "With --native or --cuda: compile again what is there.")


class CacheSettings(Group):
    """Those of `cache`."""

    remove: list[str] = setting(
        [], "Remove this kind, as listed (repeatable); all: everything that is listed.", "KIND"
    )


_TEXTS = "What is generated"


class PlanSettings(JsonOutput):
    """Those of `plan`."""

    target: str | None = setting(
        None,
        "Target: a known name such as qwen2.5-coder-32b or qwen3-8b:q8_0; or a GGUF file.",
        "-m --target --model MODEL",
        panel="Models",
    )
    drafts: list[str] = setting(
        [],
        "Draft, named likewise (repeatable); mtp, eagle or eagle3: a head on the target; none: lookup "
        "alone. Default: all known ones that could draft for the target.",
        "-md --draft --model-draft MODEL",
        panel="Models",
    )
    on: str | None = setting(
        None, "Hardware, and how many: 3090, RTX 4090, h100x8. --list shows all.", "NAME", panel="Where"
    )
    hardware: Path | None = setting(
        None, "TOML with more hardware, models or types of weights.", panel="Where"
    )
    batch: str | None = setting(
        None,
        "Sequences at once, several by commas. Default: 1 where llama.cpp is usual, 1,8,32 elsewhere.",
        "N",
        panel=_TEXTS,
    )
    context: Count = setting(4096, "Tokens of each sequence.", "-c --context", panel=_TEXTS)
    kv_type: str = setting("f16", "Type of K and V: f16, q8_0, q4_0.", "TYPE", panel=_TEXTS)
    workload: str | None = setting(
        None,
        "Bundled acceptance of a kind of text: all (the default), chat, code, edits, json, summaries, "
        "retrieval or reasoning.",
        "NAME",
        panel=_TEXTS,
    )
    acceptance: list[str] = setting(
        [],
        "Acceptance of each drafted token: 0.8, or by position 0.8,0.6,0.5; lookup=0.5; DRAFT=0.7 "
        "(repeatable).",
        "[WHO=]P",
        panel=_TEXTS,
    )
    export: Literal["vllm"] | None = setting(
        None, "Start command of vLLM for the plan: vllm.", "ENGINE", panel="Output"
    )
    list_known: bool = setting(
        False, "Show the hardware and models that are known.", "--list", panel="Output"
    )
