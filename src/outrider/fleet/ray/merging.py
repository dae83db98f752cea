"""The metrics of several replicas as one text, each sample with the replica's name."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus' text of every replica together: a family's help once, its samples with the label
    `replica`."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts.items():
        name, is_new = "", False
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                families.setdefault(name, ([], []))
            if line.startswith("#"):
                if is_new and name:
                    families[name][0].append(line)
            elif line.strip() and name:
                families[name][1].append(_labelled(line, replica))
    return "".join(f"{line}\n" for said, samples in families.values() for line in (*said, *samples))


def _labelled(line: str, replica: str) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
