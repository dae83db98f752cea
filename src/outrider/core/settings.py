"""The settings that several commands have, in groups; `outrider.core.schema` says what a setting is."""

# Annotations are no strings here: pydantic would evaluate each of them at every start.

from dataclasses import Field as DataclassField
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SecretStr, create_model

from outrider.core.params import (
    DraftSampling,
    FastForward,
    JsonStyle,
    PolicyName,
    Rule,
    SamplingParams,
    Verification,
)
from outrider.core.schema import (
    MACHINE,
    MODELS,
    PLACEMENT,
    POSITIONS,
    SAMPLING,
    SPECULATION,
    STRUCTURE,
    Group,
    Layers,
    Natural,
    Number,
    Share,
    setting,
)

_VERIFICATION = Verification()
FirstLayers = Annotated[int, Field(ge=0, le=10_000)]

# Models


class Target(Group):
    """Which target."""

    panel = MODELS
    model: str | None = setting(
        None,
        "-m",
        metavar="MODEL",
        help="Target: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. Default: the embedded model.",
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
        help="Draft model with the target's tokenizer; auto: the best beside the target or in the hub's "
        "cache; none: no draft model. The embedded default comes with one: default-draft.",
    )
    hf_repo_draft: str | None = setting(
        None, "-hfd", metavar="REPO", help="Draft from the hub: OWNER/REPO[:QUANT]."
    )


class Hub(Group):
    """How the hub is asked."""

    panel = MODELS
    hf_token: SecretStr | None = setting(None, "-hft", metavar="TOKEN", help="Hub token. Default: $HF_TOKEN.")
    offline: bool = setting(False, help="Use only files in the hub's cache.")


class Models(Target, DraftModel, Hub):
    """Which models."""


class Template(Group):
    """How a conversation becomes a text."""

    panel = MODELS
    chat_template_file: Path | None = setting(None, help="Chat template (Jinja) in place of the model's own.")


class Reasoning(Group):
    """How much a model thinks before it answers."""

    panel = MODELS
    reasoning_budget: Annotated[int, Field(ge=-1)] = setting(
        -1, help="End the reasoning after N tokens; -1: no limit, 0: no reasoning."
    )
    reasoning_budget_message: str | None = setting(
        None, help="Text to write before a forced end of the reasoning."
    )


# Sampling


def _setting_name(sampler: DataclassField[Any]) -> str:
    first: str = (*sampler.metadata["flags"], sampler.name)[0]
    return first.removeprefix("--").replace("-", "_")


def samplers(defaults: SamplingParams, *names: str) -> type[Group]:
    """A group with a setting for each sampler of SamplingParams, or for those that are named."""
    made: dict[str, Any] = {}
    for sampler in fields(SamplingParams):
        shown, default = sampler.metadata, getattr(defaults, sampler.name)
        if shown and (sampler.name in names or not names):
            number = Number if isinstance(default, float) else int
            kind = Annotated[number, Field(**shown["bounds"])]  # type: ignore[valid-type]
            declared = setting(default, *shown["flags"], metavar=shown["metavar"], help=shown["help"])
            made[_setting_name(sampler)] = (kind, declared)
    return create_model("Samplers", __base__=Group, **made)


def sampling_params(settings: Group, **others: Any) -> SamplingParams:
    """What settings say of the samplers, and the parameters that need more than a setting. Raises
    SettingError."""
    names = {sampler.name: _setting_name(sampler) for sampler in fields(SamplingParams) if sampler.metadata}
    given = {name: getattr(settings, own) for name, own in names.items() if hasattr(settings, own)}
    return SamplingParams(**given, **others)


if TYPE_CHECKING:  # a class that is made when the program runs has no type

    class _Samplers(Group):
        """A setting for each sampler, with llama.cpp's defaults."""

    class ServedSampling(Group):
        """What requests get that say nothing about it."""
else:
    _Samplers = samplers(SamplingParams())
    _Samplers.panel = SAMPLING
    _OPENAI = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    ServedSampling = samplers(_OPENAI, "temperature", "top_k", "top_p", "min_p")
    ServedSampling.panel = SAMPLING


