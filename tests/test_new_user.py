"""A session of half an hour as a new user has it (`new_user`): nothing is lost without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from new_user import CHAPTERS, Place
from real_server import MODEL, REASON


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=REASON)
@pytest.mark.parametrize("name", CHAPTERS)
def test_a_new_user_is_left_without_a_word_nowhere(name: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    CHAPTERS[name](place)
    assert place.wrong == []
