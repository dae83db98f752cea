"""The first calls of tiny models, which the guard makes in a child process: made once in a run for each kind
of file, library and options, whatever the weights and whatever cache a test has."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from outrider.backends.gguf import guard
from outrider.core.errors import ModelFileError
from outrider.models.header import read_header

__all__ = ["REAL", "remembering"]

REAL = guard._run_child
_TINY_BYTES = 1 << 22


def remembering(folder: Path) -> Callable[[Sequence[str], float], int]:
    """Runs a child, or remembers in `folder` that another for such a file ended well. A failure is not
    remembered."""

    def run(command: Sequence[str], limit_s: float) -> int:
        path, options = Path(command[-2]), command[-1]
        try:
            header = read_header(path)
        except ModelFileError:
            return REAL(command, limit_s)
        if header.file_bytes > _TINY_BYTES:
            return REAL(command, limit_s)
        fields = {name: value for name, value in header.fields.items() if name != "general.name"}
        kind = f"{fields} {header.tensors} {header.file_bytes} {options}"
        mark = folder / sha256(kind.encode()).hexdigest()
        if mark.exists():
            return 0
        status = REAL(command, limit_s)
        if status == 0:
            folder.mkdir(exist_ok=True)
            mark.touch()
        return status

    return run
