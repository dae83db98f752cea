"""Which schemas of the JSON Schema Test Suite are enforced, and how faithfully?

    python benchmarks/structured/suite.py [--lenient] [--out results/suite.md]

Every document of every test case is put to the constraint that its schema compiles to, over single bytes:
no model is needed. The table counts, for each file of the suite, schemas that compile, schemas that are
refused and documents on which constraint and suite disagree; below it the refusals by keyword and every
disagreement. tests/test_json_schema_suite.py holds the reasons.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from harness import argument_parser, run_program, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from json_schema_suite import SUITE, Outcome, byte_vocabulary, judge, read_suite
from outrider.constraints import Compiler
from outrider.core.errors import GrammarError, SettingError
from outrider.core.files import write_whole


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("--suite", type=Path, default=SUITE)
    parser.add_argument("--lenient", action="store_true", help="go on without keywords that are not enforced")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    vocabulary = byte_vocabulary()
    compiler = Compiler(vocabulary)
    cases = read_suite(arguments.suite)
    outcomes = [judge(case, compiler, vocabulary, lenient=arguments.lenient) for case in cases]
    text = "\n".join(report(outcomes))
    try:
        if arguments.out:
            write_whole(arguments.out, text, "results")
    except SettingError as error:
        sys.exit(str(error))
    print(text)


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Everything, as Markdown."""
    taken = [outcome for outcome in outcomes if outcome.refusal is None]
    documents = sum(len(outcome.case.documents) for outcome in taken)
    wrong = [deviation for outcome in taken for deviation in outcome.deviations]
    yield "# The JSON Schema Test Suite, draft 2020-12\n"
    yield f"{len(taken)} of {len(outcomes)} schemas compile; on {len(wrong)} of their {documents} documents"
    yield "constraint and suite disagree.\n"
    lines = []
    for file in dict.fromkeys(outcome.case.file for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.case.file == file]
        kinds = Counter(deviation.kind for outcome in own for deviation in outcome.deviations)
        refused = sum(outcome.refusal is not None for outcome in own)
        counts = [len(own) - refused, refused, kinds["refused"], kinds["accepted"], kinds["failed"]]
        lines.append([file, *map(str, counts)])
    yield from table(
        ["file", "compile", "refused schemas", "valid refused", "invalid accepted", "errors"], lines
    )
    yield "## Refused schemas by reason\n"
    reasons = Counter(reason(o.refusal) for o in outcomes if o.refusal is not None)
    yield from table(["reason", "schemas"], [[why, str(count)] for why, count in reasons.most_common()])
    yield "## Documents on which they disagree\n"
    yield from (f"- {d.kind}: {d.file}, {d.case}: {d.test}" for d in wrong)
    yield ""


def reason(error: GrammarError) -> str:
    """What a schema was refused for: the keyword without its place, references without their targets."""
    said = error.why.splitlines()[0]
    said = re.sub(r"#/\S*?([^/\s]+)(?=\s)", r"`\1`", said, count=1)
    return re.sub(r"(?<=document )\(.*\)|'[^']*://[^']*'", "(…)", said)[:120]


if __name__ == "__main__":
    run_program(main)
