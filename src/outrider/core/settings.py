"""The schema of settings: what can be set, once, for the command line, the environment, TOML and help.

A group is a Pydantic model; `setting` adds what a field's type does not say: default, flags, help. The
settings of a command are a class that inherits the groups that it uses. One name serves all sources:
`max_running` is `--max-running`, OUTRIDER_MAX_RUNNING and the TOML key `max_running`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, Verification

MODELS = "Models"
TEXT = "Prompt and text"
SAMPLING = "Sampling"
STRUCTURE = "Structured output"
SPECULATION = "Speculation"
OUTPUT = "Output"
MACHINE = "Machine"

_PANELS = {MODELS: 0, TEXT: 1, SAMPLING: 2, STRUCTURE: 3, SPECULATION: 4, OUTPUT: 6, MACHINE: 7}
"""Where a panel is in the help; a command's own are between."""
_OWN_PANEL = 5

_METAVARS = {bool: None, int: "N", float: "S", str: "TEXT", Path: "FILE"}
_SAMPLING = SamplingParams()
_VERIFICATION = Verification()


def setting(
    default: Any,
    *flags: str,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    argument: bool = False,
    hidden: bool = False,
) -> Any:
    """A setting of a group, and how the command line has it.

    Args:
        default: Its value where nothing is given; `...`: it must be given.
        flags: Its names; without a long one among them the field's name makes it.
        help: What the help says.
        metavar: Stands for the value; None: by type.
        panel: Where the help lists it; None: its group's.
        argument: It has no name and is given by its place.
        hidden: The help leaves it out.
    """
    shown: Any = {
        "flags": list(flags),
        "metavar": metavar,
        "panel": panel,
        "argument": argument,
        "hidden": hidden,
    }
    return Field(default, description=help, json_schema_extra=shown)


def with_default(group: type[Group], name: str, default: Any) -> Any:
    """The setting of a group, with another default."""
    field = group.model_fields[name]
    return Field(default, description=field.description, json_schema_extra=field.json_schema_extra)


class Group(BaseModel):
    """Settings that belong together. Errors never repeat a value: it may be a secret."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True, defer_build=True
    )
    panel: ClassVar[str] = OUTPUT
    """Where the help lists the settings that this very class adds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a group, as every source and the help have it; `kind` is the type of a single value.

    `flags` are as typer takes them: `--page/--no-page`; `panel` is where the help lists it.
    """

    name: str
    kind: type
    default: Any
    is_required: bool
    is_list: bool
    is_argument: bool
    is_hidden: bool
    flags: tuple[str, ...]
    panel: str
    metavar: str | None
    help: str

    @property
    def flag(self) -> str:
        """What messages call it: its first long name."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.metavar or "").split("/")[0]


def settings_of(group: type[Group]) -> dict[str, Setting]:
    """The settings of a class by name: panel by panel, and there its own before those of its groups."""
    groups = _names(group)
    inherited = [base.model_fields for base in group.__bases__ if issubclass(base, Group)]
    own = [name for name in groups if not any(name in fields for fields in inherited)]
    settings = [_setting(group, name) for name in dict.fromkeys((*own, *groups))]
    settings.sort(key=lambda setting: _PANELS.get(setting.panel, _OWN_PANEL))
    return {setting.name: setting for setting in settings}


def _names(group: type[Group]) -> dict[str, None]:
    found: dict[str, None] = {}
    for base in group.__bases__:
        if issubclass(base, Group):
            found |= _names(base)
    return found | dict.fromkeys(group.model_fields)


def _setting(group: type[Group], name: str) -> Setting:
    field = group.model_fields[name]
    shown: Any = field.json_schema_extra
    atoms = _atoms(field.annotation)
    kind = next((known for known in _METAVARS if known in atoms), str)
    home = next(base for base in reversed(group.__mro__) if name in getattr(base, "model_fields", ()))
    return Setting(
        name=name,
        kind=kind,
        default=None if field.is_required() or field.default == [] else field.default,
        is_required=field.is_required(),
        is_list=get_origin(field.annotation) is list,
        is_argument=shown["argument"],
        is_hidden=shown["hidden"],
        flags=() if shown["argument"] else _flags(name, kind, field.default, shown["flags"]),
        panel=shown["panel"] or vars(home).get("panel", OUTPUT),
        metavar=shown["metavar"] or _METAVARS[kind],
        help=field.description or "",
    )


