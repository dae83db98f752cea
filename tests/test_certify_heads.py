"""A head that reads more than what was accepted is found, though no text changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from backends import MAINLINE
from head_files import write_eagle
from llama_cpp_models import TEXT
from outrider.backends.gguf import LoadOptions
from outrider.core.errors import SettingError
from outrider.drafters.model import ModelDrafter
from outrider.lab.certify.certificate import reasons
from outrider.lab.certify.checks import certify
from outrider.lab.certify.faults import check_fault
from outrider.lab.certify.plan import CertifyPlan, Findings, Subject
from outrider.policy import FixedPolicy
from outrider.session.pair import Pair
from tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

FEW = CertifyPlan(num_tokens=40, num_seeded=4, num_repeated=2, num_sampled=1, samples=20, repeats=1)
OPTIONS = LoadOptions(backend="llama.cpp", threads=1)
KINDS = ["glm4moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen35", "eagle3"))]


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """A target, and a file of its head where that has one."""
    folder, kind = tmp_path_factory.mktemp("certified"), request.param
    if kind == "eagle3":
        yield [write_tiny(folder / "t.gguf"), write_eagle(folder / "e.gguf", agrees=False)]
    else:
        yield [write_tiny(folder / "t.gguf", arch=kind, mtp_layers=1)]


def certified(files: list[Path], plan: CertifyPlan) -> Findings:
    policy = FixedPolicy(draft_max=3, p_min=0.0)
    with (
        closing(Pair.load(*files, options=OPTIONS)) as pair,
        pair.open(128, policy=policy, lookup=False) as session,
    ):
        drafters = session.engine.drafters
        draft = next((each.model for each in drafters if isinstance(each, ModelDrafter)), None)
        subject = Subject(session.target, drafters, policy, draft, pair.alignment)
        return certify(subject, [TEXT[:20], TEXT[20:40]], plan)


def test_a_head_that_reads_what_was_accepted_holds(files: list[Path]) -> None:
    found = certified(files, FEW)
    assert found.holds and [test.prompt for test in found.head] == [0, 1]
    assert all(test.places > 3 and test.difference < 0.01 for test in found.head)


def test_a_rejected_state_is_found_and_changes_no_text(files: list[Path]) -> None:
    found = certified(files, replace(FEW, fault=check_fault("rejected-state")))
    assert not found.holds and replace(found, head=()).holds
    [reason] = reasons(found)
    assert reason.startswith("head: in 2 of 2 texts it drafts from more than what was accepted")


def test_without_a_head_that_cannot_be_tested(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="none drafts here"):
        certified([write_tiny(tmp_path / "t.gguf")], replace(FEW, fault=check_fault("rejected-state")))
