"""`outrider bench` as its users call it: plan and flags, progress, reports, refusals. A stand-in sweeps."""

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench_models import TARGETS, bench_rows
from cli_helpers import Call, refused
from outrider.costs.store import PairCosts, export_costs
from outrider.lab.bench.figures import bests
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.results import ROWS, Results
from outrider.lab.loaded import Loader
from outrider.lab.settings import Setting
from outrider.models.hub import HubOptions
from outrider.session.options import Progress
from outrider.session.session import describe_policy
from recordings import FLAT, SMALL, curve
from tiny_gguf import write_tiny

ROWS_FOUND = bench_rows(TARGETS[:1], workloads=("chat", "edits"))


class Sweep:
    """Stands in for the sweep: keeps what it was asked for and gives rows that were made up."""

    def __init__(self) -> None:
        self.calls: list[tuple[SweepPlan, Path, Loader]] = []

    def __call__(self, plan: SweepPlan, folder: Path, loader: Loader, *, progress: Progress) -> Results:
        self.calls.append((plan, folder, loader))
        progress("recording, tiny: chat", 0.25)
        progress("running, tiny: chat", 0.5)
        folder.mkdir(parents=True, exist_ok=True)
        return Results.of(ROWS_FOUND)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    module, stand_in = ModuleType("outrider.lab.bench.sweep"), Sweep()
    vars(module)["run_sweep"] = stand_in
    monkeypatch.setitem(sys.modules, "outrider.lab.bench.sweep", module)
    monkeypatch.setattr("outrider.cli.bench.write_report", lambda _, path: path.write_text("<!doctype"))
    monkeypatch.chdir(tmp_path)
    return stand_in


