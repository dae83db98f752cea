"""Every setting of the server, in one model.

A setting has one name: `max_running` in the TOML file, `OUTRIDER_MAX_RUNNING` in the environment,
`--max-running` on the command line. The tables below are the file's; `outrider.server.settings`
says which source wins. Times are in seconds, sizes in bytes unless a name says tokens.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.files import read_toml
from outrider.core.loading_settings import Context, DraftContext, Loading
from outrider.core.schema import (
    Count,
    Group,
    Natural,
    Number,
    Share,
    setting,
    setting_error,
    with_default,
)
from outrider.core.settings import (
    BasicSampling,
    Drafting,
    DraftSources,
    Models,
    PairSettings,
    Template,
    Verbose,
)
from outrider.engine import MAX_PAUSE_S

Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1024)]


class Speculation(Drafting, DraftSources):
    """Who drafts, how far, and what keeps a draft; as `outrider run` has them."""


class ServedModels(Models, Template):
    """Which models; as `outrider run` has them."""


class Sampling(BasicSampling):
    """What requests that say nothing about it get. OpenAI's defaults."""

    temp: Annotated[Number, Field(ge=0)] = with_default(BasicSampling, "temp", 1.0)
    top_k: Natural = with_default(BasicSampling, "top_k", 0)
    top_p: Annotated[Number, Field(gt=0, le=1)] = with_default(BasicSampling, "top_p", 1.0)
    min_p: Share = with_default(BasicSampling, "min_p", 0.0)


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
    tls_cert: Path | None = setting(None, help="Certificate chain (PEM): serve HTTPS.")
    tls_key: Path | None = setting(None, help="Its private key (PEM), without a passphrase.")
    page: bool = setting(True, help="The web page at /. On by default.")
    metrics: bool = setting(True, help="Metrics for Prometheus at /metrics. On by default.")


class Access(Group):
    """Who may use it."""

    panel = "Access"
    api_key: list[SecretStr] = setting(
        [], help="A key that clients must send (repeatable). Better in the environment."
    )
    api_keys: Path | None = setting(None, help="Keys with names and limits: TOML, or JSON lines (.jsonl).")
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
    max_pause: Annotated[float, Field(gt=0)] = setting(
        MAX_PAUSE_S, help="How long reading a prompt may hold up running answers, in seconds."
    )
    kept_sequences: Annotated[int, Field(ge=0, le=192)] = setting(
        8, help="Ended requests whose KV is kept for others that begin alike."
    )
    max_waiting: Natural = setting(64, help="Requests that may wait for their turn; more are answered 429.")
    kv_tokens: Count | None = setting(
        None, help="KV cells shared by all requests. Default: a context for each running one."
    )
    max_connections: Count = setting(512, help="Connections open at once.")
    max_body: Bytes = setting(4 * 2**20, metavar="BYTES", help="Bytes of a request's body.")
    max_schema: Bytes = setting(256 * 2**10, metavar="BYTES", help="Bytes of a JSON schema or grammar.")
    max_prompt_tokens: Count | None = setting(
        None, help="Tokens of a prompt. Default: what the context holds."
    )
    max_tokens: Count | None = setting(
        None, help="Tokens of an answer, whatever it asks for. Default: what the context holds."
    )
    default_max_tokens: Count | None = setting(
        None, help="Tokens of an answer that asks for no number. Default: until it ends."
    )
    max_choices: Count = setting(8, help="Choices (n) of a request.")
    timeout: Seconds = setting(600.0, help="Seconds that a request may take in all.")
    body_timeout: Seconds = setting(
        30.0, help="Seconds that a client may take to send its headers, and again its body."
    )
    write_timeout: Seconds = setting(60.0, help="Seconds that a client may leave an answer unread.")
    drain_timeout: Seconds = setting(
        30.0, help="Seconds that running requests get to end when the server is stopped."
    )


class Logs(Verbose):
    """What is written to standard error."""

    log_json: bool = setting(False, help="Log JSON objects, one a line.")
    log_prompts: bool = setting(False, help="Log the bodies of requests: the users' own words.")


TABLES: dict[str, type[Group]] = {
    "models": ServedModels,
    "speculation": Speculation,
    "sampling": Sampling,
    "machine": Machine,
    "server": Server,
    "access": Access,
    "limits": Limits,
    "logs": Logs,
}
"""The tables of the TOML file."""


