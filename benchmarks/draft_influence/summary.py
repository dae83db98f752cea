"""Tables, the finding in one paragraph, and the picture, from rows of measure.py.

    python benchmarks/draft_influence/summary.py results/ROWS.jsonl [--readme README.md] [--picture moved.svg]

With --readme the tables replace what stands there between the marks; else they go to standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from draft_influence.figures import Results, figures, mean
from draft_influence.picture import draw
from harness import argument_parser, read_rows, run_program

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"

Points = list[tuple[float, float, float, float]]


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    results = Results(read_rows(arguments.rows))
    text = figures(results)
    if arguments.picture:
        arguments.picture.write_text(draw(series(results)), encoding="utf-8")
    if arguments.readme:
        page = arguments.readme.read_text(encoding="utf-8")
        arguments.readme.write_text(inserted(page, text), encoding="utf-8")
    else:
        print(text)


def inserted(page: str, text: str) -> str:
    """The page with the text between its marks. Ends the program where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"the page has no {BEGIN} … {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def series(results: Results) -> dict[str, dict[str, Points]]:
    """For each filter and draft: lenience, and the total variation: mean, least and greatest prompt."""
    found: dict[str, dict[str, Points]] = {}
    for filters in ("default", "wide"):
        found[filters] = {}
        for draft in results.drafts:
            points: Points = []
            for lenience in sorted((1.0, *results.leniences), reverse=True):
                cells = results.cells(
                    "positions", filters=filters, draft=draft, kind="drawn", rule="token", lenience=lenience
                )
                if cells:
                    values = [cell["tv"] for cell in cells]
                    points.append((lenience, mean(cells, "tv"), min(values), max(values)))
            found[filters][draft] = points
    return found


if __name__ == "__main__":
    run_program(main)
