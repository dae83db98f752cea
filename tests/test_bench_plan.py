"""What is swept: from the written file, from files of users, from their slips; models by their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.core.errors import HubError, ModelFileError, SettingError
from outrider.lab.bench.plan import SweepPlan, make_plan, parse_lengths, plan_text, plan_values
from outrider.lab.models import ModelFile, find_models
from outrider.lab.workloads import BUILT_IN
from outrider.lab.workloads.reading import WorkloadSpec
from outrider.models.hub import HubOptions
from tiny_gguf import write_tiny

OFFLINE = HubOptions(offline=True)


def read_plan(path: Path) -> SweepPlan:
    return make_plan(plan_values(path), f"{path}: ")


def written(folder: Path, text: str, name: str = "sweep.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(SettingError) as caught:
        read_plan(path)
    message = str(caught.value)
    assert str(path) in caught.value.what and caught.value.way_out and "\n" not in message
    return message.replace(str(path), "FILE")


def test_the_written_file_reads_back_to_the_defaults_and_names_every_setting(tmp_path: Path) -> None:
    assert read_plan(written(tmp_path, plan_text(), "other.toml")) == SweepPlan()
    for name in (*SweepPlan.model_fields, *WorkloadSpec.model_fields, *BUILT_IN):
        assert name in plan_text(), name
    assert max(map(len, plan_text().splitlines())) <= 110


def test_lengths_as_people_write_them(tmp_path: Path) -> None:
    assert parse_lengths("0-3,8") == (0, 1, 2, 3, 8)
    for text, lengths in (
        ('"2,4,8"', (2, 4, 8)),
        ("[8, 2, 2]", (2, 8)),
        ("5", (5,)),
        ('["0-2", 9]', (0, 1, 2, 9)),
    ):
        assert read_plan(written(tmp_path, f"draft_lengths = {text}")).draft_lengths == lengths
    for text in ('"3-1"', '"1-900"', '"few"', "[1.5]", "[true]", "[]", "-1"):
        assert "FILE: draft_lengths" in refusal(tmp_path, f"draft_lengths = {text}"), text


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans [1]"
    folder.mkdir()
    write_tiny(folder / "a.gguf")
    path = written(
        folder,
        'targets = ["*.gguf", "default", "hf:a/b:Q4_K_M"]\ndrafts = "sub/x.gguf"\ncosts = "c.json"\n'
        'workloads = ["chat", "mine.jsonl#math", {file = "code", name = "hot", temperature = 0.8}]',
    )
    monkeypatch.chdir(tmp_path)
    plan = read_plan(Path("plans [1]") / path.name)
    assert plan.targets[1:] == ("default", "hf:a/b:Q4_K_M")
    assert [model.path for model in find_models(plan.targets[:1], hub=OFFLINE)] == [folder / "a.gguf"]
    assert plan.drafts == (str(folder / "sub/x.gguf"),) and plan.costs == folder / "c.json"
    chat, mine, hot = plan.workloads
    assert chat == WorkloadSpec(name="chat")
    assert (mine.name, mine.file) == ("mine math", f"{folder}/mine.jsonl#math")
    assert (hot.name, hot.file, hot.temperature) == ("hot", "code", 0.8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("finalist = 3", "FILE: finalist: no such setting. Did you mean finalists?"),
        ("[[workloads]]\nname='chat'\ntemprature=1", "workloads[1].temprature: no such setting. "),
        ("finalists = -1", "FILE: finalists: -1: it has to be 0 or more"),
        ("finalists = true", "finalists is not a switch"),
        ("finalists = 'many'", "FILE: finalists: 'many': it has to be a whole number"),
        ("minutes = 0", "FILE: minutes: 0: it has to be more than 0"),
        ("minutes = inf", "FILE: minutes: inf: it has to be a finite number"),
        ("p_mins = [0.5, 1.5]", "FILE: p_mins[2]: 1.5: it has to be 1 or less"),
        ("drafters = ['lookup', 'oracle']", "FILE: drafters[2]: 'oracle': it has to be \"lookup\""),
        ("controls = ['model three']", "FILE: controls: 'model three': it is not a setting; write plain"),
        ("targets = []", "FILE: targets: "),
        ("workloads = []", "FILE: workloads: "),
        ("workloads = ['chat', 'chat']", "two of the workloads are called 'chat'; give one another name"),
        ("[[workloads]]\nname = 'chats'", "there is no built-in workload 'chats'; name its file"),
        ("[[workloads]]\nprompts = 3", "FILE: workloads[1]: it has neither name nor file"),
        ("[[workloads]]\nname = 'chat'\n[[workloads]]\nname='code'\nprompts=0", ": workloads[2].prompts: 0"),
        ("lookup_only = false", "there is no draft model and lookup_only is off"),
        ("repetitions = 0", "FILE: repetitions: 0: it has to be 1 or more"),
        ("flash_attention = 'maybe'", "flash attention: 'maybe' is not known; choose one of"),
        ("name = '../elsewhere'", "FILE: name: '../elsewhere': "),
        ("targets = 'a", "FILE: it is not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_file_field_reason_and_way_out(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.toml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(SettingError, match=why):
            read_plan(path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(SettingError, match="UTF-8"):
        read_plan(tmp_path / "latin.toml")


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
