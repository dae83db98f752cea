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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import HubError, ModelFileError
from outrider.core.files import reason_of

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata


_TIMEOUT_S = 10.0
_TOKEN = "set HF_TOKEN to a token that may read it, or log in with `hf auth login`."
_NO_ROOM = "Free some space, or set HF_HOME to a larger disk."


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


def list_files(name: str, options: HubOptions, *, with_sizes: bool = False) -> dict[str, int | None]:
    """The files of repository `name`, sorted, and their bytes where asked for (None: the hub does not
    say); only the cached ones when the hub does not answer.

    Raises HubError when the repository cannot be found or seen.
    """
    return _Repository(name, options).files(with_sizes=with_sizes)


def fetch(name: str, files: Sequence[str], options: HubOptions) -> tuple[Path, ...]:
    """The paths of `files` in the cache, downloaded where they are not there yet.

    All come from the same commit. A download that broke off goes on where it ended. The bar on
    standard error shows only on a terminal. Raises HubError for whatever prevents that.
    """
    repository = _Repository(name, options)
    return tuple(repository.fetch(file) for file in files)


class _Repository:
    """A repository at a revision, with its folder in the cache."""

    def __init__(self, name: str, options: HubOptions) -> None:
        from huggingface_hub import constants, is_offline_mode

        self._name = name
        self._options = options
        self._offline = options.offline or is_offline_mode()
        self._revision = options.revision or constants.DEFAULT_REVISION
        self._cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
        self._folder = self._cache / f"models--{name.replace('/', '--')}"

    def files(self, *, with_sizes: bool) -> dict[str, int | None]:
        from huggingface_hub import HfApi

        what, snapshot = f"hf:{self._name}", self._snapshot()
        if not self._offline:
            try:
                api = HfApi(endpoint=self._options.endpoint, token=self._options.token)
                info = api.model_info(
                    self._name,
                    revision=self._options.revision,
                    timeout=_TIMEOUT_S,
                    files_metadata=with_sizes,
                )
                return dict(sorted((sibling.rfilename, sibling.size) for sibling in info.siblings or ()))
            except Exception as error:
                if snapshot is None or not _cache_may_answer(error):
                    raise _explain(error, what, self._cache) from error
        if snapshot is None:
            raise _not_cached(what)
        paths = [path for path in snapshot.rglob("*") if path.is_file()]
        return dict(sorted((path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in paths))

    def _snapshot(self) -> Path | None:
        """Where the cache keeps the files of this revision, if it knows it."""
        try:
            commit = (self._folder / "refs" / self._revision).read_text().strip()
        except OSError:
            commit = self._revision
        folder = self._folder / "snapshots" / commit
        return folder if commit and folder.is_dir() else None

    def fetch(self, file: str) -> Path:
        """The path of a file in the cache."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        what, snapshot, options = f"hf:{self._name}/{file}", self._snapshot(), self._options
        cached = snapshot / file if snapshot and (snapshot / file).is_file() else None
        if self._offline:
            if cached is None:
                raise _not_cached(what)
            return cached
        endpoint, token = options.endpoint, options.token
        try:
            url = hf_hub_url(self._name, file, revision=self._revision, endpoint=endpoint)
            found = get_hf_file_metadata(url, token=token, timeout=_TIMEOUT_S, endpoint=endpoint)
            if cached and found.commit_hash in cached.parts:
                return cached
            url = hf_hub_url(self._name, file, revision=found.commit_hash, endpoint=endpoint)
            self._download(url, found, what)
            # The content is in place: this only links it under its name and notes the commit.
            linked = hf_hub_download(
                self._name,
                file,
                revision=self._revision,
                token=token,
                cache_dir=self._cache,
                endpoint=endpoint,
            )
            return Path(linked)
        except HubError:
            raise
        except Exception as error:
            if cached and _cache_may_answer(error):
                return cached
            raise _explain(error, what, self._cache) from error

    def _download(self, url: str, found: HfFileMetadata, what: str) -> None:
        """Bring a file's content into the cache, under the name that the hub's client looks for."""
        from huggingface_hub import constants
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported lazily

        etag = found.etag or ""
        if not re.fullmatch(r"[\w-]+", etag) or found.size is None or not found.commit_hash:
            reason = "the answer does not come from a hub (a proxy or a login page, perhaps)"
            raise HubError(what, reason, "Check the network, and HF_ENDPOINT if it is set.")
        if found.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return  # Only the hub's client itself can fetch a file of this size.
        blob = self._folder / "blobs" / etag
        lock = self._cache / ".locks" / self._folder.name / f"{etag}.lock"  # the client's own
        for folder in (lock.parent, blob.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                return
            partial = blob.with_name(f"{etag}.incomplete")
            self._go_on(url, partial, found.size, what)
            if re.fullmatch(r"[0-9a-f]{64}", etag) and file_sha256(partial) != etag:
                partial.unlink()
                raise HubError(what, "the download was damaged on its way", "Run the same command again.")
            partial.replace(blob)

    def _go_on(self, url: str, partial: Path, size_bytes: int, what: str) -> None:
        """Go on with a download to `partial` until it has all of its bytes."""
        import httpx2
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

        try:
            with partial.open("ab") as file:
                if file.tell() > size_bytes:
                    file.seek(0)
                    file.truncate()
                needed, free = size_bytes - file.tell(), shutil.disk_usage(partial.parent).free
                if needed > free:
                    room = f"{partial.parent} has room for {free / 1e9:.2f} GB"
                    raise HubError(what, f"it needs {needed / 1e9:.2f} GB more, and {room}", _NO_ROOM)
                http_get(
                    url,
                    file,
                    resume_size=file.tell(),
                    expected_size=size_bytes,
                    headers=build_hf_headers(token=self._options.token),
                    displayed_filename=what.rsplit("/", 1)[-1],
                )
        except httpx2.TransportError as error:
            reason = f"the connection broke after {partial.stat().st_size:,} of {size_bytes:,} bytes"
            raise HubError(what, reason, "Run the same command again: it goes on from there.") from error


# What the client raises, in terms of what the user asked for


def _not_cached(what: str) -> HubError:
    way_out = "Run once with network access, or name a local file."
    return HubError(what, "offline mode is on, and it is not in the hub's cache", way_out)


def _cache_may_answer(error: Exception) -> bool:
    """Whether what is cached may be used instead: the hub is out of reach, or it does not let
    this user in (any more), which says nothing about the files."""
    return _is_unreachable(error) or _status(error) in (401, 403, 429)


def _is_unreachable(error: Exception) -> bool:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    return _status(error) >= 500 or isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _status(error: Exception) -> int:
    """The status of the hub's answer; 0 where it gave none."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


def _explain(error: Exception, what: str, cache: Path) -> HubError:
    """The HubError for whatever the client raised about `what`, to be raised from it."""
    from huggingface_hub import errors

    status = _status(error)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    no_repository = isinstance(error, errors.RepositoryNotFoundError) or status == 404
    causes = (
        (_is_unreachable(error), f"the hub cannot be reached ({said})",
         "Check the network, or name a local file."),
        (isinstance(error, errors.GatedRepoError), "its owner wants its terms accepted first",
         f"Accept them on its page, then {_TOKEN}"),
        (isinstance(error, errors.RevisionNotFoundError), "the repository has no such revision",
         "Check the branch, tag or commit."),
        (isinstance(error, errors.RemoteEntryNotFoundError), "the repository has no such file",
         "Check the file's name on the repository's page."),
        (no_repository, "there is no such repository, or it is private",
         f"Check owner and name; if private, {_TOKEN}"),
        (status in (401, 403), f"the hub refuses access ({status})", _TOKEN.capitalize()),
        (status == 429, "the hub has had too many requests from here",
         "Wait some minutes, or set HF_TOKEN."),
        (status > 0, f"the hub answered with an error ({status})", "Try again later."),
        (is_full, f"the disk of {cache} is full", _NO_ROOM),
        (isinstance(error, PermissionError), f"the cache {cache} may not be written",
         "Set HF_HOME to a folder of your own."),
        (isinstance(error, OSError), said, "Run the same command again."),
        (True, f"the hub's answer cannot be used ({said})", "Check the name, and HF_ENDPOINT if it is set."),
    )  # fmt: skip
    return next(HubError(what, why, way_out) for applies, why, way_out in causes if applies)


# Where Outrider keeps what it fetches and measures, and what names a file's content.


def cache_dir() -> Path:
    """Outrider's own cache folder, which may not exist yet: $OUTRIDER_CACHE, else
    $XDG_CACHE_HOME/outrider, else ~/.cache/outrider."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "outrider"


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """The hash in hexadecimal; `on_bytes` is called with the bytes read, block by block.

    Raises ModelFileError when the file is gone or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                on_bytes(len(block))
    except OSError as error:
        reason = reason_of(error)
        raise ModelFileError(str(path), reason, "Check the file, and start again.") from error
    return digest.hexdigest()
