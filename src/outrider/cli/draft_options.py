"""Options about drafts: who makes them, how far, how they are checked. Declared like those of `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import SPECULATION, option

Rule = Annotated[
    str,
    option(
        SPECULATION,
        "--rule",
        metavar="RULE",
        help="What keeps drafted tokens: auto, token, block, or stable (the text depends on the seed alone).",
    ),
]
Lenience = Annotated[
    float,
    option(
        SPECULATION,
        "--lenience",
        metavar="L",
        help="Below 1: accept more and CHANGE the text (tokens up to 1/L times too likely).",
    ),
]
Bitwise = Annotated[
    bool | None,
    option(
        SPECULATION,
        "--bitwise/--no-bitwise",
        help="Text equal to plain decoding's bit for bit, always, or an error where the library cannot. "
        "By default where it costs nothing.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", hidden=True)]
"""What it promised is kept by --bitwise, which it now is another name of."""
Policy = Annotated[
    str | None,
    option(
        SPECULATION,
        "--policy",
        metavar="WHO",
        help="Who drafts and how far: auto (what pays here), lookup or model (auto, but only these), fixed "
        "(by the lengths below), plain (nobody).",
    ),
]
CostsFile = Annotated[
    Path | None,
    option(
        SPECULATION,
        "--costs",
        metavar="FILE",
        help="Take what calls cost from this file; if there is none, write it there.",
    ),
]
DraftMax = Annotated[
    int | None,
    option(
        SPECULATION,
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        metavar="N",
        help="Most tokens to draft a step (auto: 64, fixed: 8); 0 decodes plainly.",
    ),
]
DraftMin = Annotated[
    int | None,
    option(
        SPECULATION,
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        metavar="N",
        help="Fixed lengths: drop shorter drafts (sampled ones are kept: dropping them would bias the text).",
    ),
]
DraftPMin = Annotated[
    float | None,
    option(
        SPECULATION,
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="Fixed lengths: end a draft before a token that is less likely than P to be right (0.65).",
    ),
]
DraftSampling = Annotated[
    str,
    option(
        SPECULATION,
        "--draft-sampling",
        metavar="HOW",
        help="The draft's tokens: its most likely (greedy), drawn (sampled), or the better (auto).",
    ),
]
Lookup = Annotated[
    bool,
    option(
        SPECULATION,
        "--lookup/--no-lookup",
        help="Draft from the text so far, and what was said before it. On by default.",
    ),
]
Corpus = Annotated[
    list[Path] | None,
    option(
        SPECULATION,
        "--corpus",
        metavar="PATH",
        help="Draft from these files, and those in these folders (repeatable); indexed once.",
    ),
]
Prediction = Annotated[
    Path | None,
    option(
        SPECULATION,
        "--prediction",
        metavar="FILE",
        help="Draft from this text, which the answer will be much like: a file to be edited.",
    ),
]
