"""Models that go back to copies of their state alone, where conversations turn: only what is new is read. And
texts that left a model of any kind and came back: their answers go on as if never gone."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import cast

import numpy as np

from backends import Backend, backend, over
from engines import GREEDY, PROMPT, language_model, plain
from kinds import KINDS
from llama_cpp_models import TEXT
from outrider.backends.rewinding import LAST_TURNS, MAX_TURNS, Rewinder
from outrider.core.contracts import CHECKPOINTS, Model, SavingModel
from outrider.core.data import Completion, Request, Span
from outrider.engine import Engine
from outrider.engine.tiers import Disk, KvTiers

__all__ = ["backend"]  # pytest finds the fixture by its name

SYSTEM, MESSAGE, LAST = TEXT[:100], TEXT[110:410], TEXT[20:110]


def request(*messages: Sequence[int], control: int, max_tokens: int = 8) -> Request:
    """Messages with a control token between each two."""
    tokens = [token for message in messages for token in (*message, control)][:-1]
    return Request(tuple(tokens), GREEDY, max_tokens=max_tokens, ignore_end=True)


def tiers_of(model: Model, folder: Path, memory: int) -> KvTiers:
    disk = Disk(folder, "a tiny model", 2**30)
    return KvTiers(cast(SavingModel, model), memory_bytes=memory, disk=disk)


def control_of(model: Model) -> int:
    return max(token for token in range(model.vocabulary.size) if model.vocabulary.is_control(token))


@over("recurrent", "hybrid", "delta net", "convolution", "window")
def test_only_what_is_new_is_read(backend: Backend, kind: str, tmp_path: Path) -> None:
    def opened() -> Model:
        return backend.open(kind, 1024, max_sequences=2)

    def is_cold(asked: Request, completion: Completion) -> bool:
        with closing(opened()) as cold:
            return Engine(cold).generate(asked).tokens == completion.tokens

    with closing(opened()) as model:
        control = control_of(model)
        whole = request(SYSTEM, MESSAGE, LAST, control=control)
        turns = {
            "a shared system prompt": (request(SYSTEM, LAST, MESSAGE[:50], control=control), 100),
            "an edited last message": (request(SYSTEM, MESSAGE, LAST[5:], control=control), 401),
            "an answer that is left out": (
                replace(whole, prompt=(*whole.prompt, control, *SYSTEM[:30])),
                len(whole.prompt) - 16,
            ),
        }
        tiers = tiers_of(model, tmp_path / "kv", 2**30)
        engine = Engine(model, kv_store=tiers)
        for asked, reused in turns.values():
            assert engine.generate(whole).reused_tokens in (0, len(whole.prompt) - 16)
            completion = engine.generate(asked)
            assert reused <= completion.reused_tokens <= reused + 16 * (kind == "window")
            assert is_cold(asked, completion)
        tiers.will_close(monotonic() + 60)
        engine.reset(texts=False)
        tiers.close()
    for asked, reused in turns.values():
        with closing(opened()) as model:
            tiers = tiers_of(model, tmp_path / "kv", 0)
            completion = Engine(model, kv_store=tiers).generate(replace(asked, prompt=(*asked.prompt, 7, 8)))
            tiers.close()
            assert completion.reused_tokens >= reused, "it outlives the process"


@over("dense", "recurrent", "hybrid", "window")
def test_of_a_session_of_many_turns_each_reads_what_is_new(backend: Backend, kind: str) -> None:
    with closing(backend.open(kind, 4096, max_sequences=2)) as model:
        engine, control = Engine(model), control_of(model)
        prompt, num_new, num_read = SYSTEM, 0, 0
        for turn in range(20):
            new = (*prompt, control, *TEXT[turn : turn + 140], control)
            num_new += len(new) - len(prompt) if turn else len(new)
            completion = engine.generate(Request(new, GREEDY, max_tokens=8, ignore_end=True))
            num_read += len(new) - completion.reused_tokens
            prompt = (*new, *completion.tokens)
        assert num_read <= 1.02 * num_new


def test_what_two_texts_have_in_common_is_a_turn_for_the_third() -> None:
    engine = Engine(language_model(rewind="checkpoints", context_length=512))
    texts = [(*PROMPT * 20, *(number,) * 80) for number in range(3)]
    reused = [engine.generate(Request(text, GREEDY, max_tokens=2)).reused_tokens for text in texts]
    assert reused == [0, 0, 100]


def test_where_no_control_token_stands_and_inside_of_long_messages_there_are_turns_too() -> None:
    engine = Engine(language_model(rewind="checkpoints", context_length=3000, max_sequences=2))
    text, edited = PROMPT * 440, (*PROMPT * 320, 3, *PROMPT * 120)
    assert engine.generate(Request(text, GREEDY, max_tokens=2)).reused_tokens == 0
    completion = engine.generate(Request(edited, GREEDY, max_tokens=2))
    assert completion.reused_tokens == 1024
    assert (
        completion.tokens
        == plain(language_model(context_length=3000), Request(edited, GREEDY, max_tokens=2))[0]
    )


def states(max_bytes: int, lengths: Sequence[int], num_sequences: int = 1) -> list[list[int]]:
    """The lengths that there are copies of, by sequence, after a turn at each; a copy has 10 bytes."""
    copying = (lambda _sequence, _older: np.zeros(10, np.uint8)), (lambda *_: True)
    rewinder = Rewinder(CHECKPOINTS, copying, max_bytes=max_bytes)
    for length in lengths:
        rewinder.before_call([Span(i, (0,), length, 0, is_turn=True) for i in range(num_sequences)])
    return [list(rewinder.save(i, 10_000)[0].checkpoints) for i in range(num_sequences)]


def test_the_first_and_the_last_turns_are_kept_and_some_between() -> None:
    lengths = [100, *range(500, 6000, 500), 6100, 6110, 6120]
    [kept] = states(10**6, lengths)
    assert len(kept) == MAX_TURNS
    assert kept[0] == 100 and kept[-LAST_TURNS:] == lengths[-LAST_TURNS:]
    assert set(range(500, 6000, 1000)) & set(kept)


def test_copies_take_no_more_memory_than_they_may() -> None:
    assert states(45, [100, 200, 300]) == [[100, 200, 300]]
    assert states(25, [100, 200, 300]) == [[100, 300]]
    assert states(5, [100, 200, 300]) == [[]]
    assert sum(map(len, states(65, range(100, 900, 100), num_sequences=3))) == 6


# Texts that left a model and came back

FIRST, OTHER = TEXT[:80], TEXT[200:290]
QUICK = ("dense", "window", "recurrent", "hybrid", "delta net")


def asked(engine: Engine, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt were not read."""
    completion = engine.generate(Request(tuple(prompt), GREEDY, max_tokens=8, ignore_end=True))
    return completion.tokens, completion.reused_tokens