def _atoms(kind: Any) -> set[Any]:
    """The types that a type is made of."""
    return {kind}.union(*map(_atoms, getattr(kind, "__args__", ())))


def _flags(name: str, kind: type, default: Any, flags: list[str]) -> tuple[str, ...]:
    if any(flag.startswith("--") for flag in flags):
        return tuple(flags)
    word = name.replace("_", "-")
    # A switch that is off by default needs no name to switch it off.
    has_no = kind is bool and default is not False
    return (f"--{word}/--no-{word}" if has_no else f"--{word}", *flags)


def setting_error(
    error: ValidationError, group: type[Group], values: Mapping[str, Any], origins: Mapping[str, str]
) -> SettingError:
    """The first thing that Pydantic found, with where it was given (`origins`), and no secret in it."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    field, value = group.model_fields[name], values.get(name)
    is_hidden = SecretStr in _atoms(field.annotation) or isinstance(value, list | dict)
    reason = first["msg"][0].lower() + first["msg"][1:]
    shown = "" if is_hidden else f"{value} cannot be used: "
    return SettingError(origins.get(name, name), f"{shown}{reason}", field.description or "")


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Layers = Annotated[str, Field(coerce_numbers_to_str=True)]


# Models


class Target(Group):
    """Which target."""

    panel = MODELS
    model: str | None = setting(
        None,
        "-m",
        metavar="MODEL",
        help="Target: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. None: the embedded default.",
    )
    hf_repo: str | None = setting(
        None, "-hf", metavar="REPO", help="Target from the hub: OWNER/REPO[:QUANT]."
    )


class DraftModel(Group):
    """Which draft model."""

    panel = MODELS
    model_draft: str | None = setting(
        None,
        "-md",
        metavar="MODEL",
        help="Draft model with the same tokenizer; none: no draft model. The embedded default has its own, "
        "default-draft, which other files of it take too.",
    )
    hf_repo_draft: str | None = setting(
        None, "-hfd", metavar="REPO", help="Draft from the hub: OWNER/REPO[:QUANT]."
    )


class Hub(Group):
    """How the hub is asked."""

    panel = MODELS
    hf_token: SecretStr | None = setting(None, "-hft", metavar="TOKEN", help="Hub token. Default: $HF_TOKEN.")
    offline: bool = setting(False, help="Use only what is in the hub's cache.")


class Models(Target, DraftModel, Hub):
    """Which models."""


# Sampling


class BasicSampling(Group):
    """The samplers that a server has a default for."""

    panel = SAMPLING
    temp: Annotated[Number, Field(ge=0)] = setting(
        _SAMPLING.temperature, "--temp", "--temperature", metavar="T", help="Temperature; 0 is greedy."
    )
    top_k: int = setting(_SAMPLING.top_k, metavar="K", help="Keep the K most likely tokens; 0: all.")
    top_p: Annotated[Number, Field(gt=0, le=1)] = setting(
        _SAMPLING.top_p, metavar="P", help="Keep the nucleus of mass P; 1: all."
    )
    min_p: Share = setting(
        _SAMPLING.min_p, metavar="P", help="Keep tokens of at least P times the top's probability."
    )


class Sampling(BasicSampling):
    """llama.cpp's samplers; `outrider.core.params.SamplingParams` has the ranges of most."""

    panel = SAMPLING
    seed: int = setting(-1, "-s", help="Random seed; -1: a fresh one.")
    typical: float = setting(
        _SAMPLING.typical_p, "--typical", "--typical-p", metavar="P", help="Typical tokens of mass P; 1: all."
    )
    top_n_sigma: float = setting(
        _SAMPLING.top_n_sigma,
        "--top-n-sigma",
        "--top-nsigma",
        metavar="N",
        help="Keep logits within N standard deviations of the top; 0: all.",
    )
    xtc_probability: float = setting(
        _SAMPLING.xtc_probability, metavar="P", help="How often XTC drops top tokens; 0: never."
    )
    xtc_threshold: float = setting(
        _SAMPLING.xtc_threshold, metavar="P", help="XTC: what probability makes a top token."
    )
    dynatemp_range: float = setting(
        _SAMPLING.dynatemp_range, metavar="R", help="Temperature ±R by entropy; 0: constant."
    )
    dynatemp_exp: float = setting(_SAMPLING.dynatemp_exponent, metavar="E", help="Exponent of that.")
    repeat_penalty: float = setting(
        _SAMPLING.repeat_penalty, metavar="X", help="Divide logits of repeated tokens; 1: off."
    )
    presence_penalty: float = setting(
        _SAMPLING.presence_penalty, metavar="X", help="Subtract X from repeated tokens."
    )
    frequency_penalty: float = setting(
        _SAMPLING.frequency_penalty, metavar="X", help="Subtract X for each repetition."
    )
    repeat_last_n: int = setting(_SAMPLING.repeat_last_n, help="Tokens that penalties look at; -1: all.")
    dry_multiplier: float = setting(
        _SAMPLING.dry_multiplier, metavar="X", help="DRY: penalise going on as before; 0: off."
    )
    dry_base: float = setting(_SAMPLING.dry_base, metavar="X", help="DRY: its growth per token.")
    dry_allowed_length: int = setting(
        _SAMPLING.dry_allowed_length, help="DRY: repetitions this short are free."
    )
    dry_penalty_last_n: int = setting(_SAMPLING.dry_last_n, help="DRY: tokens looked at; -1: all.")
    dry_sequence_breaker: list[str] = setting(
        [], help="DRY: ends a repetition (repeatable; replaces the usual ones; none: no breakers)."
    )
    logit_bias: list[str] = setting([], "-l", metavar="ID±BIAS", help="Add to a logit: 15043+1 (repeatable).")
    ban: list[str] = setting([], metavar="TOKEN", help="Never this token: its id, or its text (repeatable).")
    min_tokens: int = setting(_SAMPLING.min_tokens, help="No end token before N tokens.")


