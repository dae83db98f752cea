"""The settings of `plan`."""

from __future__ import annotations

from pathlib import Path

from outrider.core.schema import MODELS, OUTPUT, Count, setting
from outrider.core.settings import JsonOutput

_TEXTS = "What is generated"


class PlanSettings(JsonOutput):
    """Those of `plan`."""

    target: str | None = setting(
        None,
        "-m",
        "--target",
        "--model",
        metavar="MODEL",
        panel=MODELS,
        help="Target: a known name such as qwen2.5-coder-32b or qwen3-8b:q8_0; or a GGUF file.",
    )
    drafts: list[str] = setting(
        [],
        "-md",
        "--draft",
        "--model-draft",
        metavar="MODEL",
        panel=MODELS,
        help="Draft, named likewise (repeatable); mtp, eagle or eagle3: a head on the target; none: lookup "
        "alone. Default: all known ones that could draft for the target.",
    )
    on: str | None = setting(
        None,
        metavar="NAME",
        panel="Where",
        help="Hardware, and how many: 3090, RTX 4090, h100x8. --list shows all.",
    )
    hardware: Path | None = setting(
        None, panel="Where", help="TOML with more hardware, models or types of weights."
    )
    batch: str | None = setting(
        None,
        metavar="N",
        panel=_TEXTS,
        help="Sequences at once, several by commas. Default: 1 where llama.cpp is usual, 1,8,32 elsewhere.",
    )
    context: Count = setting(4096, "-c", "--context", panel=_TEXTS, help="Tokens of each sequence.")
    kv_type: str = setting("f16", metavar="TYPE", panel=_TEXTS, help="Type of K and V: f16, q8_0, q4_0.")
    workload: str | None = setting(
        None,
        metavar="NAME",
        panel=_TEXTS,
        help="Bundled acceptance of a kind of text: all (the default), chat, code, edits, json, summaries, "
        "retrieval or reasoning.",
    )
    acceptance: list[str] = setting(
        [],
        metavar="[WHO=]P",
        panel=_TEXTS,
        help="Acceptance of each drafted token: 0.8, or by position 0.8,0.6,0.5; lookup=0.5; DRAFT=0.7 "
        "(repeatable).",
    )
    export: str | None = setting(
        None,
        metavar="ENGINE",
        panel=OUTPUT,
        help="Start command of vllm or llama-server for the plan.",
    )
    list_known: bool = setting(
        False, "--list", panel=OUTPUT, help="Show the hardware and models that are known."
    )
