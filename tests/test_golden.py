"""Outputs are what was recorded: see tests/golden/record.py for how a meant change is recorded again."""

import pytest

from golden.record import GOLDENS, STORED, compare


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if golden.slow else ()) for name, golden in GOLDENS.items()],
)
def test_an_output_is_what_was_recorded(name: str) -> None:
    assert not compare(name)


def test_every_stored_output_is_compared() -> None:
    assert {file.stem for file in STORED.iterdir()} == set(GOLDENS)
