"""The settings of `plan`."""

from __future__ import annotations

from pathlib import Path

from outrider.core.schema import Count, setting
from outrider.core.settings import JsonOutput

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
    export: str | None = setting(
        None, "Start command of vllm or llama-server for the plan.", "ENGINE", panel="Output"
    )
    list_known: bool = setting(
        False, "Show the hardware and models that are known.", "--list", panel="Output"
    )
