"""Errors that Outrider raises on purpose."""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all deliberate errors: the input at fault, the reason, and the way out."""

    def __init__(self, what: str, why: str, way_out: str = "") -> None:
        self.what = what
        self.why = why
        self.way_out = way_out
        super().__init__(what, why, way_out)

    def __str__(self) -> str:
        sentence = f"{self.what}: {self.why}."
        return f"{sentence} {self.way_out}" if self.way_out else sentence


class InputError(OutriderError):
    """The user's input cannot be used (exit code 2)."""


class SettingError(InputError):
    """A setting is out of range, or two exclude each other."""


class PromptError(InputError):
    """There is no prompt, it cannot be read, or it does not fit."""


class ModelFileError(InputError):
    """A model file is missing, damaged or of a kind that cannot be run."""


class HubError(InputError):
    """A hub reference cannot be resolved or fetched."""


class VocabularyMismatch(InputError):
    """The tokenizers of target and draft do not line up."""


class GrammarError(InputError):
    """A schema, regular expression or grammar is broken or cannot be enforced."""


class ConstraintError(OutriderError):
    """A constrained output cannot continue after `text`: no token is allowed, or a limit was reached."""

    text: str = ""
    tokens: tuple[int, ...] = ()


class BuildError(OutriderError):
    """A library could not be fetched, compiled or started on this machine."""


class BackendError(OutriderError):
    """A model call failed."""


class OutOfMemory(BackendError):
    """The machine has no room for the weights or the KV cache."""


class BackendCrash(BackendError):
    """The native library crashes on this machine, whatever it is asked."""


class RewindUnsupported(BackendError):
    """The model cannot go back to fewer tokens (recurrent, hybrid, sliding window)."""
