"""Every setting of the server, in one model.

A setting has one name: `max_running` in the TOML file, `OUTRIDER_MAX_RUNNING` in the environment,
`--max-running` on the command line. The tables below are the file's; `outrider.server.configuration`
says which source wins. Times are in seconds, sizes in bytes unless a name says tokens.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from outrider.core.errors import SettingError
from outrider.engine import MAX_PAUSE_S

__all__ = ["TABLES", "ServeSettings", "is_loopback", "table_of"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1024)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Layers = Annotated[str, Field(coerce_numbers_to_str=True)]


class _Table(BaseModel):
    # A setting may be a secret, so errors never repeat what was given.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)


class Models(_Table):
    """Which models; as `outrider run` has them."""

    model: str | None = None
    model_draft: str | None = None
    hf_repo: str | None = None
    hf_repo_draft: str | None = None
    hf_token: SecretStr | None = None
    offline: bool = False


class Speculation(_Table):
    """Who drafts, how far, and what keeps a draft; as `outrider run` has them."""

    policy: str | None = None
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: Share | None = None
    draft_sampling: str = "auto"
    rule: str = "auto"
    bitwise: bool | None = None
    lookup: bool = True
    corpus: list[Path] = []
    costs: Path | None = None


class Sampling(_Table):
    """What requests that say nothing about it get. OpenAI's defaults."""

    temp: Annotated[Number, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0


class Machine(_Table):
    """How the models are loaded; as `outrider run` has them."""

    ctx_size: int | None = None
    ctx_size_draft: int = 0
    gpu_layers: Layers = "all"
    gpu_layers_draft: Layers | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    threads: int = -1
    threads_batch: int = -1
    batch_size: int = 2048
    ubatch_size: int = 512
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    swa_full: bool = True
    repack: bool = True
    backend: str = "auto"
    llama_library: Path | None = None


class Server(_Table):
    """Where the server listens, and what it shows."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen at; beyond loopback it demands keys.",
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen at; 0: any that is free.")
    alias: str | None = Field(
        default=None, min_length=1, description="Name of the model in the API. Default: the file's."
    )
    tls_cert: Path | None = Field(default=None, description="Certificate chain (PEM): serve HTTPS.")
    tls_key: Path | None = Field(default=None, description="Its private key (PEM), without a passphrase.")
    page: bool = Field(default=True, description="The web page at /. On by default.")
    metrics: bool = Field(default=True, description="Metrics for Prometheus at /metrics. On by default.")


class Access(_Table):
    """Who may use it."""

    api_key: list[SecretStr] = Field(
        default=[], description="A key that clients must send (repeatable). Better in the environment."
    )
    api_keys: Path | None = Field(
        default=None, description="Keys with names and limits: TOML, or JSON lines (.jsonl)."
    )
    no_auth: bool = Field(
        default=False,
        description="Listen beyond loopback without any key. Everyone who reaches it may use it.",
    )
    metrics_open: bool = Field(default=False, description="Let /metrics be read without a key.")
    cors_origin: list[str] = Field(
        default=[], description="Let pages of this origin use the API: https://HOST[:PORT] (repeatable)."
    )
    allowed_host: list[str] = Field(
        default=[], description="Answer under this name too, as behind a proxy: HOST (repeatable)."
    )


class Limits(_Table):
    """What one client, and all of them together, may ask for."""

    max_running: Count = Field(default=4, le=64, description="Requests that generate at once, in one batch.")
    max_pause: float = Field(
        default=MAX_PAUSE_S,
        gt=0,
        description="How long reading a prompt may hold up running answers, in seconds.",
    )
    kept_sequences: int = Field(
        default=8, ge=0, le=192, description="Ended requests whose KV is kept for others that begin alike."
    )
    max_waiting: int = Field(
        default=64, ge=0, description="Requests that may wait for their turn; more are answered 429."
    )
    kv_tokens: Count | None = Field(
        default=None, description="KV cells shared by all requests. Default: a context for each running one."
    )
    max_connections: Count = Field(default=512, description="Connections open at once.")
    max_body: Bytes = Field(default=4 * 2**20, description="Bytes of a request's body.")
    max_schema: Bytes = Field(default=256 * 2**10, description="Bytes of a JSON schema or grammar.")
    max_prompt_tokens: Count | None = Field(
        default=None, description="Tokens of a prompt. Default: what the context holds."
    )
    max_tokens: Count | None = Field(
        default=None,
        description="Tokens of an answer, whatever it asks for. Default: what the context holds.",
    )
    default_max_tokens: Count | None = Field(
        default=None, description="Tokens of an answer that asks for no number. Default: until it ends."
    )
    max_choices: Count = Field(default=8, description="Choices (n) of a request.")
    timeout: Seconds = Field(default=600.0, description="Seconds that a request may take in all.")
    body_timeout: Seconds = Field(
        default=30.0, description="Seconds that a client may take to send its headers, and again its body."
    )
    write_timeout: Seconds = Field(
        default=60.0, description="Seconds that a client may leave an answer unread."
    )
    drain_timeout: Seconds = Field(
        default=30.0, description="Seconds that running requests get to end when the server is stopped."
    )


class Logs(_Table):
    """What is written to standard error."""

    log_json: bool = Field(default=False, description="Log JSON objects, one a line.")
    log_prompts: bool = Field(default=False, description="Log the bodies of requests: the users' own words.")
    verbose: bool = False


TABLES: dict[str, type[_Table]] = {
    "models": Models,
    "speculation": Speculation,
    "sampling": Sampling,
    "machine": Machine,
    "server": Server,
    "access": Access,
    "limits": Limits,
    "logs": Logs,
}
"""The tables of the TOML file."""


class ServeSettings(Models, Speculation, Sampling, Machine, Server, Access, Limits, Logs):
    """All settings in force. `check` finds those that exclude each other."""

    def check(self) -> None:
        """Raise SettingError for settings that cannot go together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise SettingError(given, f"HTTPS needs {missing} too", "Give both files.")
        if self.no_auth and self.has_keys:
            raise SettingError("no_auth", "there are keys, which it would ignore", "Leave one of them out.")
        if not is_loopback(self.host) and not self.has_keys and not self.no_auth:
            raise SettingError(
                f"host {self.host}",
                "others could use this server, and it has no key",
                "Give api_key (OUTRIDER_API_KEY) or api_keys, or no_auth if everyone may.",
            )
        for origin in self.cors_origin:
            scheme, mark, rest = origin.partition("://")
            if origin not in ("*", "null") and (not scheme or not mark or not rest or "/" in rest):
                raise SettingError(
                    f"cors_origin {origin}", "it is no origin", "Write https://HOST[:PORT], without a path."
                )
        if self.kv_tokens and self.ctx_size and self.kv_tokens < self.ctx_size:
            why = f"one request may need {self.ctx_size} (ctx_size)"
            raise SettingError(f"kv_tokens {self.kv_tokens}", why, "Give as many at least.")
        if self.max_tokens and self.default_max_tokens and self.default_max_tokens > self.max_tokens:
            why = f"max_tokens allows {self.max_tokens}"
            raise SettingError(
                f"default_max_tokens {self.default_max_tokens}", why, "Give no more than that."
            )

    def plain(self) -> dict[str, Any]:
        """All settings by name, secrets included."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        secret = {
            name: value.get_secret_value() for name, value in values.items() if isinstance(value, SecretStr)
        }
        return values | secret

    @property
    def has_keys(self) -> bool:
        """Whether clients have to send a key."""
        return bool(self.api_key) or self.api_keys is not None


def table_of(name: str) -> str | None:
    """The table that a setting stands in; None for what is no setting."""
    return next((table for table, fields in TABLES.items() if name in fields.model_fields), None)


def is_loopback(host: str) -> bool:
    """Whether an address to listen at can be reached from this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
