"""What `outrider plan` says of its own error is what benchmarks/plan finds in its rows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from outrider.lab.plan.calls import model_error
from outrider.lab.plan.catalogue import token_ratios
from plan import acceptance, check
from policy.recorded import read_recordings

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
