"""Files to look up in: which are read, how their index is kept, and what is drafted from them."""

import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines import asked
from outrider.backends.fake import FakeVocabulary
from outrider.core import files
from outrider.core.data import Draft
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.drafters.corpus import CorpusDrafter, open_corpus
from outrider.drafters.lookup import ContextIndex
from outrider.models.vocab import tokenizer_id
from test_lookup import propose

VOCABULARY = FakeVocabulary("abcdefghijklmnopqrstuvwxyz \n")


class CountingVocabulary(FakeVocabulary):
    """Counts the texts that it cuts."""

    def __init__(self, characters: str = "abcdefghijklmnopqrstuvwxyz \n") -> None:
        super().__init__(characters)
        self.texts: list[str] = []

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special or not parse_special
        self.texts.append(text)
        return super().tokenize(text)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(place))
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    place.mkdir()
    return place


def say(text: str) -> list[int]:
    return VOCABULARY.tokenize(text)


def drafted(corpus: ContextIndex, text: str, max_tokens: int = 5) -> str:
    """What is drafted after a text."""
    drafter = CorpusDrafter(corpus)
    drafter.begin(0, asked(say(text)))
    tokens = propose(drafter, max_tokens=max_tokens).tokens
    return "".join(VOCABULARY.piece(token).decode() for token in tokens)


def said(*paths: Path, vocabulary: FakeVocabulary = VOCABULARY) -> list[str]:
    """The notices of opening a corpus."""
    with collect_notices() as notices:
        open_corpus(paths, vocabulary)
    return notices


def indexes(cache: Path) -> list[Path]:
    return sorted((cache / "corpus").iterdir())


# Drafting


def test_files_are_looked_up_in(folder: Path) -> None:
    (folder / "one").write_text("the quick brown fox")
    (folder / "two").write_text("jumps over the lazy dog")
    corpus = open_corpus([folder / "one", folder / "two"], VOCABULARY)
    assert drafted(corpus, "a quick ") == "brown"
    assert drafted(corpus, "the l") == "azy d"
    assert said(folder / "one", folder / "two") == ["corpus: indexed 2 files, 42 tokens"]


def test_a_draft_follows_the_text_and_what_others_drafted(folder: Path) -> None:
    (folder / "one").write_text("abcdefgh")
    drafter = CorpusDrafter(open_corpus([folder], VOCABULARY))
    drafter.begin(3, asked(say("za")))
    assert propose(drafter, sequence=3) == Draft()
    assert propose(drafter, sequence=3, prefix=say("bc")).tokens == tuple(say("defgh"))
    drafter.observe(3, say("b"))
    draft = propose(drafter, sequence=3)
    assert draft.tokens == tuple(say("cdefgh"))
    assert [token.evidence for token in draft.items[:2]] == [(2, 1, 1), (3, 1, 1)]
    assert drafter.is_free and drafter.name == "corpus"
    drafter.reset()
    drafter.begin(3, asked(say("ab")))
    assert propose(drafter, sequence=3) == draft
    drafter.end(3)


# Which files


def test_what_is_no_text_is_left_out_and_counted(folder: Path) -> None:
    (folder / "text").write_text("some text")
    (folder / "zeros").write_bytes(b"some\0text")
    (folder / "latin").write_bytes(b"caf\xe9")
    (folder / "cut").write_bytes("caf\u00e9".encode()[:-1])
    os.mkfifo(folder / "pipe")
    (folder / "lost").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "empty").mkdir()
    assert said(folder) == [
        "corpus: indexed 1 file, 9 tokens; skipped 3 binary, 1 linked, 1 special, 1 unreadable"
    ]


def test_a_file_counts_once_however_it_is_reached_and_however_deep_it_lies(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "text").write_text("some text")
    (folder / "link").symlink_to(folder / "a" / "b" / "text")
    assert "indexed 1 file," in said(folder, folder / "a" / "b" / "text", folder)[0]
    assert drafted(open_corpus([folder], VOCABULARY), "some") == " text"


def test_marks_and_line_ends_of_other_systems_are_not_part_of_the_text(folder: Path) -> None:
    (folder / "text").write_bytes(b"\xef\xbb\xbfab\r\ncd\r\n")
    vocabulary = CountingVocabulary()
    open_corpus([folder], vocabulary)
    assert "ab\ncd\n" in vocabulary.texts


def test_long_files_are_cut_at_line_ends_and_characters_stay_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 8)
    (folder / "lines").write_text("abcde fgh\nijklm\nno\npq")
    (folder / "line").write_text("\u00e9" * 21)
    found = files.list_files([folder])
    line, lines = (list(files.chunks(path)) for path in found.sizes)
    assert lines == ["abcde fgh\n", "ijklm\nno\n", "pq", ""]
    assert "".join(line) == "\u00e9" * 21 and len(line) > 2


def test_too_large_a_file_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2_000_000)
    (folder / "text").write_text("some text")
    (folder / "data").write_text("x" * 2_000_001)
    assert said(folder)[0].endswith("skipped 1 over 2 MB")


