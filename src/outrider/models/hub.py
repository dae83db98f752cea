"""Files of a Hugging Face hub repository, through the hub's own client and into its cache.

The client writes each download to a file of its own and drops it when the download breaks
off, so gigabytes start over after Ctrl-C. Here a download goes to a file that is named after
its content, next to where the client keeps it, and is taken up again by the next run.

The client takes half a second to import, so nothing here imports it before it is needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import HubError, ModelFileError

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata


_TIMEOUT_S = 10.0
_TOKEN = "set HF_TOKEN to a token that may read it, or log in with `hf auth login`."
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How the hub is asked. What is None follows the hub client's own settings: HF_TOKEN or
    the saved login, HF_HUB_CACHE, the branch "main", HF_ENDPOINT. `offline` (or
    HF_HUB_OFFLINE) uses what the cache holds and asks nobody."""

    token: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    revision: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository at a revision, with its folder in the cache."""

    name: str
    revision: str
    folder: Path
    offline: bool
    options: HubOptions

    def snapshot(self) -> Path | None:
        """Where the cache keeps the files of this revision, if it knows it."""
        try:
            commit = (self.folder / "refs" / self.revision).read_text().strip()
        except OSError:
            commit = self.revision
        folder = self.folder / "snapshots" / commit
        return folder if commit and folder.is_dir() else None

    def cached(self, file: str) -> Path | None:
        """A file of this revision in the cache, complete."""
        snapshot = self.snapshot()
        return snapshot / file if snapshot and (snapshot / file).is_file() else None


def list_files(name: str, options: HubOptions) -> tuple[str, ...]:
    """The files of repository `name`, sorted; only the cached ones when the hub does not answer.

    Raises HubError when the repository cannot be found or seen.
    """
    import huggingface_hub

    repository = _repository(name, options)
    if repository.offline:
        return _cached_files(repository)
    try:
        api = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token)
        info = api.model_info(name, revision=options.revision, timeout=_TIMEOUT_S)
        return tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
    except Exception as error:
        if _cache_may_answer(error) and repository.snapshot():
            return _cached_files(repository)
        raise _explain(error, f"hf:{name}") from error


def fetch(name: str, files: Sequence[str], options: HubOptions) -> tuple[Path, ...]:
    """The paths of `files` in the cache, downloaded where they are not there yet.

    All come from the same commit. A download that broke off goes on where it ended. The bar on
    standard error shows only on a terminal. Raises HubError for whatever prevents that.
    """
    repository = _repository(name, options)
    return tuple(_fetch_one(repository, file) for file in files)


def _repository(name: str, options: HubOptions) -> _Repository:
    from huggingface_hub import constants, is_offline_mode

    cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
    return _Repository(
        name=name,
        revision=options.revision or constants.DEFAULT_REVISION,
        folder=cache / f"models--{name.replace('/', '--')}",
        offline=options.offline or is_offline_mode(),
        options=options,
    )


def _cached_files(repository: _Repository) -> tuple[str, ...]:
    snapshot = repository.snapshot()
    if snapshot is None:
        raise _not_cached(f"hf:{repository.name}")
    found = (path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    return tuple(sorted(found))


def _not_cached(what: str) -> HubError:
    return HubError(
        what,
        "offline mode is on, and it is not in the hub's cache",
        "Run once with network access, or name a local file.",
    )


def _fetch_one(repository: _Repository, file: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    what, options = f"hf:{repository.name}/{file}", repository.options
    cached = repository.cached(file)
    if repository.offline:
        if cached is None:
            raise _not_cached(what)
        return cached
    try:
        url = hf_hub_url(repository.name, file, revision=repository.revision, endpoint=options.endpoint)
        found = get_hf_file_metadata(url, token=options.token, timeout=_TIMEOUT_S, endpoint=options.endpoint)
        if cached and found.commit_hash in cached.parts:
            return cached
        url = hf_hub_url(repository.name, file, revision=found.commit_hash, endpoint=options.endpoint)
        _download(url, repository, found, what)
        # The content is in place: this only links it under its name and notes the commit.
        linked = hf_hub_download(
            repository.name, file, revision=repository.revision, token=options.token,
            cache_dir=repository.folder.parent, endpoint=options.endpoint,
        )  # fmt: skip
        return Path(linked)
    except HubError:
        raise
    except Exception as error:
        if cached and _cache_may_answer(error):
            return cached
        raise _explain(error, what, repository.folder.parent) from error


def _download(url: str, repository: _Repository, found: HfFileMetadata, what: str) -> None:
    """Bring a file's content into the cache, under the name that the hub's client looks for."""
    from huggingface_hub import constants

    etag = found.etag or ""
    if not re.fullmatch(r"[\w-]+", etag) or found.size is None or not found.commit_hash:
        reason = "the answer does not come from a hub (a proxy or a login page, perhaps)"
        raise HubError(what, reason, "Check the network, and HF_ENDPOINT if it is set.")
    if found.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # Only the hub's client itself can fetch a file of this size.
    blob = repository.folder / "blobs" / etag
    with _lock(repository, etag):
        if blob.exists():
            return
        partial = blob.with_name(f"{etag}.incomplete")
        _check_space(blob.parent, found.size, partial, what)
        _download_rest(url, partial, found.size, what, repository.options.token)
        if _SHA256.fullmatch(etag) and file_sha256(partial) != etag:
            partial.unlink()
            raise HubError(what, "the download was damaged on its way", "Run the same command again.")
        partial.replace(blob)


@contextmanager
def _lock(repository: _Repository, etag: str) -> Iterator[None]:
    """The lock that the hub's client takes for the same content."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported lazily

    lock = repository.folder.parent / ".locks" / repository.folder.name / f"{etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        yield


