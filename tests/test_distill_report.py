"""The report of a distillation: its arithmetic on made-up answers, its pictures, its learning curve."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from distilled_reports import report
from engines import LANGUAGE
from engines import VOCABULARY as LETTERS
from outrider.backends.fake import FakeModel
from outrider.core.params import SamplingParams
from outrider.lab.distill.examples import Example
from outrider.lab.distill.report import Contender, Figure, pictures
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFacts
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import Answer, Case
from outrider.lab.rows import AnswerRow
from outrider.lab.statistics import Interval
from outrider.lab.subject import Subject
from recordings import FLAT, SMALL, DraftKind, TextKind, curve, recording

pytest.importorskip("torch")
from outrider.lab.distill.measure import PARTS, nested, own_times, slope_of, with_draft, without_draft

FACTS = ModelFacts("m", "m.gguf", "llama", "Q8_0", 1000, 1000, 0, 0, 1000, 900, 4096)
DRAFT = Path("draft.gguf")


def answer(number: int, text: TextKind, draft: DraftKind | None, length: int = 48) -> Answer:
    """A made-up answer, whole, with the offers of a draft of this quality."""
    made = recording(text, draft, seed=number, length=length)
    workload = Workload(text, (), SamplingParams(temperature=0), length, "here")
    calls = tuple((1, len(made.prompt) + i, 0.1, 0.0002) for i in range(length))
    row = AnswerRow(
        target="m", workload=text, case=made.id, prompt=made.prompt, tokens=made.tokens, text="",
        finish_reason="length", prefill_s=1.0, decode_s=0.1 * length, own_s=0.0, calls=calls, seed=0,
    )  # fmt: skip
    return Answer(Case(workload, Prompt(made.id, "x"), 0), row, made, 1.0)


def drafted(answers: list[Answer], step_s: float = 0.01, own_s: float = 0.0) -> Contender:
    """What a draft whose step takes so long makes of answers; choosing takes `own_s`."""
    own = {"plain": 0.0, "auto": own_s}
    prices = replace(subject(answers).prices(curve(SMALL, step_s)), own_s=own)
    return with_draft("trained", DRAFT, prices, answers)


def subject(answers: list[Answer]) -> Subject:
    target = LoadedTarget("m", FakeModel(LETTERS, LANGUAGE))
    return Subject(target, FACTS, curve(FLAT), tuple(answers))


def test_a_draft_that_is_always_right_is_said_to_be() -> None:
    found = drafted([answer(i, "random", "target") for i in range(5)])
    assert found.agreement == Figure(value=1.0, low=1.0, high=1.0)
    assert found.accepted_of_three == found.accepted_by_choice == Figure(value=1.0, low=1.0, high=1.0)
    assert found.agreement_by_position == [1.0] * 8 and found.answers == 5
    assert found.step_ratio == pytest.approx(0.1)
    assert found.over_plain.value > 1.5 and found.over_lookup is not None
    assert found.bound is not None and found.of_bound is not None
    assert found.bound.value >= found.over_plain.value
    assert 0.5 < found.of_bound.value <= 1


def test_a_draft_that_is_never_right_is_left_alone() -> None:
    found = drafted([answer(i, "random", "wrong") for i in range(5)])
    assert found.agreement is not None and found.agreement.value == 0
    assert found.accepted_of_three == Figure(value=0.0, low=0.0, high=0.0)
    assert found.agreement_by_position == [0.0, *[None] * 7]
    assert found.over_plain.value == pytest.approx(1.0, abs=0.1)


def test_speeds_and_shares_of_the_bound_fit_together() -> None:
    found = drafted([answer(i, "mixed", "calibrated") for i in range(6)])
    assert found.bound is not None and found.of_bound is not None
    # Geometric means of the same answers' ratios multiply.
    assert found.over_plain.value == pytest.approx(found.of_bound.value * found.bound.value)
    slower = drafted([answer(i, "mixed", "calibrated") for i in range(6)], own_s=0.01)
    assert slower.over_plain.value < found.over_plain.value
    assert slower.tokens_per_s < found.tokens_per_s


def test_plain_decoding_takes_what_its_calls_cost() -> None:
    answers = [answer(i, "random", None) for i in range(4)]
    plain, lookup = without_draft(subject(answers), answers)
    assert (plain.kind, lookup.kind) == ("none", "lookup")
    # Behind 150 tokens of prompt, a call for each token and the engine's own 0.2 ms.
    spent_s = sum(curve(FLAT).call_s(1, context=150 + i) + 0.0002 for i in range(48))
    assert plain.tokens_per_s == pytest.approx(48 / spent_s)
    assert plain.over_plain == Figure(value=1.0, low=1.0, high=1.0) and plain.agreement is None
    assert lookup.of_bound is not None and lookup.agreement is None and lookup.over_lookup is None


def test_categories_are_told_apart() -> None:
    good = [answer(i, "random", "target") for i in range(3)]
    bad = [answer(i, "copying", "wrong") for i in range(2)]
    found = drafted([*good, *bad])
    copying, random = found.categories
    assert (copying.category, copying.answers) == ("copying", 2)
    assert (random.category, random.answers) == ("random", 3)
    assert copying.agreement is not None and copying.agreement.value == 0
    assert random.agreement is not None and random.agreement.value == 1
    assert random.over_lookup is not None and copying.over_lookup is not None
    assert random.over_lookup.value > 1.5 > copying.over_lookup.value
    assert found.agreement is not None and found.agreement.value == pytest.approx(3 / 5)
    assert found.agreement.low is not None and found.agreement.low < 3 / 5 < (found.agreement.high or 0)


def test_choosing_is_timed_on_the_answers_at_hand() -> None:
    answers = [answer(i, "mixed", "calibrated") for i in range(2)]
    own = own_times(subject(answers), curve(SMALL, 0.01), answers)
    assert own["auto"] > own["plain"] > 0


def test_an_end_that_is_not_known_is_null() -> None:
    assert Figure.of(Interval(1.2, 0.0, math.inf, 1)) == Figure(value=1.2, low=0.0, high=None)


# Pictures


def test_pictures_are_drawn_of_what_there_is() -> None:
    whole = pictures(report())
    assert list(whole) == ["training", "positions", "data"]
    bare = report().model_copy(update={"measured": None, "learning_curve": None})
    assert list(pictures(bare)) == ["training"]
    for name, svg in whole.items():
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("aria-label"), name
        # Every colour that is used has a value in the file itself.
        used, given = (set(re.findall(pattern, svg)) for pattern in (r"var\((--\w+)\)", r"(--\w+): #"))
        assert used <= given, name
    assert whole == pictures(report())


def test_a_picture_says_what_it_shows() -> None:
    drawn = {
        name: ElementTree.fromstring(svg).get("aria-label") or "" for name, svg in pictures(report()).items()
    }
    assert "from 3% to 57%" in drawn["training"] and "1.31x, at step 500" in drawn["training"]
    assert "after training 57%, before training 3%" in drawn["positions"]
    assert "doubling the data added 3.0 points" in drawn["data"]


# The learning curve


def example(number: int) -> Example:
    tokens = np.zeros(4, dtype=np.int32)
    rest = np.zeros(4, dtype=np.float16)
    return Example(f"q{number}", "c", tokens, tokens, tokens[:, None], rest[:, None], rest, 0.0, "")


def test_parts_of_the_data_are_nested_and_do_not_depend_on_the_order() -> None:
    examples = [example(i) for i in range(100)]
    parts = [{e.id for e in nested(examples, part)} for part in PARTS]
    assert [len(part) for part in parts] == [12, 25, 50, 100]
    assert all(small < large for small, large in pairwise(parts))
    assert {e.id for e in nested(examples[::-1], 0.25)} == parts[1]
    # Chosen by hash: neither the first nor the last ones alone.
    assert parts[0] & {f"q{i}" for i in range(50)} and parts[0] & {f"q{i}" for i in range(50, 100)}
    more = {e.id for e in nested([example(i) for i in range(200)], 0.5)}
    assert more != parts[3] and len(more) == 100
    assert len(nested(examples[:3], 0.125)) == 1


def test_the_line_through_the_points_is_found() -> None:
    tokens = [1000, 2000, 4000, 8000]
    exact = slope_of(tokens, [0.40, 0.43, 0.46, 0.49])
    assert exact is not None
    assert exact.value == pytest.approx(0.03) and exact.low == pytest.approx(0.03, abs=1e-6)
    rough = slope_of(tokens, [0.40, 0.44, 0.45, 0.49])
    # Slope and standard error by hand: residuals -0.003, 0.009, -0.009, 0.003; t(2 degrees) = 4.303.
    assert rough is not None
    assert rough.value == pytest.approx(0.028)
    assert rough.high - rough.value == pytest.approx(4.303 * math.sqrt(0.00018 / 2 / 5), rel=1e-3)
    assert rough.low < 0.028 < rough.high


def test_two_amounts_of_data_make_no_line() -> None:
    assert slope_of([1000, 2000], [0.1, 0.2]) is None
    assert slope_of([1000, 1000, 2000], [0.1, 0.1, 0.2]) is None


def test_a_report_survives_json() -> None:
    made = report()
    text = made.model_dump_json(by_alias=True)
    assert '"schema":"outrider.distill/1"' in text
    assert type(made).model_validate_json(text) == made
    assert made.measured is not None and made.measured.of("continued") is None