def test_too_much_and_a_path_that_is_not_there_are_refused(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="nowhere: there is no such file or folder"):
        open_corpus([folder, folder / "nowhere"], VOCABULARY)
    monkeypatch.setattr(files, "MAX_FOLDER_BYTES", 10)
    (folder / "text").write_text("some more text")
    with pytest.raises(SettingError, match=r"files: 0\.01 kB of text in 1 file is too much"):
        open_corpus([folder], VOCABULARY)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no text in it"),
        (b"", "no text in it"),
        (b"\0", r"no text in it \(skipped 1 binary\)"),
    ],
)
def test_a_corpus_without_text_is_refused(folder: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (folder / "file").write_bytes(content)
    with pytest.raises(SettingError, match=reason):
        open_corpus([folder], VOCABULARY)


# The index


def test_an_index_is_made_once_and_for_its_owner_alone(folder: Path, cache: Path) -> None:
    (cache / "corpus").mkdir(parents=True, mode=0o755)
    (folder / "text").write_text("some text")
    first, again = CountingVocabulary(), CountingVocabulary()
    assert said(folder, vocabulary=first) == said(folder, vocabulary=again)
    assert "some text" in first.texts and "some text" not in again.texts
    assert drafted(open_corpus([folder], VOCABULARY), "so") == "me te"
    [index] = indexes(cache)
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    assert stat.S_IMODE(index.parent.stat().st_mode) == 0o700


def touch(folder: Path) -> None:
    (folder / "text").write_text("same textt")
    os.utime(folder / "text", ns=(1, 1))


EDITS: dict[str, Callable[[Path], object]] = {
    "change": lambda folder: (folder / "text").write_text("other text"),
    "touch": touch,
    "add": lambda folder: (folder / "more").write_text("more text"),
    "rename": lambda folder: (folder / "text").rename(folder / "renamed"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_index_is_made_again_when_files_change(
    folder: Path, cache: Path, edit: Callable[[Path], object]
) -> None:
    (folder / "text").write_text("some text")
    open_corpus([folder], VOCABULARY)
    edit(folder)
    vocabulary = CountingVocabulary()
    notices = said(folder, vocabulary=vocabulary)
    assert {path.read_text() for path in folder.iterdir()} <= set(vocabulary.texts)
    assert len(indexes(cache)) == 1
    assert f"indexed {len(list(folder.iterdir()))} file" in notices[0]


def test_another_tokenizer_has_an_index_of_its_own(folder: Path, cache: Path) -> None:
    (folder / "text").write_text("abab")
    open_corpus([folder], VOCABULARY)
    other = FakeVocabulary("ba")
    corpus = open_corpus([folder], other)
    assert len(indexes(cache)) == 2
    drafter = CorpusDrafter(corpus)
    drafter.begin(0, asked(other.tokenize("ab")))
    assert propose(drafter, max_tokens=2).tokens == tuple(other.tokenize("ab"))
    assert tokenizer_id(other) != tokenizer_id(VOCABULARY) == tokenizer_id(CountingVocabulary())


def flip(data: bytearray, place: int) -> bytearray:
    data[place] ^= 1
    return data


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flip(data, 0),
        lambda data: flip(data, data.index(b"NUMPY") + 130),
        lambda data: flip(data, data.index('["'.encode("utf-32-le"))),
        lambda data: data[: len(data) // 2],
        lambda data: data[1:],
        lambda data: data[:7],
        lambda data: data[:0],
    ],
    ids=["first", "token", "about", "half", "shifted", "short", "empty"],
)
def test_a_damaged_index_is_made_anew_and_said(
    folder: Path, cache: Path, damage: Callable[[bytearray], bytes]
) -> None:
    (folder / "text").write_text("some text, " * 10)
    sound = said(folder)
    [index] = indexes(cache)
    index.write_bytes(damage(bytearray(index.read_bytes())))
    assert said(folder) == ["the index of the corpus was damaged and is made again", *sound]
    assert said(folder) == sound
    assert drafted(open_corpus([folder], VOCABULARY), "so") == "me te"


@pytest.mark.parametrize("stage", ["read", "sorting"])
def test_interrupted_it_leaves_nothing(folder: Path, cache: Path, stage: str) -> None:
    (folder / "text").write_text("some text")

    def interrupt(what: str) -> None:
        if stage in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_corpus([folder], VOCABULARY, interrupt)
    assert not cache.exists()


def test_an_index_that_cannot_be_kept_is_used_all_the_same(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "text").write_text("some text")
    cache.write_text("a file where a folder should be")
    with collect_notices() as notices:
        assert drafted(open_corpus([folder], VOCABULARY), "so") == "me te"
    assert "cannot be kept in" in notices[0] and "(not a directory)" in notices[0]
    cache.unlink()

    def full(*_: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "(no space left on device)" in said(folder)[0]
    assert indexes(cache) == []


def test_two_at_once_both_get_a_whole_index(folder: Path, cache: Path) -> None:
    (folder / "text").write_text("some text, " * 2000)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: open_corpus([folder], FakeVocabulary("somet x,")), range(4)))
    assert len(indexes(cache)) == 1
    assert all(corpus.search([0, 1])[1] == 2 for corpus in made)


def test_what_nobody_uses_is_swept_away(folder: Path, cache: Path) -> None:
    (folder / "text").write_text("some text")
    open_corpus([folder], VOCABULARY)
    [kept] = indexes(cache)
    old, new = cache / "corpus" / "old.npz", cache / "corpus" / "new.npz"
    for path, days in ((old, 31), (new, 20), (kept, 29)):
        path.touch()
        used_s = path.stat().st_mtime - days * 24 * 3600
        os.utime(path, (used_s, used_s))
    open_corpus([folder], VOCABULARY)  # used: kept for another month
    used_s = kept.stat().st_mtime
    assert time.time() - used_s < 24 * 3600
    assert old in indexes(cache)
    (folder / "text").write_text("other text")
    open_corpus([folder], VOCABULARY)
    assert indexes(cache) == sorted([kept, new])
