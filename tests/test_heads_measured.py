"""A model's own head as `check`, `bench` and `costs` measure it, on tiny models of random weights."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_helpers import TEMPLATE, Call
from engines import GREEDY, asked
from head_files import with_good_head, write_files
from llama_cpp_models import TEXT
from outrider.backends.gguf.options import LoadOptions
from outrider.core.notices import collect_notices
from outrider.costs.store import PairCosts, export_costs
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.report import choices
from outrider.lab.bench.results import Results
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.check import agreement_of
from outrider.lab.loaded import LoadedDraft, LoadedTarget, Loader
from outrider.lab.models import OWN_HEAD, find_model, find_models, own_head
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import DRAFT, replay
from outrider.lab.rows import ModelRow
from outrider.lab.settings import Setting
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions
from outrider.policy.fixed import FixedPolicy
from recordings import FLAT, SMALL, curve
from tiny_gguf import write_tiny

OPTIONS = LoadOptions(backend="llama.cpp", threads=1, cache_type_k="f32", cache_type_v="f32")


@pytest.fixture(scope="module", params=["qwen35", "glm4moe", "eagle3 llama", "mtp qwen35", "dflash llama"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and the file of a head that is right now and then, its own or another; targets of checkpoints,
    and such that rewind freely."""
    folder = tmp_path_factory.mktemp("good")
    if " " not in request.param:
        return (with_good_head(folder / "good.gguf", request.param),) * 2
    files = write_files(folder, request.param)
    return files.target, files.head or files.target


@pytest.fixture(scope="module")
def pair(good: tuple[Path, Path]) -> Iterator[tuple[LoadedTarget, LoadedDraft]]:
    hub = HubOptions(offline=True)
    file = find_model(str(good[0]), hub=hub)
    head = own_head(file) if good[0] == good[1] else find_models([str(good[1])], hub=hub)[0]
    assert head is not None and head.is_head and not file.is_head
    loader = Loader(OPTIONS, OPTIONS, hub, 256)
    with collect_notices() as notices, closing(loader.target(file)[0]) as target:
        loaded = loader.draft(head, target)
        assert isinstance(loaded, tuple)
        with closing(loaded[0]) as draft:
            yield target, draft
    assert notices == []


def answered(target: LoadedTarget, number: int = 0, length: int = 40) -> Recording:
    prompt = TEXT[7 * number : 7 * number + 20]
    request = asked(prompt, max_tokens=length, sampling=GREEDY, ignore_end=True)
    target.engine.equip((), FixedPolicy(0))
    target.engine.reset()
    tokens = target.engine.generate(request).tokens
    return Recording(str(number), "made", prompt, tokens, "length", {})


def drafting(draft: LoadedDraft, length: int) -> Engine:
    """The engine that the head drafts in, with drafts of this length."""
    assert draft.feeder is not None
    engine = draft.feeder.engine
    engine.equip((ModelDrafter(draft.model, draft.alignment),), FixedPolicy(length, 0.0))
    engine.reset()
    return engine


