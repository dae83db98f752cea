"""What is swept: settings and their slips; models by their names."""

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from outrider.core.errors import HubError, ModelFileError, SettingError
from outrider.lab.bench.plan import SweepPlan, parse_lengths
from outrider.lab.models import ModelFile, find_models
from outrider.models.hub import HubOptions
from tiny_gguf import write_tiny

OFFLINE = HubOptions(offline=True)


def test_lengths_as_people_write_them() -> None:
    assert parse_lengths("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_lengths("8, 2,2") == (2, 8)
    for text in ("3-1", "1-900", "few", "1.5", "-1", ""):
        with pytest.raises(ValidationError, match="is not a length of 0 to 64"):
            SweepPlan(draft_lengths=text)


def test_settings_that_need_no_draft_model_are_replayed_without_one_alone() -> None:
    plan = SweepPlan(draft_lengths="2", p_mins="0,0.5", controls=["auto model", "lookup 4"])
    alone = ["plain", "auto lookup", "lookup 2", "lookup 2/0.5", "lookup 4"]
    assert [setting.name for setting in plan.settings(None)] == alone
    assert [s.name for s in plan.settings("d")] == [
        "auto", "auto model", "model 2", "model 2/0.5", "both 2", "both 2/0.5",
    ]  # fmt: skip
    assert [setting.name for setting in plan.settings(None, can_draft=False)] == ["plain"]


def test_workloads_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jsonl").write_text('{"prompt": "x"}\n')
    twice = [str(tmp_path / name / "mine.jsonl") for name in ("a", "b")]
    with pytest.raises(SettingError, match="--workload mine: two of the workloads would have this name"):
        SweepPlan(workload=twice).workloads()
    [one] = SweepPlan(workload=[twice[0]] * 2, max_tokens=9, temperature=0.5).workloads()
    assert (one.name, one.max_tokens, one.sampling.temperature) == ("mine", 9, 0.5)


# Models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.gguf, b.gguf, deep/er/c.gguf, a split model of two parts, and a file that is no model."""
    write_tiny(tmp_path / "a.gguf", seed=1)
    write_tiny(tmp_path / "b.gguf", seed=2)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_tiny(tmp_path / "deep" / "er" / "c.gguf", seed=3)
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


def found(*references: object, taken: list[ModelFile] | None = None) -> list[tuple[str, Path]]:
    models = find_models([str(reference) for reference in references], hub=OFFLINE, taken=taken or [])
    return [(model.name, model.path) for model in models]


def test_globs_paths_and_homes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = folder / "a.gguf", folder / "b.gguf", folder / "deep/er/c.gguf"
    assert found(folder / "*") == [("a", a), ("b", b)]
    assert found(folder / "**" / "*.gguf") == [("a", a), ("b", b), ("c", c)]
    assert found(b, folder / "[a-b].gguf") == [("b", b), ("a", a)]
    monkeypatch.setenv("HOME", str(folder))
    assert found("~/deep/*/c.gguf", "~/a.gguf") == [("c", c), ("a", a)]
    model = find_models([str(a)], hub=OFFLINE)[0]
    assert model.card.architecture == "llama"
    assert model.fingerprint != find_models([str(b)], hub=OFFLINE)[0].fingerprint


def test_alike_names_get_their_folder_and_then_a_number(folder: Path) -> None:
    other = folder / "deep" / "a.gguf"
    write_tiny(other, seed=9)
    twin = folder / "x" / "deep" / "a.gguf"
    twin.parent.mkdir(parents=True)
    write_tiny(twin, seed=8)
    names = [name for name, _ in found(folder / "a.gguf", other, twin, folder / "b.gguf")]
    assert names == [f"{folder.name}/a", "deep/a", "deep/a (2)", "b"]


def test_a_model_of_the_hub_is_called_by_its_repository(folder: Path) -> None:
    snapshot = folder / "models--someone--Tiny-GGUF" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    shutil.copy(folder / "b.gguf", snapshot / "a.gguf")
    assert [name for name, _ in found(folder / "a.gguf", snapshot / "a.gguf")][1] == "Tiny-GGUF/a"


def test_parts_of_a_split_model_are_one(folder: Path) -> None:
    write_tiny(folder / "big.gguf", shards=2)
    first, second = folder / "big-00001-of-00002.gguf", folder / "big-00002-of-00002.gguf"
    assert found(folder / "big*") == found(second) == [("big", first)]
    second.unlink()
    with pytest.raises(ModelFileError, match="1 of them are missing"):
        found(folder / "big*")


def test_what_leads_nowhere_is_named(folder: Path) -> None:
    for reference, why in (
        (folder / "q*.gguf", "nothing matches"),
        (folder / "*.txt", "none of the 1 files that it matches is a .gguf"),
        (folder / "gone.gguf", "there is no such file"),
        (folder, "it is a directory"),
    ):
        with pytest.raises(ModelFileError) as caught:
            found(reference)
        assert caught.value.what == str(reference) and why in caught.value.why and caught.value.way_out
    with pytest.raises(HubError, match="not in the hub's cache"):
        found("hf:no-one/no-model")
