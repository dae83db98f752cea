"""The `outrider` program: its commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from outrider.cli import options
from outrider.core.errors import OutriderError

USAGE_ERROR = 2
INTERRUPTED = 130


class _Commands(TyperGroup):
    """Reads `chat …` as `run --interactive …`: the two share all their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] == "chat":
            args = ["run", "--interactive", *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding that measures, decides and proves: the same text in fewer target calls.",
)


@app.callback()
def _program() -> None:
    """Keeps `run` a command of its own while it is the only one."""


@app.command("chat")
def _chat() -> None:
    """Hold a conversation that keeps its KV between turns: `run --interactive`, with its options."""


@app.command("run")
def _run(
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
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    draft_max: options.DraftMax = 8,
    draft_min: options.DraftMin = 0,
    draft_p_min: options.DraftPMin = 0.5,
    draft_sampling: options.DraftSampling = "greedy",
    lookup: options.Lookup = True,
    show_source: options.ShowSource = False,
    compare: options.Compare = False,
    repetitions: options.Repetitions = 3,
    json: options.Json = False,
    trace: options.Trace = None,
    quiet: options.Quiet = False,
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
) -> None:
    """Generate text with a target model and its drafts, then say what it took."""
    arguments = dict(locals())
    from outrider.backends.llama_cpp import show_log
    from outrider.cli.chat import chat
    from outrider.cli.run import run

    show_log(verbose)
    settings = options.RunSettings(**arguments)
    raise typer.Exit(chat(settings) if interactive else run(settings))


def main() -> None:
    """Run the program. Deliberate errors become one message and exit status 2, Ctrl-C 130."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(standalone_mode=True)
    except OutriderError as error:
        errors.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can reach them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        errors.print(
            Text("error: memory: this machine has none left. Choose a smaller model or context (-c).")
        )
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
