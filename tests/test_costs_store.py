"""Curves in the cache and in files: found again for what they belong to, and for nothing else."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError, SettingError
from outrider.core.notices import collect_notices
from outrider.costs import CallCosts, CallPoint, other_programs, store
from outrider.costs.other_programs import CpuTime, OtherPrograms, read_cpu_time
from outrider.costs.store import (
    PairCosts,
    Subject,
    costs_at_once,
    export_costs,
    import_costs,
    known_costs,
    store_refined,
)
from outrider.models.cache import fingerprint, read_entry, write_entry

SUBJECT = Subject("m", "abc", "build 1", "cpu; 2 cores", {"threads": 2, "rows": "all"})
_SECONDS = {1: 0.1, 2: 0.12, 3: 0.18, 4: 0.2, 5: 0.3, 6: 0.4, 7: 0.45, 8: 0.5}
COSTS = CallCosts([CallPoint(n, seconds) for n, seconds in _SECONDS.items()], prefill_token_s=0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


def measured(subject: Subject = SUBJECT, *, fresh: bool = False) -> tuple[CallCosts, list[str]] | None:
    """What `known_costs` makes of a measurement that gives COSTS; None where it measured nothing."""
    calls = []

    def measure() -> CallCosts:
        calls.append(1)
        return COSTS

    with collect_notices() as notices:
        found = known_costs(subject, measure, fresh=fresh)
    return (found, notices) if calls else None


def stored(subject: Subject = SUBJECT) -> CallCosts:
    """The curve that is kept; measuring fails the test."""
    return known_costs(subject, lambda: pytest.fail("it was measured again"))


def test_a_measured_curve_is_found_again() -> None:
    assert measured() == (COSTS, [])
    found = stored()
    assert found.points == COSTS.points and found.prefill_token_s == 0.01
    assert measured(fresh=True) == (COSTS, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "abd"},
        {"build": "build 2"},
        {"machine": "cpu; 4 cores"},
        {"settings": {"threads": 1, "rows": "all"}},
        {"settings": {"threads": 2, "rows": "last"}},
    ],
)
def test_any_other_subject_has_none(changes: dict[str, str]) -> None:
    measured()
    assert measured(replace(SUBJECT, **changes)) == (COSTS, [])  # type: ignore[arg-type]


def test_a_renamed_model_and_reordered_settings_are_the_same() -> None:
    measured()
    reordered = dict(reversed(list(SUBJECT.settings.items())))
    assert stored(replace(SUBJECT, model="other", settings=reordered)).points == COSTS.points


DAMAGED = (
    "",
    "{",
    "[1, 2]",
    '"text"',
    "{}",
    '{"costs": {"schema": "other"}}',
    '{"costs": [1]}',
    "[" * 20_000,
)


@pytest.mark.parametrize("content", [*map(str.encode, DAMAGED), b"\xff\xfe\x00"])
def test_a_damaged_or_foreign_file_is_passed_over_with_a_word(cache: Path, content: bytes) -> None:
    measured()
    [file] = cache.iterdir()
    file.write_bytes(content)
    again = measured()
    assert again is not None
    [notice] = again[1]
    assert str(file) in notice and "measuring again" in notice
    assert stored().points == COSTS.points


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_more(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    found = measured()
    assert found is not None
    [line] = found[1]  # though it can neither be read nor written
    assert str(cache.parent) in line and "something else is in its place" in line and "not kept" in line


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_one_cause_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fails)
    monkeypatch.setattr(Path, "read_text", fails)
    with collect_notices() as notices:
        read_entry(cache / "a.json", "again")
        write_entry(cache / "b.json", {})
    assert len(notices) == 1 and os.strerror(number).lower() in notices[0]


def test_an_estimate_is_kept_as_one_until_it_is_measured() -> None:
    seen = [CallPoint(1, 1.0), CallPoint(4, 3.0)]
    costs, is_provisional = costs_at_once(SUBJECT, lambda: CallCosts(seen))
    assert is_provisional and costs.is_estimate and not costs.is_measured
    again = CallCosts.from_json(costs.as_json())
    assert again.is_estimate and again.points == costs.points
    for _ in range(40):
        costs.observe(1, 2.0, context=0)
    store_refined(SUBJECT, costs)
    kept, is_provisional = costs_at_once(SUBJECT, lambda: pytest.fail("it is kept"))
    assert is_provisional and kept.call_s(1, context=0) == pytest.approx(2.0, rel=0.01)
    known_costs(SUBJECT, lambda: CallCosts([CallPoint(n, 0.5 * n) for n in range(1, 9)]))
    measured, is_provisional = costs_at_once(SUBJECT, lambda: pytest.fail("it is kept"))
    assert not is_provisional and measured.call_s(1, context=0) == pytest.approx(0.5)


# Beside other programs


def beside(monkeypatch: pytest.MonkeyPatch, *cores: float) -> None:
    """Other programs are watched so often, and keep so many cores busy each time."""
    seen = iter(cores)
    monkeypatch.setattr(OtherPrograms, "cores", lambda self: self.seen)
    monkeypatch.setattr(OtherPrograms, "__init__", lambda self: setattr(self, "seen", next(seen)))
    monkeypatch.setattr(store, "look", OtherPrograms)


def known(seconds: float) -> tuple[float, list[str]]:
    """Seconds of a call over one token, as they are known or measured now, with one spare core; notices."""
    points = [replace(point, seconds=seconds * point.num_tokens) for point in COSTS.points]
    with collect_notices() as notices:
        costs = known_costs(SUBJECT, lambda: CallCosts(points), spare_cores=1.0)
    return round(costs.call_s(1, context=0), 6), notices


def test_costs_measured_beside_other_programs_are_measured_again_when_these_are_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside(monkeypatch, 1.5, 1.5, 0.1, 1.3, 0.1, 1.2)
    assert known(0.3) == (0.3, [store.BUSY])
    assert known(0.2) == (0.3, [store.BUSY]), "they still are: it would be no better"
    assert known(0.2) == (0.2, [store.BUSY]), "they were when it began, and not for long"
    assert known(0.1) == (0.1, []), "what a spare core does disturbs nothing"
    assert known(9.9) == (0.1, []), "nobody is watched any more"


def test_what_a_session_teaches_does_not_make_such_costs_good(monkeypatch: pytest.MonkeyPatch) -> None:
    beside(monkeypatch, 2.0)
    known(0.3)
    costs = CallCosts(COSTS.points)
    for _ in range(40):
        costs.observe(1, 0.2, context=0)
    store_refined(SUBJECT, costs)
    beside(monkeypatch, 0.0, 0.0)
    assert known(0.2) == (0.2, [])


def test_only_the_work_of_others_counts() -> None:
    times = [CpuTime(10.0, 100.0, 5.0), CpuTime(14.0, 112.0, 11.0)]
    others = OtherPrograms(lambda: times.pop(0))
    assert others.cores() == pytest.approx((12 - 6) / 4)
    assert OtherPrograms(lambda: None).cores() == 0.0, "where the system does not say"
    times = [CpuTime(10.0, 100.0, 5.0), CpuTime(10.1, 101.0, 5.0)]
    assert OtherPrograms(lambda: times.pop(0)).cores() == 0.0, "it counts too coarsely for so short a time"
    times = [CpuTime(10.0, 100.0, 5.0), CpuTime(12.0, 101.9, 7.0)]
    assert OtherPrograms(lambda: times.pop(0)).cores() == 0.0, "it may count the own work later"


def test_the_cores_of_this_process_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, core = tmp_path / "stat", min(os.sched_getaffinity(0))
    monkeypatch.setattr(other_programs, "STAT", stat)
    stat.write_text(f"cpu 9 9 9 9\ncpu{core} 100 20 3 5000 600 7 8 9 50 60\ncpu999 7 7 7 7 7 7 7 7\nintr 5\n")
    found = read_cpu_time()
    assert found is not None and found.busy_s * os.sysconf("SC_CLK_TCK") == 100 + 20 + 3 + 7 + 8 + 9
    stat.write_text(f"cpu{core} many\n")
    assert read_cpu_time() is None
    stat.unlink()
    assert read_cpu_time() is None


def test_a_session_moves_the_stored_curve_only_a_part_of_the_way_and_a_short_one_not_at_all() -> None:
    measured()
    for calls in (10, 100):
        session = stored()
        assert session.points == COSTS.points
        for i in range(calls):
            session.observe(1 if i % 2 else 8, 2 * (0.1 if i % 2 else 0.5), context=0)
        store_refined(SUBJECT, session)
    assert stored().call_s(1, context=0) == pytest.approx(0.1 * 2**0.3, rel=0.05)


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
    costs = CallCosts(COSTS.points)
    for size in (1, 8) * 60:
        costs.observe(size, 2 * _SECONDS[size], context=0)
    export_costs(path, PairCosts(costs, draft, {"target": {"model": "big"}}))
    found = import_costs(path)
    assert found.target.call_s(8, context=0) == pytest.approx(1.0, rel=0.05), "with what was learned"
    assert found.draft is not None and found.draft.call_s(1, context=0) == pytest.approx(0.01)
    assert found.about == {"target": {"model": "big"}}
    export_costs(path, PairCosts(COSTS))
    assert import_costs(path).draft is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no", "not JSON"),
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
    with pytest.raises(SettingError, match=r"draft: it is damaged \(a call over 1 tokens"):
        import_costs(path)
    with pytest.raises(SettingError, match="folder does not exist"):
        export_costs(tmp_path / "no" / "pair.json", PairCosts(COSTS))
