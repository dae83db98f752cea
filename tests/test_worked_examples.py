"""The worked examples of CONTRIBUTING.md: each is put where it says, and does what it promises."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines import GREEDY, PROMPT, language_model, plain
from formats_samples import HERMES, TOOLS, VOCABULARY, Read, template
from outrider import Session
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.backends.gguf import libraries
from outrider.constraints import sources
from outrider.core.data import Grammar, Request
from outrider.core.errors import GrammarError
from outrider.drafters import registry as drafters
from outrider.engine import Engine
from outrider.formats import format_of, syntaxes
from outrider.lab.bench.results import Results
from outrider.policy.fixed import FixedPolicy

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SWEEP = ROOT / "benchmarks" / "sweep" / "results" / "sweep"


def example(heading: str, module: ModuleType) -> dict[str, Any]:
    """The names of a module, and what the example under a heading defines with them."""
    [block] = re.findall(rf"^## {heading}.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:1]
    assert block.count("\n") <= 40, "a worked example has at most 40 lines"
    names = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + block, heading, "exec"), names)
    return names


def test_a_drafter() -> None:
    again = example("Example: a drafter", drafters)["AgainDrafter"]
    request = Request(PROMPT, GREEDY, max_tokens=40, ignore_end=True)
    drafted = Engine(language_model(), [again()], FixedPolicy(draft_max=4, p_min=0)).generate(request)
    assert drafted.tokens == plain(language_model(), request)[0]
    assert {"again"} == {name for record in drafted.records for name in record.draft.sources}


def test_a_kind_of_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KINDS", dict(sources.KINDS))
    example("Example: a kind of grammar", sources)
    letters = FakeVocabulary("0123456789ab")
    session = Session(FakeModel(letters, random_logits(letters.size)))
    text = session.generate("ab", grammar=Grammar("digits", "4"), sampling=GREEDY).text
    assert re.fullmatch("[0-9]{4}", text)
    with pytest.raises(GrammarError, match="is not a number"):
        session.generate("ab", grammar=Grammar("digits", "four"))


def test_a_chat_format(monkeypatch: pytest.MonkeyPatch) -> None:
    called = example("Example: a chat format", syntaxes)["CALLED"]
    monkeypatch.setattr(syntaxes, "SYNTAXES", (*syntaxes.SYNTAXES, called))
    source = HERMES.replace("<tool_call>\n", "<call>").replace("\n</tool_call>", "</call>")
    source = source.replace(
        '{"name": "{{ call.function.name }}", "arguments": ', "{{ call.function.name }}: "
    )
    known = format_of(template(source.replace(" | tojson }}}", " | tojson }}")), VOCABULARY)
    assert known.name == "called"
    found = Read(known.reader(TOOLS), 'Well.\n<call>get_weather: {"city": "Ulm"}</call>')
    assert (found.content, found.calls) == ("Well.", [("get_weather", '{"city": "Ulm"}')])


def test_a_picture() -> None:
    prompts: Callable[[Results], Any] = example(
        "Example: a picture", import_module("outrider.lab.bench.report")
    )["prompts"]
    made = prompts(Results.read(SWEEP))
    assert len(made.bars) == len(made.rows) > 0 and max(made.bars) == 100


def test_a_native_library() -> None:
    fork = example("Example: a native library", libraries)["Fork"]
    assert issubclass(fork, libraries.DIALECTS[-1]) and all(
        fork.marker != each.marker for each in libraries.DIALECTS
    )
