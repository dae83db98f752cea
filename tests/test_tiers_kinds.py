"""Texts that left a model and came back, on every kind of model: their answers go on as if never gone."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import cast

import pytest

from backends import MAINLINE, Backend, Native, backend, over
from kinds import KINDS
from llama_cpp_models import TEXT
from outrider.backends.gguf.head_model import HeadModel
from outrider.backends.gguf.model import GgufModel
from outrider.core.contracts import Model, SavingModel
from outrider.core.data import Request
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers.disk import Disk
from outrider.engine.tiers.store import KvTiers
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy

__all__ = ["backend"]  # pytest finds the fixture by its name

FIRST, OTHER = TEXT[:80], TEXT[200:290]
QUICK = ("dense", "window", "recurrent", "hybrid", "delta net")
HEADS = [name for name, kind in KINDS.items() if kind.mtp_layers]


def tiers_of(model: Model, folder: Path, memory: int) -> KvTiers:
    disk = Disk(folder, "a tiny model", 2**30)
    return KvTiers(cast(SavingModel, model), memory_bytes=memory, disk=disk, clock=lambda: 0.0)


def asked(engine: Engine, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt were not read."""
    request = Request(tuple(prompt), SamplingParams(temperature=0), max_tokens=8, ignore_end=True)
    completion = engine.generate(request)
    return completion.tokens, completion.reused_tokens


def check(open_model: Callable[[], tuple[Model, list[ModelDrafter]]], folder: Path) -> None:
    """Two turns of a conversation, with another text between them and a restart before the third."""
    model, drafters = open_model()
    with closing(model):
        engine = Engine(model, drafters, FixedPolicy())
        first, _ = asked(engine, FIRST)
        turn = (*FIRST, *first, *TEXT[80:84])
        second, _ = asked(engine, turn)
        third, _ = asked(engine, (*turn, *second, *TEXT[90:94]))
    model, drafters = open_model()
    with closing(model):
        tiers = tiers_of(model, folder, 2**30)
        engine = Engine(model, drafters, FixedPolicy(), kv_store=tiers)
        assert asked(engine, FIRST) == (first, 0)
        asked(engine, OTHER)
        assert asked(engine, turn) == (second, len(FIRST) + len(first) - 1)
        assert tiers.counts.hits["memory"] == 1
        tiers.will_close(monotonic() + 60)
        engine.reset(texts=False)
        tiers.close()
    model, drafters = open_model()
    with closing(model):
        tiers = tiers_of(model, folder, 0)
        engine = Engine(model, drafters, FixedPolicy(), kv_store=tiers)
        expected = third, len(turn) + len(second) - 1
        assert asked(engine, (*turn, *second, *TEXT[90:94])) == expected
        assert tiers.counts.hits["disk"] == 1
        tiers.close()


@over(*QUICK, *(kind for kind in KINDS if kind not in (*QUICK, *HEADS)))
def test_what_came_back_goes_on_as_if_never_gone(backend: Backend, kind: str, tmp_path: Path) -> None:
    check(lambda: (backend.open(kind, 256), []), tmp_path / "kv")


@pytest.mark.slow
@over(*HEADS, names=MAINLINE)
def test_a_head_goes_on_drafting_for_what_came_back(backend: Native, kind: str, tmp_path: Path) -> None:
    def opened() -> tuple[Model, list[ModelDrafter]]:
        model: GgufModel = backend.open(kind, 256)
        vocabulary = model.vocabulary
        return model, [ModelDrafter(HeadModel(model, 256), align(vocabulary, vocabulary))]

    check(opened, tmp_path / "kv")
