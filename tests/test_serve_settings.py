"""The server's settings: one name in every source, and which source wins."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from outrider.cli.serve_settings import ServeOptions
from outrider.core.errors import SettingError
from outrider.core.schema import settings_of
from outrider.server.keys import read_keys
from outrider.server.settings import TABLES, ServeSettings, as_toml, is_loopback, read_configuration

KEY = "a-key-of-twenty-four-chars"


def file(folder: Path, text: str) -> Path:
    path = folder / "outrider.toml"
    path.write_text(text, encoding="utf-8")
    return path


FLAGS = {name: list(setting.names) for name, setting in settings_of(ServeOptions).items()}
"""All names of every option, those that switch it off included."""


def test_every_setting_has_one_table_and_one_option_of_its_name() -> None:
    names = [name for table in TABLES.values() for name in table.model_fields]
    assert sorted(names) == sorted(set(names)) == sorted(ServeSettings.model_fields)
    assert set(FLAGS) == {*names, "config", "print_config"}
    for name, flags in FLAGS.items():
        assert f"--{name.replace('_', '-')}" in flags, name


def test_the_command_line_wins_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = file(tmp_path, "port = 1\nmax_running = 2\nmax_waiting = 3\n")
    environment = {"OUTRIDER_PORT": "4", "OUTRIDER_MAX_RUNNING": "5"}
    found = read_configuration({"port": 6}, environment, path)
    settings = found.settings
    assert (settings.port, settings.max_running, settings.max_waiting) == (6, 5, 3)
    assert settings.drain_timeout == ServeSettings().drain_timeout
    assert found.origins["port"] == "--port"
    assert found.origins["max_running"] == "OUTRIDER_MAX_RUNNING"
    assert found.origins["max_waiting"] == f"{path}: max_waiting"


def test_variables_hold_lists_and_switches_and_empty_ones_nothing() -> None:
    environment = {
        "OUTRIDER_CORS_ORIGIN": "https://a.example, https://b.example",
        "OUTRIDER_CORPUS": "one,,two",
        "OUTRIDER_PAGE": "no",
        "OUTRIDER_NO_AUTH": "1",
        "OUTRIDER_MAX_RUNNING": "",
        "OUTRIDER_GPU_LAYERS": "12",
        "OUTRIDER_CACHE": "/tmp",
    }
    found = read_configuration({}, environment)
    settings = found.settings
    assert settings.cors_origin == ["https://a.example", "https://b.example"]
    assert settings.corpus == [Path("one"), Path("two")]
    assert (settings.page, settings.no_auth, settings.max_running, settings.gpu_layers) == (
        False,
        True,
        4,
        "12",
    )
    assert found.notices == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_runing = 2", "outrider.toml: max_runing: no such setting. Did you mean max_running?"),
        ("[limits]\nport = 2", "outrider.toml: port: not a setting of [limits]. Move it to [server]."),
        ("[nonsense]\nport = 2", "outrider.toml: nonsense: no such setting."),
        ("max_running = true", "outrider.toml: max_running: not true or false."),
        ("[limits]\nmax_running = 0", "outrider.toml: max_running: 0 cannot be used: it has to be 1 or more"),
        ("[limits]\ntimeout = nan", "outrider.toml: timeout: nan cannot be used"),
        ('cors_origin = "https://a"', "outrider.toml: cors_origin: https://a cannot be used: it has to be"),
        ("port = ", "outrider.toml: it is not valid TOML"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingError) as error:
        read_configuration({}, {}, file(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path}/{complaint}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml: no such file"):
        read_configuration({}, {}, tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    with pytest.raises(SettingError, match=r"odd\.toml: it is not UTF-8"):
        read_configuration({}, {}, tmp_path / "odd.toml")


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        (
            "OUTRIDER_MAXRUNNING",
            "2",
            "OUTRIDER_MAXRUNNING: no such setting. Did you mean OUTRIDER_MAX_RUNNING?",
        ),
        ("OUTRIDER_Port", "2", "OUTRIDER_Port: no such setting. Did you mean OUTRIDER_PORT?"),
        ("OUTRIDER_PORT", "tcp://10.0.0.1:80", "OUTRIDER_PORT: tcp://10.0.0.1:80 cannot be used"),
        ("OUTRIDER_NO_AUTH", "maybe", "OUTRIDER_NO_AUTH: maybe cannot be used"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variable: str, value: str, complaint: str) -> None:
    with pytest.raises(SettingError) as error:
        read_configuration({}, {variable: value})
    assert str(error.value).startswith(complaint)


def test_variables_that_only_begin_like_ours_are_mentioned() -> None:
    found = read_configuration({}, {"OUTRIDER_SERVICE_HOST": "10.0.0.1", "OUTRIDERS": "x"})
    assert found.notices == ("OUTRIDER_SERVICE_HOST is not a setting of the server and has no effect",)


def test_no_error_repeats_a_secret() -> None:
    for flags in ({"api_key": KEY}, {"api_key": [KEY, 3]}, {"hf_token": [KEY]}):
        with pytest.raises(SettingError) as error:
            read_configuration(flags, {})
        assert KEY not in str(error.value)
    assert KEY not in repr(ServeSettings(api_key=[SecretStr(KEY)]))


def test_what_is_printed_hides_secrets_and_says_where_each_value_comes_from(tmp_path: Path) -> None:
    path = file(tmp_path, 'alias = "böse\\"\\n\\u007f\\\\🙂"\n')
    found = read_configuration({"api_key": [KEY]}, {"OUTRIDER_HF_TOKEN": KEY, "OUTRIDER_PORT": "1"}, path)
    printed = as_toml(found)
    assert KEY not in printed
    assert "# api_key: set, not shown  # --api-key" in printed
    assert "port = 1  # OUTRIDER_PORT" in printed
    assert "max_running = 4  # default" in printed
    assert tomllib.loads(printed)["server"]["alias"] == 'böse"\n\x7f\\🙂'


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
SETTINGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXT,
        "alias": TEXT,
        "corpus": st.lists(TEXT.filter(lambda text: "\0" not in text).map(Path), max_size=3),
        "cors_origin": st.lists(TEXT, max_size=3),
        "port": st.integers(0, 65535),
        "timeout": st.floats(0.001, 604800),
        "temp": st.floats(0, 1e300),
        "page": st.booleans(),
        "max_tokens": st.none() | st.integers(1, 10**12),
    },
)


@given(values=SETTINGS)
def test_what_is_printed_can_be_read_back(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = read_configuration(values, {})
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    path.write_bytes(as_toml(found).encode())
    assert read_configuration({}, {}, path).settings == found.settings


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: others could use this server, and it has no key. Give --api"),
        ({"host": "::"}, "--host ::: others could use this server"),
        ({"host": "example.org"}, "--host example.org: others could use this server"),
        ({"no_auth": True, "api_key": [KEY]}, "--no-auth: there are keys, which it would ignore"),
        ({"no_auth": True, "api_keys": Path("keys.toml")}, "--no-auth: there are keys"),
        ({"tls_cert": Path("a")}, "--tls-cert: HTTPS needs --tls-key too"),
        ({"tls_key": Path("a")}, "--tls-key: HTTPS needs --tls-cert too"),
        ({"cors_origin": ["example.org"]}, "--cors-origin example.org: not an origin"),
        ({"cors_origin": ["https://a.example/"]}, "--cors-origin https://a.example/: not an origin"),
        ({"ctx_size": 64, "kv_tokens": 63}, "--kv-tokens 63: one request may need 64"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingError) as error:
        read_configuration(values, {}).settings.check()
    assert str(error.value).startswith(complaint)


EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def test_the_examples_hold() -> None:
    read_configuration({}, {}, EXAMPLES / "outrider.toml").settings.check()
    assert [key.name for key in read_keys(EXAMPLES / "keys.toml")] == ["anna", "build-server"]
    unit = (EXAMPLES / "outrider.service").read_text()
    variables = dict(word.split("=") for word in re.findall(r"OUTRIDER_\w+=\S+", unit))
    dockerfile = (EXAMPLES.parent.parent / "docker" / "Dockerfile").read_text()
    variables |= dict(word.split("=") for word in re.findall(r"OUTRIDER_\w+=[^\s\\]+", dockerfile))
    assert {"OUTRIDER_API_KEYS", "OUTRIDER_HOST", "OUTRIDER_LOG_JSON"} <= set(variables)
    read_configuration({}, variables)


def test_every_option_that_the_documentation_names_exists() -> None:
    text = (EXAMPLES.parent / "serving.md").read_text()
    named = set(re.findall(r"`(?:outrider serve [^`]*)?(--[a-z-]+)", text)) - {"--help"}
    assert len(named) > 10
    assert named <= {flag for flags in FLAGS.values() for flag in flags}


def test_what_is_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "192.168.0.1", "localhost.example.org", "", "127.0.0.1.example.org"):
        assert not is_loopback(host), host


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, 8),
        ({"max_running": 1}, 0),
        ({"max_running": 1, "cache_ram": 0}, 8),
        ({"max_running": 1, "kept_sequences": 3}, 3),
        ({"kept_sequences": 0}, 0),
    ],
)
def test_a_server_of_one_request_keeps_kv_in_memory_alone(values: dict[str, Any], kept: int) -> None:
    assert ServeSettings(**values).num_kept == kept
