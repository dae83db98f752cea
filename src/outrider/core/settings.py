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
from outrider.core.schema import Group, Layers, Natural, NonEmpty, Number, Share, setting

_VERIFICATION = Verification()
FirstLayers = Annotated[int, Field(ge=0, le=10_000)]

# Models


class Target(Group, panel="Models"):
    """Which target."""

    model: str | None = setting(
        None,
        "Target: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. Default: the embedded model.",
        "-m MODEL",
    )
    hf_repo: str | None = setting(None, "Target from the hub: OWNER/REPO[:QUANT].", "-hf REPO")


class Hub(Group, panel="Models"):
    """How the hub is asked."""

    hf_token: SecretStr | None = setting(None, "Hub token. Default: $HF_TOKEN.", "-hft TOKEN")
    offline: bool = setting(False, "Use only files in the hub's cache.")


class Models(Target, Hub, panel="Models"):
    """Which models."""

    model_draft: str | None = setting(
        None,
        "Draft model with the target's tokenizer; auto: the best beside the target or in the hub's "
        "cache; none: no draft model. The embedded default comes with one: default-draft.",
        "-md MODEL",
    )
    hf_repo_draft: str | None = setting(None, "Draft from the hub: OWNER/REPO[:QUANT].", "-hfd REPO")


class Template(Group, panel="Models"):
    """How a conversation becomes a text."""

    chat_template_file: Path | None = setting(None, "Chat template (Jinja) in place of the model's own.")


class Reasoning(Group, panel="Models"):
    """How much a model thinks before it answers."""

    reasoning_budget: Annotated[int, Field(ge=-1)] = setting(
        -1, "End the reasoning after N tokens; -1: no limit, 0: no reasoning."
    )
    reasoning_budget_message: str | None = setting(
        None, "Text to write before a forced end of the reasoning."
    )


# Sampling


def _setting_name(sampler: DataclassField[Any]) -> str:
    first: str = [*sampler.metadata["names"].split(), ""][0]
    return first[2:].replace("-", "_") if first.startswith("--") else sampler.name


def samplers(defaults: SamplingParams, *names: str) -> type[Group]:
    """A group with a setting for each sampler of SamplingParams, or for those that are named."""
    made: dict[str, Any] = {}
    for sampler in fields(SamplingParams):
        shown, default = sampler.metadata, getattr(defaults, sampler.name)
        if shown and (sampler.name in names or not names):
            number = Number if isinstance(default, float) else int
            kind = Annotated[number, Field(**shown["bounds"])]  # type: ignore[valid-type]
            made[_setting_name(sampler)] = (kind, setting(default, shown["help"], shown["names"]))
    return create_model("Samplers", __base__=Group, __cls_kwargs__={"panel": "Sampling"}, **made)


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
    _OPENAI = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    ServedSampling = samplers(_OPENAI, "temperature", "top_k", "top_p", "min_p")


class Sampling(_Samplers, panel="Sampling"):
    """llama.cpp's samplers, and what else chooses tokens."""

    seed: int = setting(-1, "Random seed; -1: a fresh one.", "-s")
    dry_sequence_breaker: list[str] = setting(
        [], "DRY: text that ends a repetition (repeatable; replaces the default ones; none: no breakers)."
    )
    logit_bias: list[str] = setting(
        [], "Add BIAS to a token's logit: 15043+1, or 15043-inf (repeatable).", "-l ID±BIAS"
    )


# Structured output


