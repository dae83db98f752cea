"""Step records as JSON lines, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from engines import VOCABULARY, same_vocabulary
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.data import Request, StepRecord
from outrider.core.errors import SettingError
from outrider.core.files import check_writable
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.session.readout import write_trace


def records() -> tuple[StepRecord, ...]:
    logits = random_logits(VOCABULARY.size, seed=11)
    drafter = ModelDrafter(FakeModel(VOCABULARY, logits), same_vocabulary())
    drawn = Verification(draft_sampling="sampled")
    request = Request((0, 1, 2), SamplingParams(seed=1), max_tokens=9, ignore_end=True, verification=drawn)
    return Engine(FakeModel(VOCABULARY, logits), [drafter]).generate(request).records


def test_one_object_a_step_without_distributions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("an older trace")
    check_writable(path, "trace")
    made = records()
    write_trace(path, made)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [record.step for record in made]
    assert [line["tokens"] for line in lines] == [list(record.tokens) for record in made]
    assert any(line["draft"]["sampled"] for line in lines)
    assert not any({"probs", "greedy_probs"} & line["draft"].keys() for line in lines)
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "trace.jsonl"
    folder.mkdir()
    (folder / "kept").touch()
    with pytest.raises(SettingError, match="could not be written"):
        write_trace(folder / "absent" / "trace", records())
    assert os.listdir(folder) == ["kept"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe, "trace")
    made = records()
    write_trace(pipe, made)
    if not pipe.is_fifo():
        pytest.fail("the pipe was replaced by a file")
    reader.join()
    assert len(read[0].splitlines()) == len(made)


def test_a_link_keeps_pointing_at_the_trace(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "traces.jsonl"
    file.touch()
    link.symlink_to(file)
    write_trace(link, records())
    assert link.is_symlink() and file.read_text()
