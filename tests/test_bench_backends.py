"""A sweep under several native libraries: what is measured under each, what is said, what is left out."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from bench_models import FakeLoader, plan
from bench_rows import bench_rows
from cli_helpers import call
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.options import LoadOptions
from outrider.cli.bench_json import summary_json
from outrider.core.errors import BackendError, SettingError
from outrider.costs.store import PairCosts, export_costs
from outrider.lab.bench.plan import SweepPlan, make_plan
from outrider.lab.bench.report import print_report, write_report
from outrider.lab.bench.results import Results
from outrider.lab.bench.summary.counts import quality_of
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.rows import ModelRow, Row, RunRow, SkippedRow
from outrider.lab.settings import Setting
from outrider.lab.workloads.reading import WorkloadSpec
from outrider.models.hub import HubOptions
from outrider.session import describe_policy
from recordings import FLAT, SMALL, curve
from tiny_gguf import write_tiny

BOTH = ("llama.cpp", "ik")
NAMES = ("target (llama.cpp)", "target (ik)")
ROW: TypeAdapter[Row] = TypeAdapter(Row)


def small(folder: Path, **changes: Any) -> SweepPlan:
    few = {"drafts": ("twin",), "finalists": 1, "draft_lengths": "0-2", "p_mins": (0.0,), "controls": ()}
    return plan(folder, **(few | {"backends": BOTH} | changes))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, FakeLoader]:
    folder, loader = tmp_path_factory.mktemp("backends"), FakeLoader()
    return run_sweep(small(folder), folder / "run", loader=loader), loader


# The plan


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"backends": ["cuda"]}, "'cuda' is not known; choose one of auto, ik, llama.cpp"),
        ({"backends": []}, "at least 1 item"),
        ({"backends": ["auto", "ik"]}, "auto takes one of them by itself"),
        ({"backends": BOTH, "library": "libllama.so"}, "library is one of them"),
        ({"backend": "ik"}, "no such setting. Did you mean backends?"),
    ],
)
def test_backends_that_make_no_sense_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError) as caught:
        make_plan(values)
    assert why in str(caught.value)


# The sweep


def test_every_target_is_measured_under_each(swept: tuple[Results, FakeLoader]) -> None:
    results, _ = swept
    assert results.targets == NAMES
    assert [results.backend(name) for name in NAMES] == [*BOTH]
    for rows in (results.answers, results.predictions, results.runs, results.blocks, results.done):
        assert {row.target for row in rows} == set(NAMES)
    assert {(row.model, row.beside) for row in results.costs if row.role == "draft"} == {
        ("twin", name) for name in NAMES
    }
    assert results.same_file(NAMES[1]) == NAMES


def test_a_backend_that_is_not_here_is_named_and_left_out(tmp_path: Path) -> None:
    asked = small(tmp_path)
    for _ in range(2):  # going on says it no second time
        results = run_sweep(asked, tmp_path / "run", loader=FakeLoader(missing=["llama.cpp"]))
        assert results.targets == (NAMES[1],)
        assert results.skipped == (SkippedRow(what="backend llama.cpp", why="it is not installed"),)
    with pytest.raises(BackendError, match="not installed"):
        run_sweep(asked, tmp_path / "none", loader=FakeLoader(missing=BOTH))


def test_quantizations_are_scored_under_one_backend(tmp_path: Path) -> None:
    """The file is what is scored: what it costs in quality is said of it under either."""
    asked = small(tmp_path, targets=("target-Q8_0", "target-Q4_0"), drafts=(), quality=True)
    results = run_sweep(asked, tmp_path / "run", loader=FakeLoader())
    assert {(row.target, row.reference) for row in results.quality} == {
        ("target-Q4_0 (llama.cpp)", "target-Q8_0 (llama.cpp)")
    }
    scored = [target for target in results.targets if quality_of(results, target)]
    assert scored == ["target-Q4_0 (llama.cpp)", "target-Q4_0 (ik)"]


# What is said


BIG = "big-Q8_0"


def rows_of(backend: str, pace: float, name: str | None = None) -> list[Row]:
    """A run of the target under one backend, all of its times multiplied."""
    rows = bench_rows([BIG], ["small-Q8_0", None], ("chat", "edits"), quality=False)
    name = name or f"{BIG} ({backend})"
    found = []
    for row in rows:
        changed = ROW.validate_json(row.model_dump_json().replace(f'"{BIG}"', json.dumps(name)))
        if isinstance(changed, ModelRow):
            changed = changed.model_copy(update={"backend": backend})
        if isinstance(changed, RunRow):
            times = {"decode_s": changed.decode_s * pace, "block": f"{backend} {changed.block}"}
            changed = changed.model_copy(update=times)
        elif hasattr(changed, "block"):
            changed = changed.model_copy(update={"block": f"{backend} {changed.block}"})
        found.append(changed)
    return found


def both(pace: float) -> Results:
    """llama.cpp takes `pace` times as long as ik."""
    first, *others = [*rows_of("llama.cpp", pace), *rows_of("ik", 1.0)]
    return Results.of([first, *(row for row in others if row.kind != "head")])


def printed(results: Results) -> str:
    console = Console(file=StringIO(), width=200)
    print_report(results, console)
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


def test_the_library_to_take_is_named_with_draft_setting_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, file, **__: file.write("<svg></svg>"))
    results = both(1.5)
    text = printed(results)
    assert "Take ik for big-Q8_0, with the draft small-Q8_0 and the setting “auto”: 1.50x (" in text
    assert "the best under llama.cpp" in text
    command = f"outrider run -m models/{BIG}.gguf -md models/small-Q8_0.gguf --backend ik"
    assert text.count(command) == 1 and "--backend llama.cpp" not in text
    write_report(results, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text("utf-8")
    assert "Take ik for big-Q8_0" in html and "<th scope='col'>backend</th>" in html


def test_as_data_the_choice_names_the_backend_too(tmp_path: Path) -> None:
    shown = summary_json(both(1.5), tmp_path, None)
    assert {(cell["target"], cell["backend"]) for cell in shown["cells"]} == {
        (f"{BIG} ({backend})", backend) for backend in BOTH
    }
    [choice] = shown["choices"]
    assert (choice["backend"], choice["outcome"], choice["draft"]) == ("ik", "faster", "small-Q8_0")
    assert choice["gain"]["value"] == pytest.approx(1.5) and choice["rival"] == f"{BIG} (llama.cpp)"
    assert shlex.split(choice["command"])[-2:] == ["--backend", "ik"]


def test_libraries_that_are_as_fast_are_said_to_be() -> None:
    text = printed(both(1.0))
    assert "For big-Q8_0 either library will do: " in text and "Take " not in text


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, in a cache of its own: what its calls cost is measured once."""
    folder = tmp_path_factory.mktemp("measured")
    write_tiny(folder / "tiny.gguf")
    return folder


