"""The `outrider` program: its commands, and how errors become messages and exit statuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.cli import costs_options, draft_options, grammar_options, options, verify_options
from outrider.cli.commands import Command, Commands
from outrider.cli.output import readable
from outrider.cli.settings import RunSettings
from outrider.cli.streams import USAGE_ERROR, leave, open_streams
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams, Verification

_SAMPLING = SamplingParams()
_VERIFICATION = Verification()
INTERRUPTED = 130


class _Program(Commands):
    """All commands; what is common to them is given to those that are made when they are asked for."""

    def made(self, module: ModuleType) -> Any:
        return module.command(Command, _as_run)


app = typer.Typer(
    cls=_Program,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding that measures, decides and proves: the same text in fewer target calls.",
)


def _libraries() -> list[str]:
    """The packages that are installed of those that run models, with their versions."""
    found = []
    for name in ("ik-llama-cpp-python", "xllamacpp", "llama-cpp-python"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__} ({', '.join(_libraries()) or 'no library to run models'})")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keeps `run` a command of its own."""


@app.command("run", cls=Command, help="Generate text with a target model and its drafts; say what it took.")
@app.command("chat", cls=Command, help="Hold a conversation that keeps its KV between turns.")
def _run(
    ctx: typer.Context,
    prompt_argument: options.PromptArgument = None,
    model: options.Model = None,
    model_draft: options.DraftModel = None,
    hf_repo: options.HubModel = None,
    hf_repo_draft: options.HubDraft = None,
    hf_token: options.HubToken = None,
    offline: options.Offline = False,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    system: options.System = None,
    raw: options.Raw = False,
    escape: options.Escape = True,
    predict: options.MaxTokens = -1,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEnd = False,
    interactive: options.Interactive = False,
    seed: options.Seed = -1,
    temp: options.Temperature = _SAMPLING.temperature,
    top_k: options.TopK = _SAMPLING.top_k,
    top_p: options.TopP = _SAMPLING.top_p,
    min_p: options.MinP = _SAMPLING.min_p,
    typical: options.TypicalP = _SAMPLING.typical_p,
    top_n_sigma: options.TopNSigma = _SAMPLING.top_n_sigma,
    xtc_probability: options.XtcProbability = _SAMPLING.xtc_probability,
    xtc_threshold: options.XtcThreshold = _SAMPLING.xtc_threshold,
    dynatemp_range: options.DynatempRange = _SAMPLING.dynatemp_range,
    dynatemp_exp: options.DynatempExponent = _SAMPLING.dynatemp_exponent,
    repeat_penalty: options.RepeatPenalty = _SAMPLING.repeat_penalty,
    presence_penalty: options.PresencePenalty = _SAMPLING.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = _SAMPLING.frequency_penalty,
    repeat_last_n: options.RepeatLastN = _SAMPLING.repeat_last_n,
    dry_multiplier: options.DryMultiplier = _SAMPLING.dry_multiplier,
    dry_base: options.DryBase = _SAMPLING.dry_base,
    dry_allowed_length: options.DryAllowedLength = _SAMPLING.dry_allowed_length,
    dry_penalty_last_n: options.DryLastN = _SAMPLING.dry_last_n,
    dry_sequence_breaker: options.DryBreaker = None,
    logit_bias: options.LogitBias = None,
    ban: options.Ban = None,
    min_tokens: options.MinTokens = _SAMPLING.min_tokens,
    json_schema: grammar_options.JsonSchema = None,
    json_mode: grammar_options.JsonMode = False,
    regex: grammar_options.Regex = None,
    choices: grammar_options.Choice = None,
    grammar_source: grammar_options.GrammarSource = None,
    json_style: grammar_options.Style = None,
    fast_forward: grammar_options.FastForwardMode = None,
    lenient_schema: grammar_options.Lenient = False,
    constrain_after: grammar_options.After = None,
    rule: draft_options.Rule = _VERIFICATION.rule,
    lenience: draft_options.Lenience = _VERIFICATION.lenience,
    bitwise: draft_options.Bitwise = None,
    strict: draft_options.Strict = False,
    policy: draft_options.Policy = None,
    draft_max: draft_options.DraftMax = None,
    draft_min: draft_options.DraftMin = None,
    draft_p_min: draft_options.DraftPMin = None,
    draft_sampling: draft_options.DraftSampling = _VERIFICATION.draft_sampling,
    lookup: draft_options.Lookup = True,
    corpus: draft_options.Corpus = None,
    prediction: draft_options.Prediction = None,
    costs: draft_options.CostsFile = None,
    show_source: options.ShowSource = False,
    compare: options.Compare = False,
    repetitions: options.Repetitions = 3,
    json: options.Json = False,
    logprobs: options.Logprobs = None,
    trace: options.Trace = None,
    explain: options.Explain = False,
    quiet: options.Quiet = False,
    smooth: options.Smooth = False,
    verbose: options.Verbose = False,
    ctx_size: options.Context = None,
    ctx_size_draft: options.DraftContext = 0,
    gpu_layers: options.GpuLayers = "all",
    gpu_layers_draft: options.DraftGpuLayers = None,
    split_mode: options.SplitMode = "layer",
    main_gpu: options.MainGpu = 0,
    threads: options.Threads = -1,
    threads_batch: options.ThreadsBatch = -1,
    batch_size: options.BatchTokens = 2048,
    ubatch_size: options.MicroBatchTokens = 512,
    flash_attn: options.FlashAttention = "auto",
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    mmap: options.Mmap = True,
    mlock: options.Mlock = False,
    swa_full: options.FullWindow = True,
    repack: options.Repack = True,
    backend: options.Backend = "auto",
    llama_library: options.LlamaLibrary = None,
) -> None:
    arguments = dict(locals())
    del arguments["ctx"], arguments["strict"]
    if strict:
        typer.echo("note: --strict is --bitwise now, which keeps what it promised", err=True)
        arguments["bitwise"] = True
    settings = RunSettings(**arguments)
    from outrider.backends.gguf import show_log
    from outrider.cli.chat import chat
    from outrider.cli.run import run

    show_log(verbose)
    answer = chat if interactive or ctx.info_name == "chat" else run
    _exit_with(lambda: answer(settings))


