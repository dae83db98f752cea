"""The commands of the program, and the help of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from shutil import get_terminal_size
from textwrap import fill, wrap
from typing import Any

import outrider
from outrider.core.schema import Setting, settings_of

_LONG = 40
"""The help of a command with more settings shows only the usual ones."""
_USUAL = frozenset(
    """
    prompt_argument prompt file system predict stop model hf_repo model_draft hf_repo_draft
    ctx_size threads gpu_layers backend temp top_p seed json_schema grammar policy draft_max corpus prediction
    show_source compare explain quiet print_json offline verbose host port api_key alias models_dir
    max_running config log_prompts targets drafts workload prompts repetitions minutes out quick
    tokens output base
    """.split()  # noqa: SIM905 (names are read, not quotation marks)
)
"""Settings that most people need"""
_WIDTH = 78
_NAMES = 26
"""columns of the names, before the explanations"""

_RUN = """Generate text with a target model and its drafts, and show what it took.

Exit status: 0; 2 for an error; 3 for an output cut off before its schema or grammar ends; 130 after Ctrl-C;
141 when the reader of its output left (| head).
"""
_BENCH = """Find the pairing and the settings that win here: sweep targets, drafts, settings and workloads.

bench report and bench export read runs (-h says more).
A sweep that was interrupted continues when it is started again.
"""


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command: its settings' class and its function, which returns the exit status, as MODULE:NAME (in
    `outrider.cli` unless the module says another)."""

    settings: str
    function: str
    help: str


COMMANDS = {
    "run": CommandSpec("settings:RunSettings", "run:run", _RUN),
    "chat": CommandSpec(
        "settings:TextSettings",
        "chat:chat",
        "Hold a conversation; its KV is kept between turns.",
    ),
    "verify": CommandSpec(
        "settings:VerifySettings",
        "verify:verify",
        "Test that speculation (without --policy: of fixed lengths) does not change the output.",
    ),
    "costs": CommandSpec(
        "settings:CostsSettings",
        "costs:costs",
        "Measure what model calls cost here, and what acceptance drafts must reach.",
    ),
    "bench": CommandSpec("bench_settings:BenchSettings", "bench:bench", _BENCH),
    "bench report": CommandSpec(
        "bench_settings:ReportSettings", "bench:report", "Show the report of a run, finished or not."
    ),
    "bench export": CommandSpec(
        "bench_settings:ExportSettings",
        "bench:export",
        "Write the rows of a run as a table: CSV or JSON lines.",
    ),
    "check": CommandSpec(
        "settings:CheckSettings",
        "check:check",
        "Find out within a minute whether a draft model, or lookup alone, pays on this machine.",
    ),
    "plan": CommandSpec(
        "settings:PlanSettings",
        "plan:plan",
        "Predict what a pair would do on other hardware, and write the command for vLLM.",
    ),
    "distill": CommandSpec(
        "outrider.lab.distill.plan:DistillSettings",
        "distill:distill",
        "Train a small draft on the target's own answers, and measure it on held-out prompts.",
    ),
    "trim": CommandSpec(
        "settings:TrimSettings",
        "trim:trim_draft",
        "Make a draft cheaper without training: a smaller vocabulary, and weight types that are fast here.",
    ),
    "quantize": CommandSpec(
        "settings:QuantizeSettings",
        "quantize:quantize_model",
        "Quantize a model with llama.cpp's own quantizer, from one download.",
    ),
    "serve": CommandSpec(
        "serve_settings:ServeOptions",
        "serve_settings:serve_configured",
        "Serve models: an OpenAI-compatible API, and a web page.",
    ),
    "cache": CommandSpec(
        "settings:CacheSettings",
        "cache:cache",
        "Show what Outrider keeps on this machine, where, and remove it.",
    ),
    "setup": CommandSpec(
        "settings:SetupSettings",
        "setup:setup",
        "Show which libraries and devices run GGUF files here; compile a library for this CPU.",
    ),
}


def load(place: str) -> Any:
    """What MODULE:NAME means."""
    module, _, name = place.partition(":")
    return getattr(
        import_module(module if module.startswith("outrider.") else f"outrider.cli.{module}"), name
    )


def help_of_program() -> str:
    """All commands, each with the first line of its help."""
    commands = [(name, spec.help.partition("\n")[0]) for name, spec in COMMANDS.items()]
    options = [("--version", "Show the version."), ("-h, --help", "Show this, or the help of a command.")]
    about = (outrider.__doc__ or "").partition("\n")[0]
    usage = ("Usage: outrider COMMAND [OPTIONS]", "", f"  {about}", "")
    return "\n".join((*usage, *_rows(commands, _WIDTH), "", *_rows(options, _WIDTH)))


def help_of(name: str, *, everything: bool) -> str:
    """The help of a command: the settings that most people need, or everything."""
    spec = COMMANDS[name]
    settings = settings_of(load(spec.settings)).values()
    is_short = len(settings) > _LONG and not everything
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    usage = [f"Usage: outrider {name} [OPTIONS]"]
    for setting in settings:
        if setting.is_argument:
            shown_as = setting.metavar or ""
            usage.append(shown_as if setting.is_required or shown_as.startswith("[") else f"[{shown_as}]")
        if setting.name in _USUAL or not is_short:
            panel = "Arguments" if setting.is_argument else setting.panel
            panels.setdefault(panel, []).append((_written(setting), _meaning(setting)))
    if is_short:
        panels["More"] = [("--help-all", f"Show all {len(settings)} options.")]
    width = max(min(get_terminal_size().columns - 2, _WIDTH), 50)
    said = [
        fill(paragraph, width, initial_indent="  ", subsequent_indent="  ")
        for paragraph in spec.help.split("\n\n")
    ]
    shown = ["\n".join((f"{panel}:", *_rows(rows, width))) for panel, rows in panels.items() if rows]
    return "\n\n".join([" ".join(usage), *said, *shown])


def _rows(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    indent = " " * (_NAMES + 4)
    for names, meaning in rows:
        lines = wrap(meaning, width - len(indent))
        if len(names) > _NAMES:
            yield f"  {names}"
        else:
            yield f"  {names}".ljust(len(indent)) + lines.pop(0)
        yield from (indent + line for line in lines)


def _written(setting: Setting) -> str:
    if setting.is_argument:
        return setting.metavar or ""
    short = [name for name in setting.names if not name.startswith("--")]
    no = "[no-]" if any(map(setting.is_off, setting.names)) else ""
    long = setting.flag.replace("--", f"--{no}", 1)
    return f"{', '.join([*short, long])} {setting.metavar or ''}".rstrip()


def _meaning(setting: Setting) -> str:
    default = "on" if setting.default is True else setting.default
    default = ", ".join(default) if isinstance(default, list) else default
    return setting.help if default in (None, False, "") else f"{setting.help} [{default}]"
