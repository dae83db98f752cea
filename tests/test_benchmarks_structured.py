"""The scripts of benchmarks/structured: the cases, and what figures are worked out from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from json_schema_suite import Case as SuiteCase
from json_schema_suite import Deviation, Outcome, byte_vocabulary, may_be_written
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.constraints import Compiler
from outrider.core.errors import GrammarError
from outrider.costs import CallCosts, CallPoint, PairCosts
from outrider.drafters.suffix import SuffixDrafter
from outrider.models.chat import ChatTemplate
from outrider.session import Session
from structured import live, report, suite
from structured.bench import MODES, Bench, Plan
from structured.cases import GROUPS, Case, load_cases
from structured.summary import errors

VOCABULARY = byte_vocabulary()
CASES = load_cases()
REPORT = {
    "contains_insult": True,
    **{f"contains_{what}": False for what in ("threat", "hate", "sexual_content")},
    "contains_spam": True,
    "contains_personal_data": False,
    "is_off_topic": False,
    "decision": "remove",
}
HEAD = {
    "kind": "machine",
    "cpu": "a processor",
    "threads": 2,
    "tokens": 256,
    "style": "spaced",
    "repetitions": 3,
    "measured": "today",
    "modes": ["off", "forced"],
    "models": {"target.gguf": "abc"},
}


def run(calls: int, seconds: float, **other: Any) -> dict[str, Any]:
    """A run of 100 tokens as live.py writes it."""
    return {
        "tokens": 100,
        "target_calls": calls,
        "forced": 100 - calls,
        "evaluated": 100,
        "decode_s": seconds,
        "constraint_s": 0.01,
        "finish": "stop",
        "complaint": None,
        **other,
    }


def row(id: str, group: str, forced: int, **other: Any) -> dict[str, Any]:
    runs = {"off": [run(100, s) for s in (5.0, 4.0, 9.0)], "forced": [run(forced, 2.5, **other)] * 3}
    return {"kind": "case", "id": id, "group": group, "temperature": 0.0, "runs": runs, "divergence": {}}


def test_there_are_cases_of_every_group_and_kind() -> None:
    groups = Counter(case.group for case in CASES if case.kind == "json_schema")
    assert set(groups) == set(GROUPS) and sum(groups.values()) >= 30
    assert {case.kind for case in CASES} == {"json_schema", "json", "regex", "choice", "gbnf"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_compiles_and_is_judged_as_the_constraint_does(case: Case) -> None:
    if case.kind == "json_schema":
        jsonschema.Draft202012Validator.check_schema(case.limit)
    constraint = Compiler(VOCABULARY).compile(case.grammar()).start()
    assert not constraint.is_complete
    assert case.complaint("?") is not None
    assert not may_be_written(constraint, VOCABULARY, "?")


@pytest.mark.parametrize(
    ("id", "good", "bad"),
    [
        ("record-moderation", json.dumps(REPORT), json.dumps({**REPORT, "decision": "ban"})),
        ("map-pattern", '{"FR": "Paris"}', '{"France": "Paris"}'),
        ("choice-sentiment", "negative", "negativ"),
        ("regex-date", "1969-07-20", "1969-7-20"),
        ("gbnf-list", "- fig\n- red plum\n- pear\n", "- fig\n- plum\n"),
        ("gbnf-arithmetic", "(2 + 4) * 4 = 24", "2 + = 24"),
        ("any-json", '{"name": "Mia", "age": 3}', '{"name": }'),
    ],
)
def test_good_and_bad_answers_are_told_apart(id: str, good: str, bad: str) -> None:
    [case] = (case for case in CASES if case.id == id)
    compiled = Compiler(VOCABULARY).compile(case.grammar())
    assert case.complaint(good) is None and case.complaint(bad) is not None
    assert may_be_written(compiled.start(), VOCABULARY, good)
    assert not may_be_written(compiled.start(), VOCABULARY, bad)


def test_cases_are_chosen_by_group_or_name() -> None:
    assert {case.group for case in load_cases(names=["record"])} == {"record"}
    assert {case.id for case in load_cases(names=["tool-any"])} == {"tool-any-alarm", "tool-any-shopping"}
    with pytest.raises(SystemExit, match="has no case nothing"):
        load_cases(names=["nothing"])


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "a", "kind": "tool", "prompt": "p"},
        {"id": "a", "kind": "x", "prompt": "p", "json": ""},
        {"json": ""},
    ],
)
def test_what_is_no_case_is_named(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(
        json.dumps({"id": "b", "kind": "tool", "prompt": "p", "json": ""}) + "\n" + json.dumps(bad)
    )
    with pytest.raises(SystemExit, match="line 2 is no case"):
        load_cases(path)


def test_calls_are_pooled_and_times_are_medians() -> None:
    rows = [HEAD, row("tool-a", "tool", 30), row("tool-b", "tool", 44), row("nested-person", "nested", 71)]
    text = "\n".join(report.section(Path("x.jsonl"), rows))
    assert "| tool | 2 | 1.00 | 0.37 | 2.00x (2.00–2.00) |" in text
    assert "- tool: 0.37 calls/token with forcing alone, goal 0.40: met; above it: tool-b 0.44" in text
    assert "- nested-person: 0.71 calls/token with forcing alone, goal 0.70: NOT met" in text
    assert "- all: 2.07x fewer calls than off, goal 1.3x: met" in text
    assert "| tool-a | 100 | 0.30 | 70 | 2.00x |" in text
    assert "valid: 18 of 18 finished texts; 0 were cut off" in text
    assert "- forced: masks took 0.40% of decoding, 100 µs a position" in text


def test_what_went_wrong_is_listed() -> None:
    wrong = row("tool-a", "tool", 30, complaint="$.x: no")
    wrong["divergence"] = {"forced": {"position": 7, "margin": 0.01}}
    failed = row("tool-b", "tool", 30)
    failed["runs"]["forced"] = [{"error": "it broke"}]
    slow = row("tool-c", "tool", 30, decode_s=6.0)
    cut = row("tool-d", "tool", 30, finish="length")
    text = "\n".join(report.section(Path("x.jsonl"), [HEAD, wrong, failed, slow, cut]))
    assert "- valid: 15 of 18 finished texts; 3 were cut off" in text
    assert text.count("INVALID tool-a forced: $.x: no") == 3
    assert "- errors: 1\n  - tool-b at 0 forced: it broke" in text
    assert "same tokens as off in 2 of 3 cases; apart: tool-a at 7 (margin 0.010)" in text
    assert "slower than 0.98x: tool-c forced 0.83x" in text


def bench(plan: Plan) -> Bench:
    vocabulary = FakeVocabulary("".join(map(chr, range(32, 127))))
    target = FakeModel(vocabulary, random_logits(vocabulary.size, seed=3), context_length=2048)
    session = Session(
        target, [SuffixDrafter()], template=ChatTemplate("{{ messages[0].content }}", bos="", eos="")
    )
    points = [CallPoint(n, 0.05 + 0.001 * n) for n in (1, 2, 4, 8, 16, 64)]
    return Bench(session, PairCosts(CallCosts(points, prefill_token_s=0.002), None), plan)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_a_case_is_answered_in_every_mode(temperature: float) -> None:
    [case] = load_cases(names=["record-moderation"])
    measured = bench(Plan(list(MODES.values()), num_tokens=400, repetitions=2)).measure(case, temperature)
    runs = measured["runs"]
    assert set(runs) == set(MODES) and all(len(found) == 2 for found in runs.values())
    assert all(
        run["finish"] == "stop" and run["complaint"] is None for found in runs.values() for run in found
    )
    assert all(run["target_calls"] == run["tokens"] and not run["drafted"] for run in runs["off"])
    assert all(set(run["drafted"]) == {"grammar"} for name in ("forced", "canonical") for run in runs[name])
    assert all(run["target_calls"] < run["tokens"] / 4 and run["forced"] > 100 for run in runs["forced"])
    assert all(case.complaint(text) is None for text in measured["texts"].values())
    if temperature == 0:
        assert measured["divergence"] == {} and len(set(measured["texts"].values())) == 1
    assert "INVALID" not in live.line(measured)


def test_a_schema_that_is_refused_is_an_error_of_its_runs() -> None:
    case = Case("x", "other", "Give a number.", "json_schema", {"not": {"type": "string"}})
    measured = bench(Plan([MODES["off"], MODES["forced"]], num_tokens=20, repetitions=1)).measure(case, 0.0)
    assert "not" in measured["runs"]["off"][0]["error"] and not measured["texts"]
    assert [mode for _, mode, _ in errors([measured])] == ["off", "forced"]
    assert "INVALID 1" in live.line(measured)


def test_the_suite_is_reported_by_file_and_reason() -> None:
    case = SuiteCase("not", "a case", {}, (("a test", 1, True),))
    found = Outcome(case, None, (Deviation("refused", "not", "a case", "a test"),))
    refused = Outcome(case, GrammarError("schema", "#/properties/x/not cannot be enforced"))
    text = "\n".join(suite.report([found, refused]))
    assert "1 of 2 schemas compile; on 1 of their 1 documents" in text
    assert "| not | 1 | 1 | 1 | 0 | 0 |" in text
    assert "| `not` cannot be enforced | 1 |" in text
    assert "- refused: not, a case: a test" in text
