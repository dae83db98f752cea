"""The contract of backends on real models: those that measurements are made with, on mainline and on ik."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from backends import FILES, IK, MAINLINE, Kept, Native, next_rows
from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import FREE
from outrider.core.data import Logits
from outrider.models.gguf import read_card
from outrider.models.hub import cache_dir

FOLDER = cache_dir() / "models"
MODELS = {
    "SmolLM2-135M": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Gemma-3-270M": "gemma-3-270m-q4_k_m.gguf",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
LIBRARIES = (*MAINLINE[:1], *IK[:1])
PASSAGE = """The river is wide and its water is cold. Every morning the old ferry crosses it with farmers,
two or three children on their way to school, and now and then a cart full of apples. Nobody knows who built
the first boat; the grandmother of the present captain used to say that it had floated down from the hills by
itself. In winter, when ice drifts past the piers, the bell on the other side is rung twice before the ropes
are untied, and whoever wants to cross has to wait until a lantern answers from the opposite bank."""
MIN_CORRELATION = 0.98
"""Between rows that differ by rounding: 0.992 was seen, and 0.963 between one row and the next."""

pytestmark = pytest.mark.slow


class Real(Native):
    """A real model on a native library, with the options under which the library was found to be right."""

    def __init__(self, library: str, model: str, folder: Path) -> None:
        super().__init__(FILES[library], folder)
        self.file_path = FOLDER / MODELS[model]
        self.memory = folder / "builds.json"
        asked = self.options(LoadOptions(gpu_layers=0, cache_type_k="f16", cache_type_v="f16"))
        self.survived, self.notice = check_build(read_card(self.file_path), asked, next(candidates(asked)))
        self._weights = Weights(self.file_path, self.survived)
        self.text = tuple(self._weights.vocabulary.tokenize(PASSAGE))
        assert len(self.text) >= 100

    def weights(self, kind: str = "dense", options: LoadOptions | None = None) -> Weights:
        del kind, options  # there is one model
        return self._weights

    def close(self) -> None:
        self._weights.close()


@pytest.fixture(
    scope="module",
    params=[(name, model) for model in MODELS for name in LIBRARIES],
    ids=lambda pair: "-".join(pair),
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    library, model = request.param
    if not (FOLDER / MODELS[model]).exists():
        pytest.skip(f"{MODELS[model]} is not in {FOLDER}: tests fetch no models")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("real")
        patch.setenv("OUTRIDER_CACHE", str(folder))
        opened = Real(library, model, folder)
    yield opened
    opened.close()


def correlations(rows: Logits, expected: Logits) -> list[float]:
    """How alike rows are, each with the one in its place."""
    return [float(np.corrcoef(row, other)[0, 1]) for row, other in zip(rows, expected, strict=True)]


def assert_alike(rows: Logits, expected: Logits) -> None:
    assert rows.shape == expected.shape
    assert min(correlations(rows, expected)) > MIN_CORRELATION


def test_what_the_library_computes_was_checked_and_is_remembered(real: Real) -> None:
    """Calls over many tokens agree with calls over few, at the options that the check has chosen."""
    asked = real.options(LoadOptions(gpu_layers=0))
    assert "works" in real.memory.read_text()
    assert (real.notice is None) == (real.survived.extra_buffer_types == asked.extra_buffer_types)
    expected = real.expected(real.text[:40])
    with closing(real.open(context_length=64)) as model:
        assert_alike(next_rows(model, real.text[:40]), expected)
    shifted = correlations(expected[1:], expected[:-1])
    assert max(shifted) < MIN_CORRELATION, "rows differ by more than rounding does"


def test_calls_rewinding_and_copying_among_many_sequences(real: Real) -> None:
    operations = [
        ("grow", 0, 9), ("grow", 1, 6), ("copy", 0, 5), ("shrink", 0, 4), ("grow", 2, 11), ("copy", 1, 3),
        ("shrink", 2, 2), ("grow", 0, 7), ("shrink", 1, 30), ("grow", 1, 5), ("copy", 2, 9), ("grow", 0, 3),
    ]  # fmt: skip
    with closing(real.open(context_length=64, max_sequences=3)) as model:
        kept = Kept(model, real.text, 40, may_refuse=False)
        for operation in operations:
            kept.do(*operation)
            assert [model.length(s) for s in range(3)] == [len(text) for text in kept.texts]
        assert model.rewinding == FREE and sum(map(len, kept.texts)) > 20
        for sequence, text in enumerate(kept.texts):
            assert_alike(
                next_rows(model, real.text[-2:], sequence), real.expected((*text, *real.text[-2:]))[-2:]
            )
