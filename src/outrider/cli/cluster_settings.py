"""The settings of commands that can work on a Ray cluster."""

from __future__ import annotations

from outrider.core.schema import MACHINE, Group, setting


class OnRay(Group):
    """Where the work is done."""

    panel = MACHINE
    ray: str | None = setting(
        None,
        metavar="ADDRESS",
        help="Work on a Ray cluster: its HOST:PORT, auto, or local (docs/cluster.md).",
    )


class OnMachines(OnRay):
    """Where it is done and measured."""

    panel = MACHINE
    machines: list[str] = setting(
        [], metavar="KIND", help="With --ray: measure on this kind of machine alone (repeatable)."
    )
