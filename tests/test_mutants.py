"""The kept list of mutants (scripts/mutants.py) fits the sources; running it takes minutes, this does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from mutants import read_mutants

ROOT = Path(__file__).parents[1]


def test_every_mutant_applies_to_one_place_and_names_tests_that_there_are() -> None:
    mutants = read_mutants()
    said = {mutant.id: mutant.place(ROOT / "src" / "outrider")[1] for mutant in mutants}
    assert {name: why for name, why in said.items() if why} == {}
    assert len(said) == len(mutants) >= 70
    assert {t for m in mutants for t in m.tests if not (ROOT / "tests" / f"{t}.py").exists()} == set()