class ServeSettings(Sampling, Server, Access, Limits, Logs, Machine, Speculation, PairSettings):
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


# Where settings come from: command line before environment before TOML file before defaults.

PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_OTHERS = frozenset({CONFIG_VARIABLE, f"{PREFIX}CACHE"})
"""Variables of ours that are no settings of the server."""

_ALIKE = 0.8
"""Names at least so similar to a setting's are taken for slips."""

_FIELDS = ServeSettings.model_fields


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force; `origins` says where each that is no default comes from."""

    settings: ServeSettings
    origins: Mapping[str, str]
    notices: tuple[str, ...] = ()


def read_configuration(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Configuration:
    """The settings in force; `flags` are those that the command line gave, by name.

    Without `file` the variable OUTRIDER_CONFIG may name one. Raises SettingError.
    """
    notices: list[str] = []
    path = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [
        *(_file_values(path) if path else ()),
        *_environment_values(environment, notices),
        *((name, value, f"--{name.replace('_', '-')}") for name, value in flags.items()),
    ]
    for name, value, origin in sources:
        _check_kind(name, value, origin)
        values[name], origins[name] = value, origin
    try:
        settings = ServeSettings.model_validate(values)
    except ValidationError as error:
        raise setting_error(error, ServeSettings, values, origins) from None
    return Configuration(settings, origins, tuple(notices))


def as_toml(configuration: Configuration) -> str:
    """The settings in force as a file that can be read back; secrets are left out, and said to be."""
    lines = []
    for table, fields in TABLES.items():
        lines += ["", f"[{table}]"]
        for name in fields.model_fields:
            value = getattr(configuration.settings, name)
            origin = configuration.origins.get(name, "default")
            if value is None or value == []:
                lines.append(f"# {name}: not set")
            elif _is_secret(value):
                lines.append(f"# {name}: set, not shown  # {_one_line(origin)}")
            else:
                lines.append(f"{name} = {_toml(value)}  # {_one_line(origin)}")
    return "\n".join(lines[1:]) + "\n"


def _file_values(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting of a file."""
    content = read_toml(path, "Name a TOML file (--config).")
    for key, value in content.items():
        if isinstance(value, dict) and key in TABLES:
            for name, inner in value.items():
                yield _named_in_file(path, name, key), inner, f"{path}: {name}"
        else:
            yield _named_in_file(path, key, None), value, f"{path}: {key}"


def _named_in_file(path: Path, name: str, table: str | None) -> str:
    """The name, which must be a setting's and stand in its own table or in front of all."""
    home = table_of(name)
    where = f"{path}: {name}"
    if home is None:
        raise SettingError(where, "there is no such setting", _suggestion(name, lambda known: known))
    if table is not None and home != table:
        raise SettingError(where, f"it is no setting of [{table}]", f"Move it to [{home}].")
    return name


def _environment_values(environment: Mapping[str, str], notices: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting that a variable gives. An empty variable gives nothing."""
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _FIELDS and variable == _variable(name):
            is_list = get_origin(_FIELDS[name].annotation) is list
            yield name, _items(text, variable) if is_list else text, variable
        elif get_close_matches(name, _FIELDS, 1, _ALIKE):
            raise SettingError(variable, "there is no such setting", _suggestion(name, _variable))
        else:
            notices.append(f"{variable} is no setting of the server: it is not used")


def _items(text: str, variable: str) -> list[Any]:
    """Several values in one variable: separated by commas, or an array as in TOML."""
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        items = tomllib.loads(f"items = {text}")["items"]
    except tomllib.TOMLDecodeError:
        items = None
    if not isinstance(items, list):
        raise SettingError(variable, "it is no array", 'Write ["a", "b"], or a,b.')
    return items


def _check_kind(name: str, value: Any, origin: str) -> None:
    """Raise SettingError for a yes or no where a number or text belongs: it would pass for 1 or 0."""
    annotation = _FIELDS[name].annotation
    if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
        raise SettingError(origin, "it is no switch", _FIELDS[name].description or "")


def _suggestion(name: str, spelled: Any) -> str:
    found = get_close_matches(name, _FIELDS, 1, 0.6)
    return f"Did you mean {spelled(found[0])}?" if found else "`outrider serve --print-config` shows all."


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _is_secret(value: Any) -> bool:
    return isinstance(value, SecretStr) or (isinstance(value, list) and isinstance(value[0], SecretStr))


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
