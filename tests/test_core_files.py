"""Files that are written whole or not at all; sequences of tokens."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import SettingError
from outrider.core.files import check_writable, write_whole
from outrider.core.sequences import common_prefix

TEXT = "a line\n" * 1000


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("an older plan")
    check_writable(path, "plan")
    write_whole(path, TEXT, "plan")
    assert path.read_text() == TEXT and os.listdir(tmp_path) == ["plan.toml"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(SettingError, match="the plan could not be written"):
        write_whole(tmp_path / "absent" / "plan", TEXT, "plan")
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe, "plan")
    write_whole(pipe, TEXT, "plan")
    if not pipe.is_fifo():
        pytest.fail("the pipe was replaced by a file")
    reader.join()
    assert read == [TEXT]


def test_a_link_keeps_pointing_at_the_file(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.touch()
    link.symlink_to(file)
    write_whole(link, TEXT, "plan")
    assert link.is_symlink() and file.read_text() == TEXT


# Sequences of tokens


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS)
def test_a_common_prefix_is_the_longest_beginning_of_both(one: list[int], other: list[int]) -> None:
    shared = common_prefix(one, other)
    assert one[:shared] == other[:shared]
    assert one[: shared + 1] != other[: shared + 1] or shared == len(one) == len(other)


@given(TOKENS, TOKENS, TOKENS)
def test_it_is_that_of_tuples_and_iterators_too(start: list[int], one: list[int], other: list[int]) -> None:
    assert common_prefix(tuple(start + one), iter(start + other)) == len(start) + common_prefix(one, other)
