"""Every setting of the server, in one model.

A setting has one name: `max_running` in the TOML file, `OUTRIDER_MAX_RUNNING` in the environment,
`--max-running` on the command line. The tables below are the file's; `outrider.server.configuration`
says which source wins. Times are in seconds, sizes in bytes unless a name says tokens.
"""

from __future__ import annotations

import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from outrider.core.errors import SettingError
from outrider.core.schema import Count, Group, Natural, setting
from outrider.core.settings import (
    Context,
    DraftContext,
    Drafting,
    DraftSources,
    Loading,
    Models,
    PairSettings,
    Reasoning,
    ServedSampling,
    Template,
    Verbose,
)
from outrider.engine.tiers.folder import Folder
from outrider.session.options import Keeping

Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1024)]
Gibibytes = Annotated[float, Field(gt=0, le=100_000)]


class Speculation(Drafting, DraftSources):
    """Who drafts, how far, and what keeps a draft; as `outrider run` has them."""


class ServedModels(Models, Template, Reasoning):
    """Which models; as `outrider run` has them."""


class Machine(Context, DraftContext, Loading):
    """How the models are loaded; as `outrider run` has them."""

    ctx_size: int | None = setting(
        None, "-c", help="Context of a request in tokens; 0: as trained. Default: 4096, or as trained."
    )