class Structure(Group, panel="Structured output"):
    """What the output may be: one of five kinds, and how it is enforced."""

    json_schema: str | None = setting(
        None,
        "JSON of this schema: a file, or the schema itself ({…, true, false).",
        "-j --json-schema -jf --json-schema-file SCHEMA",
    )
    json_mode: bool = setting(False, "Any JSON value.")
    regex: str | None = setting(None, "Text that this pattern matches as a whole.", "PATTERN")
    choices: list[str] = setting([], "One of these texts (repeatable).", "--choice")
    grammar: str | None = setting(
        None,
        "Text of this grammar: a GBNF or .lark file, or GBNF itself (it has a ::=).",
        "--grammar --grammar-file GRAMMAR",
    )
    json_style: JsonStyle | None = setting(
        None,
        "White space in JSON: spaced (the default) or compact.",
        "STYLE",
    )
    fast_forward: FastForward | None = setting(
        None,
        "Where the grammar leaves no choice: exact (draft the text; the default), canonical (allow its "
        "usual tokens alone) or off.",
        "MODE",
    )
    lenient_schema: bool = setting(
        False, "Ignore parts of the schema that cannot be enforced, and list them."
    )
    constrain_after: NonEmpty | None = setting(
        None, "Leave the output free up to this text, such as </think>."
    )


# Speculation


class Drafting(Group, panel="Speculation"):
    """Who drafts, how far, and what keeps a draft."""

    policy: PolicyName | None = setting(
        None,
        "Who drafts, and how far: auto (whatever pays here), lookup or model (auto with these alone), "
        "fixed (the lengths below), plain (nobody).",
        "WHO",
    )
    draft_max: Annotated[int, Field(ge=0, le=2048)] | None = setting(
        None,
        "Draft at most N tokens a step (auto: 64, fixed: 8); 0 decodes plainly.",
        "--draft-max --draft --draft-n --spec-draft-n-max",
    )
    draft_p_min: Share | None = setting(
        None,
        "Fixed lengths: end a draft before a token less likely than P to be accepted (0.65).",
        "--draft-p-min --spec-draft-p-min P",
    )
    rule: Rule = setting(
        _VERIFICATION.rule,
        "Verification rule: token, block, stable (the text depends on the seed alone), or auto: stable "
        "with a seed, else block.",
        "RULE",
    )
    bitwise: bool | None = setting(
        None,
        "The text of plain decoding, bit for bit, or an error where the library cannot give it. Default: "
        "where it costs nothing.",
    )
    lookup: bool = setting(True, "Draft from the text so far, and from earlier texts.")


class DraftSources(Group, panel="Speculation"):
    """What drafts are made from, beyond the models and the text."""

    draft_sampling: DraftSampling = setting(
        _VERIFICATION.draft_sampling,
        "The draft model's tokens: the most likely (greedy), sampled, or whichever pays (auto).",
        "HOW",
    )
    corpus: list[Path] = setting(
        [], "Draft from this file, or the files in this folder (repeatable); indexed once.", "PATH"
    )


# How models are loaded, and where they are computed, with llama.cpp's names


class Context(Group, panel="Machine"):
    """Room for the tokens of a sequence."""

    ctx_size: Natural | None = setting(
        None, "Context in tokens; 0: as trained. Default: what the answer needs.", "-c"
    )


class Threads(Group, panel="Machine"):
    """Threads of this machine."""

    threads: int = setting(-1, "Threads; -1: the physical cores.", "-t")


class Placement(Group, panel="Where it is computed"):
    """Which devices hold and compute what, with llama.cpp's names."""

    device: str | None = setting(
        None, "GPUs to use, as outrider setup lists them: CUDA0,CUDA1; none: no GPU.", "-dev NAMES"
    )
    gpu_layers: Layers = setting(
        "auto", "Layers on the GPU: a number, all, or auto (what fits).", "-ngl --gpu-layers --n-gpu-layers N"
    )
    split_mode: str = setting("layer", "How GPUs share the model: none, layer, row or tensor.", "-sm MODE")
    tensor_split: str | None = setting(
        None, "Their shares of the model: 3,1 gives the first three quarters.", "-ts N0,N1"
    )
    main_gpu: int = setting(0, "The GPU to use under -sm none.", "-mg")
    override_tensor: list[str] = setting(
        [], "Place the tensors whose names match: exps=CPU (repeatable).", "-ot PATTERN=BUFFER"
    )
    cpu_moe: bool = setting(False, "Keep all experts of a mixture on the CPU.", "-cmoe")
    n_cpu_moe: FirstLayers = setting(0, "Keep the experts of the first N layers on the CPU.", "-ncmoe")
    kv_offload: bool = setting(True, "Keep the KV cache on the GPU.", "-kvo")
    op_offload: bool = setting(True, "Compute large calls over weights in host memory on the GPU.")
    device_draft: str | None = setting(None, "The draft's GPUs; default: as -dev.", "-devd NAMES")
    gpu_layers_draft: Layers | None = setting(
        None,
        "The draft's layers on the GPU; default: as -ngl.",
        "-ngld --gpu-layers-draft --n-gpu-layers-draft N",
    )


