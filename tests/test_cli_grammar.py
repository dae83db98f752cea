"""`outrider run` and `chat` with a limited output: its options, what is said, what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Call, refused, result
from outrider.cli.grammar import MAX_BYTES
from outrider.constraints.compiler import Compiled
from outrider.core.contracts import Constraint
from outrider.core.errors import ConstraintError

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["admin", "user", "guest"]},
        "email_verified": {"type": "boolean"},
        "two_factor": {"type": "boolean"},
    },
    "required": ["role", "email_verified", "two_factor"],
    "additionalProperties": False,
}
TEXT = json.dumps(RECORD)
PROSE = '{"type": "string", "minLength": 60}'


@pytest.fixture
def limited(outrider: Call, models: Path) -> Call:
    """A command with the tiny target, greedy, drafting by fixed lengths."""
    base = f"-m {models / 'chat.gguf'} -t 1 --temp 0 --policy fixed -n 120".split()
    return lambda command, *arguments, stdin="": outrider(command, *base, *arguments, stdin=stdin)


@pytest.fixture
def run(limited: Call) -> Call:
    return partial(limited, "run", "-p", "hello")


# What is asked for


def test_a_schema_comes_from_a_file_or_the_command_line(run: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text("\ufeff" + json.dumps(RECORD, indent=2) + "\n")
    outcomes = [
        run("--json-schema", str(file)),
        run("-j", TEXT),
        run("-jf", str(file)),
        run("--json-schema-file", str(file)),
        run("-j", f"  {TEXT}"),
    ]
    assert {outcome.status for outcome in outcomes} == {0}
    assert len({outcome.out for outcome in outcomes}) == 1
    answer = json.loads(outcomes[0].out)
    assert list(answer) == list(RECORD["properties"])
    assert answer["role"] in RECORD["properties"]["role"]["enum"]
    assert outcomes[0].out == json.dumps(answer) + "\n", "spaced, as Python writes it"


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--regex", "[ab]{3}-[0-9]{2}"], "[ab]{3}-[0-9]{2}"),
        (["--choice", "yes, of course", "--choice", "no"], "yes, of course|no"),
        (["--choice", 'a "quoted" one|x', "--choice", 'a "quoted" one|y'], r'a "quoted" one\|[xy]'),
        (["--grammar", 'root ::= "go " ("left" | "right")'], "go (left|right)"),
        (["--json-schema", '{"const": {"a": [1, 2]}}', "--json-style", "compact"], r'\{"a":\[1,2\]\}'),
        (["--json-mode", "-n", "3"], r"[\s\S]*"),
    ],
)
def test_every_kind_limits_the_output(run: Call, arguments: list[str], pattern: str) -> None:
    outcome = run(*arguments)
    assert outcome.status == (3 if "-n" in arguments else 0), outcome.err
    assert re.fullmatch(pattern, outcome.out.removesuffix("\n")), outcome.out


def test_grammars_come_from_files_of_both_kinds(run: Call, tmp_path: Path) -> None:
    (tmp_path / "g.gbnf").write_text('root ::= "go " way\nway ::= "left" | "right"\n')
    (tmp_path / "g.lark").write_text('start: "go " WAY\nWAY: "left" | "right"\n')
    inline = run("--grammar", 'root ::= "go " ("left" | "right")').out
    assert inline in ("go left\n", "go right\n")
    for name in ("--grammar", "--grammar-file"):
        for file in ("g.gbnf", "g.lark"):
            assert run(name, str(tmp_path / file)).out == inline


# What is said


def test_the_readout_says_what_forcing_saved(run: Call) -> None:
    err = run("-j", TEXT).err
    assert "structure " in err and "JSON of a schema, spaced" in err
    assert re.search(r"calls saved +[1-9][0-9]* by forced text", err)
    assert "masks and" in err and "canonical" not in err and "incomplete" not in err
    assert max(map(len, err.splitlines())) <= 80
    assert "structure" not in run().err


def test_json_has_counts_times_and_whether_it_is_complete(run: Call, models: Path) -> None:
    data = result(run("-j", TEXT, "--json", "-md", str(models / "draft.gguf")))
    assert data["complete"] is True and json.loads(data["text"])
    saved = [counts["calls_saved"] for counts in data["drafters"].values()]
    assert sum(saved) == data["generated_tokens"] - data["target_calls"]
    assert data["drafters"]["grammar"]["calls_saved"] > 0 < data["time_s"]["constraint"] < data["decode_s"]
    free = result(run("--json", "-n", "4"))
    assert free["complete"] is True and free["settings"]["grammar"] is None
    assert free["time_s"]["constraint"] == 0


def test_an_output_that_was_cut_off_is_said_to_be_incomplete(run: Call) -> None:
    outcome = run("-j", PROSE, "-n", "5")
    assert outcome.status == 3 and outcome.out.startswith('"')
    assert "note: the JSON is incomplete: token limit (-n)\n" in outcome.err
    assert "the JSON is incomplete" in run("-j", PROSE, "-n", "5", "-q").err
    assert "the text is incomplete" in run("--regex", "a{50}", "-n", "5").err
    data = json.loads(run("-j", PROSE, "-n", "5", "--json").out)
    assert data["complete"] is False and data["finish_reason"] == "length"
    stopped = run("--choice", "left or right", "-r", "or").err
    assert "incomplete: a stop text (-r)" in stopped and "; complete" not in stopped
    assert "; complete" in run("--choice", "left or right").err
    assert "the context is full" in run("--regex", "a{90}b", "-n", "-1", "-c", "48").err


def test_what_the_schema_keeps_silent_about_is_noted_before_the_answer(run: Call) -> None:
    odd = '{"type": "array", "items": {"type": "boolean"}, "uniqueItems": true, "maxItems": 2}'
    refused = run("-j", odd)
    assert refused.status == 2 and refused.out == "" and "uniqueItems" in refused.err
    lenient = run("-j", odd, "--lenient-schema")
    assert lenient.status == 0 and "uniqueItems" in lenient.err.split("target calls")[0]
    assert any(
        "uniqueItems" in notice for notice in result(run("-j", odd, "--lenient-schema", "--json"))["notices"]
    )


# Dead ends


class _Dead:
    """A constraint that has nothing left behind four tokens."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allowed(self, drafted: tuple[int, ...]) -> Any:
        if self._read + len(drafted) >= 4:
            raise ConstraintError("constrained output", "nothing may follow here")
        return self._inner.allowed(drafted)

    def accept(self, tokens: tuple[int, ...]) -> None:
        self._read += len(tokens)
        self._inner.accept(tokens)


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Compiled.start
    monkeypatch.setattr(Compiled, "start", lambda self: _Dead(sound(self)))


