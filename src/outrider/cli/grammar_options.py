"""Options about what the output may be: one of five kinds, and how it is enforced. Declared like those of
`options`; `outrider.cli.grammar` reads them."""

from __future__ import annotations

from typing import Annotated

from outrider.cli.options import option

STRUCTURE = "Structured output"

JsonSchema = Annotated[
    str | None,
    option(
        STRUCTURE,
        "-j",
        "--json-schema",
        "-jf",
        "--json-schema-file",
        metavar="SCHEMA",
        help="JSON that fulfils this schema: a file, - for stdin, or the schema itself ({…, true, false).",
    ),
]
JsonMode = Annotated[bool, option(STRUCTURE, "--json-mode", help="Any JSON value.")]
Regex = Annotated[
    str | None,
    option(STRUCTURE, "--regex", metavar="PATTERN", help="Text that matches this pattern as a whole."),
]
Choice = Annotated[
    list[str] | None,
    option(STRUCTURE, "--choice", metavar="TEXT", help="One of these texts (repeatable)."),
]
GrammarSource = Annotated[
    str | None,
    option(
        STRUCTURE,
        "--grammar",
        "--grammar-file",
        metavar="GRAMMAR",
        help="Text of this grammar: a GBNF file, a .lark file, - for stdin, or GBNF itself (it has a ::=).",
    ),
]
Style = Annotated[
    str | None,
    option(
        STRUCTURE,
        "--json-style",
        metavar="STYLE",
        help="White space of JSON: spaced (the default), compact, pretty or flexible (as the model likes).",
    ),
]
FastForwardMode = Annotated[
    str | None,
    option(
        STRUCTURE,
        "--fast-forward",
        metavar="MODE",
        help="Text with only one way to go on: exact (drafted; the default), canonical (its usual tokens "
        "alone are allowed) or off.",
    ),
]
Lenient = Annotated[
    bool,
    option(
        STRUCTURE, "--lenient-schema", help="Go on without what of the schema cannot be enforced, and say so."
    ),
]
After = Annotated[
    str | None,
    option(
        STRUCTURE,
        "--constrain-after",
        metavar="TEXT",
        help="Leave the output free up to this text: </think>, for instance.",
    ),
]