class Positions(Group, panel="Longer contexts"):
    """How positions are stretched beyond the context that a model was trained for."""

    rope_scaling: str = setting("", "RoPE scaling: none, linear or yarn; default: the model's.", "KIND")
    rope_scale: Annotated[Number, Field(gt=0)] | None = setting(None, "Stretch the context X times.", "X")
    rope_freq_base: Annotated[Number, Field(ge=0)] = setting(0.0, "RoPE base frequency; 0: the model's.", "X")
    rope_freq_scale: Annotated[Number, Field(ge=0)] = setting(
        0.0, "RoPE frequency factor: 1 / --rope-scale; 0: the model's.", "X"
    )
    yarn_orig_ctx: Natural = setting(0, "YaRN: the original context; 0: the model's.")


class Loading(Threads, Placement, Positions, panel="Machine"):
    """How weights are loaded and calls are computed, with llama.cpp's names."""

    threads_batch: int = setting(-1, "Threads for calls over several tokens; -1: as -t.", "-tb")
    threads_draft: int = setting(-1, "The draft's threads; -1: as -t.", "-td")
    threads_batch_draft: int = setting(
        -1, "The draft's threads for calls over several tokens; -1: as -tb.", "-tbd"
    )
    batch_size: int = setting(2048, "The most tokens in one call.", "-b")
    ubatch_size: int = setting(512, "Tokens computed at once within a call.", "-ub")
    flash_attn: str = setting("auto", "Flash attention: on, off or auto (by model and device).", "-fa WHEN")
    cache_type_k: str = setting("f16", "Type of the keys in the KV cache: f16, q8_0, …", "-ctk TYPE")
    cache_type_v: str = setting("f16", "Type of the values in the KV cache.", "-ctv TYPE")
    cache_type_k_draft: str | None = setting(
        None, "Type of the draft's keys; default: as -ctk.", "-ctkd TYPE"
    )
    cache_type_v_draft: str | None = setting(
        None, "Type of the draft's values; default: as -ctv.", "-ctvd TYPE"
    )
    lora: list[Path] = setting([], "Add a LoRA adapter (GGUF) to the target (repeatable).", panel="Models")
    lora_scaled: list[str] = setting(
        [], "The same with a scale: FILE:0.5 (repeatable).", "FILE:SCALE", panel="Models"
    )
    mmap: bool = setting(True, "Map the file into memory instead of reading it.")
    mlock: bool = setting(False, "Lock the weights in memory.")
    swa_full: bool = setting(True, "Keep all KV of sliding-window layers, so that drafts can be rolled back.")
    mtp: bool = setting(True, "Draft with the model's own MTP head, if it has one and no -md is given.")
    repack: bool = setting(True, "Repack weights: often faster, sometimes not.")
    backend: str = setting(
        "auto", "Native library: llama.cpp, ik (ik_llama.cpp) or auto (whichever is faster here).", "NAME"
    )
    llama_library: Path | None = setting(None, "A build of your own: the libllama of either.")


# Output


class Verbose(Group):
    """Whether the libraries' own log is shown."""

    verbose: bool = setting(False, "Show llama.cpp's own log.", "-v")


class JsonOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(
        False, "Print one JSON object, and nothing else, on standard output.", "--json"
    )


class PairSettings(Models, Template, Drafting, Context, Loading, Verbose):
    """Which models are loaded and how, and how they draft: what `run`, `verify` and `serve` share."""
