"""Files of a Hugging Face hub repository, through the hub's own client and into its cache. The client drops
what it has of a file when a download is interrupted, so the download itself is done here: into a file named
after its content, which the next run goes on with. The client takes half a second to import, so nothing here
imports it before it is needed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.core.errors import HubError, ModelFileError
from outrider.core.files import check_room, reason_of

_TIMEOUT_S = 10.0
_NO_ROOM = "Free some space, or set HF_HOME to a folder of your own, on a larger disk."
_TOKEN = "set HF_TOKEN to a token that may read it, or log in with `hf auth login`."


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How the hub is asked. What is None follows the hub client's own settings: HF_TOKEN or the saved login,
    HF_HUB_CACHE, HF_ENDPOINT. `offline` (or HF_HUB_OFFLINE) uses what the cache holds and asks nobody."""

    token: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    endpoint: str | None = None

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    @property
    def is_offline(self) -> bool:
        from huggingface_hub import is_offline_mode

        return self.offline or is_offline_mode()


def list_files(name: str, options: HubOptions) -> list[str]:
    """The files of repository `name`, sorted; only the cached ones when the hub does not answer. Raises
    HubError when the repository cannot be found or seen."""
    from huggingface_hub import HfApi

    what, snapshot = f"hf:{name}", _snapshot(name, options)
    if not options.is_offline:
        try:
            info = HfApi(endpoint=options.endpoint, token=options.token).model_info(name, timeout=_TIMEOUT_S)
            return sorted(sibling.rfilename for sibling in info.siblings or ())
        except Exception as error:
            # Out of reach, or it does not let this user in (any more), which says nothing about the files.
            if snapshot is None or not (_is_unreachable(error) or _status(error) in (401, 403, 429)):
                raise _explain(error, what, options.cache) from error
    if snapshot is None:
        raise _not_cached(what)
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())


def _snapshot(name: str, options: HubOptions) -> Path | None:
    folder = options.cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def fetch(name: str, files: Sequence[str], options: HubOptions) -> tuple[Path, ...]:
    """The paths of `files` in the cache, all of the same commit, downloaded where they are not there yet. The
    bar on standard error shows only on a terminal. Raises HubError for whatever prevents that."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    paths: list[Path] = []
    for file in files:
        what = f"hf:{name}/{file}"
        # Below <cache>/models--owner--repo/snapshots/<commit>
        commit = paths[0].relative_to(options.cache).parts[2] if paths else None
        find: Callable[..., Any] = partial(
            hf_hub_download,
            name,
            file,
            revision=commit,
            token=options.token,
            cache_dir=options.cache,
            endpoint=options.endpoint,
            etag_timeout=_TIMEOUT_S,
            local_files_only=options.offline,
        )
        try:
            path = (found := find(dry_run=True)).local_path
            if not Path(path).is_file():
                if found.will_download:
                    _download(name, file, found.commit_hash, options)
                path = find()  # puts the content under its name
        except HubError:
            raise
        except Exception as error:
            is_missing = isinstance(error, LocalEntryNotFoundError)
            if is_missing and options.is_offline:
                raise _not_cached(what) from None
            cause = error.__cause__ if is_missing and isinstance(error.__cause__, Exception) else error
            raise _explain(cause, what, options.cache) from error
        paths.append(Path(path))
    return tuple(paths)


def _download(name: str, file: str, commit: str, options: HubOptions) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]  # lazy

    what, folder = f"hf:{name}/{file}", f"models--{name.replace('/', '--')}"
    url = hf_hub_url(name, file, revision=commit, endpoint=options.endpoint)
    found = get_hf_file_metadata(url, token=options.token, timeout=_TIMEOUT_S, endpoint=options.endpoint)
    size, sha256 = found.size or 0, found.etag or ""
    if not re.fullmatch("[0-9a-f]{64}", sha256) or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # a small file that has no such hash, or one that only the client can fetch
    blob = options.cache / folder / "blobs" / sha256
    lock = options.cache / ".locks" / folder / f"{sha256}.lock"  # the client's own
    for parent in (blob.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    incomplete = blob.with_name(f"{sha256}.incomplete")
    with WeakFileLock(lock):
        if blob.exists():
            return
        with incomplete.open("ab") as content:
            check_room(blob.parent, size - content.tell(), lambda why: HubError(what, why, _NO_ROOM))
            headers = build_hf_headers(token=options.token)
            http_get(
                url,
                content,
                resume_size=content.tell(),
                expected_size=size,
                headers=headers,
                displayed_filename=file,
            )
        if file_sha256(incomplete) != sha256:
            incomplete.unlink()
            raise HubError(what, "the download was damaged on its way", "Run the same command again.")
        incomplete.replace(blob)


# What the client raises, in terms of what the user asked for


def _not_cached(what: str) -> HubError:
    way_out = "Run once with network access, or name a local file."
    return HubError(what, "offline mode is on, and it is not in the hub's cache", way_out)


def _is_unreachable(error: Exception) -> bool:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    return _status(error) >= 500 or isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _status(error: Exception) -> int:
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


def _explain(error: Exception, what: str, cache: Path) -> HubError:
    from huggingface_hub import errors

    status = _status(error)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    no_repository = isinstance(error, errors.RepositoryNotFoundError) or status == 404
    causes = (
        (_is_unreachable(error), f"the hub cannot be reached ({said})",
         "Check the network, or name a local file."),
        (isinstance(error, errors.GatedRepoError), "its owner wants its terms accepted first",
         f"Accept them on its page, then {_TOKEN}"),
        (isinstance(error, errors.RemoteEntryNotFoundError), "the repository has no such file",
         "Check the file's name on the repository's page."),
        (no_repository, "there is no such repository, or it is private",
         f"Check owner and name; if private, {_TOKEN}"),
        (status in (401, 403), f"the hub refuses access ({status})", _TOKEN.capitalize()),
        (status == 429, "the hub has had too many requests from here",
         "Wait some minutes, or set HF_TOKEN."),
        (status > 0, f"the hub answered with an error ({status})", "Try again later."),
        (isinstance(error, OSError) and error.errno, f"the cache {cache} cannot be used ({reason_of(error)})",
         _NO_ROOM),
        (isinstance(error, OSError), said, "Run the same command again."),
        (True, f"the hub's answer cannot be used ({said})", "Check the name, and HF_ENDPOINT if it is set."),
    )  # fmt: skip
    return next(HubError(what, why, way_out) for applies, why, way_out in causes if applies)


# Where Outrider keeps what it fetches and measures, and what names a file's content.


def cache_dir() -> Path:
    """$OUTRIDER_CACHE, else $XDG_CACHE_HOME/outrider, else ~/.cache/outrider; it may not exist yet."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "outrider"


def file_sha256(path: Path) -> str:
    """The hash in hexadecimal. Raises ModelFileError when the file is gone or cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = reason_of(error)
        raise ModelFileError(str(path), reason, "Check the file, and start again.") from error
