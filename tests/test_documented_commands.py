"""Every command line of the README and of docs/: the program takes it, and (slow) carries it out."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from cli_helpers import call
from outrider.cli import commands
from outrider.cli.main import app
from outrider.cli.output import INCOMPLETE
from outrider.core.schema import Group
from tiny_gguf import write_tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_INLINE = re.compile(r"`outrider ([a-z][^`]* [^`]*)`")
_PATTERN = re.compile(r"\[-|\|[A-Z]|…(?!\")|^bench [a-z]+$|^run --json$")
"""How a command is called, not a line to be typed."""
_LINE = re.compile(r"^(?:    |\$ |)(?:\.venv/bin/)?outrider (.+)$")
_MADE = re.compile(r"^    echo '(.+)' > (\S+)$", re.MULTILINE)
"""A file that an example writes."""


def documented() -> Iterator[tuple[str, str]]:
    """Page and command line of each; lines that a backslash continues are one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        in_block = False
        for line in text.splitlines():
            if line.startswith("```"):
                in_block = not in_block
            elif (in_block or line.startswith("    ")) and (found := _LINE.match(line)):
                yield page.name, found[1]
            else:
                yield from ((page.name, code) for code in _INLINE.findall(line))


COMMANDS = sorted({(page, line) for page, line in documented() if not _PATTERN.search(line)})


def words_of(line: str) -> list[str]:
    """The arguments of a line, up to a comment, a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))


def test_there_are_such_lines() -> None:
    assert len(COMMANDS) > 35
    assert {command.split()[0] for _, command in COMMANDS} >= {
        "run",
        "serve",
        "check",
        "bench",
        "verify",
    }


def test_an_example_that_generates_ends_and_gives_the_same_text_again() -> None:
    for page, line in COMMANDS:
        words = words_of(line)
        if words[0] == "run":
            assert "-n" in words, (page, line)
            assert "--temp" in words or "--seed" in words, (page, line)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_the_program_takes_it(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[Group] = []

    def carry_out(_: commands.CommandSpec, settings: Group) -> int:
        carried_out.append(settings)
        return 0

    monkeypatch.setattr(commands, "_carry_out", carry_out)
    words = words_of(line)
    with pytest.raises(SystemExit) as ended:
        app(words, prog_name="outrider")
    assert ended.value.code == 0, (page, line)
    assert carried_out or set(words) & {"--help", "-h", "--version"}


# Carried out

MODELS = ("target", "draft", "other", "big", "big-2", "small", "drafts/a", "drafts/b", "model-f16")
QWEN = ("qwen2.5-coder-1.5b-instruct-q4_k_m", "qwen2.5-coder-0.5b-instruct-q4_k_m")
TEXTS = {
    "src/parser.py": "def parse(text):\n    return text.split()\n",
    "docs/style.md": "Write short sentences.\n",
    "parser.py": "def parse(text):\n    return text.split()\n",
    "old.py": "def old():\n    return 1\n",
    "request.txt": "Write it again.",
    "edit_request.txt": "Rename it.",
    "mine.jsonl": '{"prompt": "Hello"}\n{"prompt": "Name a river."}\n',
    "requests.log": '{"prompt": "Hello"}\n{"prompt": "Name a sea."}\n',
}
"""Files that the documents name; models are tiny ones."""
MEANT = {
    "TARGET": "target.gguf",
    "DRAFT": "draft.gguf",
    "FOLDER": "measured",
    "A": "measured",
    "B": "measured",
}
MEANT |= {"[FILE]": "settings.toml", "FILE.csv": "rows.csv"}
"""What is typed in the place of a word in capitals."""
SMALL_SWEEP = ["--minutes", "0.1", "--prompts", "1", "-n", "16"]
ADDED = {"bench": SMALL_SWEEP, "verify": ["--quick"], "serve": ["--port", "0"]}
"""Options that bound what else takes minutes, or would take a port that is in use."""
LEFT_OUT = {
    "setup --native": "compiles for minutes; tests of native builds do so on request",
    "distill": "trains for an hour; its own tests train for seconds",
    "hf:": "needs the hub",
    "--contestant": "needs other engines",
    "--ray": "needs a cluster; test_cluster_ray.py has some",
}
STATUSES = {"--inject": (1,), "check": (0, 1), "trim": (0, 1)}
"""Exit statuses that may not be 0: a broken rule is found, and random models make no draft that pays."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that are named."""
    folder = tmp_path_factory.mktemp("typed")
    for page in PAGES:
        for text, name in _MADE.findall(page.read_text(encoding="utf-8")):
            (folder / name).write_text(text)
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "drafts").mkdir()
    for name in (*MODELS, *QWEN):
        write_tiny(folder / f"{name}.gguf", context_length=4096, chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def swept(place: Path) -> Path:
    """The same folder with a sweep that was measured."""
    typed(place, ["bench", "-m", "target.gguf", "--out", "measured", *SMALL_SWEEP])
    return place


def typed(folder: Path, words: Sequence[str], statuses: Sequence[int] = (0,)) -> None:
    """Run the program there; a server until it is ready."""
    command = [sys.executable, "-m", "outrider", *words]
    quiet, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    said, is_ended = [], False
    with subprocess.Popen(command, cwd=folder, stdin=quiet, stdout=pipe, stderr=both, text=True) as program:
        for line in program.stdout or ():
            said.append(line)
            if line.startswith(("ready", "{")) and words[0] == "serve" and not is_ended:  # or a log in JSON
                program.terminate()  # once: a second signal would end it before its time
                is_ended = True
    assert program.returncode in statuses, "".join(said)
    assert "Traceback" not in "".join(said)


RUNS = sorted({line for _, line in COMMANDS if words_of(line)[0] == "run"})


@pytest.mark.parametrize("line", RUNS)
def test_an_answer_is_generated_as_it_is_written(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """By a tiny model of random weights, which an example with a schema may not end in its tokens."""
    monkeypatch.chdir(place)
    words = words_of(line)
    model = [] if "-m" in words else ["-m", "target.gguf"]
    done = call(monkeypatch, capfdbinary, words[0], *model, *words[1:])
    assert done.status == 0 or (done.status == INCOMPLETE and "--json-schema" in words), done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS}))
def test_the_program_carries_it_out(line: str, swept: Path) -> None:
    for part, reason in LEFT_OUT.items():
        if part in line:
            pytest.skip(reason)
    words = [MEANT.get(word, word) for word in words_of(line)]
    command = " ".join(words[:2])
    if words[0] in ADDED and command not in ("bench compare", "bench export", "bench init"):
        words += ADDED[words[0]]
    if words == ["bench", *SMALL_SWEEP] or ("--backend" in words and "-m" not in words):
        words += ["-m", "target.gguf"]  # not the embedded default, which takes minutes
    if words[0] == "bench" and "-n" in words:
        words += ["--out", f"sweep-{abs(hash(line))}"]  # a folder holds one sweep
    trimmed = swept / "small.trimmed.gguf"
    trimmed.unlink(missing_ok=True)
    if words[0] != "trim":  # what it writes is there for the others
        shutil.copy(swept / "small.gguf", trimmed)
    typed(swept, words, next((found for part, found in STATUSES.items() if part in words), (0,)))
