"""llama-server's own code, as the package xllamacpp has it, for machines without the program.

    python benchmarks/peer.py -m MODEL.gguf --port 8080 -t 2 -tb 2 -np 1 -c 4096 [--spec-type ngram-mod]

The options are llama-server's, as far as these measurements need them; the rest is its default. It ends with
SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys

import xllamacpp  # type: ignore[import-untyped]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", required=True, metavar="MODEL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    for name, default in (("-t", 2), ("-tb", 2), ("-np", 1), ("-c", 4096)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--spec-type", default="none")
    given = parser.parse_args()
    asked = xllamacpp.CommonParams()
    asked.model.path = given.m
    asked.hostnames, asked.port = [given.host], given.port
    asked.cpuparams.n_threads, asked.cpuparams_batch.n_threads = given.t, given.tb
    asked.n_parallel, asked.n_ctx = given.np, given.c
    kind = f"COMMON_SPECULATIVE_TYPE_{given.spec_type.replace('-', '_').upper()}"
    asked.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(asked)
    print(f"listening at {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
