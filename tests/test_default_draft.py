"""The draft that ships with the embedded default: what it says of itself, and what it does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Request
from outrider.core.notices import collect_notices
from outrider.core.params import SamplingParams
from outrider.lab.certify.texts import compare_texts
from outrider.lab.prompts import is_held_out
from outrider.lab.written import written_prompts
from outrider.models import embedded
from outrider.models.embedded import EMBEDDED_NAME, embedded_draft
from outrider.models.header import read_header
from outrider.models.hub import cache_dir, file_sha256
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy
from outrider.policy.state import CALIBRATION_KEY, read_calibration
from outrider.session.learned import prior_in

TARGET = cache_dir() / "models" / EMBEDDED_NAME
MAX_BYTES = 16_000_000
PROMPTS = 6


needs_target = pytest.mark.skipif(not TARGET.exists(), reason="`outrider run` fetches it; tests do not")


@pytest.fixture(scope="module")
def draft() -> Path:
    path = embedded_draft()
    assert path is not None, "the package has no draft for its default"
    return path


def test_it_is_small_and_says_how_it_was_made(draft: Path) -> None:
    assert draft.stat().st_size <= MAX_BYTES
    made = read_header(draft)
    assert made.text("general.license") == "apache-2.0"
    assert made.text("outrider.distill.teacher_sha256") == embedded._SHA256
    acceptance = made.text(CALIBRATION_KEY)
    assert acceptance is not None and read_calibration(acceptance)["mean_confidence"] == 0.712
    assert (made.number("outrider.distill.steps") or 0) > 500
    assert (made.number("outrider.distill.tokens") or 0) > 1_000_000
    assert "prompts that come with Outrider" in (made.text("outrider.distill.data") or "")


@pytest.mark.slow
@needs_target
def test_its_teacher_is_the_default_and_its_map_fits(draft: Path) -> None:
    assert file_sha256(TARGET) == embedded._SHA256
    options = LoadOptions(threads=1, gpu_layers=0)
    weights, target = Weights(draft, options), Weights(TARGET, options)
    lined_up = align(target.vocabulary, weights.vocabulary)
    assert not lined_up.report.fault and lined_up.report.is_reduced and lined_up.window == 128
    with collect_notices() as notices:
        prior = prior_in(weights.open(64))
    assert prior is not None and notices == []
    weights.close()
    target.close()


@pytest.fixture(scope="module")
def pair(draft: Path) -> Iterator[Pair]:
    pair = Pair.load(TARGET, draft, options=LoadOptions(threads=1))
    yield pair
    pair.close()


@pytest.mark.slow
@needs_target
def test_it_is_right_more_often_than_not_and_changes_no_text(pair: Pair) -> None:
    """On prompts that no training reads. Counts do not depend on the machine, but for near-ties."""
    session = Session.open(pair, SessionOptions(1024, lookup=False, policy=FixedPolicy(2, 0.5)))
    drafted = accepted = compared = 0
    held_out = [written for written in written_prompts(400) if is_held_out(written.prompt)]
    for written in held_out[:PROMPTS]:
        tokens = pair.encode([dict(message) for message in written.prompt.messages])  # type: ignore[arg-type]
        request = Request(tokens, SamplingParams(temperature=0), max_tokens=40)
        found = compare_texts(session.engine, request)
        assert found.holds, found.differences
        drafted += found.counts["drafted_tokens"]
        accepted += found.counts["accepted_tokens"]
        compared += found.tokens
    assert compared > 20 * PROMPTS and drafted > compared / 4
    assert accepted / drafted >= 0.55
