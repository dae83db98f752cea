"""A target with a draft, with lookup alone and plainly, in turn over the same prompts.

    python benchmarks/default_draft/live.py --draft DRAFT.gguf --prompts heldout.jsonl --out live.jsonl
    python benchmarks/default_draft/live.py --show live.jsonl

Greedy texts, one row for each prompt, with seconds of decoding (the draft model's reading of the prompt
included), calls, tokens drafted and accepted by the model. Every way is a session of its own that begins with
what calls cost here and with nothing learned about acceptance, as a new user's does. The target is the
embedded default unless `--target` names one; `--also` does the same with another file of it, a quantization,
in turn with the first. Further drafts (`--draft` again) are ways of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import (
    Row,
    append,
    argument_parser,
    describe,
    geometric_mean,
    interval,
    read_rows,
    resume,
    run_program,
)
from outrider.backends.gguf import LoadOptions
from outrider.core.data import Completion
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models import cache_dir, embedded_default
from outrider.session import Pair, Session

WAYS = ("plain", "lookup", "draft")


def main() -> None:
    parser = argument_parser(__doc__, out=False, tokens=96, threads=2)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path, action="append")
    parser.add_argument("--also", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines, as heldout.py writes them")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="say what a file of results holds, and end")
    arguments = parser.parse_args()
    if arguments.show is None:
        if not (arguments.draft and arguments.prompts and arguments.out):
            parser.error("--draft, --prompts and --out, or --show")
        measure(arguments)
    show(read_rows(arguments.show or arguments.out))


def measure(arguments: argparse.Namespace) -> None:
    targets = {"": arguments.target or embedded_default()} | (
        {f" {arguments.also.stem}": arguments.also} if arguments.also else {}
    )
    first, *others = arguments.draft
    drafts = dict(zip(WAYS, ("none", "none", first), strict=True))
    drafts |= {f"{WAYS[-1]}:{draft.stem}": draft for draft in others}
    prompts = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    head = describe(*targets.values(), *arguments.draft)
    head |= {"threads": arguments.threads, "tokens": arguments.tokens}
    done = {row["prompt"] for row in resume(arguments.out, head, ("threads", "tokens", "cpu"))}
    with tempfile.TemporaryDirectory() as folder:
        forget(Path(folder))
        options = LoadOptions(threads=arguments.threads)
        sessions: dict[str, Session] = {}
        for suffix, target in targets.items():
            for way, draft in drafts.items():
                pair = Pair.load(target, draft, options=options)
                sessions[way + suffix] = pair.open(2048)
        ways = list(sessions)
        for number, prompt in enumerate(prompts[: arguments.count]):
            if prompt["id"] not in done:
                at = number % len(ways)
                row = row_of(prompt, sessions, [*ways[at:], *ways[:at]], arguments.tokens)
                append(arguments.out, row)
        for session in sessions.values():
            session.close()


def forget(folder: Path) -> None:
    """Work in a cache that knows what calls cost and nothing else."""
    known = cache_dir()
    for name in ("models", "costs", "builds.json"):
        if (known / name).exists():
            (folder / name).symlink_to(known / name)
    os.environ["OUTRIDER_CACHE"] = str(folder)


def row_of(prompt: Row, sessions: dict[str, Session], order: Sequence[str], tokens: int) -> Row:
    texts = {way: generate(sessions[way], prompt, way, tokens) for way in order}
    return {
        "kind": "prompt",
        "prompt": prompt["id"],
        "category": prompt.get("category", ""),
        "ways": {way: figures(texts[way]) for way in sessions},
        "parts": [
            way for way in sessions if texts[way].tokens != texts[way.replace(way.split()[0], WAYS[0])].tokens
        ],
    }


def generate(session: Session, prompt: Row, way: str, tokens: int) -> Completion:
    for drafter in session.engine.drafters:
        drafter.reset()
    return session.generate(
        prompt["messages"],
        max_tokens=tokens,
        sampling=SamplingParams(temperature=0),
        speculate=not way.startswith(WAYS[0]),
    )


def figures(text: Completion) -> Row:
    steps = [record for record in text.records if record.kind == "decode"]
    sources = [
        (source == ModelDrafter.name, i < record.num_accepted)
        for record in steps
        for i, source in enumerate(record.draft.sources)
    ]
    return {
        "decode_s": sum(record.total_s - record.read_s for record in steps),
        "tokens": sum(len(record.tokens) for record in steps),
        "calls": len(steps),
        "draft_calls": sum(record.work.calls for record in steps),
        "drafted": sum(own for own, _ in sources),
        "accepted": sum(own and right for own, right in sources),
        "looked_up": sum(not own for own, _ in sources),
    }


def show(rows: Sequence[Row]) -> None:
    """Ratios of seconds a token over all prompts and by category, with 95 % over the prompts."""
    rows = [row for row in rows if row.get("kind") == "prompt"]
    step_s = {way: np.array([pace(row, way) for row in rows]) for way in rows[0]["ways"]}
    print(f"{len(rows)} prompts; geometric means, 95 % over the prompts")
    for way, mine in step_s.items():
        suffix = way[len(way.split()[0]) :]
        columns = [f"{way:34} {1e3 * mine.mean():6.2f} ms a token"]
        for name, other in (
            ("plain", "plain"),
            ("lookup", f"lookup{suffix}"),
            ("its plain", f"plain{suffix}"),
        ):
            ratios = step_s[other] / mine
            low, high = interval(ratios)
            columns.append(f"over {name} {geometric_mean(ratios):.3f} ({low:.3f}-{high:.3f})")
        columns.append(f"calls {sum(row['ways'][way]['calls'] for row in rows)}")
        columns.append(f"parts {sum(way in row['parts'] for row in rows)}")
        print("  ".join(columns))
        if way.startswith("draft"):
            show_draft(rows, way)
    for category in sorted({row["category"] for row in rows}):
        chosen = [i for i, row in enumerate(rows) if row["category"] == category]
        columns = [f"  {category:14} ({len(chosen)})"]
        for way in (way for way in step_s if way.startswith("draft")):
            lookup, plain = (way.replace(way.split()[0], other) for other in ("lookup", "plain"))
            ratio = geometric_mean((step_s[lookup] / step_s[way])[chosen])
            over = geometric_mean((step_s[plain] / step_s[way])[chosen])
            columns.append(f"{way}: over lookup {ratio:.3f}, over its plain {over:.3f}")
        print("  ".join(columns))


def pace(row: Row, way: str) -> float:
    """Seconds a token."""
    return float(row["ways"][way]["decode_s"] / row["ways"][way]["tokens"])


def show_draft(rows: Sequence[Row], way: str) -> None:
    sums = {key: sum(row["ways"][way][key] for row in rows) for key in rows[0]["ways"][way]}
    share = f"{sums['accepted'] / sums['drafted']:.1%}" if sums["drafted"] else "none"
    print(
        f"    the model: {sums['draft_calls']} calls, {sums['drafted']} tokens drafted, {share} accepted, "
        f"of {sums['tokens']} tokens"
    )


if __name__ == "__main__":
    run_program(main)
