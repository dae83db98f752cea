"""What a quantization costs in quality: exact on small models, a bound where tokens are lumped together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import PROMPT, VOCABULARY
from outrider.backends.fake import FakeModel, NextLogits, random_logits
from outrider.core.data import Row
from outrider.core.errors import BackendError, InputError
from outrider.lab.bench.quality import Reference, families
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow, QualityRow
from outrider.models.gguf import ModelCard, read_card
from tiny_gguf import write_tiny

ROUNDING = 1e-4
"""What 16 bits may add to a divergence."""
SIZE = VOCABULARY.size
LANGUAGE = random_logits(SIZE, seed=3, order=4)


def near(seed: int, share: float = 0.3) -> NextLogits:
    """A language that is nearly `LANGUAGE`."""
    other = random_logits(SIZE, seed=seed, order=4)
    return lambda tokens: ((1 - share) * LANGUAGE(tokens) + share * other(tokens)).astype(np.float32)


def answer(case: str = "0", length: int = 40, seed: int = 0) -> AnswerRow:
    tokens = np.random.default_rng([seed, *case.encode()]).integers(0, SIZE - 1, length)
    return AnswerRow(
        target="t", workload="w", case=case, prompt=PROMPT, tokens=tuple(int(t) for t in tokens), text="",
        finish_reason="length", prefill_s=0, decode_s=0, own_s=0, seed=0,
    )  # fmt: skip


def model_of(language: NextLogits, name: str = "fake", **settings: Any) -> FakeModel:
    return FakeModel(VOCABULARY, language, name=name, **settings)


def rows_of(language: NextLogits, text: AnswerRow) -> list[Row]:
    """The logits at every position of the answer, worked out without a model."""
    whole = [*text.prompt, *text.tokens]
    return [language(whole[:i]) for i in range(len(text.prompt), len(whole))]


def exact_kl(reference: Sequence[Row], rows: Sequence[Row]) -> float:
    """The mean divergence over whole vocabularies, in the textbook's way."""
    total = 0.0
    for theirs, mine in zip(reference, rows, strict=True):
        p, q = (np.exp(row.astype(float)) / np.exp(row.astype(float)).sum() for row in (theirs, mine))
        total += sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total / len(reference)


# The divergence


def kl(folder: Path, language: NextLogits, model: NextLogits, text: AnswerRow, top: int = 256) -> QualityRow:
    reference = Reference(folder, "best", top)
    reference.save(model_of(language), [text])
    [found] = reference.compared(model_of(model), "other", [text])
    return found


@given(st.integers(0, 10_000), st.integers(1, SIZE), st.floats(0.05, 8), st.floats(0, 1))
def test_the_divergence_is_a_lower_bound_and_exact_over_the_whole_vocabulary(
    seed: int, top: int, scale: float, share: float
) -> None:
    """The seed, how many tokens are kept, how peaky the reference is, how far the model is from it."""
    theirs = random_logits(SIZE, seed=seed, order=3, scale=scale)
    other = random_logits(SIZE, seed=seed + 1, order=3, scale=scale)

    def mine(tokens: Sequence[int]) -> Row:
        return ((1 - share) * theirs(tokens) + share * other(tokens)).astype(np.float32)

    text = answer(length=8, seed=seed)
    with TemporaryDirectory() as folder:
        found = kl(Path(folder), theirs, mine, text, top)
    reference, rows = rows_of(theirs, text), rows_of(mine, text)
    exact = exact_kl(reference, rows)
    slack = ROUNDING + 1e-3 * exact
    assert 0 <= found.mean_kl <= exact + slack
    if top >= SIZE - 1:  # a rest of one token is that token
        assert found.mean_kl == pytest.approx(exact, abs=slack)
    agree = np.mean([np.argmax(a) == np.argmax(b) for a, b in zip(reference, rows, strict=True)])
    assert found.top1_agreement == pytest.approx(agree) and found.num_tokens == 8


@pytest.mark.parametrize("top", [1, 2, SIZE])
def test_what_one_of_them_rules_out_leaves_a_finite_figure(tmp_path: Path, top: int) -> None:
    low = np.array([0, *[-1e4] * (SIZE - 1)], np.float32)
    certain = np.array([0, *[-np.inf] * (SIZE - 1)], np.float32)
    even, text = np.zeros(SIZE, np.float32), answer()
    assert kl(tmp_path / "a", lambda _: low, lambda _: even, text, top).mean_kl == pytest.approx(
        math.log(SIZE)
    )
    for name, row in (("b", low), ("c", certain)):
        assert math.isfinite(kl(tmp_path / name, lambda _: even, lambda _, row=row: row, text, top).mean_kl)  # type: ignore[misc]
    assert kl(tmp_path / "d", lambda _: certain, lambda _: certain, text, top).mean_kl == 0


