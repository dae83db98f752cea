"""The README's chart: speed-up over llama.cpp's plain decoding by kind of task, on two machines.

    python benchmarks/backends/picture.py docs/pictures/speedup.svg

Rows: `live_epyc_q4.jsonl` (ik_llama.cpp's wheel and native build) and `../policy/heldout_q4.jsonl`
(llama.cpp on a Xeon, other prompts). Geometric means over the prompts of a kind, of medians of 3 repetitions.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib as mpl
from matplotlib import pyplot as plt

from backends.report import Times, of_runs, ratio
from harness import Row, read_rows
from policy.summary import token_s

HERE = Path(__file__).parent
KINDS = {
    "code edits": ("edit",),
    "summaries": ("summarization",),
    "retrieval": ("rag", "qa"),
    "JSON": ("json", "extraction"),
    "coding": ("coding",),
    "mathematics": ("math", "math_reasoning"),
    "chat and writing": ("writing", "roleplay", "humanities", "stem", "reasoning", "translation"),
}
SERIES = (
    ("EPYC, ik_llama.cpp compiled for it", "#0072B2", "o"),
    ("EPYC, ik_llama.cpp's wheel", "#56B4E9", "s"),
    ("Xeon, llama.cpp", "#D55E00", "D"),
)


def xeon() -> tuple[Times, Times, dict[str, str]]:
    """Plain decoding, the automatic choice (seconds per token by prompt), and each prompt's kind."""
    rows = prompts(HERE.parent / "policy" / "heldout_q4.jsonl")
    found = [
        {str(row["id"]): sorted(map(token_s, row["runs"][way]))[1] for row in rows}
        for way in ("plain", "auto")
    ]
    return found[0], found[1], {str(row["id"]): row["category"] for row in rows}


def prompts(path: Path) -> list[Row]:
    return [row for row in read_rows(path) if row["kind"] == "prompt"]


def speedups(base: Times, times: Times, category: dict[str, str]) -> list[float]:
    return [ratio(base, times, [i for i in category if category[i] in kinds]) for kinds in KINDS.values()]


def main() -> None:
    rows = prompts(HERE / "live_epyc_q4.jsonl")
    category = {str(row["id"]): row["category"] for row in rows}
    base = of_runs(rows, "llama.cpp", "plain")
    found = [speedups(base, of_runs(rows, name, "auto"), category) for name in ("native", "wheel")]
    found.append(speedups(*xeon()))
    mpl.rcParams |= {"svg.hashsalt": "outrider", "font.size": 10}
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for (label, colour, marker), values in zip(SERIES, found, strict=True):
        axes.plot(values, range(len(KINDS)), marker, color=colour, label=label, markersize=7)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.annotate(" llama.cpp, plain decoding", (1, -0.75), ha="left", color="#555555", fontsize=9)
    axes.set_xscale("log")
    ticks = [0.9, 1, 1.25, 1.5, 2, 3, 4]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(KINDS)), list(KINDS))
    axes.set_ylim(len(KINDS) - 0.5, -1.05)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=True, edgecolor="none", framealpha=1, loc="lower right")
    figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