# Structured output


class Structure(Group):
    """What the output may be: one of five kinds, and how it is enforced."""

    panel = STRUCTURE
    json_schema: str | None = setting(
        None,
        "-j",
        "--json-schema",
        "-jf",
        "--json-schema-file",
        metavar="SCHEMA",
        help="JSON that fulfils this schema: a file, - for stdin, or the schema itself ({…, true, false).",
    )
    json_mode: bool = setting(False, help="Any JSON value.")
    regex: str | None = setting(None, metavar="PATTERN", help="Text that matches this pattern as a whole.")
    choices: list[str] = setting([], "--choice", help="One of these texts (repeatable).")
    grammar: str | None = setting(
        None,
        "--grammar",
        "--grammar-file",
        metavar="GRAMMAR",
        help="Text of this grammar: a GBNF file, a .lark file, - for stdin, or GBNF itself (it has a ::=).",
    )
    json_style: str | None = setting(
        None,
        metavar="STYLE",
        help="White space of JSON: spaced (the default), compact, pretty or flexible (as the model likes).",
    )
    fast_forward: str | None = setting(
        None,
        metavar="MODE",
        help="Text with only one way to go on: exact (drafted; the default), canonical (its usual tokens "
        "alone are allowed) or off.",
    )
    lenient_schema: bool = setting(
        False, help="Go on without what of the schema cannot be enforced, and say so."
    )
    constrain_after: str | None = setting(
        None, help="Leave the output free up to this text: </think>, for instance."
    )


# Speculation


class Drafting(Group):
    """Who drafts, how far, and what keeps a draft."""

    panel = SPECULATION
    policy: str | None = setting(
        None,
        metavar="WHO",
        help="Who drafts and how far: auto (what pays here), lookup or model (auto, but only these), fixed "
        "(by the lengths below), plain (nobody).",
    )
    draft_max: int | None = setting(
        None,
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        help="Most tokens to draft a step (auto: 64, fixed: 8); 0 decodes plainly.",
    )
    draft_min: int | None = setting(
        None,
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        help="Fixed lengths: drop shorter drafts (sampled ones are kept: dropping them would bias the text).",
    )
    draft_p_min: Share | None = setting(
        None,
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="Fixed lengths: end a draft before a token that is less likely than P to be right (0.65).",
    )
    rule: str = setting(
        _VERIFICATION.rule,
        metavar="RULE",
        help="What keeps drafted tokens: auto, token, block, or stable (the text depends on the seed alone).",
    )
    bitwise: bool | None = setting(
        None,
        help="Text equal to plain decoding's bit for bit, always, or an error where the library cannot. "
        "By default where it costs nothing.",
    )
    lookup: bool = setting(
        True, help="Draft from the text so far, and what was said before it. On by default."
    )


