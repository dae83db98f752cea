"""What a quantization costs in quality: exact on small models, a bound where tokens are lumped together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import PROMPT, VOCABULARY
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.quantizer import quantize
from outrider.core.data import Row
from outrider.core.errors import BackendError, InputError, SettingError, VocabularyMismatch
from outrider.lab.bench.quality import Reference, Teacher, compare, families, log_softmax, score
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow
from outrider.models import ModelCard, embedded_default, read_card
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


# Reading a model's distributions


@pytest.mark.parametrize(("max_rows", "max_batch_tokens"), [(64, 64), (7, 64), (3, 2), (1, 1)])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_rows_are_those_of_every_position(max_rows: int, max_batch_tokens: int, length: int) -> None:
    model, text = (
        model_of(LANGUAGE, max_rows=max_rows, max_batch_tokens=max_batch_tokens),
        answer(length=length),
    )
    found = [row.copy() for row in score(model, text.prompt, text.tokens)]
    assert np.array_equal(found, rows_of(LANGUAGE, text))
    assert model.length(0) == 0
    num_read = len(PROMPT) - 1
    joined = num_read % max_batch_tokens > 0  # the first row is of the call that reads the prompt's end
    rest = -(-(length - joined) // min(64, max_rows, max_batch_tokens))
    assert len(model.calls) == -(-num_read // max_batch_tokens) + rest


def test_scoring_leaves_the_model_empty_when_it_ends_early_or_fails() -> None:
    model, text = model_of(LANGUAGE, max_rows=8), answer()
    rows = score(model, text.prompt, text.tokens)
    next(rows)
    rows.close()
    assert model.length(0) == 0
    model.fail_at_call = len(model.calls) + 3
    with pytest.raises(BackendError):
        list(score(model, text.prompt, text.tokens))
    assert model.length(0) == 0


def test_texts_that_cannot_be_scored() -> None:
    short, text = model_of(LANGUAGE, context_length=44), answer()
    assert len(list(score(short, text.prompt, text.tokens))) == 40
    with pytest.raises(BackendError, match="45 tokens do not fit its context of 44"):
        list(score(short, text.prompt, (*text.tokens, 0)))
    with pytest.raises(BackendError, match="nothing comes before"):
        list(score(short, (), text.tokens))
    with pytest.raises(BackendError, match="no numbers"):
        list(score(model_of(lambda _: np.full(SIZE, np.nan, np.float32)), text.prompt, text.tokens))


def test_a_teacher_holds_the_likeliest_tokens_and_the_rest(tmp_path: Path) -> None:
    rows = rows_of(LANGUAGE, answer())
    teacher = Teacher.of(rows, 3)
    assert (teacher.ids.shape, teacher.vocabulary_size) == ((40, 3), SIZE)
    assert [a.dtype for a in (teacher.ids, teacher.log_probs, teacher.rest)] == [
        "int32",
        "float16",
        "float32",
    ]
    for i, row in enumerate(rows):
        p = np.exp(row.astype(float)) / np.exp(row.astype(float)).sum()
        order = np.argsort(-p)
        assert list(teacher.ids[i]) == list(order[:3])
        assert np.exp(teacher.log_probs[i].astype(float)) == pytest.approx(p[order[:3]], rel=0.004)
        assert teacher.rest[i] == pytest.approx(p[order[3:]].sum(), rel=1e-6)
        likely, rest = teacher.probabilities(i)
        assert likely.sum() + rest == pytest.approx(1, abs=1e-12)
    teacher.save(tmp_path / "case.npz")
    again = Teacher.load(tmp_path / "case.npz")
    for name in ("ids", "log_probs", "rest"):
        assert np.array_equal(getattr(again, name), getattr(teacher, name))
        assert getattr(again, name).dtype == getattr(teacher, name).dtype
    assert again.vocabulary_size == SIZE
    assert [path.name for path in tmp_path.iterdir()] == ["case.npz"]


def test_a_teachers_file_that_is_missing_damaged_or_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    teacher = Teacher.of(rows_of(LANGUAGE, answer()), 3)
    with pytest.raises(InputError, match="no such file"):
        Teacher.load(path)
    teacher.save(path)
    data = path.read_bytes()
    for damaged in (b"", b"words", data[: len(data) // 2], data[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            Teacher.load(path)
    np.savez(path, ids=np.zeros((2, 2)))
    with pytest.raises(InputError, match="damaged"):
        Teacher.load(path)
    with pytest.raises(SettingError, match="could not be written"):
        teacher.save(tmp_path / "none" / "case.npz")


# The divergence


@given(
    st.integers(0, 10_000), st.integers(1, SIZE), st.floats(0.05, 8), st.floats(0, 1)
)  # the reference's seed, K, how peaky it is, how far the model is from it
def test_the_divergence_is_a_lower_bound_and_exact_over_the_whole_vocabulary(
    seed: int, top: int, scale: float, share: float
) -> None:
    rng = np.random.default_rng(seed)
    reference = [(scale * rng.standard_normal(SIZE)).astype(np.float32) for _ in range(8)]
    rows = [
        ((1 - share) * row + share * scale * rng.standard_normal(SIZE)).astype(np.float32)
        for row in reference
    ]
    exact = exact_kl(reference, rows)
    found = compare(Teacher.of(reference, top), rows)
    slack = ROUNDING + 1e-3 * exact
    assert 0 <= found.mean_kl <= exact + slack
    if top >= SIZE - 1:  # a rest of one token is that token
        assert found.mean_kl == pytest.approx(exact, abs=slack)
    agree = np.mean([np.argmax(a) == np.argmax(b) for a, b in zip(reference, rows, strict=True)])
    assert found.top1_agreement == pytest.approx(agree) and found.num_tokens == 8


def test_more_tokens_bring_the_bound_nearer() -> None:
    rng = np.random.default_rng(1)
    reference = [(2 * rng.standard_normal(500)).astype(np.float32) for _ in range(20)]
    rows = [(row + rng.standard_normal(500)).astype(np.float32) for row in reference]
    bounds = [compare(Teacher.of(reference, top), rows).mean_kl for top in (1, 8, 64, 256, 500)]
    assert bounds == sorted(bounds) and bounds[0] < 0.3 * bounds[-1]
    assert bounds[-1] == pytest.approx(exact_kl(reference, rows), rel=1e-3)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1, 3, 10, 100])
@pytest.mark.parametrize("top", [1, 16, 256])
def test_a_model_does_not_differ_from_itself(scale: float, top: int) -> None:
    rng = np.random.default_rng(2)
    rows = [(scale * rng.standard_normal(20_000) + 30).astype(np.float32) for _ in range(4)]
    found = compare(Teacher.of(rows, top), rows)
    assert 0 <= found.mean_kl < ROUNDING / 10
    assert found.top1_agreement == 1


def test_what_one_of_them_rules_out_leaves_a_finite_figure() -> None:
    low, even = np.array([0, -1e4, -1e4], np.float32), np.zeros(3, np.float32)
    assert compare(Teacher.of([low], 2), [even]).mean_kl == pytest.approx(math.log(3))
    assert 100 < compare(Teacher.of([even], 2), [low]).mean_kl < 10_000
    certain = np.array([0, -np.inf, -np.inf], np.float32)
    assert math.isfinite(compare(Teacher.of([even], 2), [certain]).mean_kl)
    assert compare(Teacher.of([certain], 2), [certain]).mean_kl == 0


def test_logits_of_any_height_have_their_distribution() -> None:
    row = np.array([30_000, 29_999, -30_000], np.float32)
    assert log_softmax(row)[:2] == pytest.approx([-math.log1p(math.exp(-1)), -1 - math.log1p(math.exp(-1))])


def test_another_vocabulary_is_refused_and_so_are_too_few_rows() -> None:
    teacher = Teacher.of(rows_of(LANGUAGE, answer()), 3)
    with pytest.raises(VocabularyMismatch, match=f"{SIZE} tokens, this model 9"):
        compare(teacher, [np.zeros(9, np.float32)] * 40)
    with pytest.raises(ValueError, match="39 rows for 40 positions"):
        compare(teacher, rows_of(LANGUAGE, answer())[:-1])


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
    with pytest.raises(InputError, match="damaged"):
        list(reference.compared(second, "worse", answers))
    third = model_of(LANGUAGE)
    reference.save(third, answers)
    assert len(third.calls) == 2
    assert len(list(reference.compared(second, "worse", answers))) == 3

    with pytest.raises(InputError, match="no such file"):  # the same case, answered in another way
        list(reference.compared(second, "worse", [answer("a", seed=1)]))


def test_texts_of_two_references_are_kept_apart(tmp_path: Path) -> None:
    best, other = Reference(tmp_path, "best"), Reference(tmp_path, "other")
    best.save(model_of(LANGUAGE), [answer()])
    with pytest.raises(InputError, match="no such file"):
        list(other.compared(model_of(LANGUAGE), "worse", [answer()]))
    other.save(model_of(near(8)), [answer()])
    (found,) = best.compared(model_of(LANGUAGE), "worse", [answer()])
    assert found.mean_kl < ROUNDING
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be made"):
        Reference(tmp_path / "file", "best").save(model_of(LANGUAGE), [answer()])


def test_another_tokenizer_leaves_the_model_empty(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "best")
    reference.save(model_of(LANGUAGE), [answer()])
    larger = FakeVocabulary("abcdefgh ")
    other = FakeModel(larger, random_logits(larger.size))
    with pytest.raises(VocabularyMismatch):
        list(reference.compared(other, "worse", [answer()]))
    assert other.length(0) == 0


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
    assert families([q4, f16, q8], ["q8", "else"]) == [(q8, q4, f16)]
    with pytest.raises(SettingError, match="q4 and q8"):
        families([q4, f16, q8], ["q8", "q4"])
    assert families([]) == []


# Real models


@pytest.mark.slow
def test_real_quantizations_are_worse_the_smaller_they_are(tmp_path: Path) -> None:
    options = LoadOptions(threads=2, threads_batch=2)
    source = embedded_default()
    files = [quantize(source, name, tmp_path / f"{name}.gguf").path for name in ("F16", "Q8_0", "Q4_K_M")]
    found: dict[str, tuple[float, float]] = {}
    reference = Reference(tmp_path / "reference", "F16")
    answers: list[AnswerRow] = []
    for path in files:
        weights = Weights(path, options)
        model = weights.open(256)
        if not answers:
            prompt, text = (
                tuple(model.vocabulary.tokenize(words))
                for words in (
                    "Question: what is the sky?",
                    " It is the air above us, and it looks blue by day.",
                )
            )
            answers = [answer().model_copy(update={"prompt": prompt, "tokens": text})]
            reference.save(model, answers)
        (row,) = reference.compared(model, path.stem, answers)
        found[path.stem] = row.mean_kl, row.top1_agreement
        model.close()
        weights.close()
    assert found["F16"][0] < ROUNDING and found["F16"][1] == 1
    assert 1e-4 < found["Q8_0"][0] < 0.02 < found["Q4_K_M"][0] < 0.5
    assert found["Q4_K_M"][1] <= found["Q8_0"][1]