@app.command("verify", cls=Command, help="Test that speculation does not change the output; certify it.")
def _verify(
    model: options.Model = None,
    model_draft: options.DraftModel = None,
    hf_repo: options.HubModel = None,
    hf_repo_draft: options.HubDraft = None,
    hf_token: options.HubToken = None,
    offline: options.Offline = False,
    prompts: verify_options.Prompts = None,
    prompts_file: verify_options.PromptsFile = None,
    raw: options.Raw = False,
    tokens: verify_options.TestedTokens = None,
    quick: verify_options.Quick = False,
    test_seed: verify_options.TestSeed = 0,
    json_schema: grammar_options.JsonSchema = None,
    json_mode: grammar_options.JsonMode = False,
    regex: grammar_options.Regex = None,
    choices: grammar_options.Choice = None,
    grammar_source: grammar_options.GrammarSource = None,
    json_style: grammar_options.Style = None,
    fast_forward: grammar_options.FastForwardMode = None,
    lenient_schema: grammar_options.Lenient = False,
    constrain_after: grammar_options.After = None,
    rule: draft_options.Rule = _VERIFICATION.rule,
    lenience: draft_options.Lenience = _VERIFICATION.lenience,
    bitwise: draft_options.Bitwise = None,
    policy: draft_options.Policy = "fixed",
    draft_max: draft_options.DraftMax = None,
    draft_min: draft_options.DraftMin = None,
    draft_p_min: draft_options.DraftPMin = None,
    lookup: draft_options.Lookup = True,
    inject: verify_options.Inject = None,
    output: verify_options.CertificateFile = None,
    print_json: verify_options.CertificateJson = False,
    verbose: options.Verbose = False,
    ctx_size: options.Context = None,
    ctx_size_draft: options.DraftContext = 0,
    gpu_layers: options.GpuLayers = "all",
    gpu_layers_draft: options.DraftGpuLayers = None,
    split_mode: options.SplitMode = "layer",
    main_gpu: options.MainGpu = 0,
    threads: options.Threads = -1,
    threads_batch: options.ThreadsBatch = -1,
    batch_size: options.BatchTokens = 2048,
    ubatch_size: options.MicroBatchTokens = 512,
    flash_attn: options.FlashAttention = "auto",
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    mmap: options.Mmap = True,
    mlock: options.Mlock = False,
    swa_full: options.FullWindow = True,
    repack: options.Repack = True,
    backend: options.Backend = "auto",
    llama_library: options.LlamaLibrary = None,
) -> None:
    given = dict(locals())
    from outrider.backends.gguf import show_log
    from outrider.cli.verify import VerifySettings, verify

    show_log(verbose)
    own = {name: given[name] for name in VerifySettings.__dataclass_fields__ if name in given}
    _exit_with(lambda: verify(VerifySettings(run=_as_run(given), **own)))