def test_what_is_recorded_of_a_head_is_what_it_drafts(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    """From every place of an answer but the first, which comes of the call that reads the prompt: the head
    begins with the target's states and goes on with its own."""
    target, draft = pair
    made = answered(target)
    offers = draft.offers(made)
    assert len(offers.departures) == len(made.tokens) and offers.rereads(made.tokens)
    for place in range(1, len(made.tokens) - 8, 3):
        engine = drafting(draft, 5)
        prompt = (*made.prompt, *made.tokens[: place - 1])
        records = engine.generate(asked(prompt, max_tokens=8, sampling=GREEDY, ignore_end=True)).records
        reading, first = [record for record in records if record.kind == "decode"][:2]
        assert not reading.draft and reading.read_tokens
        path = ((offers.tokens[place], offers.confidence[place]), *offers.departures[place])[:5]
        assert first.draft.tokens[: len(path)] == tuple(token for token, _ in path)
        np.testing.assert_allclose(first.draft.acceptance[: len(path)], [p for _, p in path], atol=2e-3)


def test_a_replay_makes_the_calls_of_the_real_run(pair: tuple[LoadedTarget, LoadedDraft]) -> None:
    target, draft = pair
    rejected = accepted = 0
    for number in range(3):
        made = answered(target, number)
        made = replace(made, offers={DRAFT: draft.offers(made)})
        for length in (1, 3, 5):
            request = asked(made.prompt, max_tokens=40, sampling=GREEDY, ignore_end=True)
            real = drafting(draft, length).generate(request)
            assert real.tokens == made.tokens
            played = replay(
                made,
                FixedPolicy(length, 0.0),
                curve(FLAT),
                {DRAFT: curve(SMALL)},
                free=[],
                rewinding=target.model.rewinding,
            )
            steps = [record for record in real.records if record.kind == "decode"]
            assert [(len(r.draft), r.num_accepted, r.work.call_tokens) for r in steps] == [
                (len(r.draft), r.num_accepted, r.work.call_tokens) for r in played.records
            ]
            accepted += sum(record.num_accepted for record in steps)
            rejected += sum(len(record.draft) - record.num_accepted for record in steps)
    assert accepted > 20 and rejected > 20


def test_a_head_departs_from_right_tokens_too() -> None:
    """Three tokens are right from the target's states, but from the first of them it goes on wrong."""
    offers = Offers((5, 6, 7), (0.9, 0.9, 0.9), {0: ((8, 0.9),), 1: ((7, 0.9),), 2: ()})
    assert offers.rereads((5, 6, 7))
    known = Recording("1", "made", (1,), (5, 6, 7), "length", {DRAFT: offers})
    assert agreement_of([known]) == (1.0, 3)
    model = Offers((5, 6, 9), (0.9, 0.9, 0.9), {2: ((8, 0.9),)})
    assert not model.rereads((5, 6, 7))


def test_the_card_of_a_head(tmp_path: Path) -> None:
    with_heads, without = (
        read_card(write_tiny(tmp_path / f"{count}.gguf", arch="glm4moe", mtp_layers=count))
        for count in (1, 0)
    )
    head = with_heads.own_head
    assert head is not None and without.own_head is None and head.kind == "mtp"
    assert with_heads.bytes_per_token == without.bytes_per_token, "a plain step does not read it"
    assert head.parameters == with_heads.parameters - without.parameters
    assert head.active_parameters < head.parameters, "experts"
    assert head.output_bytes < head.bytes_per_token < head.output_bytes + head.file_bytes
    several = read_card(write_tiny(tmp_path / "2.gguf", arch="glm4moe", mtp_layers=2)).own_head
    assert several is not None and several.parameters == head.parameters, "the first alone is drafted with"


# The commands


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "drafts").mkdir()
    with_good_head(folder / "target.gguf", "glm4moe", chat_template=TEMPLATE)
    write_tiny(folder / "drafts" / "draft.gguf")
    texts = ["the rain in the street", "a stone at the shore", "there was a king", "on the other hand"]
    prompts = [{"id": str(i), "prompt": text, "max_tokens": 32} for i, text in enumerate(texts * 2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, outrider: Call, models: Path) -> Call:
    """A command among the tiny models, whose costs are measured once."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("OUTRIDER_CACHE", str(models / "cache"))
    return outrider


CHECK = ("check", "target.gguf", "-t", "1", "--seconds", "1", "--prompts", "prompts.jsonl")
MAINLINE = ("--backend", "llama.cpp")


def test_check_measures_the_targets_own_head(program: Call) -> None:
    shown = json.loads(program(*CHECK, *MAINLINE, "--json").out)
    [head] = shown["drafts"]
    assert (head["model"]["name"], head["kind"]) == ("mtp", "mtp")
    assert head["verdict"]["outcome"] in ("pays", "undecided", "does not pay")
    assert 0 < head["agreement"] < 1 and 0 < head["answers"] <= sum(shown["answers"].values())
    assert head["step_ratio"] > 0 and 0 < head["bytes_ratio"] < 1 and head["over_plain"]["value"] > 0
    assert head["model"]["path"] == shown["target"]["path"]
    assert shown["pays"] == any(found["verdict"]["pays"] for found in (*shown["drafts"], shown["lookup"]))


@pytest.mark.parametrize("kind", ["eagle3 llama", pytest.param("mtp glm4moe", marks=pytest.mark.slow)])
def test_a_file_of_heads_is_measured_as_a_draft(kind: str, program: Call, tmp_path: Path) -> None:
    files = write_files(tmp_path, kind)
    usual = ("-t", "1", "--seconds", "1", "--prompts", "prompts.jsonl", "--json")
    shown = json.loads(program("check", str(files.target), str(files.head), *usual).out)
    [head] = shown["drafts"]
    assert (head["model"]["name"], head["kind"]) == ("head", kind.split()[0])
    assert head["positions"] > 0 and head["step_ratio"] > 0
    assert (
        any("llama.cpp alone runs" in line for line in shown["notices"]) and shown["backend"] == "llama.cpp"
    )
    refused = program(
        "check", "target.gguf" if "eagle3" in kind else "drafts/draft.gguf", str(files.head), *usual
    )
    assert refused.status == 2 and str(files.head) in refused.said and refused.out == ""
    assert program("check", str(files.head), *usual).status == 2, "it is no target"


def test_a_head_that_is_not_wanted_or_cannot_run(program: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(program(*CHECK, *MAINLINE, "--no-mtp", "--json").out)["drafts"] == []
    monkeypatch.setattr("outrider.backends.gguf.heads._SIGNATURES", {"llama_no_such_call": (None,)})
    shown = json.loads(program(*CHECK, *MAINLINE, "--json").out)
    [head] = shown["drafts"]
    assert head["verdict"]["outcome"] == "cannot work"
    assert "as it is here lacks the calls for a model's own head" in head["verdict"]["sentence"]


def test_costs_of_a_head(program: Call) -> None:
    arguments = ("costs", "-m", "target.gguf", "-t", "1", "--seconds", "0.3", *MAINLINE, "--json")
    shown = json.loads(program(*arguments).out)
    assert shown["draft"]["schema"] == "outrider.costs/1"
    assert shown["about"]["draft"]["settings"]["heads"] == "own"
    assert shown["about"]["target"]["settings"]["heads"] == "fed"
    assert shown["about"]["draft"]["model"] == "target, MTP head"
    plain = json.loads(program(*arguments, "--no-mtp").out)
    assert plain["draft"] is None and "heads" not in plain["about"]["target"]["settings"]


@pytest.fixture(scope="module")
def swept(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A sweep over a model with a head and one without."""
    folder = tmp_path_factory.mktemp("swept")
    write_tiny(folder / "headless.gguf", name="headless")
    export_costs(folder / "costs.json", PairCosts(curve(FLAT, 0.01), curve(SMALL, 0.002)))
    values: dict[str, Any] = {
        "targets": [str(models / "target.gguf"), str(folder / "headless.gguf")],
        "drafts": [OWN_HEAD],
        "workload": [str(models / "prompts.jsonl")],
        "max_tokens": 24,
        "prompts": 3,
        "draft_lengths": "1-4",
        "p_mins": "0",
        "controls": ["model 3", "model 2", "lookup 4"],
        "finalists": 1,
        "repetitions": 1,
        "costs": folder / "costs.json",
    }
    plan, options = SweepPlan(**values), replace(OPTIONS, backend="auto")
    loader = Loader(options, options, HubOptions(offline=True), 512, plan.costs)
    with collect_notices() as notices:
        run_sweep(plan, folder / "run", loader)
    assert "llama.cpp alone runs" in notices[0]
    return Results.read(folder / "run")


def test_a_sweep_runs_a_head_as_a_draft(swept: Results) -> None:
    [pair] = swept.pairs
    assert (pair.target, pair.draft, pair.usable) == ("target", OWN_HEAD, True)
    [head] = [row for row in swept.models if row.role == "draft"]
    assert isinstance(head, ModelRow) and head.beside == "target" and head.model == OWN_HEAD
    assert any(row.what == "mtp for headless" for row in swept.skipped)
    assert {row.backend for row in swept.models} == {"llama.cpp"}, "the one that runs heads"
    [costs] = [row for row in swept.costs if row.role == "draft"]
    assert (costs.model, costs.beside) == (OWN_HEAD, "target")
    assert {len(row.cases) for row in swept.predictions} == {3}
    predicted = {
        (row.draft, row.setting, row.workload, case.case): case
        for row in swept.predictions
        if row.target == "target"
        for case in row.cases
    }
    compared = 0
    drafted = [run for run in swept.runs if run.draft is not None]
    # Whoever reads the prompt has no hidden state of its last token yet, and may draft a token less.
    readers = {
        case: min(run.order for run in drafted if run.case == case) for case in {run.case for run in drafted}
    }
    assert all(run.equal for run in swept.runs)
    for run in drafted:
        if Setting.of(run.setting).is_auto or run.order == readers[run.case]:
            continue
        case = predicted[run.draft, run.setting, run.workload, run.case]
        assert (run.target_calls, run.draft_calls) == (case.target_calls, case.draft_calls)
        assert (run.drafted, run.accepted) == (case.drafted, case.accepted)
        compared += 1
    assert compared >= 3


def test_the_report_of_a_sweep_with_a_head(swept: Results) -> None:
    assert swept.columns_of("target") == [None, OWN_HEAD] and swept.columns_of("headless") == [None]
    for ran, command in choices(swept).items():
        assert "-md" not in command
        assert ("--no-mtp" in command) == (ran.target == "target" and ran.draft is None)
