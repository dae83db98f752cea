"""What of an output is compared: everything but times, numbers of this machine, paths, versions and dates.

Those are replaced by their type, so that keys and structure are still compared.
"""

import json
import re
from difflib import unified_diff
from typing import Any

__all__ = ["difference", "normal", "pretty", "rounded", "shape"]

_DIGITS = 6

_MEASURED = re.compile(
    r"(_s|_ms|_us|seconds|_per_s|per_second|_time|_at|_ratio|_bytes|started|created|expires|machine|build"
    r"|versions?|commit|path|library|libraries|fingerprint|sha256|file|overhead"
    r"|drift|speedup|speedups|plain_seconds|constraint_share)$"
)
"""Keys whose values differ between machines, moments or runs."""

_IDENTIFIERS = re.compile(r"\b(chatcmpl|cmpl|resp|msg|fc|call|rs|req|item)[-_][0-9a-zA-Z]{8,}\b")
_DATES = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?)?")
_VERSIONS = re.compile(r"\b\d+\.\d+\.\d+(\.\w+)*\b")
_FOLDERS = re.compile(r"(/[\w.+-]+){2,}/")
_FIGURES = re.compile(r"\b\d+(\.\d+)?( ?(ms|µs|s|tokens/s|tok/s)\b)")
_LONGER = re.compile(r"\d+% longer|as long as else")


_CLOCKED = {"notices", "estimate", "estimate_unknown"}
"""What is there or not as the machine was busy or not, where the rest is measured"""


def normal(value: Any, *also: str, kept: tuple[str, ...] = ()) -> Any:
    """`value` (plain data) with what cannot be compared replaced by its type, and floats at 6 digits.

    `also` are further keys whose values are replaced, `kept` keys whose values are compared all the same.
    """
    if isinstance(value, dict):
        return {
            key: shape(inner) if _is_measured(key, also, kept) else normal(inner, *also, kept=kept)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [normal(inner, *also, kept=kept) for inner in value]
    return _text(value) if isinstance(value, str) else rounded(value)


def _is_measured(key: str, also: tuple[str, ...], kept: tuple[str, ...]) -> bool:
    return key in also or (key not in kept and _MEASURED.search(key) is not None)


def rounded(value: Any) -> Any:
    """`value` (plain data) with floats at 6 digits, and nothing else changed."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def shape(value: Any, kept: tuple[str, ...] = ()) -> Any:
    """The types of what was measured; keys stay, and of equal members of a list one. Under keys that are
    `kept` values are compared as `normal` has them."""
    if isinstance(value, dict):
        clocked = {key: "<by the clock>" for key in _CLOCKED & value.keys()}
        members = {key: normal(inner) if key in kept else shape(inner, kept) for key, inner in value.items()}
        return members | clocked
    if isinstance(value, list | tuple):
        shapes = [shape(inner, kept) for inner in value]
        return [one for i, one in enumerate(shapes) if one not in shapes[:i]]
    if isinstance(value, bool):
        return "<bool>"
    return "<text>" if isinstance(value, str) else "<number or null>"


def _text(text: str) -> str:
    text = _IDENTIFIERS.sub(r"\1-<id>", text)
    text = _DATES.sub("<date>", text)
    text = _FOLDERS.sub("<folder>/", text)
    text = _LONGER.sub("<so much longer>", _FIGURES.sub(r"<number>\2", text))
    return _VERSIONS.sub("<version>", text)


def pretty(value: Any) -> str:
    """Plain data as it is stored: one line for each value, keys in order."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def difference(name: str, stored: Any, found: Any, max_lines: int = 60) -> str:
    """The lines that differ from what is stored; empty where none do."""
    old, new = pretty(stored).splitlines(), pretty(found).splitlines()
    lines = list(unified_diff(old, new, "stored", f"{name}, found", n=2, lineterm=""))
    cut = [f"… and {len(lines) - max_lines} more lines"] if len(lines) > max_lines else []
    return "\n".join(lines[:max_lines] + cut)
