"""Targets under several native libraries: each is a target of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from outrider.core.errors import BackendError
from outrider.lab.models import ModelFile

__all__ = ["under_backends", "usable_backends"]


def under_backends(models: Sequence[ModelFile], backends: Sequence[str], *, several: bool) -> list[ModelFile]:
    """Every model under each backend; where there are `several`, its name says which: "model (ik)"."""
    return [
        replace(model, name=f"{model.name} ({backend})" if several else model.name, backend=backend)
        for model in models
        for backend in backends
    ]


def usable_backends(
    names: Iterable[str], check: Callable[[str], None]
) -> tuple[list[str], Mapping[str, BackendError]]:
    """Those that are here, and what is wrong with each other one: `check` raises it.

    Raises BackendError where none is here.
    """
    usable, refused = list[str](), dict[str, BackendError]()
    for name in names:
        try:
            check(name)
        except BackendError as error:
            refused[name] = error
        else:
            usable.append(name)
    if not usable:
        raise next(iter(refused.values()))
    return usable, refused
