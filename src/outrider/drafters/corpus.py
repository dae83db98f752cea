"""Looking up in files of the user's: a code base, a document. They are tokenized and sorted once, and the
index is kept in the user's own cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Request
from outrider.core.errors import SettingError
from outrider.core.files import FileList, chunks, list_files, parse_json, reason_of, write_private
from outrider.core.notices import notify
from outrider.core.numbers import counted
from outrider.drafters.lookup import ContextIndex, LookupDrafter, RunningText
from outrider.models.hub import cache_dir
from outrider.models.vocab import tokenizer_id

_UNUSED_S = 30 * 24 * 3600.0

Progress = Callable[[str], None]
"""Called with what is being done and how much of it is."""


class _Stored(NamedTuple):
    """An index as it is kept, and a line about it: `identity` must be that of the files for it to be used."""

    contexts: ContextIndex
    identity: str
    line: str

    def save(self, path: Path) -> None:
        """Raises OSError."""
        stored, laid = BytesIO(), np.frombuffer(self.contexts.stored, ">u4")
        about = np.array(json.dumps([self.identity, self.line]))
        np.savez(stored, laid=laid, places=np.asarray(self.contexts.places), about=about)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > _UNUSED_S:
                other.unlink()
        write_private(path, [stored.getbuffer()])

    @classmethod
    def load(cls, path: Path) -> _Stored:
        """Raises FileNotFoundError, or ValueError for anything that `save` did not write."""
        try:
            with path.open("rb") as file, np.load(file) as stored:  # checks that it is whole
                index = ContextIndex(stored["laid"].tobytes(), stored["places"])
                found = cls(index, *parse_json(str(stored["about"])))
            os.utime(path)
        except (BadZipFile, EOFError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(str(path)) from error
        return found


def open_corpus(
    paths: Sequence[Path], vocabulary: Vocabulary, progress: Progress = lambda _what: None
) -> ContextIndex:
    """The files at and below `paths`, as this tokenizer cuts them; a notice says what they are.

    They are indexed once, and again when a file comes, goes or changes. Raises SettingError for a path that
    does not exist, and for files without any text or with too much of it.
    """
    files = list_files(paths)
    names = "\0".join([tokenizer_id(vocabulary), *(str(path.resolve()) for path in paths)])
    path = cache_dir() / "corpus" / f"{sha256(names.encode(errors='replace')).hexdigest()[:32]}.npz"
    found = None
    try:
        found = _Stored.load(path)
    except ValueError:
        notify("the index of the corpus was damaged and is made again")
    except OSError:  # there is none; where it cannot be read, saving says why
        pass
    if found is None or found.identity != files.identity:
        found = _built(paths, files, vocabulary, progress)
        try:
            found.save(path)
        except OSError as error:
            notify(f"the index of the corpus cannot be kept in {path.parent} ({reason_of(error)})")
    notify(found.line)
    return found.contexts


def _built(paths: Sequence[Path], files: FileList, vocabulary: Vocabulary, progress: Progress) -> _Stored:
    texts = list(_read(files, vocabulary, progress))
    num_tokens, skipped = sum(map(len, texts)), f"skipped {files.said}" if files.said else ""
    if not num_tokens:
        why = "there is no text in it" + (skipped and f" ({skipped})")
        raise SettingError(", ".join(map(str, paths)), why, "Name files or folders with text in UTF-8.")
    size = str(num_tokens) if num_tokens < 1e5 else f"{num_tokens / 1e6:.1f} M"
    line = f"corpus: indexed {counted(len(texts), 'file')}, {size} tokens" + (skipped and f"; {skipped}")
    index = ContextIndex.build(texts, lambda n, total: progress(f"sorting, round {n + 1} of {total}"))
    return _Stored(index, files.identity, line)


def _read(files: FileList, vocabulary: Vocabulary, progress: Progress) -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of each file that is text; the others are counted in `files.skipped`."""
    before = 0
    for path, size in files.sizes.items():
        parts, read = [np.empty(0, np.int32)], 0
        try:
            for text in chunks(path):
                parts.append(np.asarray(vocabulary.tokenize(text, add_special=False), np.int32))
                read = min(read + len(text), size)
                progress(f"{(before + read) / 1e6:.1f} of {files.size_bytes / 1e6:.1f} MB read")
            yield np.concatenate(parts)
        except OSError:
            files.skipped["unreadable"] += 1
        except UnicodeDecodeError:
            files.skipped["binary"] += 1
        before += size


class CorpusDrafter(LookupDrafter[RunningText]):
    """Drafts from a corpus."""

    name = "corpus"

    def __init__(self, index: ContextIndex) -> None:
        super().__init__()
        self._indexes = [index]

    def begin(self, sequence: int, request: Request) -> None:
        self._texts[sequence] = RunningText(request.prompt, lambda: self._indexes)
