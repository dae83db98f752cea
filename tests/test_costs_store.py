"""Curves in the cache and in files: found again for what they belong to, and for nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError, SettingError
from outrider.costs import (
    CallCosts,
    CallPoint,
    PairCosts,
    Subject,
    export_costs,
    fingerprint,
    import_costs,
    load_costs,
    store_costs,
    store_refined,
)

SUBJECT = Subject("m", "abc", "build 1", "cpu; 2 cores", (("threads", 2), ("rows", "all")))
COSTS = CallCosts([CallPoint(1, 0.1), CallPoint(4, 0.2), CallPoint(8, 0.5)], prefill_token_s=0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


def test_a_stored_curve_is_found_again() -> None:
    assert load_costs(SUBJECT) == (None, None)
    assert store_costs(SUBJECT, COSTS) is None
    found, notice = load_costs(SUBJECT)
    assert notice is None and found is not None
    assert found.points == COSTS.points and found.prefill_token_s == 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "abd"},
        {"build": "build 2"},
        {"machine": "cpu; 4 cores"},
        {"settings": (("threads", 1), ("rows", "all"))},
        {"settings": (("threads", 2), ("rows", "last"))},
    ],
)
def test_any_other_subject_has_none(changes: dict[str, str]) -> None:
    store_costs(SUBJECT, COSTS)
    assert load_costs(replace(SUBJECT, **changes)) == (None, None)  # type: ignore[arg-type]


def test_a_renamed_model_and_reordered_settings_are_the_same() -> None:
    store_costs(SUBJECT, COSTS)
    found, _ = load_costs(replace(SUBJECT, model="other", settings=SUBJECT.settings[::-1]))
    assert found is not None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '"text"',
        "{}",
        '{"costs": {"schema": "other"}}',
        '{"costs": [1]}',
        b"\xff\xfe\x00",
        "[" * 20_000,
    ],
)
def test_a_damaged_or_foreign_file_is_passed_over_with_a_word(cache: Path, content: str | bytes) -> None:
    store_costs(SUBJECT, COSTS)
    [file] = cache.iterdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found, notice = load_costs(SUBJECT)
    assert found is None and notice is not None and str(file) in notice and "measuring again" in notice
    assert store_costs(SUBJECT, COSTS) is None and load_costs(SUBJECT)[0] is not None


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_more(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    assert "not kept" in str(store_costs(SUBJECT, COSTS))


def test_a_session_moves_the_stored_curve_only_a_part_of_the_way() -> None:
    store_costs(SUBJECT, COSTS)
    session, _ = load_costs(SUBJECT)
    assert session is not None
    for i in range(100):
        session.observe(1 if i % 2 else 8, 2 * (0.1 if i % 2 else 0.5), context=0)
    store_refined(SUBJECT, session)
    kept, _ = load_costs(SUBJECT)
    assert kept is not None and kept.call_s(1, context=0) == pytest.approx(0.1 * 2**0.2, rel=0.05)


def test_a_short_session_leaves_the_stored_curve_alone() -> None:
    store_costs(SUBJECT, COSTS)
    session, _ = load_costs(SUBJECT)
    assert session is not None
    for _ in range(10):
        session.observe(1, 1.0, context=0)
    store_refined(SUBJECT, session)
    kept, _ = load_costs(SUBJECT)
    assert kept is not None and kept.points == COSTS.points


def test_a_fingerprint_tells_contents_apart_and_not_names(tmp_path: Path) -> None:
    data = bytearray(b"GGUF" + bytes(3 << 20))
    first, same, other = (tmp_path / f"{name}.gguf" for name in ("first", "same", "other"))
    first.write_bytes(data)
    same.write_bytes(data)
    assert fingerprint(first) == fingerprint(same)
    for change in (5, len(data) - 5):
        other.write_bytes(data[:change] + b"x" + data[change + 1 :])
        assert fingerprint(other) != fingerprint(first)
    other.write_bytes(data + b"\0")
    assert fingerprint(other) != fingerprint(first), "the size counts"
    parts = [tmp_path / f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(data)
    before = fingerprint(parts[0])
    parts[1].write_bytes(data + b"x")
    assert fingerprint(parts[0]) != before
    with pytest.raises(ModelFileError):
        fingerprint(tmp_path / "gone.gguf")


def test_a_pair_goes_through_a_file(tmp_path: Path) -> None:
    path, draft = tmp_path / "pair.json", CallCosts([CallPoint(1, 0.01)])
    export_costs(path, PairCosts(COSTS, draft, {"target": {"model": "big"}}))
    found = import_costs(path)
    assert found.target.call_s(8, context=0) == pytest.approx(0.5)
    assert found.draft is not None and found.draft.call_s(1, context=0) == pytest.approx(0.01)
    assert found.about == {"target": {"model": "big"}}
    export_costs(path, PairCosts(COSTS))
    assert import_costs(path).draft is None


def test_an_export_holds_what_was_learned(tmp_path: Path) -> None:
    path, costs = tmp_path / "pair.json", CallCosts(COSTS.points)
    for _ in range(60):
        costs.observe(1, 0.2, context=0)
        costs.observe(8, 1.0, context=0)
    export_costs(path, PairCosts(costs))
    assert import_costs(path).target.call_s(8, context=0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no", "no JSON"),
        ("[" * 20_000, "nested too deeply"),
        ("[]", "schema"),
        ('{"schema": "outrider.costs/1"}', "schema"),
        ('{"schema": "outrider.costs/1", "target": {}}', "schema"),
        ('{"schema": "outrider.costs/1", "target": null}', "schema"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "pair.json"
    path.write_text(content)
    with pytest.raises(SettingError, match=complaint) as caught:
        import_costs(path)
    assert str(caught.value).startswith(str(path))


def test_a_damaged_draft_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    with pytest.raises(SettingError, match="no such file"):
        import_costs(path)
    export_costs(path, PairCosts(COSTS, COSTS))
    data = json.loads(path.read_text())
    data["draft"]["calls"][0]["seconds"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(SettingError, match="draft: a call over 1 tokens"):
        import_costs(path)
    with pytest.raises(SettingError, match="folder does not exist"):
        export_costs(tmp_path / "no" / "pair.json", PairCosts(COSTS))