@pytest.mark.parametrize("name", ["plain", "auto", "auto lookup", "auto model", "model 3", "both 2/0.75"])
def test_the_commands_flags_ask_for_the_setting(
    name: str, measured: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(measured))
    file = str(measured / "tiny.gguf")
    usual = ("run", "-m", file, "-md", file, "-t", "1", "-n", "1", "-p", "the", "--raw", "--json")
    outcome = call(monkeypatch, capfdbinary, *usual, *Setting.of(name).flags)
    wanted = Setting.of(name).policy(curve(FLAT), {"draft": curve(FLAT)})
    settings = json.loads(outcome.out)["settings"]
    assert settings["policy"] == describe_policy(wanted)
    if name in ("model 3", "both 2/0.75"):
        assert ("lookup" in settings["drafters"]) == Setting.of(name).uses_lookup, settings["drafters"]


@pytest.mark.skipif(
    {library.backend for library in candidates(LoadOptions())} != {*BOTH},
    reason="it takes both native libraries",
)
def test_real_files_run_in_the_library_that_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path / "big.gguf")
    write_tiny(tmp_path / "draft.gguf", noise=0.3)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "the re and the re"}\n{"prompt": "def the(re): return"}')
    export_costs(tmp_path / "costs.json", PairCosts(curve(FLAT, 0.01), curve(SMALL, 0.002)))
    asked = SweepPlan(
        targets=(str(tmp_path / "big.gguf"),), drafts=(str(tmp_path / "draft.gguf"),),
        backends=("llama.cpp", "ik"),
        workloads=(WorkloadSpec(file=str(tmp_path / "mine.jsonl"), max_tokens=16),), draft_lengths=(2,),
        p_mins=(0.0,), repetitions=1, costs=tmp_path / "costs.json", context=512, threads=1,
    )  # fmt: skip
    results = run_sweep(asked, tmp_path / "run", hub=HubOptions(offline=True))
    assert results.targets == ("big (llama.cpp)", "big (ik)") and not results.skipped
    ran = {(row.model, row.role): row.effective["backend"] for row in results.models if row.role == "target"}
    assert ran == {(f"big ({backend})", "target"): backend for backend in BOTH}
    drafts = [row for row in results.models if row.role == "draft"]
    assert [(row.backend, row.effective["backend"]) for row in drafts] == [(name, name) for name in BOTH]
    assert {(row.target, row.draft) for row in results.runs if row.setting == "auto"} == {
        (f"big ({backend})", "draft") for backend in BOTH
    }
