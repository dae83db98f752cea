"""Drafts trimmed for a target: what is kept, what the file says, what is measured, what is refused."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from gguf import GGUFReader

from backends import FILES, NATIVE
from cli_helpers import TEMPLATE, Call
from distilling import spoken
from engines import VOCABULARY
from llama_cpp_models import SMALL
from outrider.backends.fake import FakeModel, random_logits
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.quantizer import quantize
from outrider.core.contracts import PartOf
from outrider.core.errors import ModelFileError, SettingError, VocabularyMismatch
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.lab.loaded import Loader
from outrider.lab.models import find_models
from outrider.lab.prompts import HELD_OUT_SHARE, Prompt, Workload, conversation_hash, is_held_out
from outrider.lab.trim import (
    BY_TOKEN,
    OUTPUT,
    Source,
    TrimRequest,
    answer_prompts,
    count_uses,
    lost_ratios,
    order_of,
    prompts_of,
    read_source,
    subset_of,
    texts_of,
    trim,
    write_trimmed,
)
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written import FIELD, Written, written_prompts
from outrider.models.hub import HubOptions
from outrider.models.vocab import Alignment, align, tokenizer_id
from outrider.models.vocab.subset import OTHER, Ids, needed_tokens
from tiny_gguf import MERGES, write_tiny
from vocabularies import TableVocabulary, Token

pytestmark = pytest.mark.usefixtures("trusted")

LIBRARY = str(FILES[NATIVE[0]].path)
"""One alone: several would be compared."""
SIZE = 256 + len(MERGES) + 2
KEPT = [*range(256), 256, 257, 258, SIZE - 2, SIZE - 1]
"""All bytes, "Ġt", "he", "Ġthe" and the control tokens"""
DROPPED = 270
"""the most used of the others"""
ORDER = np.array([*KEPT, DROPPED, *np.setdiff1d(np.arange(SIZE), [*KEPT, DROPPED])])
REDUCED = ORDER[: len(KEPT) + 1]
TOKENS = [65, 256, 3, 258, 101, 200, 12]
"""known to it"""


@dataclass(frozen=True, slots=True)
class Target:
    path: Path
    source: Source
    weights: Weights

    def write(self, path: Path, kept: Ids = REDUCED, source: Source | None = None) -> Path:
        """A trimmed draft of the target itself."""
        found = source or self.source
        write_trimmed(found, kept, path, self.weights.vocabulary, np.arange(SIZE), {"source": "tiny"})
        return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_tiny(tmp_path_factory.mktemp("target") / "tiny.gguf", chat_template=TEMPLATE)
    weights = Weights(path, SMALL)
    yield Target(path, read_source(path), weights)
    weights.close()


# What is written


def test_the_kept_tokens_say_what_they_said(target: Target, tmp_path: Path) -> None:
    made = target.write(tmp_path / "draft.gguf")
    rows, whole = (
        spoken(made, subset_of(REDUCED, SIZE).to_draft[TOKENS].tolist()),
        spoken(target.path, TOKENS),
    )
    np.testing.assert_allclose(rows[:, :-1], whole[:, KEPT], rtol=0, atol=1e-3)
    np.testing.assert_allclose(rows[:, -1], whole[:, DROPPED], rtol=0, atol=1e-3)
    fields = {name: field.contents() for name, field in GGUFReader(made).fields.items()}
    assert fields["outrider.trim.source"] == "tiny"
    assert fields["outrider.draft.target_tokens"] == [*KEPT, -1]
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert fields["llama.context_length"] == 512


def test_unknown_tokens_are_read_as_their_pieces(target: Target, tmp_path: Path) -> None:
    weights = Weights(target.write(tmp_path / "draft.gguf"), SMALL)
    ours, theirs = target.weights.vocabulary, weights.vocabulary
    alignment = align(ours, theirs)
    assert alignment.report.common_tokens == len(KEPT)
    for token in range(SIZE):
        read = alignment.read([65, token])[1:]
        if token in KEPT:
            assert read == [KEPT.index(token)]
        else:
            assert len(read) > 1 and alignment.other_token not in read
            assert b"".join(map(theirs.piece, read)) == ours.piece(token)
    weights.close()


def test_what_is_kept_is_kept_as_it_is(target: Target, tmp_path: Path) -> None:
    coarse = tmp_path / "coarse.gguf"
    quantize(target.path, "Q4_0", coarse)
    source = read_source(coarse)
    tensors = {name: tensor for name, tensor in source.tensors.items() if name != OUTPUT}
    for found in (source, replace(source, tensors=tensors)):  # its embedding is its output layer too
        made = GGUFReader(target.write(tmp_path / f"{len(found.tensors)}.gguf", source=found))
        kept = {tensor.name: tensor for tensor in made.tensors}
        assert kept.keys() == found.tensors.keys()
        for name, tensor in found.tensors.items():
            assert kept[name].tensor_type == tensor.kind
            rows = tensor.rows[[*KEPT, DROPPED]] if name in BY_TOKEN else tensor.rows
            np.testing.assert_array_equal(kept[name].data.view(np.uint8).reshape(rows.shape), rows)


def test_a_model_that_keeps_all_tokens_is_the_same_model(target: Target, tmp_path: Path) -> None:
    made = target.write(tmp_path / "draft.gguf", ORDER)
    assert "outrider.draft.target_tokens" not in GGUFReader(made).fields
    np.testing.assert_array_equal(spoken(made, TOKENS), spoken(target.path, TOKENS))


# Which tokens matter

TABLE = TableVocabulary(
    [Token(b"<s>", control=True), Token(b"<unused7>", control=True), Token(b"a"), Token(b"2024"),
     Token(b"314"), Token(b"\n \n"), Token(b"the"), Token(b"of"), Token(b"bye", end=True)]
)  # fmt: skip


def test_tokens_are_kept_by_use_and_what_the_target_lacks_never() -> None:
    floor = needed_tokens(TABLE)
    assert floor.tolist() == [0, 2, 4, 5, 8]
    lined_up = SimpleNamespace(to_target=np.where(np.arange(TABLE.size) == 3, -1, np.arange(TABLE.size)))
    uses = np.bincount([6, 6, 6, 7, 7, *[3] * 9], minlength=TABLE.size).astype(float)
    order = order_of(uses, cast(Alignment, lined_up), floor)
    assert order.tolist() == [0, 2, 4, 5, 8, 6, 7, 1, 3]
    assert lost_ratios(order, [6, 7, 8, 9], np.array([6, 7, 1, -1])) == [1, 3 / 4, 1 / 2, 1 / 4]


def test_the_target_answers_many_at_once() -> None:
    model = FakeModel(VOCABULARY, random_logits(VOCABULARY.size, seed=3), max_sequences=2)
    prompts = [VOCABULARY.tokenize("abc"), VOCABULARY.tokenize("d"), VOCABULARY.tokenize("bb" * 200), [3]]
    times = iter(range(10_000))
    found = answer_prompts(Engine(model), prompts, 9_000, clock=lambda: float(next(times)))
    assert len(found) == 3, "one does not fit"
    tokens = sum(len(answer.tokens) for answer in found)
    assert count_uses(VOCABULARY, ["ab"], found).sum() == pytest.approx(2 + 2 * tokens)
    assert all(model.length(sequence) == 0 for sequence in range(2))
    first = int(np.argmax(random_logits(VOCABULARY.size, seed=3)(prompts[0])))
    assert first in {answer.tokens[0] for answer in found}


def test_prompts_that_measure_are_not_counted() -> None:
    bundled = prompts_of(())
    measured = {conversation_hash(p) for w in bundled.measured for p in w.prompts}
    assert not measured & {conversation_hash(p) for p in bundled.counted}
    assert len(measured) == sum(len(load_workload(n).prompts) for n in BUILT_IN)
    own = Workload("own", tuple(Prompt(str(i), f"text {i}") for i in range(64)), SamplingParams(), 32, "")
    found = prompts_of([own])
    ids = {p.id for w in found.measured for p in w.prompts}
    assert 4 <= len(ids) < 32 and ids.isdisjoint(p.id for p in found.counted)
    assert list(texts_of(found.counted)) == [p.messages for p in found.counted]
    few = prompts_of([replace(own, prompts=own.prompts[:2])])
    assert [w.name for w in few.measured] == list(BUILT_IN) and len(few.counted) == 2


# All of it


def test_a_draft_is_trimmed_measured_and_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_tiny(tmp_path / "small.gguf", noise=0.1, chat_template=TEMPLATE, context_length=512)
    draft, big = find_models([str(small), str(target.path)], hub=HubOptions())
    prompts = tuple(Prompt(str(i), f"the rain in the street {i}") for i in range(40))
    monkeypatch.setattr("outrider.lab.trim.MEASURING_SECONDS", 0.2)
    options = LoadOptions(threads=1, library=LIBRARY)
    asked = TrimRequest(
        draft, big, tmp_path / "out.gguf", Loader(options, options, HubOptions()), vocabulary=275,
        seconds=0.2, workloads=(Workload("own", prompts, SamplingParams(), 32, ""),),
    )  # fmt: skip
    report = trim(asked)
    tried = {found.model.quantization: found.alone.value for found in report.types if found.alone}
    assert list(tried) == ["F32", "Q4_K_M", "Q4_0"], "its own, and those that make it smaller"
    assert tried[report.after.model.quantization] == max(tried.values()) and report.after in report.types
    assert (report.known_tokens, report.source_tokens) == (274, SIZE)
    assert [choice.tokens for choice in report.sizes] == [275, SIZE]
    assert "own (" in report.counted[0] and "answers of the target" in report.counted[1]
    assert report.before.step_s and 0 <= (report.after.agreement or 0) <= 1
    assert report.as_json()["schema"] == "outrider.trim/1"
    weights = Weights(asked.out, SMALL)
    part = weights.vocabulary.part_of
    assert isinstance(part, PartOf) and part.reads_pieces
    assert part.target_tokenizer == tokenizer_id(target.weights.vocabulary)
    assert weights.vocabulary.spelling(274) == OTHER.encode()
    weights.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "small.gguf"]


# What is refused, and what is left behind


@pytest.mark.parametrize(
    ("arguments", "small", "said"),
    [
        (("--vocabulary", "200"), "small.gguf", "--vocabulary 200: 263 are needed in any case: bytes,"),
        (("-o", "small.gguf"), "small.gguf", "small.gguf: it is the source itself"),
        (("-o", "pipe", "--force"), "small.gguf", "pipe: it is not a file that could be replaced"),
        (("-o", "none/out.gguf"), "small.gguf", "none/out.gguf: its folder does not exist"),
        (("--seconds", "-1"), "small.gguf", "seconds"),
        (("--prompts", "gone.jsonl"), "small.gguf", "gone.jsonl: no such file"),
        ((), "gone.gguf", "gone.gguf: there is no such file"),
        ((), "foreign.gguf", "do not line up"),
    ],
)
def test_what_cannot_be_done_is_said_before_anyone_waits(
    outrider: Call,
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    tmp_path: Path,
    arguments: tuple[str, ...],
    small: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "small.gguf", noise=0.1, chat_template=TEMPLATE)
    write_tiny(tmp_path / "foreign.gguf", merges=[merge[::-1] for merge in MERGES])
    os.mkfifo(tmp_path / "pipe")  # and no device: where the check fails, it is replaced
    before = sorted(path.name for path in tmp_path.iterdir())
    usual = ("--for", str(target.path), "-t", "1", "--no-repack", "--llama-library", LIBRARY)
    outcome = outrider("trim", small, *usual, *arguments)
    assert outcome.status == 2 and said in outcome.said and "Traceback" not in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_rows_that_cannot_be_cut_apart_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "odd.gguf")
    data = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = (202).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(ModelFileError, match="of type 202, whose rows cannot be taken apart"):
        read_source(path)


def test_tokens_that_llama_cpp_reads_otherwise_are_refused(target: Target, tmp_path: Path) -> None:
    wrong = np.roll(np.arange(SIZE), 1)
    with pytest.raises(VocabularyMismatch):
        write_trimmed(target.source, REDUCED, tmp_path / "d.gguf", target.weights.vocabulary, wrong, {})


# Exactness


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "no-residual"])
def test_a_trimmed_draft_is_certified_at_every_temperature_and_a_fault_found(
    outrider: Call, monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path, fault: str | None
) -> None:
    """Greedy, and at 0.7 and 1.0 with most likely and with drawn drafts: of the target's 289 tokens the draft
    knows 261, and what it lacks comes from the target."""
    made = target.write(tmp_path / "draft.gguf")
    monkeypatch.chdir(tmp_path)
    pair = ("-m", str(target.path), "-md", str(made), "-t", "1", "--quick")
    outcome = outrider("verify", *pair, *(("--inject", fault) if fault else ()))
    assert outcome.status == (1 if fault else 0) and ("HOLDS" in outcome.out) == (fault is None), outcome.out


# The bundled prompts

ENOUGH = 12_000


def said(entry: Written) -> str:
    """The whole of what is sent."""
    return json.dumps(entry.prompt.messages)


def test_no_prompt_comes_twice_all_slots_are_filled_and_turns_alternate() -> None:
    prompts = written_prompts(ENOUGH)
    assert len({said(entry) for entry in prompts}) == len({entry.prompt.id for entry in prompts}) == ENOUGH
    counts = Counter(entry.category for entry in prompts)
    assert len(counts) >= 12 and max(counts.values()) - min(counts.values()) <= 1
    some_with_system = some_with_follow_ups = 0
    for entry in prompts:
        roles = [message["role"] for message in entry.prompt.messages if isinstance(message, dict)]
        some_with_system += roles[0] == "system"
        some_with_follow_ups += bool(entry.prompt.follow_ups)
        roles = roles[roles[0] == "system" :]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert "{passage" not in said(entry)
        assert not any(FIELD.search(text) for text in entry.prompt.follow_ups)
    assert 0.05 * ENOUGH < some_with_system < 0.4 * ENOUGH
    assert 0.15 * ENOUGH < some_with_follow_ups < 0.6 * ENOUGH


@pytest.mark.parametrize("count", [0, -3, 10**12])
def test_a_count_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(SettingError, match=r"there are [0-9,]{6,}"):
        written_prompts(count)


# Training or held out


def chat(text: str, **changes: object) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})
    return replace(Prompt("a", messages), **changes)  # type: ignore[arg-type]


def test_about_the_share_is_held_out_and_always_the_same() -> None:
    prompts = [chat(f"What is {i} times {i % 7}?") for i in range(4000)]
    held_out = [is_held_out(prompt) for prompt in prompts]
    assert held_out == [is_held_out(prompt) for prompt in prompts]
    assert sum(held_out) / 4000 == pytest.approx(HELD_OUT_SHARE, abs=0.015)
    assert sum(is_held_out(prompt, 0.5) for prompt in prompts) / 4000 == pytest.approx(0.5, abs=0.04)
    assert not any(is_held_out(prompt, 0) for prompt in prompts)
    assert all(is_held_out(prompt, 1) for prompt in prompts)
    assert all(is_held_out(p, 0.5) for p, held in zip(prompts, held_out, strict=True) if held)


def test_the_side_of_a_conversation_does_not_change() -> None:
    """Held-out sets of earlier versions stay held out."""
    assert conversation_hash(Prompt("x", "Tell me  of\nLisbon")) == "b80bed9a48f0155349d9c3d6c9cffcf9"


def test_the_same_conversation_falls_on_the_same_side() -> None:
    plain = conversation_hash(chat("Tell me about Lisbon."))
    turns = (
        {"content": "Be brief.", "role": "system"},
        {"content": "Tell me about Lisbon.", "role": "user", "x": 1},
    )
    for same in (
        chat("  tell me about LISBON.\n"), chat("Tell  me\tabout Lisbon."), Prompt("c", turns),
        chat("Tell me about Lisbon.", id="b", follow_ups=("And Porto?",), max_tokens=5),
    ):  # fmt: skip
        assert conversation_hash(same) == plain
