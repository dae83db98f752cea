"""/slots/0?action=save|restore|erase: a caller's own texts, to files and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from full_disk import file_size_limit
from guarded import client
from outrider.server.guard import protect
from outrider.server.keys import key_ring
from outrider.server.settings import ServeSettings
from serving import Serving, serving

TEXT = "a long beginning of a text that many requests share, said twice " * 4
ONE, TWO = "the-first-key-of-all-of-them", "the-second-key-of-all-of-them"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Serving]:
    with serving(settings=ServeSettings(slot_save_path=tmp_path / "slots")) as found:
        yield found


def cached(running: Serving, prompt: str) -> int:
    answer = running.post("/v1/completions", prompt=prompt, max_tokens=3).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_text_is_saved_erased_and_restored(running: Serving, tmp_path: Path) -> None:
    assert cached(running, TEXT) == 0
    saved = running.post("/slots/0?action=save", filename="text.bin").json()
    assert saved["id_slot"] == 0 and saved["filename"] == "text.bin" and saved["timings"]["save_ms"] > 0
    assert saved["n_saved"] == len(TEXT)
    [file] = (tmp_path / "slots").glob("*.slot")
    assert saved["n_written"] == file.stat().st_size and file.stat().st_mode & 0o777 == 0o600
    assert running.client.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": len(TEXT)}
    assert running.client.post("/slots/0?action=erase").status_code == 400
    restored = running.post("/slots/0?action=restore", filename="text.bin").json()
    assert restored["n_restored"] == len(TEXT) and restored["n_read"] > 0
    assert cached(running, TEXT) == len(TEXT) - 1


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "a" * 200, "null\0", "sp ace", "trick\n", 7, None]
)
def test_names_that_leave_the_folder_are_refused(running: Serving, name: object) -> None:
    cached(running, TEXT)
    for action in ("save", "restore"):
        answer = running.post(f"/slots/0?action={action}", filename=name)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "filename"


def test_what_cannot_be_done_is_said(running: Serving, tmp_path: Path) -> None:
    assert running.post("/slots/0?action=save", filename="x").status_code == 400  # nothing is stored
    assert running.post("/slots/0?action=restore", filename="x").json()["error"]["param"] == "filename"
    assert running.post("/slots/0?action=melt", filename="x").status_code == 400
    assert running.post("/slots/zero?action=save", filename="x").status_code == 400
    cached(running, TEXT)
    assert running.post("/slots/-1?action=erase").status_code == 400
    with file_size_limit(100):
        full = running.post("/slots/0?action=save", filename="x")
    assert full.status_code == 507 and "too large" in full.json()["error"]["message"]
    assert running.post("/slots/0?action=save", filename="x").status_code == 200
    [file] = (tmp_path / "slots").glob("*.slot")
    file.write_bytes(file.read_bytes()[:-9])
    torn = running.post("/slots/0?action=restore", filename="x")
    assert torn.status_code == 400 and "cut short" in torn.json()["error"]["message"]
    assert cached(running, TEXT) == len(TEXT) - 1


def test_without_a_folder_nothing_is_saved() -> None:
    with serving() as running:
        cached(running, TEXT)
        answer = running.post("/slots/0?action=save", filename="x")
        assert answer.status_code == 501 and "--slot-save-path" in answer.json()["error"]["message"]
        assert running.post("/slots/0?action=erase").json()["n_erased"] > 0


def test_callers_have_slots_and_files_of_their_own(tmp_path: Path) -> None:
    settings = ServeSettings(slot_save_path=tmp_path / "slots", api_key=[SecretStr(ONE), SecretStr(TWO)])
    with serving(settings=settings) as running:
        one = client(protect(running.app, settings, key_ring(settings)))

        def post(key: str, path: str, **body: object) -> tuple[int, dict[str, object]]:
            answer = one.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            return answer.status_code, answer.json()

        assert post(ONE, "/v1/completions", prompt=TEXT, max_tokens=3)[0] == 200
        assert post(TWO, "/slots/0?action=save", filename="x")[0] == 400
        assert post(TWO, "/slots/0?action=erase")[0] == 400
        assert post(ONE, "/slots/0?action=save", filename="x")[0] == 200
        status, refused = post(TWO, "/slots/0?action=restore", filename="x")
        assert status == 400 and "no such file" in str(refused)
        [file] = (tmp_path / "slots").glob("*.slot")
        assert post(TWO, "/v1/completions", prompt="short", max_tokens=3)[0] == 200
        assert post(TWO, "/slots/0?action=save", filename="x")[0] == 200
        [other] = {*(tmp_path / "slots").glob("*.slot")} - {file}
        other.write_bytes(file.read_bytes())  # whoever can write there cannot give it away either
        status, refused = post(TWO, "/slots/0?action=restore", filename="x")
        assert status == 400 and "another key" in str(refused)
