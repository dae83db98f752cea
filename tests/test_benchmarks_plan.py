"""What `outrider plan` says of its own error is what benchmarks/plan finds in its rows."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from outrider.lab.plan.calls import model_error
from outrider.lab.plan.catalogue import token_ratios
from outrider.lab.recording import read_recordings
from plan import acceptance, check

BUNDLED = Path(__file__).parents[1] / "src/outrider/lab/plan/acceptance.toml"


@pytest.mark.slow
def test_the_errors_that_are_shown_are_those_of_the_rows() -> None:
    found = [(errors, ratios) for *_, errors, ratios in check.curve_errors()]
    absolute, relative = ([error for part in parts for error in part] for parts in zip(*found, strict=True))
    ratios, rows = check.published()
    assert ratios == token_ratios() and check.summaries(absolute, relative, rows) == model_error()


@pytest.mark.slow
def test_the_bundled_acceptance_is_that_of_the_recordings() -> None:
    text = acceptance.written(read_recordings(acceptance.RECORDINGS))
    assert text == BUNDLED.read_text(encoding="utf-8")


def test_no_row_is_fitted_and_checked_and_each_names_its_source() -> None:
    data = tomllib.loads((check.HERE / "published.toml").read_text(encoding="utf-8"))
    rows = data["rows"]
    names = ("source", "on", "target", "draft", "texts", "speedup")
    keys = [
        tuple(row.get(key) for key in (*names, "by", "verified", "method", "call_tokens", "length"))
        for row in rows
    ]
    assert len(set(keys)) == len(keys)
    assert {row["use"] for row in rows} == {"fit", "check", "range"}
    assert all(data["sources"][row["source"]].startswith("https://") for row in rows)
    assert sum(row["use"] == "check" for row in rows) >= 15


def test_the_models_that_constants_are_fitted_to_are_not_predicted() -> None:
    for models in check.curves().values():
        assert any(model.model.startswith(check.FITTED) for model in models)
    assert not any(model.startswith(check.FITTED) for _, model, *_ in check.curve_errors())
