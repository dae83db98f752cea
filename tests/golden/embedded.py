"""The program's `--json` on the embedded default model, SmolLM2-135M, at fixed seeds.

Texts depend on the library's kernels: on another kind of CPU, or with another version of llama.cpp, record
them again on an unchanged checkout before you compare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from golden.commands import program
from golden.normal import normal, shape

__all__ = ["answers", "certificate"]

_PROMPT = "Repeat this text: The river is wide and the water is cold. The boat crosses the river."
_MACHINE = ("--backend", "llama.cpp", "-t", "1", "-c", "1024", "-fa", "on", "--repack")
"""what a measurement would choose otherwise; so does whether calls are made of equal bits (`RUNS`)"""
_DRAFT, _NO_DRAFT = ("-md", "default-draft"), ("-md", "none")
_FIXED = ("--policy", "fixed", "--draft-max", "4", "--draft-p-min", "0.3")
_GREEDY = ("--temp", "0", "-s", "7", "-n", "32")
_SAMPLED = ("--temp", "0.8", "-s", "7", "-n", "32")
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 20}, "cold": {"type": "boolean"}},
        "required": ["place", "cold"],
        "additionalProperties": False,
    }
)

RUNS: Mapping[str, tuple[str, ...]] = {
    "plain": (*_GREEDY, "--policy", "fixed", "--draft-max", "0", *_NO_DRAFT),
    "greedy, lookup": (*_GREEDY, *_FIXED, *_NO_DRAFT),
    "greedy, draft model": (*_GREEDY, *_FIXED, *_DRAFT, "--no-lookup"),
    "greedy, both": (*_GREEDY, *_FIXED, *_DRAFT),
    "sampled, plain": (*_SAMPLED, "--policy", "fixed", "--draft-max", "0", *_NO_DRAFT),
    "sampled, lookup": (*_SAMPLED, *_FIXED, *_NO_DRAFT),
    "sampled, draft model": (*_SAMPLED, *_FIXED, *_DRAFT, "--no-lookup"),
    "sampled, the stable rule": (*_SAMPLED, *_FIXED, *_DRAFT, "--rule", "stable"),
    "a schema": (*_GREEDY, *_FIXED, *_DRAFT, "--json-schema", _SCHEMA),
    "a schema, sampled": (*_SAMPLED, *_FIXED, *_NO_DRAFT, "--json-schema", _SCHEMA),
    "bit-equal": (*_GREEDY, *_FIXED, *_DRAFT, "--bitwise"),
    "automatic": (*_GREEDY, *_DRAFT),
}
"""Options of `run`; of the automatic choice, which follows the clock, only form and text are compared."""

_BY_CHOICE = ("acceptance_by_position", "drafters", "explanation")
"""what has a place for each kind of draft that was made, if any was"""


def answers() -> Any:
    """`run` with every set of options."""
    found = {}
    for name, options in RUNS.items():
        bitwise = () if "--bitwise" in options else ("--no-bitwise",)
        out = program("run", *_MACHINE, *bitwise, *options, "--json", _PROMPT)
        if name == "automatic":
            out["out"] |= dict.fromkeys(_BY_CHOICE)
            found[name] = shape(out, ("text", "settings"))
        else:
            out["out"].pop("explanation", None)  # costs are measured, whatever the lengths
            found[name] = normal(out)
    return found


def certificate() -> Any:
    """`verify --quick` of the model with its own draft."""
    return normal(program("verify", *_MACHINE, *_DRAFT, "--quick", "-n", "8", "-p", _PROMPT, "--json"))
