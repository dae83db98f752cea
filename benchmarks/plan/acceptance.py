"""The bundled tables of acceptance by kind of text, counted in stored recordings: writes acceptance.toml."""

from __future__ import annotations

from pathlib import Path

from harness import argument_parser, run_program
from outrider.lab.plan.acceptance import ALL
from outrider.lab.plan.recorded import tables_of
from outrider.lab.recording import Recording, read_recordings

RECORDINGS = Path(__file__).parents[1] / "policy" / "qwen_q4.recordings.jsonl"
KINDS = {
    "chat": ("writing", "roleplay", "humanities", "stem", "qa", "translation"),
    "code": ("coding",),
    "edits": ("edit",),
    "json": ("json", "extraction"),
    "summaries": ("summarization",),
    "retrieval": ("rag",),
    "reasoning": ("reasoning", "math", "math_reasoning"),
}
HEAD = """# Acceptance by kind of text, written by benchmarks/plan/acceptance.py.
# `offered` is the share of steps that have a draft, the others are the shares of drafts by position.

source = "Qwen2.5-Coder 1.5B with its 0.5B as draft, Q4_K_M, greedy, {answers} answers of up to 128 tokens"
"""


def written(recordings: list[Recording]) -> str:
    lines = [HEAD.format(answers=len(recordings))]
    for name, categories in {ALL: None, **KINDS}.items():
        mine = [r for r in recordings if categories is None or r.category in categories]
        for kind, table in tables_of(mine, {"draft": "draft"}).items():
            lines.append(f"[workloads.{name}.{kind}]")
            lines.append(f"offered = {table.offered:.3f}")
            for field in ("drafted", "accepted"):
                lines.append(f"{field} = [{', '.join(f'{value:.3f}' for value in getattr(table, field))}]")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    options.out.write_text(written(read_recordings(RECORDINGS)), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
