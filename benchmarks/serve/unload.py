"""What memory stays when models are unloaded: three of them, loaded, asked and unloaded in turn.

    python benchmarks/serve/unload.py FOLDER --out unload.jsonl [--rounds 8] [--threads 1]

FOLDER holds the models. In each round each is asked for a text and for JSON of a schema that was not seen
before, beside another one, and then all are unloaded. A row says what the process has of its own then:
without pages of mapped files.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program
from outrider.lab.bench.servers import Server
from serve.processes import rss_bytes

SAME = ("threads", "models", "cpu")


def main() -> None:
    parser = argument_parser(__doc__, rounds=8, threads=1, tokens=24)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    program = shlex.quote(str(Path(sys.executable).with_name("outrider")))
    command = f"{program} serve --models-dir {{folder}} --models-max 2 -t {{threads}} -c 2048 --port {{port}}"
    files = sorted(arguments.folder.glob("*.gguf"))
    resume(arguments.out, describe(*files) | {"threads": arguments.threads}, SAME)
    values = {"folder": arguments.folder, "threads": arguments.threads}
    with Server("outrider", command, values) as server, httpx.Client(base_url=server.address) as client:
        for number in range(arguments.rounds):
            row = _round(server, client, number, [file.stem for file in files], arguments.tokens)
            append(arguments.out, row)
            print(row, flush=True)


def _round(server: Server, client: httpx.Client, number: int, names: list[str], tokens: int) -> Row:
    loaded = 0
    for i, name in enumerate(names):
        schema = {"type": "object", "properties": {f"field_{number}_{i}": {"type": "string", "maxLength": 9}}}
        for format_ in (None, {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}):
            body = {"model": name, "max_tokens": tokens, "response_format": format_}
            body["messages"] = [{"role": "user", "content": f"Say something of number {number}."}]
            client.post("/v1/chat/completions", json=body, timeout=600).raise_for_status()
        loaded = max(loaded, rss_bytes(server, own=True))
    for name in names:
        client.post("/models/unload", json={"model": name}, timeout=60).raise_for_status()
    return {
        "kind": "round",
        "round": number,
        "loaded_bytes": loaded,
        "left_bytes": rss_bytes(server, own=True),
    }


if __name__ == "__main__":
    run_program(main)