@app.command("costs", cls=Command, help="Measure what calls of the models cost here; what drafts must reach.")
def _costs(
    model: options.Model = None,
    model_draft: options.DraftModel = None,
    hf_repo: options.HubModel = None,
    hf_repo_draft: options.HubDraft = None,
    hf_token: options.HubToken = None,
    offline: options.Offline = False,
    seconds: costs_options.Seconds = None,
    fresh: costs_options.Fresh = False,
    tune: costs_options.Tune = False,
    costs: costs_options.CostsFile = None,
    print_json: costs_options.CostsJson = False,
    verbose: options.Verbose = False,
    sequences: costs_options.Sequences = 1,
    ctx_size: options.Context = None,
    gpu_layers: options.GpuLayers = "all",
    gpu_layers_draft: options.DraftGpuLayers = None,
    split_mode: options.SplitMode = "layer",
    main_gpu: options.MainGpu = 0,
    threads: options.Threads = -1,
    threads_batch: options.ThreadsBatch = -1,
    batch_size: options.BatchTokens = 2048,
    ubatch_size: options.MicroBatchTokens = 512,
    flash_attn: options.FlashAttention = "auto",
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    mmap: options.Mmap = True,
    mlock: options.Mlock = False,
    swa_full: options.FullWindow = True,
    repack: options.Repack = True,
    backend: options.Backend = "auto",
    llama_library: options.LlamaLibrary = None,
) -> None:
    given = dict(locals())
    from outrider.backends.gguf import show_log
    from outrider.cli.costs import CostsSettings
    from outrider.cli.costs import costs as show_costs

    show_log(verbose)
    own = {name: given[name] for name in CostsSettings.__dataclass_fields__ if name in given}
    _exit_with(lambda: show_costs(CostsSettings(run=_as_run(given), **own)))


def _exit_with(work: Callable[[], int]) -> None:
    """Do the work of a command, and end with its status; after Ctrl-C say so."""
    try:
        status = work()
    except KeyboardInterrupt:  # typer would end without a word, in the middle of a line
        typer.echo("\ninterrupted", err=True)
        status = INTERRUPTED
    raise typer.Exit(status)


def _as_run(given: dict[str, Any]) -> RunSettings:
    """Settings of `run` with these options, and its defaults for the rest."""
    names = RunSettings.__dataclass_fields__
    defaults = {name: param.default for name, param in signature(_run).parameters.items() if name in names}
    return RunSettings(**(defaults | {name: value for name, value in given.items() if name in names}))


def main() -> None:
    """Run the program. Deliberate errors become one message and exit status 2, Ctrl-C 130."""
    open_streams()
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(prog_name="outrider")
    except OutriderError as error:
        errors.print(Text.assemble(("error: ", "bold red"), readable(str(error))))
        leave(USAGE_ERROR)
    except MemoryError:
        errors.print(
            Text("error: memory: this machine has none left. Choose a smaller model or context (-c).")
        )
        leave(USAGE_ERROR)


if __name__ == "__main__":
    main()