@over(*QUICK, *(kind for kind in KINDS if kind not in QUICK))
def test_what_came_back_goes_on_as_if_never_gone(backend: Backend, kind: str, tmp_path: Path) -> None:
    """Two turns of a conversation, with another text between them and a restart before the third."""
    with closing(backend.open(kind, 256)) as model:
        engine = Engine(model)
        first, _ = asked(engine, FIRST)
        turn = (*FIRST, *first, *TEXT[80:84])
        second, _ = asked(engine, turn)
        third, _ = asked(engine, (*turn, *second, *TEXT[90:94]))
    with closing(backend.open(kind, 256)) as model:
        tiers = tiers_of(model, tmp_path / "kv", 2**30)
        engine = Engine(model, kv_store=tiers)
        assert asked(engine, FIRST) == (first, 0)
        asked(engine, OTHER)
        assert asked(engine, turn) == (second, len(FIRST) + len(first) - 1)
        assert tiers.counts.hits["memory"] == 1
        tiers.will_close(monotonic() + 60)
        engine.reset(texts=False)
        tiers.close()
    with closing(backend.open(kind, 256)) as model:
        tiers = tiers_of(model, tmp_path / "kv", 0)
        expected = third, len(turn) + len(second) - 1
        assert asked(Engine(model, kv_store=tiers), (*turn, *second, *TEXT[90:94])) == expected
        assert tiers.counts.hits["disk"] == 1
        tiers.close()
