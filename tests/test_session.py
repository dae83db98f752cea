"""Loading pairs, generating, closing: the Python API on tiny models of the llama.cpp backend."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from string import ascii_lowercase
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGUFWriter
from starlette.testclient import TestClient

import outrider
from llama_cpp_models import TEXT
from outrider import Pair, Session, SessionOptions
from outrider.backends.fake import FakeModel, FakeVocabulary, scripted_logits
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.data import Request
from outrider.core.errors import (
    BackendError,
    InputError,
    ModelFileError,
    OutOfMemory,
    OutriderError,
    PromptError,
    SettingError,
    VocabularyMismatch,
)
from outrider.core.params import SamplingParams
from outrider.costs.other_programs import OtherPrograms
from outrider.costs.store import BUSY, ESTIMATED
from outrider.drafters.lookup import SuffixDrafter
from outrider.models.cache import is_first_today
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.server.assembly import create_app
from outrider.server.service import Service
from outrider.session import learned
from outrider.session import loading as loading_module
from outrider.session.options import Keeping, no_progress
from outrider.session.session import settings_of
from tiny_gguf import BEGIN, write_tiny

pytestmark = pytest.mark.usefixtures("trusted")

GREEDY = SamplingParams(temperature=0)
PROMPT = TEXT[:12]
OPTIONS = LoadOptions(threads=1)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
OTHER_MERGES = tuple(f"{a} {b}" for a in ascii_lowercase for b in ascii_lowercase)
TALK = [{"role": "user", "content": "in the end"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of a tiny model; written once for each set of options."""
    folder = tmp_path_factory.mktemp("models")
    files: dict[str, Path] = {}

    def write(**options: Any) -> Path:
        key = repr(options)
        if key not in files:
            files[key] = write_tiny(folder / f"tiny{len(files)}.gguf", **options)
        return files[key]

    return write


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """Every set of weights that a test's session loads."""
    loaded: list[Weights] = []

    class Watched(Weights):
        def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
            super().__init__(path, options)
            loaded.append(self)

    monkeypatch.setattr(loading_module, "Weights", Watched)
    return loaded


def is_closed(weights: Weights) -> bool:
    try:
        weights.metadata("general.name")
    except BackendError:
        return True
    return False


# Loading


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)])
def test_a_pair_says_what_its_target_says_in_fewer_calls(
    path: Callable[..., Path], sampling: SamplingParams
) -> None:
    target, draft = path(), path(noise=0.02)
    with Session.load(target, context_length=256, options=OPTIONS) as session:
        plain = session.generate(PROMPT, max_tokens=40, sampling=sampling, ignore_end=True, speculate=False)
    policy = FixedPolicy(p_min=0.0)
    with Session.load(target, draft, context_length=256, options=OPTIONS, policy=policy) as session:
        names = [drafter.name for drafter in session.engine.drafters]
        assert names == ["prediction", "lookup", "earlier", "draft"]
        fast = session.generate(PROMPT, max_tokens=40, sampling=sampling, ignore_end=True)
        assert session.notices == []
    assert fast.tokens == plain.tokens and len(fast.tokens) == 40
    assert any("draft" in record.draft.sources for record in fast.records)
    assert sum(r.kind == "decode" for r in fast.records) < sum(r.kind == "decode" for r in plain.records)


