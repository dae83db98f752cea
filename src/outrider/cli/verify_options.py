"""The options that `verify` has alone; it shares the others with `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outrider.cli.options import OUTPUT, SAMPLING, SPECULATION, TEXT, option

Prompts = Annotated[
    list[str] | None,
    option(TEXT, "-p", "--prompt", metavar="TEXT", help="A prompt (repeatable). None: a built-in set."),
]
PromptsFile = Annotated[
    Path | None,
    option(
        TEXT,
        "-f",
        "--file",
        metavar="FILE",
        help="One prompt a line; in a .jsonl a string or an object with `prompt` (- for stdin).",
    ),
]
TestedTokens = Annotated[
    int | None,
    option(TEXT, "-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate for each prompt."),
]
TestSeed = Annotated[
    int, option(SAMPLING, "-s", "--seed", metavar="N", help="Seed of all tests: their outcome repeats.")
]
Quick = Annotated[bool, option(TEXT, "--quick", help="Fewer prompts, tokens and samples: under a minute.")]
Inject = Annotated[
    str | None,
    option(
        SPECULATION,
        "--inject",
        metavar="FAULT",
        help="Break the rule, to see the tests fail: no-residual, swapped, argmax-draft, reused-random "
        "or kept-rejected; or a grammar's masks: unmasked-drafts or forcing-mask; or the calls of "
        "bit-equal text: unequal-calls.",
    ),
]
CertificateFile = Annotated[
    Path | None,
    option(OUTPUT, "-o", "--output", metavar="FILE", help="The certificate. Default: outrider-verify.json."),
]
CertificateJson = Annotated[
    bool, option(OUTPUT, "--json", help="Print the certificate; write it only where --output says so.")
]
