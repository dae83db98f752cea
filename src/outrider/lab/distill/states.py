"""What goes into three of a target's layers along its answers: what an EAGLE-3 head is trained on.

llama.cpp computes them, as it does for the head in use: so a head is trained on what it will read, whatever
the target's quantization, and a target that cannot give them is found out before. They are kept as 16-bit
floats beside the answers, since to make them anew would take as long in every epoch as the training itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.backends.gguf import Weights
from outrider.core.errors import InputError
from outrider.core.files import write_whole
from outrider.lab.distill.examples import Example, Tokens, example_path
from outrider.lab.teacher_forced import teacher_forced

States = npt.NDArray[np.float16]

_LARGEST = float(np.finfo(np.float16).max)


def read_tokens(example: Example) -> Tokens:
    """The tokens of an answer and its prompt that are read: all but the last."""
    return np.concatenate([example.prompt, example.answer[:-1]])


def states_folder(answers: Path, layers: Sequence[int]) -> Path:
    """Where the inputs of these layers are kept."""
    return answers / f"states-{'-'.join(map(str, layers))}"


def states_path(folder: Path, example: Example) -> Path:
    """Those along one answer."""
    return folder / f"{example_path(folder, example.id).stem}.npy"


def read_states(path: Path) -> States:
    """What is kept along an answer (tokens read, values). Raises InputError for a missing or damaged file."""
    try:
        found: States = np.load(path, mmap_mode="r")
        if found.ndim == 2 and found.dtype == np.float16:
            return np.array(found)
        reason = f"it holds {found.ndim} dimensions of {found.dtype}"
    except (OSError, ValueError, EOFError) as error:
        reason = str(error)
    raise InputError(str(path), f"it is damaged ({reason})", "Remove it: it is made again.")


def write_states(
    target: Weights,
    layers: Sequence[int],
    examples: Sequence[Example],
    folder: Path,
    length: int,
    on_done: Callable[[int], None],
) -> None:
    """Compute and keep the inputs of `layers` along those of the examples that have none yet; the target's
    library must give them. `length`: tokens of the longest text; `on_done` is called with the number that are
    done. Raises BackendError, OutOfMemory or SettingError."""
    model = target.open(length)
    try:
        hidden = model.keep_hidden_states(layers)
        for done, example in enumerate(examples, start=1):
            path = states_path(folder, example)
            if not path.exists():
                tokens = tuple(read_tokens(example).tolist())
                for _ in teacher_forced(model, tokens, len(tokens)):
                    pass
                content = io.BytesIO()
                rows = hidden.of(0).clip(-_LARGEST, _LARGEST)
                np.save(content, rows.astype(np.float16))
                write_whole(path, content.getvalue(), "target's states")
                model.truncate(0, 0)
            on_done(done)
    finally:
        model.close()
