"""Which servers take part in a comparison, and whether they may all be loaded at once."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Collection
from pathlib import Path

from llama_server import Server
from serve.processes import cpu_s

IDLE_SHARE = 0.05
"""More of a core than this, used by servers that nobody asks, would disturb the one that is asked."""


def contestants(arguments: argparse.Namespace) -> dict[str, str]:
    """The command of each server, with places to fill in."""
    program = shlex.quote(str(Path(sys.executable).with_name("outrider")))
    ours = f"{program} serve -m {{model}} --port {{port}} -t {{threads}}"
    ours += " -tb {threads} -c {context} --max-running {slots}"
    found = {"outrider": ours + (" -md {draft}" if arguments.draft else "")}
    if arguments.llama_server:
        base = shlex.join(server_words(arguments.llama_server))
        base += " -m {model} --host 127.0.0.1 --port {port}"
        base += " -t {threads} -tb {threads} -np {slots} -c {total_context}"
        found["llama plain"] = base
        for kind in ("ngram-mod", "ngram-simple", "ngram-map-k4v"):
            found[f"llama {kind}"] = f"{base} --spec-type {kind}"
        if arguments.draft:
            draft = f"{base} --spec-type draft-simple -md {{draft}} -td {{threads}} -tbd {{threads}}"
            found["llama draft"] = draft
            found["llama draft-15"] = f"{draft} --spec-draft-n-max 15 --spec-draft-p-min 0.75"
    found |= dict(given.split("=", 1) for given in arguments.contestant)
    names = arguments.only.split(",") if arguments.only else list(found)
    if unknown := [name for name in names if name not in found]:
        sys.exit(f"no contestant {', '.join(unknown)}: there are {', '.join(found)}")
    return {name: found[name] for name in names}


def server_words(program: str) -> list[str]:
    """The command of a llama-server, or of the one in xllamacpp."""
    own = Path(__file__).with_name("peer.py").resolve()
    return [sys.executable, str(own)] if program == "xllamacpp" else [program]


def values_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What is filled into commands."""
    names = ("model", "draft", "threads", "slots", "context")
    values = {name: getattr(arguments, name) for name in names}
    return values | {"total_context": arguments.slots * arguments.context}


def check_memory(num_servers: int, arguments: argparse.Namespace) -> None:
    """Refuse what would swap: repacked weights are a copy in every server."""
    models = [model for model in (arguments.model, arguments.draft) if model]
    needed = num_servers * 1.5 * sum(model.stat().st_size for model in models)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    if needed > available:
        sys.exit(
            f"{num_servers} servers may need {needed / 1e9:.1f} GB of the {available / 1e9:.1f} GB that are "
            "free: choose fewer with --only"
        )


def check_idle(servers: Collection[Server], wait_s: float = 2.0) -> None:
    """Refuse to measure beside servers that spin while nobody asks them."""
    time.sleep(0.5)
    before = {server.name: cpu_s(server) for server in servers}
    time.sleep(wait_s)
    busy = {server.name: (cpu_s(server) - before[server.name]) / wait_s for server in servers}
    if sum(busy.values()) > IDLE_SHARE:
        sys.exit(f"idle servers are busy (shares of a core): {busy}. Choose fewer with --only")
