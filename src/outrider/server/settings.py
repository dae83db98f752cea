"""The server's settings, and where they come from: the command line, else the environment, else the TOML
file, else defaults. A setting has one name: `--max-running`, `OUTRIDER_MAX_RUNNING`, `max_running`. Times are
in seconds, sizes in bytes unless a name says tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.files import read_toml, reason_of
from outrider.core.notices import collect_notices, notify
from outrider.core.schema import Count, Group, Natural, setting, setting_error
from outrider.core.settings import (
    Context,
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
from outrider.engine.tiers import Disk
from outrider.models.reference import is_companion, is_sidecar
from outrider.session.options import Keeping

Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1024)]
Gibibytes = Annotated[float, Field(gt=0, le=100_000)]


class Speculation(Drafting, DraftSources):
    """Who drafts, how far, and what keeps a draft; as `outrider run` has them."""


class ServedModels(Models, Template, Reasoning):
    """Which models; as `outrider run` has them."""


class Machine(Context, Loading):
    """How the models are loaded; as `outrider run` has them."""

    ctx_size: Natural | None = setting(
        None, "Context of a request in tokens; 0: as trained. Default: 4096, or as trained.", "-c"
    )


class Server(Group, panel="Server"):
    """Where the server listens, and what it shows."""

    host: Annotated[str, Field(min_length=1)] = setting(
        "127.0.0.1", "Address to listen at; beyond loopback it demands keys."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = setting(8080, "Port to listen at; 0: any that is free.")
    alias: Annotated[str, Field(min_length=1)] | None = setting(
        None, "Name of the model in the API. Default: the file's.", "-a"
    )
    any_model: bool = setting(
        False, "Answer requests for a model of any name, for clients that have a fixed one."
    )
    spm_infill: bool = setting(
        False, "Fill-in-the-middle: the text after the gap comes first, as some models have it."
    )
    models_dir: Path | None = setting(
        None, "Serve each GGUF file of this folder under its name; loaded when it is asked for."
    )
    models_max: Count = setting(1, "Of several models, as many stay loaded at once.")
    idle: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "Of several models, unload those without a request for so long. Default: never.",
        "SECONDS",
    )
    tls_cert: Path | None = setting(None, "Certificate chain (PEM): serve HTTPS.")
    tls_key: Path | None = setting(None, "Its private key (PEM), without a passphrase.")
    page: bool = setting(True, "The web page at /.")


class Access(Group, panel="Access"):
    """Who may use it."""

    api_key: list[SecretStr] = setting(
        [], "A key that clients must send (repeatable). Better in the environment."
    )
    api_keys: Path | None = setting(None, "A TOML file of keys with names and limits.")
    no_auth: bool = setting(
        False, "Listen beyond loopback without any key. Everyone who reaches it may use it."
    )
    metrics_open: bool = setting(False, "Let /metrics be read without a key.")
    cors_origin: list[str] = setting(
        [], "Let pages of this origin use the API: https://HOST[:PORT] (repeatable)."
    )
    allowed_host: list[str] = setting([], "Answer under this name too, as behind a proxy: HOST (repeatable).")


class Limits(Group, panel="Limits"):
    """What one client, and all of them together, may ask for."""

    max_running: Annotated[Count, Field(le=64)] = setting(
        4, "Requests that generate at once, in one batch.", "-np --max-running --parallel"
    )
    max_gap: Annotated[float, Field(gt=0)] | None = setting(
        None,
        "The longest step while several requests run, in milliseconds: prompts are read in parts, and "
        "drafts end, so that none is longer. Default: 5 times a step without either.",
        "MS",
    )
    kept_sequences: Annotated[int, Field(ge=0, le=192)] | None = setting(
        None,
        "Ended requests whose KV stays in the cache, for others that begin alike. Default: 8, or 0 with "
        "-np 1, where --cache-ram holds it.",
    )
    max_waiting: Natural = setting(64, "Requests that may wait for their turn; more are answered 429.")
    kv_tokens: Count | None = setting(
        None, "KV cells shared by all requests. Default: a context for each running one."
    )
    max_connections: Count = setting(512, "Connections open at once.")
    max_body: Bytes = setting(4 * 2**20, "Bytes of a request's body.", "BYTES")
    max_tokens: Count | None = setting(
        None, "Tokens of an answer, whatever it asks for. Default: what the context holds."
    )
    default_max_tokens: Count | None = setting(
        None, "Tokens of an answer that asks for no number. Default: until it ends."
    )
    timeout: Seconds = setting(600.0, "Seconds that a request may take in all.")
    client_timeout: Seconds = setting(
        60.0, "Seconds that a client may take for its headers, for its body, and to go on reading."
    )
    drain_timeout: Seconds = setting(
        30.0, "Seconds that running requests get to end when the server is stopped."
    )


class Cache(Group, panel="Cache"):
    """Where KV and texts go that are to be used again later."""

    cache_ram: Annotated[int, Field(ge=-1)] = setting(
        1024, "Memory for KV that leaves the cache, in MiB; 0: none, -1: no limit.", "-cram --cache-ram MIB"
    )
    cache_prompt: bool = setting(
        True, "Go on from what is stored of a prompt, unless a request says otherwise."
    )
    cache_dir: Path | None = setting(
        None, "A folder for KV that leaves the cache; it outlives the server.", "DIR"
    )
    cache_disk: Gibibytes = setting(8.0, "What the folder may take, in GiB.", "GIB")

    @property
    def keeping(self) -> Keeping:
        """What the session keeps."""
        memory = self.cache_ram * 2**20 if self.cache_ram >= 0 else sys.maxsize
        return Keeping(memory, self.cache_dir, int(self.cache_disk * 2**30))


class Logs(Verbose):
    """What is written to standard error."""

    log_json: bool = setting(False, "Log JSON objects, one a line.")
    log_prompts: bool = setting(False, "Log the bodies of requests: the users' own words.")


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
            Disk(self.cache_dir, "", 0)
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


def is_loopback(host: str) -> bool:
    """Whether an address to listen at can be reached from this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# Where they come from

PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_OTHERS = frozenset({CONFIG_VARIABLE, f"{PREFIX}CACHE"})
"""Outrider's variables that are no settings of the server."""
_ALIKE = 0.8
"""Names at least this similar to a setting's are taken for slips."""
_FIELDS = ServeSettings.model_fields
_Given = dict[str, tuple[Any, str]]
"""values by the names of settings, each with where it comes from"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force; `models` has those of each of several models, by name."""

    settings: ServeSettings
    notices: Sequence[str]
    models: Mapping[str, ServeSettings]


def read_configuration(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Configuration:
    """The settings in force; `flags` are those that the command line gave, by name. Without `file` the
    variable OUTRIDER_CONFIG may name one. Raises SettingError."""
    path = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    found: _Given = {}
    several: dict[str, _Given] = {}
    for key, value in (read_toml(path, "Name a TOML file (--config).") if path else {}).items():
        is_table = isinstance(value, dict) and key in TABLES
        for name, inner in value.items() if is_table else [(key, value)]:
            if key == "models" and isinstance(inner, dict):
                several[name] = _of_table(f"{path}: models.{name}.", inner, _OF_MODELS, "a model")
            else:
                known = TABLES[key].model_fields if is_table else _FIELDS
                found |= _of_table(f"{path}: ", {name: inner}, known, f"[{key}]")
    with collect_notices() as notices:
        found |= _of_environment(environment)
    found |= {name: (value, f"--{name.replace('_', '-')}") for name, value in flags.items()}
    settings = _validated(found)
    return Configuration(settings, notices, _several(settings, found, several))


def _of_table(place: str, values: Mapping[str, Any], known: Iterable[str], whose: str) -> _Given:
    for name in values:
        if name not in known:
            table = next((table for table, group in TABLES.items() if name in group.model_fields), None)
            if table is None:
                close = get_close_matches(name, _FIELDS, 1, 0.6)
                all_ = "`outrider serve --help-all` shows all."
                way_out = f"Did you mean {close[0]}?" if close else all_
                raise SettingError(place + name, "no such setting", way_out)
            raise SettingError(place + name, f"not a setting of {whose}", f"Move it to [{table}].")
    return {name: (value, place + name) for name, value in values.items()}


def _of_environment(environment: Mapping[str, str]) -> _Given:
    found: _Given = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _FIELDS and variable == PREFIX + name.upper():
            is_list = get_origin(_FIELDS[name].annotation) is list
            items = [item.strip() for item in text.split(",") if item.strip()]
            found[name] = items if is_list else text, variable
        elif close := get_close_matches(name, _FIELDS, 1, _ALIKE):
            raise SettingError(variable, "no such setting", f"Did you mean {PREFIX}{close[0].upper()}?")
        else:
            notify(f"{variable} is not a setting of the server and has no effect")
    return found


def _validated(given: _Given) -> ServeSettings:
    for name, (value, origin) in given.items():
        annotation = _FIELDS[name].annotation
        # True or false where a number or text belongs would pass for 1 or 0.
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise SettingError(origin, "not true or false", _FIELDS[name].description or "")
    values = {name: value for name, (value, _) in given.items()}
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        origins = {name: origin for name, (_, origin) in given.items()}
        raise setting_error(error, ServeSettings, values, origins) from None


# Several models: a table [models.NAME] for each, files of a folder, and the one that -m names.

_OF_MODELS = {
    name for group in (ServedModels, Speculation, ServedSampling, Machine) for name in group.model_fields
} | {"alias"}
"""settings that a model may have for itself"""
_NAMING = {*Models.model_fields, "alias", "chat_template_file"} - {"hf_token", "offline"}
"""of these, the ones that no other model inherits"""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-\d{5}")


def _several(settings: ServeSettings, found: _Given, own: dict[str, _Given]) -> dict[str, ServeSettings]:
    """The settings of each of several models: its own over the shared ones. Empty where there is one
    model."""
    if settings.models_dir is not None:
        for name, path in _files_in(settings.models_dir).items():
            own.setdefault(name, {"model": (str(path), str(path))})
    if own and (reference := settings.model or settings.hf_repo):
        first = settings.alias or Path(reference).stem
        own = {first: {name: value for name, value in found.items() if name in _NAMING}} | {
            name: given for name, given in own.items() if name != first
        }
    shared = {name: value for name, value in found.items() if name not in _NAMING}
    return {name: _validated(shared | given) for name, given in own.items()}


def _files_in(folder: Path) -> dict[str, Path]:
    """The GGUF files of a folder by name: the first part of a split one, and no companions (mmproj)."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError as error:
        raise SettingError(f"--models-dir {folder}", reason_of(error), "Name a folder.") from None
    found: dict[str, Path] = {}
    for path in files:
        part = _SPLIT.fullmatch(path.stem)
        if is_companion(path.name) or is_sidecar(path.name) or (part and part[2] != "00001"):
            continue
        found[part[1] if part else path.stem] = path
    if not found:
        raise SettingError(f"--models-dir {folder}", "there is no .gguf file in it", "Name another folder.")
    return found
