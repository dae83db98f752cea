"""The kept list of mutants (scripts/mutants.py) fits the sources; running it takes minutes, this does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from mutants import Mutant, read_mutants

ROOT = Path(__file__).parents[1]


def test_every_mutant_applies_to_one_place_and_names_tests_that_there_are() -> None:
    mutants = read_mutants()
    said = {mutant.id: mutant.place(ROOT / "src" / "outrider")[1] for mutant in mutants}
    assert {name: why for name, why in said.items() if why} == {}
    assert len(said) == len(mutants) >= 70
    assert {t for m in mutants for t in m.tests if not (ROOT / "tests" / f"{t}.py").exists()} == set()


def test_a_mutant_that_does_not_apply_says_what_comes_nearest(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("total = first + second  # to\n")
    place, why = Mutant("x", "part", "total = first + other", "", ()).place(tmp_path)
    assert place is None and why.endswith("the nearest line: total = first + second  # to")
    assert Mutant("x", "part", "first", "", ()).place(tmp_path) == (tmp_path / "part" / "a.py", "")
    assert "occurs 2 times" in Mutant("x", "part", "to", "", ()).place(tmp_path)[1]
