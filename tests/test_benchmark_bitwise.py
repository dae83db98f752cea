"""benchmarks/backends/bitwise.py on exact models: what it generates, and what it counts."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines import GREEDY, PROMPT, VOCABULARY, ScriptedDrafter, oracle
from outrider.backends.bitwise import BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel, Rounding, random_logits
from outrider.core.contracts import Drafter, Model
from outrider.core.data import Request
from outrider.core.params import Verification
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.policy import AutoPolicy
from outrider.session import Session

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "backends" / "bitwise.py"


def load() -> Any:
    """The script as a module; the name of its folder is taken by another module of the tests."""
    spec = spec_from_file_location("benchmark_bitwise", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["benchmark_bitwise"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load()
LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3, scale=1.0)
PADDED = Rounding((1,))


def fake(num_sequences: int, context_length: int = 256) -> FakeModel:
    return FakeModel(
        VOCABULARY, LANGUAGE, context_length=context_length, max_sequences=num_sequences, rounding=PADDED
    )


def equal(num_sequences: int) -> BitwiseModel:
    sizes = EqualSizes(tuple(range(2, 25)))
    return BitwiseModel(lambda n: fake(1, n), sizes, context_length=256, max_sequences=num_sequences)


def session(model: Model) -> Session:
    """As much of a session as is needed."""
    drafters: list[Drafter] = [
        PredictionDrafter(),
        SuffixDrafter(min_match=1),
        ScriptedDrafter(oracle(LANGUAGE, 3)),
    ]
    return cast(Session, SimpleNamespace(engine=Engine(model, drafters, AutoPolicy())))


def answers(number: int) -> list[Any]:
    return [
        bench.Answer(
            i,
            way,
            Request(
                (*PROMPT, i % 4, i // 4),
                GREEDY,
                max_tokens=20,
                ignore_end=True,
                speculate=False,
                verification=Verification("stable"),
            ),
        )
        for i, way in zip(range(number), ["auto", "lookup", "fixed 4", "prediction"] * number, strict=False)
    ]


def total(rows: list[dict[str, Any]], what: str, name: str) -> int:
    return sum(row[what][name] for row in rows)


def test_equal_calls_differ_nowhere_and_others_do() -> None:
    rows = bench.compare(session(equal(1)), session(equal(5)), answers(4), 1, random.Random(0))
    for name in ("alone", "at_once"):
        assert total(rows, "differing", name) == 0 < total(rows, "drafted", name)
    assert [row["drafting"] for row in rows] == ["auto", "lookup", "fixed 4", "prediction"]
    assert all(row["tokens"] == 20 for row in rows)
    rows = bench.compare(session(fake(1)), session(fake(5)), answers(4), 1, random.Random(0))
    assert total(rows, "differing", "at_once") > 0


def test_others_run_all_the_while_and_none_is_left() -> None:
    model = fake(5)
    engine = Engine(model)
    requests = [answer.plain for answer in answers(4)]
    found = bench.at_once(engine, requests, 1, random.Random(1))
    assert [len(completion.tokens) for completion in found] == [20] * 4
    assert engine.num_running == 0
    assert max(len(spans) for spans in model.calls) > 2
    assert all(len(spans) > 1 for spans in model.calls)


def test_the_prediction_is_the_text_but_for_its_beginning() -> None:
    answer = bench.Answer(0, "prediction", Request(PROMPT, GREEDY, speculate=False))
    asked = answer.drafted((1, 2, 3))
    assert asked.prediction == (2, 3) and asked.speculate and asked.drafting == bench.WAYS["prediction"]


def test_tokens_that_differ_are_counted() -> None:
    assert bench.differing((1, 2, 3), (1, 2, 3)) == 0
    assert bench.differing((1, 2, 3), (1, 9, 3)) == 1
    assert bench.differing((1, 2, 3), (1, 2)) == 1


def test_the_summary_names_tokens_and_prices() -> None:
    def runs(*steps: float) -> dict[str, Any]:
        made = [{"step_s": s, "prompt_s": 2 * s, "token_s": s / 2} for s in steps]
        return {"plain": made, "auto": made}

    priced = [
        {"kind": "price", "bitwise": runs(1.1, 9, 1.1), "shared": runs(1, 1, 5)},
        {"kind": "price", "bitwise": runs(1.3), "shared": runs(1)},
    ]
    assert bench.percent(priced, "plain", "step_s") == pytest.approx(20)
    batch = {"tokens": 4, "differing": {"alone": 0, "at_once": 2}, "drafted": {"alone": 3, "at_once": 1}}
    lines = list(bench.summary([{"kind": "answers", "answers": [batch, batch]}, *priced]))
    assert lines == [
        "alone: 2 answers, 8 tokens, 6 drafted, 0 differ",
        "at_once: 2 answers, 8 tokens, 2 drafted, 4 differ",
        "price over 2 prompts: plain steps +20.0 %, prompts +20.0 %, answers +20.0 %",
    ]
