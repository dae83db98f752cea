"""Drafts that know a part of their target's tokens: the map is verified, and honoured in both directions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from engines import GREEDY, VOCABULARY, Extending, asked, reduced_drafter, sampler
from llama_cpp_models import TEXT
from outrider import Pair, Session
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import DraftRequest, PartOf
from outrider.core.data import Draft, Row
from outrider.core.errors import SettingError, VocabularyMismatch
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.lab.recording import record_offers
from outrider.models.vocab import Alignment, align, compare, tokenizer_id
from outrider.models.vocab.subset import Subset, choose_subset, coverage
from outrider.policy.fixed import FixedPolicy, grow
from outrider.sampling import RequestSampler, draw
from outrider.sampling.chain import Chain
from tiny_gguf import MERGES, Reduced, vocabulary, write_tiny
from vocabularies import ReducedVocabulary, TableVocabulary, Token, bytes_and

pytestmark = pytest.mark.usefixtures("trusted")

REDUCED = ReducedVocabulary(VOCABULARY, "bd ")
OTHER = REDUCED.size - 1
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


# The map


def test_a_reduced_vocabulary_lines_up_by_its_map_however_it_cuts() -> None:
    found = align(VOCABULARY, REDUCED)
    assert found.to_target.tolist() == [1, 3, 4, 5, -1]
    assert found.to_draft.tolist() == [-1, 0, -1, 1, 2, 3]
    assert (found.other_token, found.identical) == (4, False)
    report = found.report
    assert report.is_reduced and not report.fault
    assert (report.common_tokens, report.target_tokens) == (4, 6)


def test_what_the_draft_does_not_know_is_read_as_the_other_token() -> None:
    assert align(VOCABULARY, REDUCED).read(VOCABULARY.tokenize("abcd ")) == [4, 0, 4, 1, 2]
    other = compare(VOCABULARY, FakeVocabulary("bd "))  # a vocabulary of its own: there it is left out
    assert other.read(VOCABULARY.tokenize("abcd ")) == [0, 1, 2]


def test_drafts_with_the_same_map_line_up_as_any_others() -> None:
    again = ReducedVocabulary(VOCABULARY, "bd ")
    again.part_of = replace(again.part_of, name="another file")
    assert compare(REDUCED, again).identical


def with_part(part: PartOf, *changes: tuple[int, Token]) -> TableVocabulary:
    """A draft of the table below, with some tokens changed."""
    tokens = [*KEPT, Token(b"<|other|>", control=True)]
    for at, token in changes:
        tokens[at] = token
    return TableVocabulary(tokens, part_of=part)


END = Token(b"<end>", control=True, end=True)
WHOLE = TableVocabulary([*bytes_and("the", " the", "er"), END])
KEPT = [*bytes_and(" the"), END]
IDS = (*range(256), 257, 259, -1)
PART = PartOf(IDS, 258, tokenizer_id(WHOLE), "small")


def test_a_sound_map_is_believed() -> None:
    assert align(WHOLE, with_part(PART)).to_target.tolist() == list(IDS)
    without = PartOf(IDS[:-1], None, PART.target_tokenizer, "small")
    found = align(WHOLE, TableVocabulary(KEPT, part_of=without))
    assert found.other_token is None and found.read([257, 258]) == [256]


def moved(**places: int) -> tuple[int, ...]:
    ids = list(IDS)
    for place, token in places.items():
        ids[int(place[1:])] = token
    return tuple(ids)


DAMAGED: dict[str, tuple[PartOf, tuple[tuple[int, Token], ...]]] = {
    "too short": (replace(PART, target_tokens=IDS[:-2]), ()),
    "empty": (replace(PART, target_tokens=()), ()),
    "out of range": (replace(PART, target_tokens=moved(_3=260)), ()),
    "negative": (replace(PART, target_tokens=moved(_3=-2)), ()),
    "a gap": (replace(PART, target_tokens=moved(_3=-1)), ()),
    "twice": (replace(PART, target_tokens=moved(_3=4)), ()),
    "swapped": (replace(PART, target_tokens=moved(_97=98, _98=97)), ()),
    "no other token": (replace(PART, other_token=None), ()),
    "another other token": (replace(PART, other_token=0), ()),
    "an other token that there is not": (replace(PART, other_token=9999), ()),
    "for no tokenizer": (replace(PART, target_tokenizer=""), ()),
    "an other token of text": (PART, ((258, Token(b"<|other|>")),)),
    "another spelling": (PART, ((256, Token(b"the")),)),
    "control here alone": (PART, ((256, Token(b" the", control=True)),)),
    "no end": (PART, ((257, Token(b"<end>", control=True)),)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_map_is_refused(damage: str) -> None:
    part, changes = DAMAGED[damage]
    draft = with_part(part, *changes)
    with pytest.raises(VocabularyMismatch) as caught:
        align(WHOLE, draft)
    assert caught.value.what == "draft small" and "distill" in caught.value.way_out
    assert "is damaged" in caught.value.why
    refused = compare(WHOLE, draft)
    assert refused.report.fault and refused.other_token is None
    assert set(refused.to_target.tolist()) == set(refused.to_draft.tolist()) == {-1}


def test_a_map_for_another_tokenizer_is_refused() -> None:
    """Also where all that it names happens to be there: other tokens would be missing, or the cuts differ."""
    for other in (
        TableVocabulary([*bytes_and("the", " the", "er"), END], words=r"(?s)\d|\D+", kind="table (digits)"),
        TableVocabulary(bytes_and("x"), kind="table (x)"),
    ):
        with pytest.raises(VocabularyMismatch, match=r"small: .*made for another tokenizer") as caught:
            align(other, with_part(PART))
        assert other.kind in caught.value.why


# What the draft says, against the slow way


def alignments() -> dict[str, Alignment]:
    return {
        "itself": compare(VOCABULARY, VOCABULARY),
        "reduced": align(VOCABULARY, REDUCED),
        "another order": compare(VOCABULARY, FakeVocabulary("xdcyba")),
        "a part": compare(VOCABULARY, FakeVocabulary("bc")),
    }


def over_target(alignment: Alignment, row: Row) -> Row:
    mapped = np.full(VOCABULARY.size, -np.inf, dtype=np.float32)
    for token, counterpart in enumerate(alignment.to_target.tolist()):
        if counterpart >= 0:
            mapped[counterpart] = row[token]
    return mapped


SETTINGS = {
    "greedy": GREEDY,
    "plain": SAMPLED,
    "default": SamplingParams(),
    "bias": SamplingParams(temperature=0.5, logit_bias=((1, 2.0), (3, -1.0)), banned=(0,)),
}


@given(
    name=st.sampled_from(sorted(alignments())),
    settings_name=st.sampled_from(sorted(SETTINGS)),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.5, 3.0, 40.0]),
    is_drawn=st.booleans(),
)
def test_choices_confidences_and_distributions_are_those_over_the_whole_vocabulary(
    name: str, settings_name: str, seed: int, scale: float, is_drawn: bool
) -> None:
    alignment, params = alignments()[name], SETTINGS[settings_name]
    rng = np.random.default_rng(seed)
    drafter = ModelDrafter(FakeModel(VOCABULARY, random_logits(VOCABULARY.size)), alignment)
    drawing = (lambda q, _i: int(q.tokens[0])) if is_drawn else None
    request = DraftRequest(0, 4, sampler(params), drawing, with_mode_of=True)
    for _ in range(2):  # a buffer that is used again holds nothing of before
        row = (rng.standard_normal(len(alignment.to_target)) * scale).astype(np.float32)
        adjusted = request.sampler.adjust(over_target(alignment, row), ())
        best = int(adjusted.argmax())
        foreign = row[alignment.to_target < 0].astype(np.float64)
        found = drafter.look(row, request, ())
        if not is_drawn and len(foreign) and foreign.max() > adjusted[best]:
            assert found is None
            continue
        assert found is not None and found[0] == best
        everything = np.concatenate((adjusted.astype(np.float64), foreign))
        sure = 1 / np.exp(np.clip(everything - adjusted[best], None, 60)).sum()
        assert found[1] == pytest.approx(sure, rel=1e-5)
        expected = Chain(params).distribution(adjusted)
        offered = found[2]
        assert offered is not None and offered.tokens.tolist() == expected.tokens.tolist()
        assert offered.probs == pytest.approx(expected.probs, rel=1e-5)


# The drafter


def says(*script: int, other: float = -5.0) -> Callable[[Sequence[int]], Row]:
    """A draft that says these tokens of its own, one after the other, after a prompt of four."""

    def logits(tokens: Sequence[int]) -> Row:
        row = np.zeros(REDUCED.size, dtype=np.float32)
        row[OTHER] = other
        row[script[min(len(tokens) - 4, len(script) - 1)]] = 6
        return row

    return logits


def offered(drafter: ModelDrafter, length: int, prefix: Sequence[int] = (), **request: Any) -> Draft:
    asked_for = DraftRequest(0, length, sampler(request.pop("params", GREEDY)), **request)
    return drafted(drafter, asked_for, prefix)


def drafted(drafter: ModelDrafter, request: DraftRequest, prefix: Sequence[int] = ()) -> Draft:
    draft = Extending(request, prefix)
    grow(drafter, [draft])
    return Draft(tuple(draft.tokens))


def model_of(drafter: ModelDrafter) -> FakeModel:
    assert isinstance(drafter.model, FakeModel)
    return drafter.model


def test_the_text_is_read_with_the_other_token_in_place_of_what_is_unknown() -> None:
    drafter = reduced_drafter(says(0, 1, 2, 0))
    drafter.begin(0, asked(VOCABULARY.tokenize("abca")))
    assert offered(drafter, 2).tokens == tuple(VOCABULARY.tokenize("bd"))
    drafter.observe(0, VOCABULARY.tokenize("bc"))
    assert offered(drafter, 1, prefix=tuple(VOCABULARY.tokenize("a"))).tokens
    assert model_of(drafter).stored(0) == (4, 0, 4, 4, 0, 4, 4)


def test_a_draft_ends_before_what_it_does_not_know() -> None:
    drafter = reduced_drafter(says(0, 1, OTHER, 2))
    drafter.begin(0, asked(VOCABULARY.tokenize("abca")))
    assert offered(drafter, 8).tokens == tuple(VOCABULARY.tokenize("bd"))
    assert offered(drafter, 8, params=SAMPLED).tokens == tuple(VOCABULARY.tokenize("bd"))


def test_a_likely_unknown_lowers_the_confidence() -> None:
    sure = []
    for other in (-5.0, 5.0):
        drafter = reduced_drafter(says(0, other=other))
        drafter.begin(0, asked(VOCABULARY.tokenize("abca")))
        [acceptance] = offered(drafter, 1).acceptance
        assert acceptance == pytest.approx(1 / (1 + 3 * np.exp(-6) + np.exp(other - 6)), rel=1e-5)
        sure.append(acceptance)
    assert sure[0] > 0.95 and sure[1] < 0.75


def test_a_drawn_draft_goes_on_among_the_tokens_that_it_knows() -> None:
    """Restricted for every draw alike: what is offered is distributed as it claims."""
    logits = random_logits(REDUCED.size, seed=3, order=1)
    drafter = reduced_drafter(lambda tokens: logits(tokens) + np.eye(5, dtype=np.float32)[OTHER] * 9)
    drafter.begin(0, asked(VOCABULARY.tokenize("abca")))
    rng = np.random.default_rng(2)
    draft = offered(drafter, 4, params=SAMPLED, draw=lambda q, _i: draw(q, rng))
    assert draft.probs is not None and len(draft) >= 1
    text = [4]
    for token, q in zip(draft.tokens, draft.probs, strict=True):
        weights = np.exp(logits(text).astype(np.float64))[:4]
        assert q.tokens.tolist() == [1, 3, 4, 5]
        assert q.probs == pytest.approx(weights / weights.sum(), rel=1e-5)
        text = align(VOCABULARY, REDUCED).read([token])
    assert max(draft.acceptance) < 0.1, "it says that something else is more likely"


def test_under_a_constraint_the_unknown_is_no_reason_to_stop() -> None:
    drafter = reduced_drafter(says(OTHER))
    drafter.begin(0, asked(VOCABULARY.tokenize("abca")))
    constraint = OneOf(Pieces(*"abcd "), ["dddd"], forcing=False)
    request = DraftRequest(0, 3, RequestSampler(GREEDY, VOCABULARY, (), constraint), constraint=constraint)
    draft = drafted(drafter, request)
    assert draft.tokens == tuple(VOCABULARY.tokenize("ddd")) and draft.acceptance == (1.0,) * 3


def test_recorded_offers_are_the_drafters_own() -> None:
    language = random_logits(REDUCED.size, seed=5, order=2)
    drafter = reduced_drafter(lambda tokens: language(tokens) + np.eye(5, dtype=np.float32)[OTHER])
    prompt, answer = VOCABULARY.tokenize("abca"), VOCABULARY.tokenize("dcb adbca bd")
    found = record_offers(drafter.model, drafter.alignment, prompt, answer)
    assert -1 in found.tokens and max(found.tokens) > 0
    for i, token in enumerate(found.tokens):
        drafter.reset()
        drafter.begin(0, asked([*prompt, *answer[:i]]))
        draft = offered(drafter, 1)
        assert draft.tokens == ((token,) if token >= 0 else ())
        if draft.tokens:
            assert draft.acceptance[0] == pytest.approx(found.confidence[i], abs=2e-5)


# Files


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def target_id(target: Path) -> str:
    weights = Weights(target, OPTIONS)
    found = tokenizer_id(weights.vocabulary)
    weights.close()
    return found


OPTIONS = LoadOptions(threads=1)


def test_a_file_with_a_map_drafts_for_its_target(target: Path, target_id: str, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path / "draft.gguf", noise=0.02, reduced=Reduced(10, target_id))
    texts = []
    for speculate in (False, True):
        policy = FixedPolicy(p_min=0.0)
        with Session.load(target, draft, context_length=256, options=OPTIONS, policy=policy) as session:
            if speculate:
                [drafter] = [d for d in session.engine.drafters if isinstance(d, ModelDrafter)]
                report = drafter.alignment.report
                assert (report.common_tokens, report.target_tokens) == (268, len(vocabulary()))
                assert drafter.alignment.other_token == 268
            texts.append(
                session.generate(
                    TEXT[:12], max_tokens=60, sampling=GREEDY, ignore_end=True, speculate=speculate
                )
            )
    plain, fast = texts
    assert fast.tokens == plain.tokens and len(fast.tokens) == 60
    stood = sum(r.num_accepted for r in fast.records if "draft" in r.draft.sources)
    assert stood > 10, "its weights are the target's own, a little blurred"


def test_a_file_with_a_damaged_map_is_refused(target: Path, target_id: str, tmp_path: Path) -> None:
    ids = (*Reduced(10, "").kept(MERGES), -1)[:-5]
    draft = write_tiny(tmp_path / "odd.gguf", reduced=Reduced(10, target_id, ids))
    with pytest.raises(VocabularyMismatch, match=r"draft odd: .*map of its reduced vocabulary is damaged"):
        Pair.load(target, draft, options=OPTIONS)


# Which tokens are kept

WORDS = ("the", "of", "and", "to", "in")
TABLE = TableVocabulary(
    [Token(b"<s>", control=True), *(Token(bytes([i])) for i in range(97, 105)),
     *(Token(word.encode()) for word in WORDS), Token(b"bye", end=True)]
)  # fmt: skip
"""0: control; 1-8: bytes; 9-13: words; 14: ends a text"""


def counts(**words: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = np.zeros(TABLE.size, dtype=np.int64)
    for word, count in words.items():
        found[9 + WORDS.index(word)] = count
    return found


def test_the_most_frequent_tokens_are_kept_and_those_that_are_needed() -> None:
    subset = choose_subset(TABLE, counts(of=3, to=9, the=1), 13)
    assert subset.to_target.tolist() == [*range(9), 10, 12, 14, -1] and subset.has_other
    assert subset.size == 13
    assert subset.to_draft[[0, 10, 12, 14]].tolist() == [0, 9, 10, 11]
    assert set(subset.to_draft[[9, 11, 13]].tolist()) == {12}


def test_a_size_that_is_no_reduction_keeps_all() -> None:
    for size in (TABLE.size, TABLE.size + 10):
        whole = choose_subset(TABLE, counts(), size)
        assert not whole.has_other and whole.size == TABLE.size
        assert whole.to_target.tolist() == whole.to_draft.tolist() == list(range(TABLE.size))


def test_a_size_without_room_for_what_is_needed_is_refused() -> None:
    assert choose_subset(TABLE, counts(), 12).size == 12
    with pytest.raises(SettingError, match="11 tokens are too few: 11 are needed in any case"):
        choose_subset(TABLE, counts(), 11)


@given(st.sets(st.integers(0, 39), min_size=1))
def test_both_maps_say_the_same(kept: set[int]) -> None:
    subset = Subset.of(sorted(kept, reverse=True), 40)
    assert subset.to_target.tolist() == [*sorted(kept), -1]
    for token in range(40):
        place = int(subset.to_draft[token])
        assert (subset.to_target[place] == token) if token in kept else place == len(kept)


def test_coverage_is_the_share_of_known_tokens() -> None:
    subset = Subset.of([0, 1, 2], 10)
    texts = [np.array(text, dtype=np.int32) for text in ([0, 1, 5], [], [9])]
    assert coverage(subset, texts) == 0.5
    assert coverage(subset, []) == 1.0
    assert coverage(Subset.whole(10), texts) == 1.0