class Sampling(_Samplers):
    """llama.cpp's samplers, and what else chooses tokens."""

    panel = SAMPLING
    seed: int = setting(-1, "-s", help="Random seed; -1: a fresh one.")
    dry_sequence_breaker: list[str] = setting(
        [],
        help="DRY: text that ends a repetition (repeatable; replaces the default ones; none: no breakers).",
    )
    logit_bias: list[str] = setting(
        [], "-l", metavar="ID±BIAS", help="Add BIAS to a token's logit: 15043+1, or 15043-inf (repeatable)."
    )


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
        help="JSON of this schema: a file, - for stdin, or the schema itself ({…, true, false).",
    )
    json_mode: bool = setting(False, help="Any JSON value.")
    regex: str | None = setting(None, metavar="PATTERN", help="Text that this pattern matches as a whole.")
    choices: list[str] = setting([], "--choice", help="One of these texts (repeatable).")
    grammar: str | None = setting(
        None,
        "--grammar",
        "--grammar-file",
        metavar="GRAMMAR",
        help="Text of this grammar: a GBNF or .lark file, - for stdin, or GBNF itself (it has a ::=).",
    )
    json_style: JsonStyle | None = setting(
        None,
        metavar="STYLE",
        help="White space in JSON: spaced (the default), compact, pretty or flexible (the model chooses).",
    )
    fast_forward: FastForward | None = setting(
        None,
        metavar="MODE",
        help="Where the grammar leaves no choice: exact (draft the text; the default), canonical (allow its "
        "usual tokens alone) or off.",
    )
    lenient_schema: bool = setting(
        False, help="Ignore parts of the schema that cannot be enforced, and list them."
    )
    constrain_after: str | None = setting(
        None, help="Leave the output free up to this text, such as </think>."
    )


# Speculation


class Drafting(Group):
    """Who drafts, how far, and what keeps a draft."""

    panel = SPECULATION
    policy: PolicyName | None = setting(
        None,
        metavar="WHO",
        help="Who drafts, and how far: auto (whatever pays here), lookup or model (auto with these alone), "
        "fixed (the lengths below), plain (nobody).",
    )
    draft_max: Annotated[int, Field(ge=0, le=2048)] | None = setting(
        None,
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        help="Draft at most N tokens a step (auto: 64, fixed: 8); 0 decodes plainly.",
    )
    draft_min: int | None = setting(
        None,
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        help="Fixed lengths: drop shorter drafts (not sampled ones, which would bias the text).",
    )
    draft_p_min: Share | None = setting(
        None,
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="Fixed lengths: end a draft before a token less likely than P to be accepted (0.65).",
    )
    rule: Rule = setting(
        _VERIFICATION.rule,
        metavar="RULE",
        help="Verification rule: token, block, stable (the text depends on the seed alone), or auto: stable "
        "with a seed, else block.",
    )
    bitwise: bool | None = setting(
        None,
        help="The text of plain decoding, bit for bit, or an error where the library cannot give it. "
        "Default: where it costs nothing.",
    )
    lookup: bool = setting(True, help="Draft from the text so far, and from earlier texts.")


class DraftSources(Group):
    """What drafts are made from, beyond the models and the text."""

    panel = SPECULATION
    draft_sampling: DraftSampling = setting(
        _VERIFICATION.draft_sampling,
        metavar="HOW",
        help="The draft model's tokens: the most likely (greedy), sampled, or whichever pays (auto).",
    )
    corpus: list[Path] = setting(
        [],
        metavar="PATH",
        help="Draft from this file, or the files in this folder (repeatable); indexed once.",
    )


# How models are loaded, and where they are computed, with llama.cpp's names


class Context(Group):
    """Room for the tokens of a sequence."""

    panel = MACHINE
    ctx_size: int | None = setting(
        None, "-c", help="Context in tokens; 0: as trained. Default: what the answer needs."
    )


class Threads(Group):
    """Threads of this machine."""

    panel = MACHINE
    threads: int = setting(-1, "-t", help="Threads; -1: the physical cores.")


class Placement(Group):
    """Which devices hold and compute what, with llama.cpp's names."""

    panel = PLACEMENT
    device: str | None = setting(
        None,
        "-dev",
        metavar="NAMES",
        help="GPUs to use, as outrider setup lists them: CUDA0,CUDA1; none: no GPU.",
    )
    gpu_layers: Layers = setting(
        "auto",
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        help="Layers on the GPU: a number, all, or auto (what fits).",
    )
    split_mode: str = setting(
        "layer", "-sm", metavar="MODE", help="How GPUs share the model: none, layer, row or tensor."
    )
    tensor_split: str | None = setting(
        None, "-ts", metavar="N0,N1", help="Their shares of the model: 3,1 gives the first three quarters."
    )
    main_gpu: int = setting(0, "-mg", help="The GPU to use under -sm none.")
    override_tensor: list[str] = setting(
        [],
        "-ot",
        metavar="PATTERN=BUFFER",
        help="Place the tensors whose names match: exps=CPU (repeatable).",
    )
    cpu_moe: bool = setting(False, "-cmoe", help="Keep all experts of a mixture on the CPU.")
    n_cpu_moe: FirstLayers = setting(0, "-ncmoe", help="Keep the experts of the first N layers on the CPU.")
    kv_offload: bool = setting(True, "-kvo", help="Keep the KV cache on the GPU.")
    op_offload: bool = setting(True, help="Compute large calls over weights in host memory on the GPU.")
    device_draft: str | None = setting(
        None, "-devd", metavar="NAMES", help="The draft's GPUs; default: as -dev."
    )
    gpu_layers_draft: Layers | None = setting(
        None,
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        metavar="N",
        help="The draft's layers on the GPU; default: as -ngl.",
    )


