"""Earlier texts that outlive a process, a file for each cache namespace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from outrider.core.files import reason_of
from outrider.engine.tiers.folder import Folder, Unusable

_log = logging.getLogger(__name__)

_SUFFIX = ".texts"

Part = tuple[Sequence[int], Sequence[int]]
"""Tokens, and what names the blocks of the text that ends in them."""


class RememberedTexts:
    """Texts in a folder. What cannot be read or written is a line in the log."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def recall(self, scope: str) -> list[Part]:
        """The texts of a namespace, the oldest first."""
        path = self._path(scope)
        try:
            head = self._folder.read_head(path)
            if head["scope"] != self._folder.digest(scope):
                raise Unusable("it is of another namespace")
            return [(tokens, keys) for tokens, keys in head["texts"]]
        except FileNotFoundError:
            return []
        except (OSError, Unusable, KeyError, TypeError, ValueError) as error:
            _log.warning("%s is not used: %s", path, reason_of(error))
            return []

    def keep(self, scope: str, texts: Sequence[Part]) -> None:
        """Write the texts of a namespace, in place of those that were there."""
        try:
            self._folder.write(self._path(scope), {"scope": self._folder.digest(scope), "texts": list(texts)})
        except OSError as error:
            _log.warning("%s: earlier texts are not kept: %s", self._folder.path, reason_of(error))

    def forget(self) -> None:
        """Remove the texts of all namespaces."""
        for path in self._folder.names(_SUFFIX)[0]:
            with suppress(OSError):
                path.unlink()

    def _path(self, scope: str) -> Path:
        return self._folder.path / f"{self._folder.name_of('texts', scope)}{_SUFFIX}"
