"""Where a distilled draft comes from, as its file says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFWriter
from gguf.constants import Keys

from outrider.core.errors import ModelFileError
from outrider.models.header import read_header

__all__ = ["Provenance", "add_provenance", "read_provenance"]

_PREFIX = "outrider.distill."
_TEXTS = ("teacher", "teacher_sha256", "data", "version")
_NUMBERS = ("tokens", "steps", "seed")


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a draft was made.

    `teacher`: the target's name; `teacher_sha256`: of its file; `data`: what prompts at which temperatures,
    in one sentence; `tokens`: label positions trained on, each as often as it was; `version`: of Outrider;
    `licence`: the teacher's, None where its file names none. Of a draft that was continued, `tokens` and
    `steps` count what went before too.
    """

    teacher: str
    teacher_sha256: str
    data: str
    tokens: int
    steps: int
    seed: int
    version: str
    licence: str | None = None


def add_provenance(writer: GGUFWriter, provenance: Provenance) -> None:
    """Put it into the header of a file that is being written."""
    for name in _TEXTS:
        writer.add_string(_PREFIX + name, getattr(provenance, name))
    for name in _NUMBERS:
        writer.add_int64(_PREFIX + name, getattr(provenance, name))
    if provenance.licence:
        writer.add_license(provenance.licence)


def read_provenance(path: Path) -> Provenance | None:
    """How a draft was made, by its file; None for one that was not distilled here.

    Raises ModelFileError when the header cannot be read, or says it in part only.
    """
    header = read_header(path)
    if not any(key.startswith(_PREFIX) for key in header.fields):
        return None
    texts = {name: header.text(_PREFIX + name) for name in _TEXTS}
    numbers = {name: header.number(_PREFIX + name) for name in _NUMBERS}
    lacking = [name for name, value in (texts | numbers).items() if value is None]
    if lacking:
        reason = f"its header lacks {', '.join(_PREFIX + name for name in lacking)}"
        raise ModelFileError(str(path), reason, "Fetch the draft anew, or make it again.")
    licence = header.text(Keys.General.LICENSE)
    return Provenance(**texts, **numbers, licence=licence)  # type: ignore[arg-type]  # none is None
