"""The settings of how models are loaded and where they are computed, with llama.cpp's names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from outrider.core.schema import (
    MACHINE,
    MODELS,
    PLACEMENT,
    POSITIONS,
    Group,
    Layers,
    Natural,
    Number,
    setting,
)

FirstLayers = Annotated[int, Field(ge=0, le=10_000)]


class Context(Group):
    """Room for the tokens of a sequence."""

    panel = MACHINE
    ctx_size: int | None = setting(
        None, "-c", help="Context in tokens; 0: as trained. Default: what the answer needs."
    )


class DraftContext(Group):
    """The same for the draft model."""

    panel = MACHINE
    ctx_size_draft: int = setting(0, "-cd", help="Context of the draft; 0: the target's.")


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
    n_cpu_ffn: FirstLayers = setting(
        0, "-ncffn", help="Keep the dense feed-forward weights of the first N layers on the CPU."
    )
    kv_offload: bool = setting(True, "-kvo", help="Keep the KV cache on the GPU.")
    op_offload: bool = setting(True, help="Compute large calls over weights in host memory on the GPU.")


class DraftPlacement(Group):
    """The same for the draft model."""

    panel = PLACEMENT
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
    override_tensor_draft: list[str] = setting(
        [], "-otd", metavar="PATTERN=BUFFER", help="Place the draft's tensors (repeatable)."
    )
    cpu_moe_draft: bool = setting(False, "-cmoed", help="Keep all experts of the draft on the CPU.")
    n_cpu_moe_draft: FirstLayers = setting(
        0, "-ncmoed", help="Keep the experts of its first N layers on the CPU."
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
    yarn_ext_factor: Number = setting(
        -1.0, metavar="X", help="YaRN: extrapolation mix; 0: interpolate, -1: the model's."
    )
    yarn_attn_factor: Number = setting(-1.0, metavar="X", help="YaRN: attention scale; -1: the model's.")
    yarn_beta_fast: Number = setting(
        -1.0, metavar="X", help="YaRN: low correction dimension; -1: the model's."
    )
    yarn_beta_slow: Number = setting(
        -1.0, metavar="X", help="YaRN: high correction dimension; -1: the model's."
    )


class Loading(Threads, Placement, DraftPlacement, Positions):
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
    snapshots: int = setting(
        0, help="Snapshots of a recurrent state, for drafts of up to N tokens; every call takes longer."
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