class Server(Group):
    """Where the server listens, and what it shows."""

    panel = "Server"
    host: Annotated[str, Field(min_length=1)] = setting(
        "127.0.0.1", help="Address to listen at; beyond loopback it demands keys."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = setting(
        8080, help="Port to listen at; 0: any that is free."
    )
    alias: Annotated[str, Field(min_length=1)] | None = setting(
        None, "-a", help="Name of the model in the API. Default: the file's."
    )
    any_model: bool = setting(
        False, help="Answer requests for a model of any name, for clients that have a fixed one."
    )
    spm_infill: bool = setting(
        False, help="Fill-in-the-middle: the text after the gap comes first, as some models have it."
    )
    models_dir: Path | None = setting(
        None, help="Serve each GGUF file of this folder under its name; loaded when it is asked for."
    )
    models_max: Count = setting(4, help="Models that are loaded at once, of those that are served.")
    models_memory: Gibibytes | None = setting(
        None,
        metavar="GIB",
        help="Memory that all loaded models may take. Default: nine tenths of what is free.",
    )
    idle: Annotated[float, Field(gt=0)] | None = setting(
        None,
        metavar="SECONDS",
        help="Of several models, unload those without a request for this long. Default: never.",
    )
    tls_cert: Path | None = setting(None, help="Certificate chain (PEM): serve HTTPS.")
    tls_key: Path | None = setting(None, help="Its private key (PEM), without a passphrase.")
    page: bool = setting(True, help="The web page at /.")


class Access(Group):
    """Who may use it."""

    panel = "Access"
    api_key: list[SecretStr] = setting(
        [], help="A key that clients must send (repeatable). Better in the environment."
    )
    api_keys: Path | None = setting(None, help="A TOML file of keys with names and limits.")
    no_auth: bool = setting(
        False, help="Listen beyond loopback without any key. Everyone who reaches it may use it."
    )
    metrics_open: bool = setting(False, help="Let /metrics be read without a key.")
    cors_origin: list[str] = setting(
        [], help="Let pages of this origin use the API: https://HOST[:PORT] (repeatable)."
    )
    allowed_host: list[str] = setting(
        [], help="Answer under this name too, as behind a proxy: HOST (repeatable)."
    )


class Limits(Group):
    """What one client, and all of them together, may ask for."""

    panel = "Limits"
    max_running: Annotated[Count, Field(le=64)] = setting(
        4, "-np", "--max-running", "--parallel", help="Requests that generate at once, in one batch."
    )
    max_gap: Annotated[float, Field(gt=0)] | None = setting(
        None,
        metavar="MS",
        help="The longest step while several requests run, in milliseconds: prompts are read in parts, and "
        "drafts end, so that none is longer. Default: 5 times a step without either.",
    )
    kept_sequences: Annotated[int, Field(ge=0, le=192)] | None = setting(
        None,
        help="Ended requests whose KV stays in the cache, for others that begin alike. Default: 8, or 0 "
        "with -np 1, where --cache-ram holds it.",
    )
    max_waiting: Natural = setting(64, help="Requests that may wait for their turn; more are answered 429.")
    kv_tokens: Count | None = setting(
        None, help="KV cells shared by all requests. Default: a context for each running one."
    )
    max_connections: Count = setting(512, help="Connections open at once.")
    max_body: Bytes = setting(4 * 2**20, metavar="BYTES", help="Bytes of a request's body.")
    max_tokens: Count | None = setting(
        None, help="Tokens of an answer, whatever it asks for. Default: what the context holds."
    )
    default_max_tokens: Count | None = setting(
        None, help="Tokens of an answer that asks for no number. Default: until it ends."
    )
    timeout: Seconds = setting(600.0, help="Seconds that a request may take in all.")
    body_timeout: Seconds = setting(
        30.0, help="Seconds that a client may take to send its headers, and again its body."
    )
    write_timeout: Seconds = setting(60.0, help="Seconds that a client may leave an answer unread.")
    drain_timeout: Seconds = setting(
        30.0, help="Seconds that running requests get to end when the server is stopped."
    )

    @property
    def max_gap_s(self) -> float | None:
        """The longest step in seconds; None: the default."""
        return None if self.max_gap is None else self.max_gap / 1000


class Cache(Group):
    """Where KV and texts go that are to be used again later."""

    panel = "Cache"
    cache_ram: Annotated[int, Field(ge=-1)] = setting(
        1024,
        "-cram",
        "--cache-ram",
        metavar="MIB",
        help="Memory for KV that leaves the cache, in MiB; 0: none, -1: no limit.",
    )
    cache_prompt: bool = setting(
        True, help="Go on from what is stored of a prompt, unless a request says otherwise."
    )
    cache_dir: Path | None = setting(
        None, metavar="DIR", help="A folder for KV that leaves the cache; it outlives the server."
    )
    cache_disk: Gibibytes = setting(8.0, metavar="GIB", help="What the folder may take, in GiB.")
    remember: bool = setting(False, help="Keep earlier texts there, too, which drafts are looked up in.")

    @property
    def keeping(self) -> Keeping:
        """What the session keeps."""
        memory = self.cache_ram * 2**20 if self.cache_ram >= 0 else sys.maxsize
        return Keeping(memory, self.cache_dir, int(self.cache_disk * 2**30), self.remember)


class Logs(Verbose):
    """What is written to standard error."""

    log_json: bool = setting(False, help="Log JSON objects, one a line.")
    log_prompts: bool = setting(False, help="Log the bodies of requests: the users' own words.")


TABLES: dict[str, type[Group]] = {
    "models": ServedModels,
    "speculation": Speculation,
    "sampling": ServedSampling,
    "machine": Machine,
    "server": Server,
    "access": Access,
    "limits": Limits,
    "cache": Cache,
    "logs": Logs,
}
"""The tables of the TOML file."""


class ServeSettings(
    ServedSampling,
    Reasoning,
    Server,
    Access,
    Limits,
    Cache,
    Logs,
    Machine,
    Speculation,
    PairSettings,
):
    """All settings in force. `check` finds those that exclude each other."""

    def check(self) -> None:
        """Raise SettingError for settings that cannot go together, and for a folder that cannot be used."""
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise SettingError(given, f"HTTPS needs {missing} too", "Give both files.")
        if self.no_auth and self.has_keys:
            raise SettingError("--no-auth", "there are keys, which it would ignore", "Leave one out.")
        if not is_loopback(self.host) and not self.has_keys and not self.no_auth:
            raise SettingError(
                f"--host {self.host}",
                "others could use this server, and it has no key",
                "Give --api-key (OUTRIDER_API_KEY) or --api-keys, or --no-auth if everyone may.",
            )
        for origin in self.cors_origin:
            scheme, mark, rest = origin.partition("://")
            if origin not in ("*", "null") and (not scheme or not mark or not rest or "/" in rest):
                raise SettingError(
                    f"--cors-origin {origin}", "not an origin", "Write https://HOST[:PORT], without a path."
                )
        if self.cache_dir is not None:
            Folder(self.cache_dir, "", "--cache-dir")
        elif self.remember:
            raise SettingError("--remember", "there is no folder for the texts", "Give --cache-dir.")
        if self.kv_tokens and self.ctx_size and self.kv_tokens < self.ctx_size:
            why = f"one request may need {self.ctx_size} (--ctx-size)"
            raise SettingError(f"--kv-tokens {self.kv_tokens}", why, "Give at least as many.")

    @property
    def num_kept(self) -> int:
        """Sequences whose KV stays in the cache. None by default where one request runs at once and memory
        holds the others': a library may compute a single sequence's attention faster."""
        if self.kept_sequences is None:
            return 0 if self.max_running == 1 and self.cache_ram else 8
        return self.kept_sequences

    @property
    def has_keys(self) -> bool:
        """Whether clients have to send a key."""
        return bool(self.api_key) or self.api_keys is not None


def table_of(name: str) -> str | None:
    """The table that a setting is in; None for what is no setting."""
    return next((table for table, fields in TABLES.items() if name in fields.model_fields), None)


def is_loopback(host: str) -> bool:
    """Whether an address to listen at can be reached from this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
