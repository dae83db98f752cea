"""Outputs are what was recorded: see tests/golden/record.py for how a meant change is recorded again."""

from __future__ import annotations

import pytest

from golden.normal import difference, normal, shape
from golden.record import GOLDENS, STORED, compare


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if golden.slow else ()) for name, golden in GOLDENS.items()],
)
def test_an_output_is_what_was_recorded(name: str) -> None:
    assert not compare(name)


def test_every_stored_output_is_compared() -> None:
    assert {file.stem for file in STORED.iterdir()} == set(GOLDENS)


def test_a_difference_names_the_file_and_the_key() -> None:
    stored, found = {"a": {"b": [1, 2]}, "c": 3}, {"a": {"b": [1, 5]}, "d": 3}
    said = difference("x", stored, found)
    assert said.startswith("x.json differs at 3 keys:\n  a.b[1]\n  c (no longer there)\n  d (new)\n")
    assert "-   2" in said and "+   5" in said
    assert not difference("x", stored, stored)


def test_what_is_measured_is_compared_by_its_type() -> None:
    shown = {"prefill_s": 0.25, "tokens": 7, "text": "in 5 ms on 2026-11-23, see /tmp/x/y.gguf", "p": 1 / 3}
    kept = {"prefill_s": "<number or null>", "tokens": 7, "p": 0.333333}
    assert normal(shown) == kept | {"text": "in <number> ms on <date>, see <folder>/y.gguf"}
    assert shape([{"a": 1}, {"a": 2.5}, {"a": None}]) == [{"a": "<number or null>"}]
