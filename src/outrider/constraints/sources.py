"""Grammars of all kinds as sources in llguidance's dialect of Lark."""

from __future__ import annotations

import json

from llguidance import regex_to_lark

from outrider.core.data import Grammar


def lark_source(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    if grammar.kind == "regex":
        return f"start: /{regex_to_lark(grammar.text, 'ds')}/", ()
    if grammar.kind == "choice":
        options = " | ".join(json.dumps(c) for c in json.loads(grammar.text))
        return f"start: CHOICE\nCHOICE: {options}", ()
    schema = {} if grammar.kind == "json" else json.loads(grammar.text)
    style = {"spaced": (", ", ": "), "compact": (",", ":")}.get(grammar.style, (", ", ": "))
    schema["x-guidance"] = {
        "item_separator": style[0],
        "key_separator": style[1],
        "whitespace_flexible": False,
    }
    return f"start: %json {json.dumps(schema)}", ()
