"""The settings of commands: groups of `outrider.core.settings`, and their own."""

# Annotations are no strings here: pydantic would evaluate each of them at every start.

from pathlib import Path
from typing import Annotated

from pydantic import Field

from outrider.core.params import PolicyName
from outrider.core.schema import (
    MACHINE,
    MODELS,
    OUTPUT,
    SAMPLING,
    SPECULATION,
    TEXT,
    Count,
    Group,
    Natural,
    setting,
    with_default,
)
from outrider.core.settings import (
    Context,
    Drafting,
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


class TextSettings(PairSettings, Reasoning, Sampling, Structure, DraftSources):
    """Those of `run` and `chat`."""

    panel = TEXT
    prompt_argument: str | None = setting(
        None, metavar="PROMPT", argument=True, help="The prompt; or give -p, -f or standard input."
    )
    prompt: str | None = setting(None, "-p", help="The prompt.")
    system: str | None = setting(None, "-sys", help="System message.")
    escape: bool = setting(
        True, "--escape/--no-escape", "-e", help=r"Interpret \n, \t and other escapes in -p."
    )
    predict: int = setting(
        -1, "-n", "--predict", "--n-predict", help="Tokens to generate; -1: until the model ends."
    )
    stop: list[str] = setting(
        [], "-r", "--stop", "--reverse-prompt", help="Stop before this text (repeatable)."
    )
    ignore_eos: bool = setting(False, help="Continue after end-of-generation tokens.")
    interactive: bool = setting(False, "-i", help="Hold a conversation, as outrider chat does.")
    history: bool = setting(True, help="Remember what you type in a conversation.")
    show_source: bool = setting(False, panel=OUTPUT, help="Colour each token by who drafted it.")
    explain: bool = setting(False, panel=OUTPUT, help="Show what was chosen, and why.")
    quiet: bool = setting(False, "-q", panel=OUTPUT, help="Print the text alone, without the readout.")


class RunSettings(TextSettings, JsonOutput):
    """Those of `run`."""

    file: Path | None = setting(None, "-f", panel=TEXT, help="Read the prompt from a file (- for stdin).")
    raw: bool = setting(False, panel=TEXT, help="Continue the prompt as it is, without a chat template.")
    prediction: Path | None = setting(
        None,
        panel=SPECULATION,
        help="Draft from this text, which the answer will resemble: a file to be edited.",
    )
    compare: bool = setting(
        False, help="Decode plainly too, and show the speed-up and whether the text is the same."
    )
    repetitions: Count = setting(3, help="Runs of each kind for --compare.")

    @property
    def prompt_is_piped(self) -> bool:
        from_file = self.file is None or str(self.file) == "-"
        return self.prompt_argument is None and self.prompt is None and from_file


_FIRST_MESSAGE = "The first message."


class ChatSettings(TextSettings):
    """Those of `chat`."""

    prompt_argument: str | None = setting(None, metavar="PROMPT", argument=True, help=_FIRST_MESSAGE)
    prompt: str | None = setting(None, "-p", help=_FIRST_MESSAGE)


class VerifySettings(PairSettings, Structure, JsonOutput):
    """Those of `verify`."""

    prompts: list[str] = setting(
        [], "-p", "--prompt", panel=TEXT, help="A prompt (repeatable). None: a built-in set."
    )
    prompts_file: Path | None = setting(
        None,
        "-f",
        "--file",
        panel=TEXT,
        help="A file of prompts, one a line (- for stdin).",
    )
    raw: bool = setting(False, panel=TEXT, help="Continue the prompt as it is, without a chat template.")
    tokens: int | None = setting(
        None, "-n", "--predict", "--n-predict", panel=TEXT, help="Tokens to generate for each prompt."
    )
    quick: bool = setting(False, panel=TEXT, help="Fewer prompts, tokens and samples: under a minute.")
    test_seed: int = setting(
        0, "-s", "--seed", panel=SAMPLING, help="Seed of all tests: their outcome repeats."
    )
    policy: PolicyName | None = with_default(Drafting, "policy", "fixed")
    inject: str | None = setting(
        None,
        metavar="FAULT",
        panel=SPECULATION,
        help="Break the rule, to see the tests fail: no-residual, argmax-draft, reused-random, kept-rejected "
        "or acceptance=1.03 (its acceptance ratio 3 % too large); or a grammar's masks: unmasked-drafts; or "
        "the calls of bit-equal text: unequal-calls; or what is stored after a rejection: short-rewind; or "
        "what heads read: stale-states, shifted-block.",
    )
    output: Path | None = setting(None, "-o", help="The certificate. Default: outrider-verify.json.")
    print_json: bool = setting(
        False, "--json", help="Print the certificate; write it only where --output says so."
    )


class CostsSettings(Models, JsonOutput, Verbose, Context, Loading):
    """Those of `costs`."""

    seconds: Annotated[float, Field(gt=0, le=3600)] = setting(
        20.0, panel="Measuring", help="Time to measure each model for."
    )
    costs: Path | None = setting(None, panel=OUTPUT, help="Write the curves there, too, for outrider bench.")


class CheckSettings(Hub, JsonOutput, Verbose, Context, Loading):
    """Those of `check`."""

    target: str = setting(
        ...,
        metavar="TARGET",
        argument=True,
        help="A GGUF file, hf:OWNER/REPO[:QUANT], hf:OWNER/REPO/FILE, or default: the embedded default.",
    )
    drafts: list[str] = setting(
        [],
        metavar="[DRAFT]...",
        argument=True,
        help="Draft models to check, one after the other. None: up to three that are found for the target.",
    )
    prompts: list[str] = setting(
        [],
        metavar="FILE",
        panel="Checking",
        help="Your prompts: a JSON-lines file or a built-in workload (repeatable). Default: all of these.",
    )
    seconds: float = setting(
        45.0, panel="Checking", help="Time for the target's answers, and again for each draft."
    )


class QuantizeSettings(Hub, JsonOutput, Threads):
    """Those of `quantize`."""

    model: str | None = setting(
        None,
        metavar="MODEL",
        argument=True,
        help="A GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. None: the embedded default.",
    )
    to: list[str] = setting(
        ..., metavar="TYPES", panel=MODELS, help="What to make: Q8_0,Q4_K_M,… (repeatable)."
    )
    out: Path | None = setting(
        None,
        metavar="FOLDER",
        help="Where the files go. Default: beside a local file; else the working folder.",
    )
    force: bool = setting(False, help="Replace files that exist.")


class TrimSettings(Hub, JsonOutput, Verbose, Context, Loading):
    """Those of `trim`."""

    small: str = setting(
        ...,
        metavar="DRAFT",
        argument=True,
        help="The model to trim: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE.",
    )
    target: str = setting(
        ...,
        "--for",
        metavar="TARGET",
        panel=MODELS,
        help='The target that it drafts for: as DRAFT, or "default" for the embedded one.',
    )
    vocabulary: Natural | None = setting(
        None,
        panel="Trimming",
        help="Tokens that it keeps, by use; 0: all. Default: as many as pay on this machine.",
    )
    keep_types: bool = setting(False, panel="Trimming", help="Leave the types of its weights as they are.")
    prompts: list[str] = setting(
        [],
        metavar="FILE",
        panel="Counting",
        help="Your prompts: JSON lines, or a server's log (repeatable). Default: the bundled ones.",
    )
    seconds: Annotated[float, Field(ge=0, le=3600)] = setting(
        90.0, panel="Counting", help="Time for the target's answers that are counted; 0: none."
    )
    out: Path | None = setting(
        None,
        "-o",
        metavar="FILE",
        help="The trimmed draft. Default: DRAFT.trimmed.gguf, beside a local file; else in the "
        "working folder.",
    )
    force: bool = setting(False, help="Replace a file that exists.")


class SetupSettings(Group):
    """Those of `setup`."""

    panel = "Libraries"
    native: bool = setting(
        False, help="Compile ik_llama.cpp for this CPU into the cache. Takes a C++ compiler and some minutes."
    )
    cuda: bool = setting(
        False,
        help="Compile llama.cpp for this machine's NVIDIA cards. Takes a C++ compiler, 3.5 GB of disk and "
        "minutes to hours, by the cores; CUDA's own compiler is fetched where it is not installed.",
    )
    cuda_arch: str | None = setting(
        None,
        metavar="KINDS",
        help="With --cuda: for cards of this compute capability instead (86, or 86,90).",
    )
    force: bool = setting(False, help="With --native or --cuda: compile again what is there.")


class CacheSettings(JsonOutput):
    """Those of `cache`."""

    remove: list[str] = setting(
        [], metavar="KIND", help="Remove this kind, as listed (repeatable); all: everything that is listed."
    )


class OnMachines(Group):
    """Where the work is done and measured."""

    panel = MACHINE
    ray: str | None = setting(
        None,
        metavar="ADDRESS",
        help="Work on a Ray cluster: its HOST:PORT, auto, or local (docs/cluster.md).",
    )

    machines: list[str] = setting(
        [], metavar="KIND", help="With --ray: measure on this kind of machine alone (repeatable)."
    )
