"""`outrider verify` as its users run it, on tiny models."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cli_helpers import Call, Outcome
from outrider.cli import verify as command
from outrider.cli.settings import VerifySettings
from outrider.core.params import Verification
from outrider.lab.certify.certificate import BESIDE, REPEATED
from outrider.lab.certify.sampled import CertifyPlan
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.hub import cache_dir

EMBEDDED = cache_dir() / "models" / EMBEDDED_NAME
RECORD = json.dumps(
    {
        "type": "object",
        "properties": {"role": {"enum": ["admin", "user", "guest"]}, "active": {"type": "boolean"}},
        "required": ["role", "active"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def verify(outrider: Call, monkeypatch: pytest.MonkeyPatch, models: Path, tmp_path: Path) -> Call:
    """The command with the tiny pair, in a folder of its own, with far fewer samples than --quick takes, and
    one rule of the three."""
    monkeypatch.chdir(tmp_path)
    make_plan = command.make_plan
    pair = ("-m", str(models / "chat.gguf"), "-md", str(models / "draft.gguf"))

    def run(*arguments: str, stdin: str = "", samples: int = 30) -> Outcome:
        def small(settings: VerifySettings, verification: Verification) -> CertifyPlan:
            return replace(make_plan(settings, verification), samples=samples, repeats=3, significance=0.01)

        monkeypatch.setattr(command, "make_plan", small)
        base = ("verify", *pair, "-t", "1", "--quick", "-n", "8", "--rule", "token")
        return outrider(*base, *arguments, stdin=stdin)

    return run


def test_a_sound_pair_holds(verify: Call, tmp_path: Path, models: Path) -> None:
    outcome = verify("--rule", "auto")
    assert outcome.status == 0
    stages = [line.partition(":")[0] for line in outcome.err.splitlines()]  # no terminal: lines, not bars
    said = ["loading the models", "models' hashes", "greedy texts", "seeded texts", "samples"]
    assert list(dict.fromkeys(stages)) == said
    assert outcome.out.startswith("HOLDS") and "outrider-verify.json" in outcome.out
    assert len(outcome.out.splitlines()) < 24 and max(map(len, outcome.out.splitlines())) <= 80
    document = json.loads((tmp_path / "outrider-verify.json").read_text())
    assert document["verdict"] == "holds" and document["speculates"] is True and not document["stand_in"]
    [file] = document["models"]["draft"]["files"]
    assert file["bytes"] == (models / "draft.gguf").stat().st_size and len(file["sha256"]) == 64
    assert document["settings"]["policy"]["draft_max"] == 8 and document["settings"]["target"]["threads"] == 1
    assert document["machine"]["logical_cores"] == os.cpu_count()
    assert set(document["versions"]) == {"outrider", "llama_cpp", "numpy", "python"}


def test_an_injected_fault_fails(verify: Call, tmp_path: Path) -> None:
    outcome = verify("--inject", "no-residual", "-o", "broken.json")
    assert outcome.status == 1
    assert outcome.out.startswith("DOES NOT HOLD") and "fault injected: no-residual" in outcome.out
    document = json.loads((tmp_path / "broken.json").read_text())
    assert document["plan"]["fault"] == "no-residual" and document["reasons"]


def test_bit_equal_text_is_the_stronger_verdict(verify: Call) -> None:
    document = json.loads(verify("--bitwise", "--rule", "auto", "--json", "-p", "a b", "-p", "c").out)
    assert document["verdict"] == "holds" and document["kind"] == "bit-equal"
    assert document["compared_logits"] > 0 and document["settings"]["bitwise"] is True
    assert len(document["texts"]["greedy, beside another request"]) == 1
    document = json.loads(verify("--no-bitwise", "--json", "-p", "a b").out)
    assert document["kind"] == "equal but for near-ties" and document["compared_logits"] == 0


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [("-n 1", "HOLDS, BUT NO TEXT MET A DRAFT"), ("--draft-max 0", "HOLDS, BUT NOTHING WAS SPECULATED")],
)
def test_a_verdict_says_what_it_is_worth(verify: Call, arguments: str, verdict: str) -> None:
    outcome = verify(*arguments.split())
    assert outcome.status == 0 and outcome.out.startswith(verdict), outcome.out


def test_prompts_come_from_lines(verify: Call, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\r\n")
    small = ("--json", "--draft-max", "0")
    given = json.loads(verify("-f", "p.txt", "-p", "zero", *small).out)["prompts"]
    assert given == ["zero", "one", "two"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--inject", "sloppy"], "'sloppy' is not a known fault"),
        (["--rule", "best"], "--rule: best cannot be used"),
        (["-n", "0"], "--predict: 0 cannot be used"),
        (["--seed", "-3"], "--seed: -3 cannot be used"),
        (["-p", ""], "prompt 1: it is empty"),
        (["-f", "absent.txt"], "absent.txt: no such file"),
        (["-o", "nowhere/c.json"], "its folder does not exist"),
        (["-o", "."], "it is a folder"),
        (["-f", "other.jsonl", "-o", "other.jsonl"], "it exists, and is no .json file"),
        (["-p", "word " * 600], "prompt 1: its"),
        (["--inject", "unmasked-drafts"], "there is none"),
        (["-j", '{"type": 7}'], "type"),
        (["--json-style", "compact"], "nothing limits it"),
    ],
)
def test_what_cannot_run_is_one_message(
    verify: Call, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('"fine"\nnot json\n')
    (tmp_path / "other.jsonl").write_text('{"text": 3}\n')
    before = sorted(tmp_path.iterdir())
    outcome = verify("--draft-max", "0", *arguments)
    assert outcome.status == 2 and outcome.out == ""
    assert outcome.err.count("error: ") == 1 and complaint in outcome.err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


# Constrained outputs


def test_a_sound_pair_holds_under_a_schema(verify: Call, tmp_path: Path) -> None:
    outcome = verify("-n", "24", "-j", RECORD, "-o", "c.json", samples=60)
    assert outcome.status == 0, outcome.out + outcome.err
    shown = " ".join(outcome.out.split())
    assert "structure JSON of a schema, spaced" in shown and "HOLDS" in shown
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["plan"]["grammar"]["text"] == RECORD
    assert document["counts"]["drafted_tokens"] > 0
    tests = document["sampled"]
    assert any("forced text" in test["setting"] for test in tests)
    assert all(test["cells"] > 1 for test in tests)


needs_embedded = pytest.mark.skipif(not EMBEDDED.exists(), reason="`outrider run` fetches it; tests do not")


@pytest.mark.slow
@needs_embedded
@pytest.mark.parametrize("backend", ["llama.cpp", "ik"])
def test_bit_equal_text_of_the_embedded_model_holds_and_unequal_calls_do_not(
    verify: Call, backend: str
) -> None:
    asked = ("Repeat this line three times: The quick brown fox jumps over the lazy dog.", "Count to nine.")
    usual = ("-m", str(EMBEDDED), "-md", "none", "--backend", backend, "--bitwise", "--rule", "stable")
    given = (*usual, "-n", "24", *(part for text in asked for part in ("-p", text)), "--json")
    sound = verify(*given, samples=20)
    if "is not installed" in sound.err:
        pytest.skip(sound.err)
    document = json.loads(sound.out)
    assert document["verdict"] == "holds" and document["kind"] == "bit-equal", document["reasons"]
    compared = [part for name, parts in document["texts"].items() if name != REPEATED for part in parts]
    assert document["compared_logits"] == sum(part["tokens"] for part in compared) > 0
    assert sum(part["counts"]["drafted_tokens"] for part in document["texts"][BESIDE]) > 0
    broken = verify(*given, "--inject", "unequal-calls", samples=20)
    assert broken.status == 1 or "changes nothing" in broken.err
    assert broken.status == 2 or any("logits" in reason for reason in json.loads(broken.out)["reasons"])
