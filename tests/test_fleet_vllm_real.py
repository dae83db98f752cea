"""Outrider's proposer in a real vLLM: OUTRIDER_VLLM names a Python that has it, if this one has not."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_helpers import ROOT
from outrider.models.embedded import embedded_default

PYTHON = os.environ.get("OUTRIDER_VLLM") or (sys.executable if find_spec("vllm") else None)


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON is None, reason="vLLM is not installed, and OUTRIDER_VLLM names no Python that has it"
)
def test_texts_are_those_of_plain_decoding_and_drafts_are_accepted(tmp_path: Path) -> None:
    speculation = {"model": "outrider.fleet.vllm.Proposer", "num_speculative_tokens": 8}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    found = []
    for config in (None, speculation):
        command = [str(PYTHON), str(ROOT / "tests" / "vllm_program.py"), str(embedded_default())]
        command += [str(tmp_path / "model"), json.dumps(config)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "nothing is drafted any more" not in done.stdout + done.stderr
        found.append(
            json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tokens')))
        )
    plain, drafted = found
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["accepted"] > 0