def _check_space(folder: Path, size_bytes: int, partial: Path, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    present = partial.stat().st_size if partial.exists() else 0
    if present > size_bytes:
        partial.unlink()
        present = 0
    needed, free = size_bytes - present, shutil.disk_usage(folder).free
    if needed > free:
        reason = f"it needs {needed / 1e9:.2f} GB more, and {folder} has room for {free / 1e9:.2f} GB"
        raise HubError(what, reason, "Free some space, or set HF_HOME to a larger disk.")


def _download_rest(url: str, partial: Path, size_bytes: int, what: str, token: str | None) -> None:
    import httpx2
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

    try:
        with partial.open("ab") as file:
            http_get(
                url, file, resume_size=file.tell(), expected_size=size_bytes,
                headers=build_hf_headers(token=token), displayed_filename=what.rsplit("/", 1)[-1],
            )  # fmt: skip
    except httpx2.TransportError as error:
        kept = partial.stat().st_size
        reason = f"the connection broke after {kept:,} of {size_bytes:,} bytes"
        raise HubError(what, reason, "Run the same command again: it goes on from there.") from error


# What the client raises, in terms of what the user asked for


def _cache_may_answer(error: Exception) -> bool:
    """Whether what is cached may be used instead: the hub is out of reach, or it does not let
    this user in (any more), which says nothing about the files."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 429):
        return True
    return _is_unreachable(error)


def _is_unreachable(error: Exception) -> bool:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _explain(error: Exception, what: str, cache: Path | None = None) -> HubError:
    """The HubError for whatever the client raised about `what`, to be raised from it."""
    from huggingface_hub.errors import HfHubHTTPError

    if _is_unreachable(error):
        way_out = "Check the network, or name a local file."
        return HubError(what, f"the hub cannot be reached ({_first_line(error)})", way_out)
    if isinstance(error, HfHubHTTPError):
        return HubError(what, *_refusal(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(
            what, f"the disk of {cache} is full", "Free some space, or set HF_HOME to a larger disk."
        )
    if isinstance(error, PermissionError):
        return HubError(what, f"the cache {cache} may not be written", "Set HF_HOME to a folder of your own.")
    if isinstance(error, OSError):
        return HubError(what, _first_line(error), "Run the same command again.")
    reason = f"the hub's answer cannot be used ({_first_line(error)})"
    return HubError(what, reason, "Check the name, and HF_ENDPOINT if it is set.")


def _refusal(error: Exception) -> tuple[str, str]:
    """Reason and way out of an answer that the hub gave, but not with a file."""
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return "its owner wants its terms accepted first", f"Accept them on its page, then {_TOKEN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision", "Check the branch, tag or commit."
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the repository has no such file", "Check the file's name on the repository's page."
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return "there is no such repository, or it is private", f"Check owner and name; if private, {_TOKEN}"
    if status in (401, 403):
        return f"the hub refuses access ({status})", _TOKEN.capitalize()
    if status == 429:
        return "the hub has had too many requests from here", "Wait some minutes, or set HF_TOKEN."
    return f"the hub answered with an error ({status})", "Try again later."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# Where Outrider keeps what it fetches and measures.


def cache_dir() -> Path:
    """Outrider's own cache folder, which may not exist yet: $OUTRIDER_CACHE, else
    $XDG_CACHE_HOME/outrider, else ~/.cache/outrider."""
    own = os.environ.get("OUTRIDER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "outrider"


# A file's SHA-256: what names it, wherever it lies.

_BLOCK_BYTES = 1 << 22


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """The hash in hexadecimal; `on_bytes` is called with the bytes read, block by block.

    Raises ModelFileError when the file is gone or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ModelFileError(str(path), reason, "Check the file, and start again.") from error
    return digest.hexdigest()
