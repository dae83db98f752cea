"""Looking up in files of the user's: a code base, a document."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Request
from outrider.core.errors import SettingError
from outrider.core.numbers import counted
from outrider.drafters import corpus_store
from outrider.drafters.corpus_store import About, DamagedIndex, FileList, chunks, list_files
from outrider.drafters.lookup import IndexReader, LookupDrafter
from outrider.drafters.suffix_array import DEPTH, ContextIndex, lay_out, sort_contexts
from outrider.models.vocab import tokenizer_id

Progress = Callable[[str, int, int], None]
"""Called with what is being done ("reading" bytes, "sorting" in rounds), how much of it, and of how much."""


def indexing(stage: str, done: int, total: int) -> str:
    """What `Progress` was called with, for people."""
    if stage == "reading":
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB read"
    return f"sorting, round {done + 1} of {total}"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files to look up in. `notices` are lines that the user should see."""

    index: ContextIndex
    num_files: int
    num_tokens: int
    notices: tuple[str, ...] = ()


def open_corpus(paths: Sequence[Path], vocabulary: Vocabulary, progress: Progress | None = None) -> Corpus:
    """The files at and below `paths`, as this tokenizer cuts them.

    They are indexed once, in the user's own cache, and again when a file comes, goes or changes.
    Interrupted, that leaves nothing behind. Raises SettingError for a path that does not exist,
    for files without any text or with too much of it, and where the index cannot be written.
    """
    files, tokenizer = list_files(paths), tokenizer_id(vocabulary)
    names = "\0".join([tokenizer, *(str(path.resolve()) for path in paths)])
    place = corpus_store.folder()
    path = place / f"{sha256(names.encode(errors='replace')).hexdigest()[:32]}.index"
    notices: list[str] = []
    found = None
    try:
        found = corpus_store.load(path)
    except FileNotFoundError:
        pass
    except DamagedIndex as error:
        notices.append(f"the index of the corpus was damaged ({error.why}) and is made again")
    if found is None or (found[1].sources, found[1].tokenizer) != (files.identity, tokenizer):
        corpus_store.sweep(place)
        _build(paths, files, vocabulary, path, progress or (lambda *_: None))
        found = corpus_store.load(path)
    index, about = found
    tokens = str(about.num_tokens) if about.num_tokens < 1e5 else f"{about.num_tokens / 1e6:.1f} M"
    line = f"corpus: indexed {counted(about.num_files, 'file')}, {tokens} tokens"
    if about.skipped:
        line += f"; skipped {_counts(about.skipped)}"
    return Corpus(index, about.num_files, about.num_tokens, (*notices, line))


def _counts(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in sorted(skipped.items()))


def _build(
    paths: Sequence[Path], files: FileList, vocabulary: Vocabulary, path: Path, progress: Progress
) -> None:
    """Read, sort and save."""
    texts = list(_read(files, vocabulary, progress))
    num_tokens = sum(map(len, texts))
    if not num_tokens:
        why = "there is no text in it" + (f" (skipped {_counts(files.skipped)})" if files.skipped else "")
        raise SettingError(", ".join(map(str, paths)), why, "Name files or folders with text in UTF-8.")
    laid = lay_out(texts)
    about = About(files.identity, tokenizer_id(vocabulary), len(texts), num_tokens, dict(files.skipped))
    del texts
    places = sort_contexts(laid, lambda done, total: progress("sorting", done, total))
    corpus_store.save(path, laid, places, about)


def _read(files: FileList, vocabulary: Vocabulary, progress: Progress) -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of each file that is text; the others are counted in `files.skipped`."""
    total, before = files.size_bytes, 0
    for source in files.sources:
        parts, read = [np.empty(0, np.int32)], 0
        try:
            for text in chunks(source):
                parts.append(np.asarray(vocabulary.tokenize(text, add_special=False), np.int32))
                read = min(read + len(text), source.size_bytes)
                progress("reading", before + read, total)
            yield np.concatenate(parts)
        except OSError:
            files.skipped["unreadable"] += 1
        except UnicodeDecodeError:
            files.skipped["binary"] += 1
        before += source.size_bytes


class CorpusDrafter(LookupDrafter):
    """Drafts from a corpus."""

    name = "corpus"

    def __init__(self, corpus: Corpus, min_match: int = 2) -> None:
        self._index = corpus.index
        self._min_match = min_match
        self._recent: dict[int, deque[int]] = {}

    def begin(self, sequence: int, request: Request) -> None:
        self._recent[sequence] = deque(request.prompt, DEPTH)

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        self._recent[sequence].extend(tokens)

    def _reader(self, sequence: int) -> IndexReader:
        return self._index.reader(list(self._recent[sequence]), self._min_match)

    def end(self, sequence: int) -> None:
        del self._recent[sequence]

    def reset(self) -> None:
        """Forget every sequence; the corpus stays."""
        self._recent.clear()