def test_tokenizers_that_do_not_line_up_are_refused_before_anything_is_loaded(
    path: Callable[..., Path], opened: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the headers as by the loaded tokenizers; in the second case nothing stays open."""
    files = path(), path(merges=OTHER_MERGES)
    with pytest.raises(VocabularyMismatch) as by_headers:
        Pair.load(*files, options=OPTIONS)
    assert opened == []
    monkeypatch.setattr(loading_module, "check_tokenizers", lambda *_: None)
    with pytest.raises(VocabularyMismatch) as loaded:
        Pair.load(*files, options=OPTIONS)
    assert len(opened) == 2 and all(map(is_closed, opened))
    counts = [error.value.why.rpartition("): ")[2] for error in (by_headers, loaded)]
    assert counts[0] == counts[1] and "own family" in by_headers.value.way_out


def test_what_fails_while_loading_leaves_nothing_open(
    path: Callable[..., Path], opened: list[Weights], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="does not compile"):
        Pair.load(path(chat_template="{% for %}"), path(), options=OPTIONS)
    with pytest.raises(ModelFileError):
        Pair.load(path(), tmp_path / "none.gguf", options=OPTIONS)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path().read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(ModelFileError):
        Pair.load(path(), damaged, options=OPTIONS)
    count = len(opened)
    for context_length in (2**31, 1):
        with pytest.raises((OutOfMemory, SettingError)):
            Session.load(path(), path(noise=0.02), context_length=context_length, options=OPTIONS)
    assert len(opened) == count + 2, "the first is refused before anything is loaded"
    assert opened and all(map(is_closed, opened))


def test_a_draft_without_room_closes_the_target_context(
    path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OutOfMemory("draft", "there is no room")

    pair = Pair.load(path(), path(noise=0.02), options=OPTIONS)
    assert pair.draft is not None
    with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
        patch.setattr(pair.draft.weights, "open", full)
        Session.open(pair, SessionOptions(64))
    assert not pair.target.contexts
    with Session.open(pair, SessionOptions(64)) as session:  # the pair itself is as good as before
        assert session.generate(PROMPT, max_tokens=3, sampling=GREEDY, ignore_end=True).tokens
    pair.close()


def test_a_recurrent_draft_goes_back_to_checkpoints(path: Callable[..., Path]) -> None:
    found = []
    policy = FixedPolicy(draft_max=4, p_min=0.0)
    for draft in (path(arch="mamba"), None):
        pair = Pair.load(path(), draft, options=OPTIONS)
        with closing(pair), Session.open(pair, SessionOptions(256, lookup=False, policy=policy)) as session:
            found.append(session.generate(PROMPT, max_tokens=40, sampling=GREEDY, ignore_end=True))
    assert found[0].tokens == found[1].tokens
    assert sum(len(record.draft) for record in found[0].records) > 40


def test_a_draft_that_cannot_rewind_is_not_used(
    path: Callable[..., Path], opened: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    pair = Pair.load(path(), path(arch="mamba"), options=OPTIONS)
    assert pair.draft is None and is_closed(opened[1])
    with Session.open(pair, SessionOptions(64)) as session:
        assert [drafter.name for drafter in session.engine.drafters] == ["prediction", "lookup", "earlier"]
        assert len(session.notices) == 1 and "not used" in session.notices[0]
        assert session.generate(PROMPT, max_tokens=3, sampling=GREEDY, ignore_end=True).tokens
    assert is_closed(opened[0])


@pytest.mark.parametrize("lookup", [True, False])
def test_a_target_that_cannot_rewind_goes_plainly_and_keeps_no_draft(
    path: Callable[..., Path], opened: list[Weights], lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    pair = Pair.load(path(arch="mamba"), path(), options=OPTIONS)
    with Session.open(pair, SessionOptions(64, lookup=lookup)) as session:
        assert session.engine.drafters == () and len(session.notices) == 1 + lookup
        assert all("mamba" not in notice and "\n" not in notice for notice in session.notices)
        done = session.generate(PROMPT, max_tokens=5, sampling=GREEDY, ignore_end=True)
        assert len(done.tokens) == 5 and not any(record.draft.tokens for record in done.records)
    assert len(opened) == 2 and all(map(is_closed, opened))


def test_contexts_have_the_sizes_asked_for_and_the_settings_are_those_in_force(
    path: Callable[..., Path],
) -> None:
    options = LoadOptions(threads=1, batch_tokens=4096, cache_type_k="q8_0")
    files = path(), path(noise=0.02, context_length=256)
    pair = Pair.load(*files, options=options, draft_options=OPTIONS)

    def opened(length: int) -> tuple[dict[str, Any], list[str]]:
        session = Session.open(pair, SessionOptions(length, policy=FixedPolicy(draft_max=3)))
        return settings_of(session, Request((1,), GREEDY), 77), session.notices

    for length, sizes, num_notices in ((0, (512, 256), 1), (256, (256, 256), 0), (1024, (1024, 256), 2)):
        settings, notices = opened(length)
        target, draft = settings["target"], settings["draft"]
        assert (target["context_length"], draft["context_length"]) == sizes and len(notices) == num_notices
        assert settings["context_length"] == target["batch_tokens"] == target["context_length"]
    assert "trained with a context of 512 tokens, not 1024" in notices[0]
    assert settings["sampling"]["seed"] == 77 and settings["sampling"]["temperature"] == 0
    assert settings["drafters"][-1] == "draft" and settings["policy"]["draft_max"] == 3
    assert (target["path"], draft["path"]) == tuple(map(str, files)) and settings["rewind"] == "free"
    assert (target["cache_type_k"], draft["cache_type_k"]) == ("q8_0", "f16")
    assert target["threads"] == target["threads_batch"] == 1
    pair.close()


# Prompts


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_conversation_has_one_start_token(
    path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, adds_bos: bool
) -> None:
    real = GGUFWriter.add_add_bos_token
    monkeypatch.setattr(GGUFWriter, "add_add_bos_token", lambda self, _value: real(self, adds_bos))
    file = path(chat_template=TEMPLATE, name=f"adds {adds_bos}")
    with Session.load(file, context_length=64, options=OPTIONS) as session:
        vocabulary = session.target.vocabulary
        tokens = session.encode(TALK)
        assert [vocabulary.spelling(t) for t in tokens].count(BEGIN.encode()) == 1
        text = b"".join(vocabulary.piece(t) for t in tokens).decode()
        assert text == "user: in the end\nassistant:"
        assert [vocabulary.spelling(t) for t in session.encode("in")].count(BEGIN.encode()) == adds_bos
        assert session.generate(TALK, max_tokens=2, sampling=GREEDY).prompt_tokens == len(tokens)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_text_that_spells_the_start_token_gets_no_second_one(
    path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, adds_bos: bool
) -> None:
    """On every endpoint that reads control tokens in texts."""
    real = GGUFWriter.add_add_bos_token
    monkeypatch.setattr(GGUFWriter, "add_add_bos_token", lambda self, _value: real(self, adds_bos))
    file = path(chat_template=TEMPLATE, name=f"spells, {adds_bos}")
    with Session.load(file, context_length=64, options=OPTIONS) as session:
        service, bos = Service(session), session.target.vocabulary.tokenize(BEGIN, parse_special=True)[-1:]
        service.start()
        with closing(service), TestClient(create_app(service)) as client:

            def post(path: str, **body: Any) -> Any:
                return client.post(path, json={"temperature": 0, "max_tokens": 2} | body).json()

            def tokens(text: str) -> list[int]:
                return list(client.post("/tokenize", json={"prompt": text}).json()["tokens"])

            plain = tokens("in the")[adds_bos:]
            assert tokens("in the") == bos * adds_bos + plain and tokens(BEGIN) == bos
            assert tokens(f"{BEGIN}in the") == [*bos, *plain]
            assert tokens(f"{BEGIN}{BEGIN}in the") == [*bos, *bos, *plain]
            for prompt in (f"{BEGIN}in the", [*bos, *plain]):
                assert post("/completion", prompt=prompt)["tokens_evaluated"] == 1 + len(plain)
            text = post("/v1/completions", prompt=f"{BEGIN}in the")
            assert text["usage"]["prompt_tokens"] == 1 + len(plain)
            raw = {"prompt": f"{BEGIN}in the", "raw": True, "stream": False}
            assert client.post("/api/generate", json=raw).json()["prompt_eval_count"] == 1 + len(plain)
            chat = post("/v1/chat/completions", messages=TALK)
            rendered = post("/apply-template", messages=TALK)["prompt"]
            again = post("/completion", prompt=rendered, return_tokens=True)
            assert again["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
            assert again["content"] == chat["choices"][0]["message"]["content"]


def test_a_prompt_may_be_text_or_tokens_of_any_integer_kind(path: Callable[..., Path]) -> None:
    with Session.load(path(), context_length=64, options=OPTIONS) as session:
        tokens = session.encode("in the end")
        prompts: list[Any] = ["in the end", tokens, list(tokens), list(np.array(tokens)), np.array(tokens)]
        texts = {session.generate(p, max_tokens=4, sampling=GREEDY).tokens for p in prompts}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "prompt", ["", [], (), [289], [-1], [3, 2**40], TEXT[:300], "half a \ud83d"], ids=repr
)
def test_a_prompt_that_cannot_be_is_a_prompt_error_and_harms_nothing(
    path: Callable[..., Path], prompt: Any
) -> None:
    with Session.load(path(), path(noise=0.02), context_length=256, options=OPTIONS) as session:
        with pytest.raises(PromptError, match=None if len(prompt) else "it is empty"):
            session.generate(prompt, max_tokens=4)
        assert len(session.generate(PROMPT, max_tokens=4, sampling=GREEDY, ignore_end=True).tokens) == 4


# Closing


def test_after_closing_there_are_errors_and_no_crash(path: Callable[..., Path]) -> None:
    session = Session.load(path(), path(noise=0.02), context_length=64, options=OPTIONS)
    running = session.stream(PROMPT, max_tokens=20, ignore_end=True)
    next(iter(running))
    waiting = session.stream(PROMPT, max_tokens=20)
    session.close()
    session.close()
    asked: list[Callable[[], Any]] = [
        lambda: session.encode("text"),
        lambda: session.generate("text"),
        lambda: session.generate(PROMPT),
        lambda: list(waiting),
        lambda: session.target.decode([]),
        session.engine.reset,
    ]
    for ask in asked:
        with pytest.raises(OutriderError):
            ask()
    assert settings_of(session, Request((1,), GREEDY), 0)["target"]["path"] == str(path())


def test_a_generation_under_way_ends_with_an_error_when_its_session_is_closed(
    path: Callable[..., Path],
) -> None:
    session = Session.load(path(), context_length=64, options=OPTIONS)
    running = session.stream(PROMPT, max_tokens=20, ignore_end=True)
    with pytest.raises(BackendError, match="was closed"):
        for _ in running:
            session.close()
    with pytest.raises(SettingError, match="interrupted"):
        _ = running.completion


def test_sessions_of_one_pair_share_its_weights(path: Callable[..., Path]) -> None:
    pair = Pair.load(path(), options=OPTIONS)
    one, other = Session.open(pair, SessionOptions(64)), Session.open(pair, SessionOptions(128))
    texts = {s.generate(PROMPT, max_tokens=6, sampling=GREEDY).tokens for s in (one, other)}
    assert len(texts) == 1
    one.close()
    with pytest.raises(BackendError, match="was closed"):
        other.generate(PROMPT, max_tokens=6)
    with pytest.raises(BackendError, match="was closed"):
        Session.open(pair, SessionOptions(64))


def test_drafts_are_looked_up_in_texts_whose_kv_outlived_the_last_session(
    path: Callable[..., Path], tmp_path: Path
) -> None:
    opening: dict[str, Any] = {"context_length": 256, "options": OPTIONS, "policy": FixedPolicy(p_min=0.0)}
    sources = []
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        with Session.load(path(), keeping=Keeping(folder=folder), **opening) as session:
            found = session.generate(TEXT[40:60], max_tokens=4, ignore_end=True)
            sources.append({source for record in found.records for source in record.draft.sources})
            session.generate(TEXT[:120], max_tokens=1)
    assert ["earlier" in found for found in sources] == [False, True, False]


# A busy machine


def test_costs_from_a_busy_machine_are_measured_again_when_it_is_quiet(
    path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    busy = 8.0
    monkeypatch.setattr(OtherPrograms, "cores", lambda _self: busy)
    settings: Any = {"sampling": GREEDY, "max_tokens": 12, "ignore_end": True}
    files = path(noise=0.5), path(noise=0.6)
    with Session.load(*files, context_length=256, options=OPTIONS, measure=True) as session:
        knowledge = cast("AutoPolicy", session.engine.policy).state
        assert session.is_provisional and session.notices == [BUSY]
        said = session.generate(PROMPT, **settings)
        before = knowledge.costs, knowledge.draft_costs
        assert not session.measure_again(OtherPrograms(), no_progress), "it still is"
        busy = 0.0
        parts: list[float | None] = []

        def note(_what: str, part: float | None) -> None:
            parts.append(part)

        def interrupt(_what: str, part: float | None) -> None:
            parts.append(part)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.measure_again(OtherPrograms(), interrupt)
        assert len(parts) == 1 and session.is_provisional
        assert (knowledge.costs, knowledge.draft_costs) == before
        assert session.generate(PROMPT, **settings).tokens == said.tokens
        running = session.engine.submit(Request(PROMPT, GREEDY))
        assert not session.measure_again(OtherPrograms(), note), "something runs"
        session.engine.cancel(running)
        assert session.measure_again(OtherPrograms(), note)
        assert not session.is_provisional and session.notices == []
        assert knowledge.costs is not before[0] and knowledge.draft_costs is not before[1]
        again = session.generate(PROMPT, **settings)
        assert again.tokens == said.tokens and again.reused_tokens == 0
    with Session.load(path(noise=0.5), path(noise=0.6), context_length=256, options=OPTIONS) as session:
        assert session.notices == [], "they are kept as good ones"


def test_a_session_begins_with_an_estimate_until_it_is_measured(
    path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(learned, "is_first_today", is_first_today)
    files = path(noise=0.5), path(noise=0.6)

    def opened(**more: Any) -> tuple[bool, bool, list[str]]:
        with Session.load(*files, context_length=256, options=OPTIONS, **more) as session:
            session.generate(PROMPT, sampling=GREEDY, max_tokens=160, ignore_end=True)
            costs = cast("AutoPolicy", session.engine.policy).state.costs
            return session.is_provisional, costs.is_measured, session.notices

    assert opened() == (True, False, [ESTIMATED])
    kept = list((tmp_path / "cache/costs").glob("*.json"))
    assert kept and opened() == (True, False, []), "its calls were kept, and it is said once a day"
    assert opened(measure=True) == (False, True, [])
    assert opened() == (False, True, [])


# A running generation: reading it, leaving it, cancelling it


def fake_session() -> Session:
    vocabulary = FakeVocabulary("abcdefgh, ")
    model = FakeModel(vocabulary, scripted_logits(vocabulary, "abc, "), max_sequences=1)
    return Session(model, [SuffixDrafter()])


def test_a_generation_gives_its_text_as_it_comes_and_its_completion_any_number_of_times() -> None:
    generation = fake_session().stream("abc, ", max_tokens=12, sampling=GREEDY)
    pieces = [update.text for update in generation]
    completion = generation.completion
    assert "".join(pieces) == completion.text == "abc, abc, ab"
    assert generation.completion is completion and list(generation) == []
    assert tuple(generation.records) == completion.records


def test_asking_for_the_completion_runs_what_is_left() -> None:
    generation = fake_session().stream("abc, ", max_tokens=12, sampling=GREEDY)
    iterator = iter(generation)
    next(iterator)
    assert generation.completion.text == "abc, abc, ab"
    assert next(iterator, None) is None


@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_a_cancelled_generation_ends_after_its_step(num_updates: int) -> None:
    session = fake_session()
    generation = session.stream("abc, ", max_tokens=200, sampling=GREEDY)
    iterator = iter(generation)
    texts = [next(iterator).text for _ in range(num_updates)]
    generation.cancel()
    generation.cancel()
    texts += [update.text for update in iterator]
    completion = generation.completion
    assert completion.finish_reason == "cancelled" and completion.text == "".join(texts)
    assert len(completion.records) == max(num_updates, 1)
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "


@pytest.mark.parametrize("held", [True, False])
def test_leaving_the_loop_frees_the_sequence(held: bool) -> None:
    session = fake_session()
    generation = session.stream("abc, ", max_tokens=200, sampling=GREEDY)
    seen = ""
    for update in generation:
        seen += update.text
        if seen:
            break
    if held:  # what was made until then is its completion; nothing more is generated for it
        assert generation.completion.finish_reason == "cancelled"
        assert generation.completion.text == seen
    else:
        del generation
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "


def test_a_generation_that_was_never_begun_takes_no_sequence() -> None:
    session = fake_session()
    waiting = session.stream("abc, ", max_tokens=5, sampling=GREEDY)
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "
    assert waiting.completion.text == "abc, "


@pytest.mark.parametrize(
    ("prompt", "settings", "why"),
    [
        (None, {}, "prompt: it is a NoneType. Give a text, a conversation, or tokens."),
        (7, {}, "prompt: it is a int."),
        ([{"role": "user", "content": "a"}], {}, "has no chat template. Give the prompt as one text."),
        ("abc", {"max_tokens": "5"}, "max_tokens: it is a str. Give one of type int, or None."),
        ("abc", {"max_tokens": -1}, "max tokens: -1 asks for nothing"),
        ("abc", {"sampling": 0.5}, "sampling: it is a float. Give one of type SamplingParams"),
        ("abc", {"grammar": "[ab]"}, "grammar: it is a str. Give one of type Grammar"),
    ],
)
def test_what_makes_no_sense_is_an_error_in_the_words_of_the_api(
    prompt: Any, settings: dict[str, Any], why: str
) -> None:
    session = fake_session()
    with pytest.raises(InputError) as caught:
        session.generate(prompt, **settings)
    assert why in str(caught.value) and "-p" not in str(caught.value)


def test_a_generation_is_closed_by_hand_or_by_its_block() -> None:
    session = fake_session()
    whole = session.generate("abc", max_tokens=8, ignore_end=True, stop="never")
    with session.stream(
        "abc", max_tokens=8, ignore_end=True, sampling=SamplingParams(seed=whole.seed)
    ) as running:
        next(iter(running))
    assert session.engine.num_running == 0 and running.records
    other = session.stream("abc", max_tokens=8)
    other.close()
    other.close()
    assert session.engine.num_running == 0 and not other.records


def test_every_public_name_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    names = text[text.index("## Every name") :]
    assert {name for name in outrider.__all__ if f"`{name}`" not in names} == set()
    cells = [row.split(" | ")[0] for row in names.splitlines() if row.startswith("| `")]
    listed = {name for cell in cells for name in cell.split("`")[1::2]}
    assert listed == set(outrider.__all__)
