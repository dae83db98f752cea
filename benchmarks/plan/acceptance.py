"""The bundled tables of acceptance by kind of text, counted in stored recordings: writes acceptance.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, run_program
from outrider.costs import CallCosts, CallPoint
from outrider.lab.plan.acceptance import ALL, LONGEST, Acceptance
from outrider.lab.recording import Recording
from outrider.lab.replay import replay
from outrider.lab.settings import Setting
from policy.recorded import read_recordings

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
LOOKUP = Setting("lookup", LONGEST, 0.5)
"""What lookup finds is often wrong: a draft ends before a token that is less likely to be right than this."""
MODEL = Setting("model", LONGEST, 0.0)
UNIT = CallCosts([CallPoint(1, 1.0), CallPoint(64, 1.0)])
"""A replay needs a curve; of fixed lengths its calls are the same at any."""


def table(recordings: Sequence[Recording], draft: str | None = None) -> Acceptance:
    """Of a draft model, which has a draft of any length at every step, or of lookup."""
    setting, curves, free = (MODEL, {draft: UNIT}, ()) if draft else (LOOKUP, {}, None)
    records = [
        record
        for recording in recordings
        for record in replay(recording, setting.policy(UNIT, curves), UNIT, curves, free=free).records
    ]
    drafts = [record for record in records if len(record.draft)]
    accepted = tuple(share(record.num_accepted > i for record in drafts) for i in range(LONGEST))
    if draft:
        return Acceptance(accepted)
    drafted = tuple(share(len(record.draft) > i for record in drafts) for i in range(LONGEST))
    return Acceptance(accepted, drafted, len(drafts) / max(len(records), 1))


def share(those: Iterable[bool]) -> float:
    found = list(those)
    return sum(found) / max(len(found), 1)


def written(recordings: list[Recording]) -> str:
    lines = [HEAD.format(answers=len(recordings))]
    for name, categories in {ALL: None, **KINDS}.items():
        mine = [r for r in recordings if categories is None or r.category in categories]
        for kind, found in (("lookup", table(mine)), ("draft", table(mine, "draft"))):
            lines.append(f"[workloads.{name}.{kind}]")
            lines.append(f"offered = {found.offered:.3f}")
            for field in ("drafted", "accepted"):
                lines.append(f"{field} = [{', '.join(f'{value:.3f}' for value in getattr(found, field))}]")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    options.out.write_text(written(read_recordings(RECORDINGS)), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