@pytest.mark.parametrize(("max_rows", "max_batch_tokens"), [(64, 64), (7, 64), (3, 2), (1, 1)])
def test_the_figure_does_not_depend_on_the_size_of_calls(
    tmp_path: Path, max_rows: int, max_batch_tokens: int
) -> None:
    reference, text = Reference(tmp_path, "best"), answer()
    small = model_of(LANGUAGE, max_rows=max_rows, max_batch_tokens=max_batch_tokens)
    reference.save(small, [text])
    [found] = reference.compared(model_of(near(8)), "Q2_K", [text])
    assert found.mean_kl == pytest.approx(
        exact_kl(rows_of(LANGUAGE, text), rows_of(near(8), text)), abs=ROUNDING
    )
    assert small.length(0) == 0


# A target's quantizations over the recorded answers


def test_rows_say_how_far_each_quantization_is(tmp_path: Path) -> None:
    answers = [answer(case, length) for case, length in (("a", 40), ("b", 7), ("empty", 0))]
    reference = Reference(tmp_path / "new", "F16")
    reference.save(model_of(LANGUAGE), answers)
    same = list(reference.compared(model_of(LANGUAGE), "same", answers))
    worse = list(reference.compared(model_of(near(8)), "Q2_K", answers))
    assert [(row.target, row.reference, row.workload, row.case) for row in worse] == [
        ("Q2_K", "F16", "w", "a"),
        ("Q2_K", "F16", "w", "b"),
    ]
    assert [row.num_tokens for row in worse] == [40, 7]
    for row, text, identical in zip(worse, answers, same, strict=False):
        theirs, mine = rows_of(LANGUAGE, text), rows_of(near(8), text)
        assert row.mean_kl == pytest.approx(exact_kl(theirs, mine), abs=ROUNDING)
        agree = np.mean([np.argmax(a) == np.argmax(b) for a, b in zip(theirs, mine, strict=True)])
        assert row.top1_agreement == pytest.approx(agree) and agree < 1
        assert identical.mean_kl < ROUNDING and identical.top1_agreement == 1


def test_a_reference_goes_on_where_it_was(tmp_path: Path) -> None:
    answers, reference = [answer(case) for case in "abc"], Reference(tmp_path, "best")
    failing = model_of(LANGUAGE)
    failing.fail_at_call = 3  # a text takes two calls
    with pytest.raises(BackendError):
        reference.save(failing, answers)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    assert len(first) == 1
    second = model_of(LANGUAGE)
    reference.save(second, answers)
    assert len(second.calls) == 4
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in first} == first

    broken = next(tmp_path.glob("*.npz"))
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(InputError, match="are not kept"):
        list(reference.compared(second, "worse", answers))
    third = model_of(LANGUAGE)
    reference.save(third, answers)
    assert len(third.calls) == 2
    assert len(list(reference.compared(second, "worse", answers))) == 3

    with pytest.raises(InputError, match="are not kept"):  # the same case, answered in another way
        list(reference.compared(second, "worse", [answer("a", seed=1)]))


# Which files are one model


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return read_card(write_tiny(tmp_path_factory.mktemp("cards") / "tiny.gguf", name="Tiny 1B"))


def test_quantizations_of_one_model_are_found(card: ModelCard) -> None:
    def file(short: str, file_bytes: int, **changes: Any) -> ModelFile:
        return ModelFile(short, card.path, replace(card, file_bytes=file_bytes, **changes), short)

    q4, f16, q8 = (
        file("q4", 400, quantization="Q4_K_M"),
        file("f16", 1600),
        file("q8", 850, name="tiny-1b.Q8_0"),
    )
    tuned = file("tuned", 5000, name="Tiny 1B Coder")
    others = [
        file("large", 1, parameters=card.parameters + 1),
        file("mamba", 1, architecture="mamba"),
        file("tokens", 1, num_tokens=5),
        file("spelling", 1, tokenizer="llama (spm)"),
    ]
    assert families([q4, tuned, f16, *others, q8]) == [
        (f16, q4, q8),
        (tuned,),
        *((other,) for other in others),
    ]
    assert families([]) == []


# Real models
