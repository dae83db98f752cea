"""What the hub's client raises, said in terms of what the user asked for."""

from __future__ import annotations

import errno
from pathlib import Path

from outrider.core.errors import HubError

__all__ = ["cache_may_answer", "explain"]

_TOKEN = "set HF_TOKEN to a token that may read it, or log in with `hf auth login`."


def cache_may_answer(error: Exception) -> bool:
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


def explain(error: Exception, what: str, cache: Path | None = None) -> HubError:
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
