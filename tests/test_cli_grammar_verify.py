"""`outrider verify` of constrained outputs, on tiny models and on the embedded one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli_helpers import TEMPLATE, Outcome, call
from outrider.cli import verify as command
from outrider.cli.settings import VerifySettings
from outrider.core.params import Verification
from outrider.lab.certify.plan import CertifyPlan
from outrider.models import cache_dir
from outrider.models.embedded import EMBEDDED_NAME
from tiny_gguf import write_tiny

Call = Callable[..., Outcome]

EMBEDDED = cache_dir() / "models" / EMBEDDED_NAME
RECORD = json.dumps(
    {
        "type": "object",
        "properties": {"role": {"enum": ["admin", "user", "guest"]}, "active": {"type": "boolean"}},
        "required": ["role", "active"],
        "additionalProperties": False,
    }
)
MAKE_PLAN = command.make_plan


def small(settings: VerifySettings, verification: Verification) -> CertifyPlan:
    return replace(MAKE_PLAN(settings, verification), samples=60, significance=0.01)


@pytest.fixture
def verify(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Call:
    """The command with a tiny pair and few samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "make_plan", small)
    write_tiny(tmp_path / "target.gguf", chat_template=TEMPLATE)
    write_tiny(tmp_path / "draft.gguf", noise=0.3, chat_template=TEMPLATE)
    base = ("verify", "-m", "target.gguf", "-md", "draft.gguf", "-t", "1", "--quick", "-n", "24")
    return lambda *arguments: call(monkeypatch, capfdbinary, *base, "--rule", "token", *arguments)


@pytest.mark.parametrize("mode", ["exact", pytest.param("canonical", marks=pytest.mark.slow)])
def test_a_sound_pair_holds_under_a_schema(verify: Call, tmp_path: Path, mode: str) -> None:
    outcome = verify("-j", RECORD, "--fast-forward", mode, "-o", "c.json")
    assert outcome.status == 0, outcome.out + outcome.err
    shown = " ".join(outcome.out.split())
    assert "structure JSON of a schema, spaced" in shown and "HOLDS" in shown
    assert ("exact relative to the canonical tokenization" in shown) == (mode == "canonical")
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["plan"]["grammar"]["text"] == RECORD
    assert document["settings"]["grammar"]["fast_forward"] == mode
    assert document["counts"]["drafted_tokens"] > 0
    tests = document["sampled"]
    assert any("forced text" in test["setting"] for test in tests)
    assert all(test["cells"] > 1 for test in tests)


def test_a_broken_mask_is_found(verify: Call) -> None:
    outcome = verify("--choice", "a bad idea", "--choice", "a good idea", "--inject", "unmasked-drafts")
    assert outcome.status == 1 and outcome.out.startswith("DOES NOT HOLD")
    assert "impossible texts" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--inject", "unmasked-drafts"], "there is none"),
        (["-j", '{"type": 7}'], "type"),
        (["--json-style", "compact"], "nothing limits it"),
    ],
)
def test_what_cannot_be_tested_is_one_message(verify: Call, arguments: list[str], complaint: str) -> None:
    outcome = verify(*arguments)
    assert outcome.status == 2 and outcome.out == "" and complaint in outcome.err
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not EMBEDDED.exists(), reason="`outrider run` fetches the model; tests do not")
def test_the_embedded_model_holds_under_a_schema(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "make_plan", small)
    outcome = call(
        monkeypatch, capfdbinary, "verify", "--quick", "-n", "60", "-j", RECORD, "-p", "Describe a user."
    )
    assert outcome.status == 0, outcome.out + outcome.err
    document = json.loads((tmp_path / "outrider-verify.json").read_text())
    assert document["verdict"] == "holds" and document["counts"]["accepted_tokens"] > 0