class DraftSources(Group):
    """What drafts are made from, beyond the models and the text."""

    panel = SPECULATION
    draft_sampling: str = setting(
        _VERIFICATION.draft_sampling,
        metavar="HOW",
        help="The draft's tokens: its most likely (greedy), drawn (sampled), or the better (auto).",
    )
    corpus: list[Path] = setting(
        [],
        metavar="PATH",
        help="Draft from these files, and those in these folders (repeatable); indexed once.",
    )
    costs: Path | None = setting(
        None, help="Take what calls cost from this file; if there is none, write it there."
    )


class Lenience(Group):
    """Whether a draft may change the text."""

    panel = SPECULATION
    lenience: float = setting(
        _VERIFICATION.lenience,
        metavar="L",
        help="Below 1: accept more and CHANGE the text (tokens up to 1/L times too likely).",
    )


# How models are loaded


class Context(Group):
    """Room for the tokens of a sequence."""

    panel = MACHINE
    ctx_size: int | None = setting(None, "-c", help="Context in tokens; 0: as trained. Default: what fits.")


class DraftContext(Group):
    """The same for the draft model."""

    panel = MACHINE
    ctx_size_draft: int = setting(0, "-cd", help="Context of the draft; 0: the target's.")


class Threads(Group):
    """Threads of this machine."""

    panel = MACHINE
    threads: int = setting(-1, "-t", help="Threads; default: the physical cores.")


class Loading(Threads):
    """How weights are loaded and calls are computed, with llama.cpp's names."""

    panel = MACHINE
    threads_batch: int = setting(-1, "-tb", help="Threads of calls over several tokens.")
    gpu_layers: Layers = setting(
        "all", "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", help="Layers on the GPU, or all."
    )
    gpu_layers_draft: Layers | None = setting(
        None,
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        metavar="N",
        help="The draft's layers there; default: as -ngl.",
    )
    split_mode: str = setting(
        "layer", "-sm", metavar="MODE", help="How GPUs share the model: none, layer or row."
    )
    main_gpu: int = setting(0, "-mg", help="The GPU for -sm none.")
    batch_size: int = setting(2048, "-b", help="Most tokens of a call.")
    ubatch_size: int = setting(512, "-ub", help="Tokens computed at once.")
    flash_attn: str = setting(
        "auto", "-fa", metavar="WHEN", help="Flash attention: on, off, or auto: by model and device."
    )
    cache_type_k: str = setting("f16", "-ctk", metavar="TYPE", help="Type of the cached keys: f16, q8_0, …")
    cache_type_v: str = setting("f16", "-ctv", metavar="TYPE", help="Type of the cached values.")
    mmap: bool = setting(True, help="Map the file instead of reading it (the default).")
    mlock: bool = setting(False, help="Keep the weights in memory.")
    swa_full: bool = setting(
        True, help="Keep all KV of sliding-window layers, to be able to rewind (the default)."
    )
    repack: bool = setting(True, help="Repacked weights: often faster, sometimes not. On by default.")
    backend: str = setting(
        "auto",
        metavar="NAME",
        help="Native library: llama.cpp, ik (ik_llama.cpp), or auto: the faster one here for this model.",
    )
    llama_library: Path | None = setting(None, help="A build of your own: libllama of either.")


# Output


class Verbose(Group):
    """Whether the libraries' own log is shown."""

    verbose: bool = setting(False, "-v", help="Let llama.cpp's own log through.")


class JsonOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(False, "--json", help="One JSON object on standard output, and nothing else.")


class PairSettings(Models, Drafting, Context, DraftContext, Loading, Verbose):
    """Which models are loaded and how, and how they draft: what `run`, `verify` and `serve` share."""