@pytest.fixture
def run(outrider: Call) -> Call:
    return lambda *arguments: outrider("bench", *map(str, arguments))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that is over."""
    folder = tmp_path / "finished"
    folder.mkdir()
    lines = [row.model_dump_json() for row in ROWS_FOUND]
    (folder / ROWS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_without_anything_the_defaults_are_swept(run: Call, sweep: Sweep, tmp_path: Path) -> None:
    outcome = run()
    assert outcome.status == 0, outcome.err
    [(plan, folder, _)] = sweep.calls
    assert plan == SweepPlan() and folder == Path("bench")
    assert (tmp_path / "bench" / "report.html").read_text().startswith("<!")
    assert outcome.out.strip() and outcome.err.strip().endswith("report: bench/report.html")
    assert "sweeping: 25%, recording, tiny: chat" in outcome.err
    assert "running, tiny" not in outcome.err, "one line in ten seconds"


def test_every_flag_arrives(run: Call, sweep: Sweep, tmp_path: Path) -> None:
    export_costs(tmp_path / "costs.json", PairCosts(curve(FLAT, 0.01), curve(SMALL, 0.002)))
    (tmp_path / "q.jsonl").write_text('{"category": "math", "turns": ["1 + 1?"]}')
    flags = shlex.split("""
        -m t.gguf --draft d.gguf --draft e.gguf --workload edits --workload q.jsonl#math --prompts 3
        --max-tokens 40 --temp 0.2 --seed 7 --draft-lengths 2,4-6 --p-mins 0,0.9
        --finalists 4 --control auto --repetitions 5 --minutes 1.5 --costs costs.json
        -c 512 -t 2 -tb 3 -ngl 12 -ngld 7 -fa on --backend ik --offline -hft secret -o out
    """)
    outcome = run(*flags)
    assert outcome.status == 0, outcome.err
    [(plan, folder, loader)] = sweep.calls
    assert (plan.targets, plan.drafts) == (["t.gguf"], ["d.gguf", "e.gguf"])
    assert plan.workload == ["edits", "q.jsonl#math"]
    assert (plan.prompts, plan.max_tokens, plan.temperature, plan.seed) == (3, 40, 0.2, 7)
    assert (plan.draft_lengths, plan.p_mins) == ("2,4-6", "0,0.9")
    assert (plan.finalists, plan.controls, plan.repetitions) == (4, ["auto"], 5)
    assert (plan.minutes, plan.costs, folder) == (1.5, Path("costs.json"), Path("out"))
    options = loader.options
    loading = options.backend, options.threads, options.threads_batch, options.gpu_layers
    assert (loader.context, *loading, options.flash_attention) == (512, "ik", 2, 3, 12, "on")
    assert loader.draft_options.gpu_layers == 7 and loader.costs_file == plan.costs
    assert loader.hub == HubOptions(token="secret", offline=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--draft-lengths 9-3", "--draft-lengths: 9-3 cannot be used: '9-3' is not a length"),
        ("--draft-lengths 1-900", "'1-900' is not a length of 0 to 64"),
        ("--draft-lengths 1.5", "'1.5' is not a length"),
        ("--repetitions 0", "--repetitions: 0 cannot be used: it has to be 1 or more"),
        ("--finalists -1", "--finalists: -1 cannot be used: "),
        ("--p-mins 0,x", "--p-mins: 0,x cannot be used: they are probabilities"),
        ("--minutes inf", "--minutes: inf cannot be used: "),
        ("--control fast", "'fast': it is not a setting"),
        ("--prompts 0", "--prompts: 0 cannot be used: "),
        ("--workload none.jsonl", "none.jsonl: no such file"),
        ("--workload chats", "built-in workload: chat, code"),
        ("--workload other/file", "other/file: it holds no prompts"),
        ("--backend cuda", "backend: 'cuda' is not known"),
        ("-ngl some", "-ngl: 'some' is not a number"),
        ("--costs none.json", "none.json: it cannot be read (no such file"),
        ("-o other", "other: the folder holds other files, and no run to continue"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    run: Call, sweep: Sweep, tmp_path: Path, flags: str, said: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert said in refused(run(*flags.split()))
    assert sweep.calls == []


def test_costs_that_will_not_do_are_refused_before_anything_runs(
    run: Call, sweep: Sweep, tmp_path: Path
) -> None:
    export_costs(tmp_path / "costs.json", PairCosts(curve(FLAT, 0.01)))
    assert run("--costs", "costs.json").status == 0
    assert "it has no costs of a draft model" in refused(run("--costs", "costs.json", "-md", "d.gguf"))
    (tmp_path / "costs.json").write_text("{}")
    assert "not of the schema" in refused(run("--costs", "costs.json"))
    assert len(sweep.calls) == 1


@pytest.mark.usefixtures("sweep")
def test_the_findings_as_json(run: Call, finished: Path, tmp_path: Path) -> None:
    for arguments in (("--json",), ("report", finished, "--json")):
        outcome = run(*arguments)
        assert outcome.status == 0, outcome.err
        found = json.loads(outcome.out)
        shown = bests(Results.read(finished))
        assert len(found["findings"]) == len(shown)
        for one in found["findings"]:
            there = shown[one["target"], one["draft"], one["workload"]]
            assert (one["setting"], one["outcome"]) == (there.cell.setting, there.outcome)
            if (speedup := one["speedup"]) is not None:
                assert speedup["low"] <= speedup["value"] <= speedup["high"]
                assert one["plain_tokens_per_s"]["value"] > 0
        assert any(one["is_measured"] for one in found["findings"])
        assert [choice["target"] for choice in found["choices"]] == list(Results.read(finished).targets)
        assert all(choice["command"].startswith("outrider run -m ") for choice in found["choices"])
    assert not list(tmp_path.glob("finished/*.html")), "a report is written where it is asked for"


def test_reports_of_runs(run: Call, finished: Path, tmp_path: Path) -> None:
    outcome = run("report", finished)
    assert outcome.status == 0 and outcome.out.strip() and not list(tmp_path.rglob("*.html"))
    assert run("report", finished, "--html", tmp_path / "page.html").out == outcome.out
    assert "<html" in (tmp_path / "page.html").read_text()
    assert "no such file" in refused(run("report", tmp_path / "none"))
    assert "its folder does not exist" in refused(
        run("report", finished, "--html", tmp_path / "a" / "b.html")
    )


def test_exporting_a_run(run: Call, finished: Path, tmp_path: Path) -> None:
    results = Results.read(finished)
    for ending, rows in ((".csv", -1), (".jsonl", 0)):
        table = tmp_path / f"rows{ending}"
        assert run("export", finished, "--to", table).status == 0
        rows += len(table.read_text().splitlines())
        assert rows == len(results.runs) + sum(len(row.cases) for row in results.predictions)
    assert "End it in .csv or .jsonl" in refused(run("export", finished, "--to", tmp_path / "rows.xls"))


# The command that a report recommends


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, in a cache of its own: what its calls cost is measured once."""
    folder = tmp_path_factory.mktemp("measured")
    write_tiny(folder / "tiny.gguf")
    return folder


@pytest.mark.parametrize("name", ["plain", "auto", "auto lookup", "auto model", "model 3", "both 2/0.75"])
def test_the_commands_flags_ask_for_the_setting(
    name: str, measured: Path, monkeypatch: pytest.MonkeyPatch, outrider: Call
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(measured))
    file = str(measured / "tiny.gguf")
    usual = ("run", "-m", file, "-md", file, "-t", "1", "-n", "1", "-p", "the", "--raw", "--json")
    outcome = outrider(*usual, *Setting.of(name).flags)
    wanted = Setting.of(name).policy(curve(FLAT), {"draft": curve(FLAT)})
    settings = json.loads(outcome.out)["settings"]
    assert settings["policy"] == describe_policy(wanted)
    if name in ("model 3", "both 2/0.75"):
        assert ("lookup" in settings["drafters"]) == Setting.of(name).uses_lookup, settings["drafters"]
