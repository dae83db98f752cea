"""What a plan exports: what each engine is started with, against that engine's own parser."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from cli_helpers import Call
from outrider.lab.plan.acceptance import Acceptance
from outrider.lab.plan.calls import PlannedModel, machine_of
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.exports import ENGINES, Export
from outrider.lab.plan.plan import Asked, make_plan
from outrider.lab.plan.shapes import HEADS, find_shape, head_of

KNOWN = catalogue()
PARSE = """
import ctypes, glob, sys, xllamacpp
# llama.cpp's own parser, as the wheel exports it: bool common_params_to_map(argc, argv, SERVER, std::map&).
library = ctypes.CDLL(glob.glob(xllamacpp.__path__[0] + "/*.so")[0])
parse = library["_Z20common_params_to_mapiPPc13llama_exampleRSt3map"
                "I10common_argSsSt4lessIS3_ESaISt4pairIKS3_SsEEE"]
parse.restype = ctypes.c_bool
words = [word.encode() for word in sys.argv[1:]]
found = (ctypes.c_uint64 * 6)()  # an empty std::map of libstdc++
found[3] = found[4] = ctypes.addressof(found) + 8
assert parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None), 12, ctypes.byref(found))
print(found[5])
"""


def planned(
    *drafts: str,
    target: str = "llama-3.1-70b",
    on: str = "h100x4",
    batches: Sequence[int] = (1, 32),
    lookup: float | None = None,
    acceptance: float = 0.8,
) -> Any:
    machine, shape = machine_of(on, KNOWN), find_shape(target, KNOWN)
    shapes = [head_of(shape, name) if name in HEADS else find_shape(name, KNOWN) for name in drafts]
    asked = Asked(
        PlannedModel(shape, (machine,)),
        [PlannedModel(draft, (machine,), acceptance=Acceptance.of(acceptance)) for draft in shapes],
        batches,
        2048,
        machine,
        None if lookup is None else Acceptance.of(lookup),
    )
    return make_plan(asked)


CASES: dict[str, dict[str, Any]] = {
    "draft": {"drafts": ["llama-3.2-1b"]},
    "draft at fewer bits": {"drafts": ["llama-3.2-1b:fp8"], "target": "llama-3.1-70b:fp8"},
    "lookup": {"drafts": [], "lookup": 0.6},
    "both": {"drafts": ["llama-3.2-1b"], "lookup": 0.6},
    "mtp": {"drafts": ["mtp"], "target": "deepseek-v3", "on": "h200x8"},
    "eagle3": {"drafts": ["eagle3"]},
    "nothing": {"drafts": ["llama-3.1-8b"], "acceptance": 0.01},
    "one": {"drafts": ["llama-3.2-1b"], "on": "mi300x", "batches": [1]},
}


def exported(case: str, engine: str) -> Export:
    options = dict(CASES[case])
    return ENGINES[engine](planned(*options.pop("drafts"), **options))


def test_vllm_gets_the_draft_and_its_length() -> None:
    found = exported("draft", "vllm")
    assert found.config is not None
    assert found.config["method"] == "draft_model"
    assert found.config["model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert found.command[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"]
    assert json.loads(found.command[-1]) == found.config
    assert "min_p" in found.script and "logit_bias" in found.script
    assert shlex.split(found.script.splitlines()[-1]) == found.command


def test_nothing_is_exported_where_nothing_pays() -> None:
    for engine in ENGINES:
        found = exported("nothing", engine)
        assert found.config is None and "no draft is expected to pay" in found.script
        assert "spec" not in " ".join(found.command)


@pytest.mark.parametrize("case", CASES)
def test_llama_servers_own_parser_takes_the_command(case: str) -> None:
    pytest.importorskip("xllamacpp")
    if sys.platform != "linux":
        pytest.skip("the layout of its std::map is libstdc++'s")
    command = exported(case, "llama-server").command
    ran = subprocess.run([sys.executable, "-c", PARSE, *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    refused = subprocess.run(
        [sys.executable, "-c", PARSE, "llama-server", "--no-such"], capture_output=True, text=True
    )
    assert "invalid argument" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "nothing"])
def test_vllms_own_config_takes_it(case: str) -> None:
    vllm_config = pytest.importorskip("vllm.config.speculative", reason="vLLM is not installed")
    config = exported(case, "vllm").config
    assert config is not None
    fields = vllm_config.SpeculativeConfig.__dataclass_fields__
    assert set(config) <= set(fields)


def test_the_command_prints_a_script_or_json(outrider: Call) -> None:
    words = ("plan", "--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--on", "h100x4", "--batch", "1")
    script = outrider(*words, "--export", "vllm")
    assert script.status == 0 and script.out.splitlines()[-1].startswith("vllm serve meta-llama")
    assert all(line.startswith("# ") for line in script.out.splitlines()[:-1])
    found = json.loads(outrider(*words, "--export", "vllm", "--json").out)
    assert shlex.join(found["command"]) == script.out.splitlines()[-1]
    assert found["config"]["num_speculative_tokens"] >= 1
