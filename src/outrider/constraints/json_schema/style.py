"""How constrained JSON is written, in llguidance's terms."""

from __future__ import annotations

from outrider.core.params import JsonStyle

_INDENTATION = r"\n( {2}){0,16}"
_ONE_BREAK_OR_BLANK = r" |\n[ \t]{0,32}"

_OPTIONS: dict[JsonStyle, dict[str, object]] = {
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "pretty": {
        "item_separator": f",{_INDENTATION}",
        "key_separator": ": ",
        "whitespace_pattern": _INDENTATION,
    },
    "flexible": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": _ONE_BREAK_OR_BLANK},
}


_ESCAPES = 'nrbtf\\"'
"""Without \\u: with it, "\\u0061" would pass for a name that a schema with the name "a" does not know."""


def writing_options(style: JsonStyle) -> dict[str, object]:
    """How JSON is to be written: what belongs under "x-guidance" in a schema. The patterns of white
    space match at most once between two tokens of JSON, and never before or after the whole text:
    nothing can go on for ever."""
    return {**_OPTIONS[style], "json_allowed_escapes": _ESCAPES}
