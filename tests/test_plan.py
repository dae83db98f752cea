"""`outrider plan`: expected steps, plans, bad input."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import Call
from examples import examples
from outrider.core.errors import SettingError
from outrider.costs.expected_speed import expected_tokens
from outrider.lab.plan.acceptance import LONGEST, Acceptance, expected_steps, of_workload, read_acceptance
from outrider.lab.plan.calls import PlannedModel, machine_of, model_error
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.plan import LENGTHS, Asked, make_plan, plan_batch
from outrider.lab.plan.shapes import find_shape

KNOWN = catalogue()
PAIR = ("--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--on", "h100x4")
SHARES = st.floats(0, 1)


def asked(on: str = "h100x4", **changes: Any) -> Asked:
    machine = machine_of(on, KNOWN)
    target, draft = (find_shape(name, KNOWN) for name in ("llama-3.1-70b", "llama-3.2-1b"))
    fields: dict[str, Any] = {
        "target": PlannedModel(target, (machine,)),
        "drafts": [PlannedModel(draft, (machine,), acceptance=Acceptance.of(0.7))],
        "batches": (1, 8, 64),
        "context": 1024,
        "machine": machine,
        "lookup": Acceptance(tuple(0.6 * 0.8**i for i in range(LONGEST)), (1.0,) * LONGEST, offered=0.25),
    }
    return Asked(**{**fields, **changes})


# Expected steps


@settings(max_examples=examples(50))
@given(SHARES, st.integers(1, LONGEST))
def test_expected_tokens_are_those_of_the_equation(probability: float, length: int) -> None:
    step = expected_steps(None, Acceptance.of(probability), length)
    assert step.tokens == pytest.approx(expected_tokens(length, probability))
    assert step.target_calls == {length + 1: 1.0}
    assert sum(n * size for size, n in step.draft_calls.items()) == length + 1


@settings(max_examples=examples(50))
@given(SHARES, st.lists(SHARES, min_size=1, max_size=LONGEST), st.integers(1, LONGEST))
def test_the_calls_of_a_step_are_one_of_the_target(offered: float, shares: list[float], length: int) -> None:
    falling = sorted(shares, reverse=True) + [0.0] * LONGEST
    drafted = (1.0, *falling[: LONGEST - 1])
    lookup = Acceptance(tuple(0.5 * share for share in drafted), drafted, offered)
    model = Acceptance.of(0.5)
    for step in (
        expected_steps(lookup, None, length),
        expected_steps(None, model, length),
        expected_steps(lookup, model, length),
    ):
        assert sum(step.target_calls.values()) == pytest.approx(1)
        assert 1 <= step.tokens <= 1 + length
        assert max(step.target_calls) <= length + 1


@pytest.mark.parametrize(
    ("text", "name", "accepted"),
    [
        ("0.8", "", (0.8, 0.64, 0.512)),
        ("0.8,0.6", "", (0.8, 0.6, 0.45)),
        ("lookup=0.5", "lookup", (0.5, 0.25, 0.125)),
        ("a=b=0.5,0", "a=b", (0.5, 0.0, 0.0)),
        ("0", "", (0.0, 0.0, 0.0)),
    ],
)
def test_acceptance_is_read_as_it_is_typed(text: str, name: str, accepted: tuple[float, ...]) -> None:
    who, found = read_acceptance(text)
    assert who == name and found.accepted[:3] == pytest.approx(accepted)
    assert len(found.accepted) == LONGEST


@pytest.mark.parametrize("text", ["often", "1.2", "-0.1", "0.5,0.6", "lookup=", "nan"])
def test_acceptance_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--acceptance"):
        read_acceptance(text)


def test_every_bundled_table_falls_and_lies_below_what_is_drafted() -> None:
    for name in ("all", "chat", "code", "edits", "json", "summaries", "reasoning"):
        for table in of_workload(name).values():
            assert len(table.accepted) == len(table.drafted) == LONGEST
            assert list(table.accepted) == sorted(table.accepted, reverse=True)
            assert all(a <= d for a, d in zip(table.accepted, table.drafted, strict=True))


# The plan


def test_a_speedup_is_tokens_over_seconds_against_plain_calls() -> None:
    planned = asked()
    [batch] = [b for b in make_plan(planned).batches if b.batch == 8]
    target, draft = planned.target, planned.drafts[0]
    options = {"batch": 8, "context": 1024}
    plain_s = target.call_s(1, **options)
    step_s = target.call_s(4, **options) + draft.call_s(2, **options) + 2 * draft.call_s(1, **options)
    way = next(w for w in batch.ways if (w.drafters, w.draft_length) == ("draft", 3))
    assert batch.plain_tokens_per_s == pytest.approx(8 / plain_s)
    assert way.speedup == pytest.approx(expected_tokens(3, 0.7) * plain_s / step_s)
    assert way.tokens_per_s == pytest.approx(8 * expected_tokens(3, 0.7) / step_s)
    assert way.tokens_per_call == pytest.approx(expected_tokens(3, 0.7))


def test_above_break_even_a_draft_pays_and_below_it_does_not() -> None:
    found = plan_batch(asked(), 8).break_even_acceptance["llama-3.2-1b"]
    assert found is not None
    for factor, pays in ((1.02, True), (0.98, False)):
        drafts = [
            replace(model, acceptance=Acceptance.of(found["acceptance"] * factor)) for model in asked().drafts
        ]
        best = plan_batch(asked(drafts=drafts, lookup=None), 8).best
        assert (best is not None) == pays


def test_how_wrong_the_model_was_is_said_apart() -> None:
    error = model_error()
    assert error["calls"]["median"] <= 0.15 and error["speedups"]["median"] <= 0.15
    assert error["consumer"]["median"] <= 0.15 and error["consumer"]["rows"] >= 30
    assert error["range"]["held"] >= 0.9 * error["range"]["rows"] >= 60


def test_a_range_is_from_worse_acceptance_and_costs_to_better_ones() -> None:
    ways = (way for way in plan_batch(asked(odds=2.0, costs=1.2), 1).ways if way.drafters == "draft")
    way = max(ways, key=lambda way: way.speedup)
    drafts = [replace(asked().drafts[0], acceptance=Acceptance.of(0.7).shifted(odds)) for odds in (1 / 2, 2)]
    ends = [plan_batch(asked(drafts=[draft]), 1) for draft in drafts]
    wanted = "draft", way.draft_length
    low, high = (
        next(w.speedup for w in each.ways if (w.drafters, w.draft_length) == wanted) for each in ends
    )
    assert way.low == pytest.approx(low / 1.2) and way.high == pytest.approx(high * 1.2)
    assert Acceptance.of(0.7).shifted(2).accepted[0] == pytest.approx(1.4 / 1.7)


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*PAIR, "--acceptance", "0.8"),
            "70.6B 4 x NVIDIA H100 SXM, under vLLM as given published speed-ups",
        ),
        (("-m", "Qwen2.5-Coder-32B", "--on", "RTX 3090"), "under llama.cpp pays fits"),
        (("-m", "glm-4.5", "--on", "8x h200", "--batch", "1,512"), "active"),
        (("-m", "llama-4-maverick", "--on", "h100x8", "--workload", "code"), "code:"),
        (("-m", "qwen3.5-0.8b", "--on", "m1"), ""),
    ],
)
def test_a_plan_says_what_to_do_first_and_is_80_columns_wide(
    outrider: Call, words: tuple[str, ...], said: str
) -> None:
    found = outrider("plan", *words)
    text = " ".join(found.out.split())
    figures = r"[\d.]+x \([\d.]+ to [\d.]+x\) plain decoding"
    first = rf"Draft with .*, up to \d+ tokens: {figures}, from .* tokens/s|Decode plainly: .* give {figures}"
    assert found.status == 0 and re.match(first, text)
    assert all(part in text for part in said.split())
    lines = found.out.splitlines()
    assert all(len(line) <= 80 for line in lines) and "–" not in found.out
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("batch")) :]
    assert all("x " in line and " to " in line for line in table[1 : table.index("")])


def test_an_8b_draft_for_32b_on_a_3090_is_not_promised_what_nobody_measured(outrider: Call) -> None:
    words = ("-m", "qwen2.5-coder-32b", "-md", "qwen2.5-coder-0.5b", "--on", "3090", "--workload", "code")
    [batch] = json.loads(outrider("plan", *words, "--json").out)["batches"]
    [best] = [way for way in batch["drafters"] if way["drafters"] == "draft"]
    assert 1.5 <= best["speedup"] <= 2.5 and best["low"] <= 1.5 and best["high"] >= 2.5


def test_json_has_every_batch_way_and_what_it_rests_on(outrider: Call) -> None:
    plan = json.loads(outrider("plan", *PAIR, "--batch", "8,1", "--json").out)
    assert [batch["batch"] for batch in plan["batches"]] == [1, 8]
    for batch in plan["batches"]:
        assert len(batch["ways"]) == 3 * len(LENGTHS)
        assert batch["best"] == max(batch["ways"], key=lambda way: way["speedup"])
        memory = batch["memory"]
        assert memory["fits"] and memory["weights_bytes"] + memory["kv_bytes"] < memory["usable_bytes"]
    weights = [model["weights_bytes"] for model in (plan["target"], *plan["drafts"])]
    assert plan["batches"][0]["memory"]["weights_bytes"] == pytest.approx(sum(weights))
    assert "Qwen2.5-Coder" in plan["acceptance"] and plan["model_error"] == model_error()


TOO_LARGE = ("--target", "llama-3.1-405b:bf16", "--draft", "none", "--on", "h100x4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "it needs hardware"),
        (("--on", "h100"), "it needs a target"),
        (("--target", "llama-3.1-8", "--on", "h100"), "Did you mean llama-3.1-8b"),
        (("--target", "llama-3.1-8b:q5", "--on", "h100"), "no such type of weights is known"),
        (("--target", "llama-3.1-8b", "--on", "h1"), "no such hardware is known. Did you mean h100"),
        (("--target", "nowhere.gguf", "--on", "h100"), "there is no such file"),
        (TOO_LARGE, "526 GB too little memory"),
        (TOO_LARGE, "--on h100x12"),
        ((*PAIR, "--draft", "llama-3.1-405b:int4"), "it is larger than its target"),
        ((*PAIR, "--batch", "1,x"), "is not a list of numbers"),
        ((*PAIR, "--batch", "0"), "is out of range"),
        ((*PAIR, "--context", "0"), "--context"),
        ((*PAIR, "--acceptance", "2"), "a share is between 0 and 1"),
        ((*PAIR, "--acceptance", "other=0.5"), "there is no such draft"),
        ((*PAIR, "--workload", "codes"), "Did you mean code"),
        ((*PAIR, "--hardware", "nowhere.toml"), "no such file or directory"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(outrider: Call, words: tuple[str, ...], said: str) -> None:
    found = outrider("plan", *words)
    assert found.status == 2 and found.out == ""
    assert said in found.said and "Traceback" not in found.err