class Positions(Group):
    """How positions are stretched beyond the context that a model was trained for."""

    panel = POSITIONS
    rope_scaling: str = setting(
        "", metavar="KIND", help="RoPE scaling: none, linear or yarn; default: the model's."
    )
    rope_scale: Annotated[Number, Field(gt=0)] | None = setting(
        None, metavar="X", help="Stretch the context X times."
    )
    rope_freq_base: Annotated[Number, Field(ge=0)] = setting(
        0.0, metavar="X", help="RoPE base frequency; 0: the model's."
    )
    rope_freq_scale: Annotated[Number, Field(ge=0)] = setting(
        0.0, metavar="X", help="RoPE frequency factor: 1 / --rope-scale; 0: the model's."
    )
    yarn_orig_ctx: Natural = setting(0, help="YaRN: the original context; 0: the model's.")


class Loading(Threads, Placement, Positions):
    """How weights are loaded and calls are computed, with llama.cpp's names."""

    panel = MACHINE
    threads_batch: int = setting(-1, "-tb", help="Threads for calls over several tokens; -1: as -t.")
    threads_draft: int = setting(-1, "-td", help="The draft's threads; -1: as -t.")
    threads_batch_draft: int = setting(
        -1, "-tbd", help="The draft's threads for calls over several tokens; -1: as -tb."
    )
    batch_size: int = setting(2048, "-b", help="The most tokens in one call.")
    ubatch_size: int = setting(512, "-ub", help="Tokens computed at once within a call.")
    flash_attn: str = setting(
        "auto", "-fa", metavar="WHEN", help="Flash attention: on, off or auto (by model and device)."
    )
    cache_type_k: str = setting(
        "f16", "-ctk", metavar="TYPE", help="Type of the keys in the KV cache: f16, q8_0, …"
    )
    cache_type_v: str = setting("f16", "-ctv", metavar="TYPE", help="Type of the values in the KV cache.")
    cache_type_k_draft: str | None = setting(
        None, "-ctkd", metavar="TYPE", help="Type of the draft's keys; default: as -ctk."
    )
    cache_type_v_draft: str | None = setting(
        None, "-ctvd", metavar="TYPE", help="Type of the draft's values; default: as -ctv."
    )
    lora: list[Path] = setting([], panel=MODELS, help="Add a LoRA adapter (GGUF) to the target (repeatable).")
    lora_scaled: list[str] = setting(
        [], panel=MODELS, metavar="FILE:SCALE", help="The same with a scale: FILE:0.5 (repeatable)."
    )
    mmap: bool = setting(True, help="Map the file into memory instead of reading it.")
    mlock: bool = setting(False, help="Lock the weights in memory.")
    swa_full: bool = setting(
        True, help="Keep all KV of sliding-window layers, so that drafts can be rolled back."
    )
    mtp: bool = setting(
        True,
        help="Draft with the model's own MTP head, if it has one and no -md is given.",
    )
    repack: bool = setting(True, help="Repack weights: often faster, sometimes not.")
    backend: str = setting(
        "auto",
        metavar="NAME",
        help="Native library: llama.cpp, ik (ik_llama.cpp) or auto (whichever is faster here).",
    )
    llama_library: Path | None = setting(None, help="A build of your own: the libllama of either.")


# Output


class Verbose(Group):
    """Whether the libraries' own log is shown."""

    verbose: bool = setting(False, "-v", help="Show llama.cpp's own log.")


class JsonOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(
        False, "--json", help="Print one JSON object, and nothing else, on standard output."
    )


class PairSettings(Models, Template, Drafting, Context, Loading, Verbose):
    """Which models are loaded and how, and how they draft: what `run`, `verify` and `serve` share."""
