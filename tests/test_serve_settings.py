"""The server's settings: one name in every source, and which source wins."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from outrider.cli.serve_settings import ServeOptions
from outrider.core.errors import SettingError
from outrider.core.schema import settings_of
from outrider.core.settings import sampling_params
from outrider.server.keys import read_keys
from outrider.server.settings import TABLES, ServeSettings, read_configuration

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
    assert set(FLAGS) == {*names, "config"}
    for name, flags in FLAGS.items():
        assert f"--{name.replace('_', '-')}" in flags, name


def test_the_command_line_wins_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = file(tmp_path, "port = 1\nmax_running = 2\nmax_waiting = 3\n")
    environment = {"OUTRIDER_PORT": "4", "OUTRIDER_MAX_RUNNING": "5"}
    found = read_configuration({"port": 6}, environment, path)
    settings = found.settings
    assert (settings.port, settings.max_running, settings.max_waiting) == (6, 5, 3)
    assert settings.drain_timeout == ServeSettings().drain_timeout


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
    assert (settings.corpus, settings.gpu_layers) == ([Path("one"), Path("two")], "12")
    assert (settings.page, settings.no_auth, settings.max_running) == (False, True, 4)
    assert found.notices == []


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
        ("[models.a]\nport = 1", "outrider.toml: models.a.port: not a setting of a model"),
        ("[models.a]\nctx_sizes = 1", "outrider.toml: models.a.ctx_sizes: no such setting"),
        ("[models.a]\nctx_size = true", "outrider.toml: models.a.ctx_size"),
        ("[models.a]\nctx_size = 'many'", "outrider.toml: models.a.ctx_size"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingError) as error:
        read_configuration({}, {}, file(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path}/{complaint}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml: no such file"):
        read_configuration({}, {}, tmp_path / "none.toml")
    with pytest.raises(SettingError, match="--models-dir /there/is/none"):
        read_configuration({"models_dir": Path("/there/is/none")}, {})
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
    assert found.notices == ["OUTRIDER_SERVICE_HOST is not a setting of the server and has no effect"]


def test_no_error_repeats_a_secret() -> None:
    for flags in ({"api_key": KEY}, {"api_key": [KEY, 3]}, {"hf_token": [KEY]}):
        with pytest.raises(SettingError) as error:
            read_configuration(flags, {})
        assert KEY not in str(error.value)
    assert KEY not in repr(ServeSettings(api_key=[SecretStr(KEY)]))


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
    named = set(re.findall(r"`(?:outrider serve [^`]*)?(--[a-z-]+)", text)) - {"--help", "--help-all"}
    assert len(named) > 10
    assert named <= {flag for flags in FLAGS.values() for flag in flags}


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


# Several models

SEVERAL = """
[models.coder]
model = "coder.gguf"
model_draft = "draft.gguf"
ctx_size = 8192

[models."big.one"]
hf_repo = "owner/repo:Q8_0"
temp = 0.25
alias = "gpt-4o"

[sampling]
temp = 0.5

[machine]
threads = 3
"""


def test_a_file_describes_several_models(tmp_path: Path) -> None:
    found = read_configuration({}, {}, file(tmp_path, SEVERAL))
    coder, big = found.models["coder"], found.models["big.one"]
    assert (coder.model, coder.model_draft, coder.ctx_size) == ("coder.gguf", "draft.gguf", 8192)
    assert (big.hf_repo, big.model, big.alias, big.threads) == ("owner/repo:Q8_0", None, "gpt-4o", 3)
    assert (sampling_params(coder).temperature, sampling_params(big).temperature) == (0.5, 0.25)
    assert read_configuration({}, {}, file(tmp_path, "port = 1")).models == {}


def test_the_model_of_the_command_line_is_the_first_of_several(tmp_path: Path) -> None:
    path = file(tmp_path, SEVERAL)
    found = read_configuration({"model": "x/mine.gguf", "model_draft": "d.gguf"}, {}, path)
    assert list(found.models) == ["mine", "coder", "big.one"]
    assert found.models["mine"].model_draft == "d.gguf" and found.models["big.one"].model_draft is None


def test_a_folder_has_a_model_in_each_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf", "c.txt"):
        (tmp_path / name).touch()
    found = read_configuration({"models_dir": tmp_path, "ctx_size": 512}, {})
    assert {name: settings.model for name, settings in found.models.items()} == {
        "a": str(tmp_path / "a.gguf"),
        "b": str(tmp_path / "b-00001-of-00002.gguf"),
    }
    assert {settings.ctx_size for settings in found.models.values()} == {512}