@pytest.mark.usefixtures("dead")
def test_a_dead_end_keeps_the_text_and_a_conversation_goes_on_behind_it(run: Call, limited: Call) -> None:
    outcome = run("--regex", "[a-z]{40}")
    assert outcome.status == 2 and re.fullmatch("[a-z]{4,}\n", outcome.out)
    assert outcome.err.splitlines()[-1] == "error: constrained output: nothing may follow here."
    outcome = limited("chat", "--regex", "[a-z]{40}", stdin="hello\nagain\n")
    assert outcome.status == 0 and outcome.err.count("nothing may follow here") == 2
    assert len(outcome.out.splitlines()) == 2


def test_every_answer_of_a_conversation_is_limited(limited: Call) -> None:
    outcome = limited("chat", "--choice", "yes", "--choice", "no", stdin="hello\nagain\n")
    assert outcome.status == 0
    assert [line in ("yes", "no") for line in outcome.out.splitlines()] == [True, True]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--regex", "a", "--json-mode"], "--json-mode and --regex: each says what the output may be"),
        (["-j", "true", "--choice", "a", "--grammar", "x"], "--json-schema and --choice and --grammar"),
        (["--json-style", "compact"], "--json-style: it says how output is limited, and nothing limits it"),
        (["--regex", "a", "--json-style", "compact"], "--json-style: --regex does not use it"),
        (["--json-mode", "--lenient-schema"], "--lenient-schema: --json-mode does not use it"),
        (
            ["--json-mode", "--json-style", "wide"],
            '--json-style: wide cannot be used: it has to be "spaced" or "compact".',
        ),
        (["--json-mode", "--constrain-after", ""], "--constrain-after: it has to be text with at least 1"),
        (
            ["--json-mode", "--ignore-eos"],
            "ignore end: a constrained output is over when",
        ),
        (["-j", "absent.json"], "schema absent.json: no such file or directory. --json-schema takes a"),
        (["-j", "."], "schema .: is a directory"),
        (["-j", ""], "--json-schema: it is empty"),
        (["-j", "empty.json"], "schema empty.json: it is empty"),
        (["-j", "latin.json"], "schema latin.json: it is not UTF-8 (byte 1 is 0xe9)"),
        (["-j", "large.json"], "schema large.json: it is larger than 1,000,000 bytes"),
        (["-j", '{"type": '], "line 1"),
        (["-j", '{"type": "integer", "minimum": 3, "maximum": 2}'], "minimum"),
        (["--grammar", "root ::= missing"], "missing"),
        (["--regex", "(a"], "regular expression"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text(" \n")
    (tmp_path / "latin.json").write_bytes(b"{\xe9}")
    (tmp_path / "large.json").write_text("[" * (MAX_BYTES + 1))
    assert complaint in refused(run(*arguments))
