"""A sweep over real files through llama.cpp: tiny models, another tokenizer, a chat."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import COMMAND, TEMPLATE
from outrider.backends.gguf.options import LoadOptions
from outrider.costs.store import PairCosts, export_costs
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.results import Results, read_rows
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.loaded import Loader
from outrider.lab.rows import PairRow, SkippedRow
from outrider.models.hub import HubOptions
from recordings import FLAT, SMALL, curve
from tiny_gguf import MERGES, write_tiny


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Over the same prompts, greedy and sampled."""
    folder = tmp_path_factory.mktemp("real")
    write_tiny(folder / "big.F32.gguf", chat_template=TEMPLATE, name="big")
    write_tiny(folder / "draft.gguf", noise=0.3, name="draft")
    write_tiny(folder / "foreign.gguf", merges=[merge[::-1] for merge in MERGES], name="foreign")
    schema = {"type": "object", "properties": {"a": {"enum": ["the", "and"]}}, "required": ["a"]}
    prompts: list[dict[str, Any]] = [
        {"turns": ["the re and the re", "and on"]},
        {"messages": [{"role": "user", "content": "return the re"}]},
        {"prompt": "def the(re): return the"},
        {
            "messages": [{"role": "user", "content": "an object"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": schema}},
            "max_tokens": 40,
        },
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    export_costs(folder / "costs.json", PairCosts(curve(FLAT, 0.01), curve(SMALL, 0.002)))
    values: dict[str, Any] = {
        "targets": [str(folder / "big.F32.gguf")],
        "drafts": [str(folder / "draft.gguf"), str(folder / "foreign.gguf")],
        "workload": [str(folder / "mine.jsonl")],
        "max_tokens": 16,
        "draft_lengths": "0-4",
        "p_mins": "0",
        "repetitions": 1,
        "costs": folder / "costs.json",
    }
    options = LoadOptions(threads=1)
    found = []
    for name, more in (("run", {}), ("hot", {"temperature": 0.9, "prompts": 2, "drafts": []})):
        loader = Loader(options, options, HubOptions(offline=True), 512, values["costs"])
        run_sweep(SweepPlan(**(values | more)), folder / name, loader)
        found.append(Results.read(folder / name))
    return found[0], found[1]


@pytest.fixture(scope="module")
def swept(both: tuple[Results, Results]) -> Results:
    return both[0]


def test_pairs_that_do_not_line_up_are_left_out_and_said(swept: Results) -> None:
    assert {(pair.draft, pair.usable) for pair in swept.pairs} == {("draft", True), ("foreign", False)}
    why = [pair.why_not for pair in swept.pairs if pair.draft == "foreign"]
    assert all(reason and "do not line up" in reason for reason in why)
    assert {run.draft for run in swept.runs} == {None, "draft"}


def test_a_conversation_goes_on_behind_the_targets_own_answer(swept: Results) -> None:
    first, second = ({a.case: a for a in swept.answers}[case] for case in ("1", "1/2"))
    assert second.prompt[: len(first.prompt) - 1] == first.prompt[:-1]
    assert len(second.prompt) > len(first.prompt) + len(first.tokens) / 2


def test_greedy_runs_give_the_recorded_answer(both: tuple[Results, Results]) -> None:
    greedy = both[0].runs
    assert len(greedy) > 15
    assert sum(bool(run.equal) for run in greedy) / len(greedy) > 0.9  # near-ties may part
    assert all(run.divergence is not None for run in greedy if not run.equal)
    assert {run.equal for run in both[1].runs} == {None}


def test_forced_text_is_drafted_and_predicted(swept: Results) -> None:
    limited = [run for run in swept.runs if run.case == "4"]
    assert any(run.forced > 3 for run in limited)
    text = next(a.text for a in swept.answers if a.case == "4")
    assert json.loads(text)["a"] in ("the", "and")


@pytest.mark.slow
def test_the_embedded_default_from_the_command_line(tmp_path: Path) -> None:
    command = [*COMMAND, "bench", "--workload", "edits", "--prompts", "2", "--max-tokens", "24"]
    command += ["--repetitions", "1", "-o", str(tmp_path / "run"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(ended.stdout)
    rows = read_rows(tmp_path / "run")
    assert not any(isinstance(row, PairRow) for row in rows)
    assert not [row for row in rows if isinstance(row, SkippedRow)]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "SmolLM2" in page
