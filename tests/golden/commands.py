"""The program's `--json`, run in this process on tiny models or on the embedded default."""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from cli_helpers import TEMPLATE
from golden.normal import normal, rounded, shape
from outrider.cli.main import main
from tiny_gguf import write_tiny

__all__ = ["bench", "check", "costs", "plan", "program", "runs", "tiny_models", "verify"]

CURVE = Path(__file__).parents[2] / "benchmarks/policy/curves/epyc_q4.json"

PROMPT = "the and the and the and the"
_TARGET, _PAIR = ("-m", "target.gguf"), ("-md", "draft.gguf")
_MACHINE = ("--backend", "llama.cpp", "-t", "1")
_FIXED = ("--policy", "fixed", "--draft-max", "4", "--draft-p-min", "0")
_GREEDY = ("--temp", "0", "-s", "7", "-n", "24")
_SAMPLED = ("--temp", "0.8", "-s", "7", "-n", "24")
_SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]})

RUNS: Mapping[str, tuple[str, ...]] = {
    "plain": (*_GREEDY, "--policy", "fixed", "--draft-max", "0"),
    "greedy, both": (*_GREEDY, *_FIXED, *_PAIR),
    "sampled, draft model": (*_SAMPLED, *_FIXED, "--no-lookup", *_PAIR),
    "sampled, the stable rule": (*_SAMPLED, *_FIXED, *_PAIR, "--rule", "stable"),
    "a schema, sampled": (*_SAMPLED, *_FIXED, "--json-schema", _SCHEMA),
    "penalties": (*_SAMPLED, *_FIXED, *_PAIR, "--repeat-penalty", "1.2", "--dry-multiplier", "0.8"),
    "raw": (*_GREEDY, *_FIXED, *_PAIR, "--raw"),
    "automatic": (*_GREEDY, *_PAIR),
    "compared": (*_GREEDY, *_FIXED, *_PAIR, "--compare", "--repetitions", "1"),
}
"""Options of `run`. A fixed length but in one, since the automatic choice follows the clock."""

_PROGRESS = re.compile(r"^.+: \d+%.*$", re.MULTILINE)
_CLOCKED = ("automatic",)
"""Runs of which only the form and the text are compared."""


@contextmanager
def tiny_models() -> Iterator[Path]:
    """A folder with a tiny pair, where everything is done; nothing is kept."""
    with TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        write_tiny(folder / "target.gguf", chat_template=TEMPLATE)
        write_tiny(folder / "draft.gguf", noise=0.3, chat_template=TEMPLATE)
        with patch.dict(os.environ, {"OUTRIDER_CACHE": str(folder / "cache")}):
            yield folder


def program(*arguments: str, stdin: str = "") -> dict[str, Any]:
    """Run the program in this process: its exit status, the JSON it printed, and what went to standard error,
    on one line: where it is folded depends on the figures in it. Lines of progress depend on the clock."""
    out, err = io.StringIO(), io.StringIO()
    streams: dict[str, Any] = {"stdin": io.StringIO(stdin), "stdout": out, "stderr": err}
    streams["argv"] = ["outrider", *arguments]
    plain = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    status = 0
    with patch.dict(os.environ, plain), patch.multiple(sys, **streams):
        try:
            main()
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 0
    text = out.getvalue()
    return {
        "status": status,
        "out": json.loads(text) if text.startswith("{") else text,
        "err": " ".join(_PROGRESS.sub("", err.getvalue()).split()),
    }


def runs() -> Any:
    """`run` with every set of options, on the tiny pair."""
    with tiny_models():
        return {name: _run(name, *_TARGET, *_MACHINE, *options) for name, options in RUNS.items()}


def _run(name: str, *options: str) -> Any:
    found = program("run", *options, "--json", PROMPT)
    if name in _CLOCKED:
        return shape(found, ("text", "settings"))
    found["out"].pop("explanation", None)  # costs are measured, whatever the lengths
    return normal(found)


def costs() -> Any:
    """`costs`: the form of a measurement."""
    with tiny_models():
        return shape(program("costs", *_TARGET, *_PAIR, *_MACHINE, "--seconds", "0.3", "--json"))


def plan() -> Any:
    """`plan` of known models with all figures, of a head on a mixture of experts, and what it exports."""
    pair = ("--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--on", "h100x4", "--batch", "1,64")
    mixture = ("--target", "deepseek-v3", "--draft", "mtp", "--on", "h200x8", "--acceptance", "0.8")
    found = {
        "pair": program("plan", *pair, "--json"),
        "mixture": program("plan", *mixture, "--batch", "8", "--json"),
    }
    found["vllm"] = program("plan", *pair, "--export", "vllm", "--json")
    return {name: rounded(shown) for name, shown in found.items()}


def check() -> Any:
    """`check` of a pair."""
    kept = ("tokenizers", "kind", "parameters", "active_parameters", "architecture", "schema", "workloads")
    with tiny_models() as folder:
        options = (*_MACHINE, "--seconds", "1", "--prompts", _prompts(folder), "--json")
        return shape(program("check", "target.gguf", "draft.gguf", *options), kept)


def verify() -> Any:
    """`verify` of a pair that holds, bit-equal text, and a rule that is broken on purpose."""
    with tiny_models():
        options = (*_TARGET, *_PAIR, *_MACHINE, "--quick", "-n", "8", "-p", "a b", "-p", "the and", "--json")
        return {
            name: normal(program("verify", *options, *more))
            for name, more in {
                "holds": (),
                "bit-equal": ("--bitwise",),
                "broken": ("--inject", "no-residual", "--rule", "token"),
            }.items()
        }


_COUNTED = (
    *("kind", "target", "draft", "setting", "workload", "case", "tokens", "target_calls", "draft_calls"),
    *("drafted", "accepted", "equal", "finish_reason"),
)


def bench() -> Any:
    """`bench` over two prompts at given costs: what is swept and chosen is compared, not the times."""
    with tiny_models() as folder:
        copy(CURVE, "curve.json")
        swept = program(
            "bench", *_TARGET, *_PAIR, *_MACHINE, "--workload", _prompts(folder), "--costs", "curve.json",
            "--repetitions", "1", "--finalists", "1", "-n", "16", "--draft-lengths", "0-4",
            "--json", "-o", "run",
        )  # fmt: skip
        exported = program("bench", "export", "run", "--to", "rows.csv")
        with open("rows.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    predicted = [{name: row[name] for name in _COUNTED} for row in rows if row["kind"] == "prediction"]
    swept = shape(swept, ("schema", "skipped"))
    return {"swept": swept, "exported": normal(exported), "predicted": predicted}


def _prompts(folder: Path) -> str:
    texts = ("the rain in the street", "a stone at the shore")
    lines = [json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return "prompts.jsonl"
