"""What a session builds, and how the readout shows each drafter."""

from pathlib import Path

from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.cli.report import SOURCE_STYLES, source_name
from outrider.core.notices import collect_notices
from outrider.drafters.registry import DRAFTERS, build_drafters
from outrider.models.vocab import align

VOCABULARY = FakeVocabulary("ab ")


def test_settings_that_ask_for_all_get_each_drafter_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b a b")
    draft = FakeModel(VOCABULARY, random_logits(VOCABULARY.size))
    drafters = build_drafters(
        "target", VOCABULARY, corpus=[tmp_path], draft=(draft, align(VOCABULARY, VOCABULARY))
    )
    assert [drafter.name for drafter in drafters] == [kind.name for kind in DRAFTERS]
    assert [drafter.is_free for drafter in drafters] == [kind.name != "draft" for kind in DRAFTERS]


def test_what_is_switched_off_or_impossible_is_not_built() -> None:
    assert [drafter.name for drafter in build_drafters("t", VOCABULARY, lookup=False)] == ["prediction"]
    with collect_notices() as notices:
        drafters = build_drafters("t", VOCABULARY, can_rewind=False, corpus=[Path("nowhere")])
    assert [drafter.name for drafter in drafters] == ["lookup", "earlier"]
    assert notices == ["the corpus is not used: t cannot take rejected drafts back"]


def test_people_see_every_drafter_by_a_name_and_a_colour_of_its_own() -> None:
    styles = [SOURCE_STYLES[kind.name] for kind in DRAFTERS]
    assert len(set(styles)) == len(styles) and all(styles)
    assert all(source_name(kind.name) == kind.title for kind in DRAFTERS)
