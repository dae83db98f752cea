"""The white space of constrained JSON, in llguidance's terms."""

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


def whitespace_options(style: JsonStyle) -> dict[str, object]:
    """What has to stand under "x-guidance" in a schema. The patterns match at most once between two
    tokens of JSON, and never before or behind the whole text: nothing can go on for ever."""
    return dict(_OPTIONS[style])
