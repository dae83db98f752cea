"""Heads in files of their own (EAGLE-3, MTP layers): which are taken, and which are refused and why."""

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from backends import IK, MAINLINE
from head_files import EVEN, OPTIONS, Files, write_eagle, write_files
from outrider.backends.gguf.options import LoadOptions
from outrider.drafters.model import ModelDrafter
from outrider.models.hub import HubOptions
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions
from tiny import Sizes
from tiny_gguf import MERGES, write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

THREE = FixedPolicy(draft_max=3, p_min=0.0)


@pytest.fixture(scope="module", params=["eagle3 llama", "mtp qwen35"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files whose head is right now and then."""
    return write_files(tmp_path_factory.mktemp("good"), request.param)


def test_a_file_of_heads_is_left_alone_where_bits_must_be_equal(good: Files) -> None:
    with closing(Pair.load(good.target, good.head, options=OPTIONS)) as pair:
        if not pair.target.rewinding.is_free:
            pytest.skip("calls of equal bits are for attention alone")
        with Session.open(pair, SessionOptions(128, policy=THREE, bitwise=True)) as session:
            assert any(n.startswith("head (") and n.endswith("bit-equal") for n in session.notices)
            assert not any(isinstance(drafter, ModelDrafter) for drafter in session.engine.drafters)


# What does not fit

WRONG_EAGLES: dict[str, dict[str, Any]] = {
    "states of 32 values, and those of target.gguf have 64": {"metadata": {"target_hidden_size": 32}},
    "reads layer 9, and target.gguf has 2": {"layers": (0, 1, 9)},
    "it reads 2 layers of its target": {"layers": (0, 1)},
    "with 2 of its own": {"layers_held": 2},
    "it knows 288 tokens, and target.gguf 289": {"merges": MERGES[:-1]},
    "these have other numbers": {"merges": MERGES[::-1]},
    "names some twice": {"drafted": (1, 2, 2)},
    "none of its 289": {"drafted": (1, 289)},
    "it takes embeddings or output from its target": {"sizes": Sizes(width=128, kv_heads=2)},
    "fc.weight": {"left_out": ("token_embd.weight", "fc.weight")},
    "dies at its first call (SIGABRT)": {"metadata": {"rope.dimension_count": 64}},
    "computes it wrongly": {"layers": (0, 1, 2)},  # llama.cpp gives no such state of Llama models
}


@pytest.mark.parametrize("why", WRONG_EAGLES)
def test_an_eagle3_head_that_does_not_fit_is_refused(why: str, tmp_path: Path) -> None:
    made = {"agrees": False, **WRONG_EAGLES[why]}
    if "layers_held" in made:
        made["metadata"] = {"block_count": made.pop("layers_held")}
    target = write_tiny(tmp_path / "target.gguf")
    assert why in Files(target, write_eagle(tmp_path / "head.gguf", **made)).why_refused()


WRONG_LAYERS: dict[str, dict[str, Any]] = {
    "made for a model of kind glm4moe of 2 layers, 64 wide": {"arch": "glm4moe"},
    "of kind qwen35 of 8 layers, 64 wide, and the target is qwen35 of 4": {"arch": "qwen35", "layers": 8},
    "of 4 layers, 128 wide": {"arch": "qwen35", "sizes": Sizes(width=128)},
    "a reduced vocabulary (d2t: 145 tokens of 289), which is not supported": {
        "arch": "qwen35",
        "drafted": EVEN,
    },
    "it holds 2 MTP layers, and llama.cpp runs one of kind qwen35": {"arch": "qwen35", "mtp_layers": 2},
}


@pytest.mark.parametrize("why", WRONG_LAYERS)
def test_mtp_layers_of_another_model_are_refused(why: str, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", arch="qwen35")
    made: dict[str, Any] = {"mtp_layers": 1, "part": "heads", **WRONG_LAYERS[why]}
    assert why in Files(target, write_tiny(tmp_path / "head.gguf", **made)).why_refused()


def test_targets_and_libraries_that_give_no_states_are_named(tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head.gguf")
    other = write_tiny(tmp_path / "other.gguf", arch="qwen2moe")
    assert "dies at its first call" in Files(other, head).why_refused()
    target = write_tiny(tmp_path / "target.gguf")
    missing = patch("outrider.backends.gguf.heads._LAYER_SIGNATURES", {"llama_no_such_call": (None,)})
    with missing:
        why = Files(target, head).why_refused()
    assert (
        why
        == "it holds an EAGLE-3 head, and llama.cpp cannot run it here: it has no function llama_no_such_call"
    )
    if IK:
        assert "ik_llama.cpp cannot run it" in Files(target, head).why_refused(LoadOptions(backend="ik"))


def test_the_library_that_runs_heads_is_taken_for_both(tmp_path: Path) -> None:
    files = write_files(tmp_path, "eagle3 llama")
    with closing(Pair.load(files.target, files.head, options=LoadOptions(threads=1))) as pair:
        assert pair.target.library.backend == "llama.cpp"
        line = "head holds an EAGLE-3 head, which llama.cpp alone runs: it is used for both"
        assert line in pair.notices


def test_a_head_that_is_found_beside_the_target_is_taken(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", layers=6)
    write_eagle(tmp_path / "head.gguf")
    write_eagle(tmp_path / "a-wrong-eagle3.gguf", layers=(0, 1, 9))
    write_tiny(tmp_path / "small.gguf", layers=1)
    with closing(Pair.load(target, "auto", options=OPTIONS, hub=HubOptions(offline=True))) as pair:
        assert pair.draft_name == "head"
        assert any(line.startswith("-md auto takes head.gguf (") for line in pair.notices)
        assert any("a-wrong-eagle3.gguf" in line and "reads layer 9" in line for line in pair.notices)


def test_a_found_head_that_cannot_run_is_passed_over(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target.gguf", arch="qwen2moe", layers=6)
    write_eagle(tmp_path / "head.gguf")
    with closing(Pair.load(target, "auto", options=OPTIONS, hub=HubOptions(offline=True))) as pair:
        assert pair.draft is None or pair.draft_name != "head"
        assert any(line.startswith("-md auto skips head.gguf: ") for line in pair.notices)
