"""Models from the hub, against a stand-in for it."""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import try_to_load_from_cache

from hub_standin import TOKEN, Hub, Repository, serve
from outrider.core.errors import HubError
from outrider.models.hub import HubOptions
from outrider.models.reference import choose_file, resolve

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
