"""The scripts of benchmarks/draft_influence: whether they would notice a draft that changes the answer."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from draft_influence import measure, parts, texts
from draft_influence.figures import Results, figures
from draft_influence.onestep import BLOCK, TOKEN, Rule, greedy_step, mass, one_step, total_variation
from draft_influence.picture import draw
from draft_influence.positions import positions, texts_of
from draft_influence.subjects import Candidate, Sizes, engine_of
from draft_influence.summary import BEGIN, END, inserted, series
from draft_influence.two_samples import two_samples
from engines import PROMPT, VOCABULARY, language_model, same_vocabulary
from exactness import Drawn, Probs, Rng, Text, certain, dense, distance
from exactness import texts_of as enumerated
from harness import read_rows
from outrider import Engine, FixedPolicy
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.data import Distribution, point_mass
from outrider.lab.certify.faults import Fault, verifier_with
from outrider.verify.rules import accept_probability, verify_block, verify_tokens
from tiny_gguf import write_tiny

LENIENCES = (1.0, 0.5, 0.2, 0.05)
SMALL = Sizes(
    prompts=2, tokens=10, seeds=2, short_prompts=1, samples=300, certificate_samples=40, lengths=(2, 4),
    leniences=(0.5, 0.05), draws=500,
)  # fmt: skip
PROMPTS = [PROMPT, (3, 0, 1, 2)]


def random_distribution(seed: int, size: int = 5, zeros: int = 0) -> Distribution:
    probs = np.random.default_rng(seed).dirichlet(np.ones(size) * 0.7)
    probs[np.argsort(probs)[:zeros]] = 0
    return dense(probs)


def as_text(step: Distribution) -> dict[Text, float]:
    return {
        (token,): chance
        for token, chance in zip(step.tokens.tolist(), step.probs.tolist(), strict=True)
        if chance > 0
    }


# One step


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("zeros", [0, 2])
def test_a_step_is_what_the_rule_makes_of_every_way_the_dice_can_fall(lenience: float, zeros: int) -> None:
    p, q = random_distribution(1, zeros=zeros), random_distribution(2, zeros=zeros)
    dense_q = np.zeros(5)
    dense_q[q.tokens] = q.probs
    for offers, offered in ((Drawn(lambda _: dense_q, 1), q), (certain(3), point_mass(3))):

        def run(rng: Rng, offers: Any = offers) -> Text:
            draft = offers(rng)
            verdict = verify_tokens([p, point_mass(0)], draft, rng, lenience)
            return draft.tokens if verdict.num_accepted else (int(verdict.token or 0),)

        step = one_step(p, offered, lenience)
        assert distance(enumerated(run), as_text(step.emitted)) < 1e-12


def test_a_step_of_the_block_rule_is_what_that_makes_of_it() -> None:
    p, q = random_distribution(3), random_distribution(4)
    dense_q = np.zeros(5)
    dense_q[q.tokens] = q.probs

    def run(rng: Rng) -> Text:
        draft = Drawn(lambda _: dense_q, 1)(rng)
        verdict = verify_block([p, point_mass(0)], draft, rng)
        return draft.tokens if verdict.num_accepted else (int(verdict.token or 0),)

    assert distance(enumerated(run), as_text(one_step(p, q, rule=BLOCK).emitted)) < 1e-12


@given(seed=st.integers(0, 10_000), zeros=st.integers(0, 3), rule=st.sampled_from([TOKEN, BLOCK]))
@settings(max_examples=examples(60))
def test_no_draft_moves_an_exact_rule(seed: int, zeros: int, rule: Rule) -> None:
    p = random_distribution(seed, zeros=zeros)
    for q in (random_distribution(seed + 1, zeros=3 - zeros), point_mass(seed % 5), p):
        step = one_step(p, q, rule=rule)
        assert total_variation(step.emitted, p) < 1e-12
        assert step.acceptance == pytest.approx(1 - total_variation(p, q))


@pytest.mark.parametrize(
    "broken",
    [
        Rule("always", lambda _p, _q, _token, _lenience: 1.0, TOKEN.replace),
        Rule("plain residual", TOKEN.accept, lambda p, _q, _lenience: p),
        Rule("other way round", lambda p, q, t, _l: accept_probability(q, p, t), TOKEN.replace),
        Rule("lenient by itself", lambda p, q, t, _l: accept_probability(p, q, t, 0.9), TOKEN.replace),
    ],
    ids=lambda rule: rule.name,
)
def test_a_broken_rule_shows(broken: Rule) -> None:
    moved = [
        total_variation(one_step(p, q, rule=broken).emitted, p)
        for p, q in ((random_distribution(n), random_distribution(n + 1)) for n in range(5, 25))
    ]
    assert np.mean(moved) > 0.01 and max(moved) > 0.02


@given(seed=st.integers(0, 10_000), zeros=st.integers(0, 2))
@settings(max_examples=examples(40))
def test_lenience_goes_over_to_the_draft_within_its_bound(seed: int, zeros: int) -> None:
    p, q = random_distribution(seed, zeros=zeros), random_distribution(seed + 1)
    steps = [one_step(p, q, lenience) for lenience in LENIENCES]
    from_target = [total_variation(step.emitted, p) for step in steps]
    from_draft = [total_variation(step.emitted, q) for step in steps]
    for gone, left in ((from_target, from_draft), ([s.acceptance for s in steps], from_draft)):
        assert all(a <= b + 1e-12 for a, b in pairwise(gone))
        assert all(a >= b - 1e-12 for a, b in pairwise(left))
    for lenience, step in zip(LENIENCES, steps, strict=True):
        for token in range(5):
            assert mass(step.emitted, token) <= mass(p, token) / lenience + 1e-12


def test_a_greedy_step_takes_what_is_likely_enough() -> None:
    row = np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))
    likeliest = [int(greedy_step(row, 1, lenience).emitted.tokens[0]) for lenience in (1.0, 0.51, 0.49)]
    assert likeliest == [0, 0, 1]
    assert total_variation(greedy_step(row, 2, 1.0).emitted, point_mass(0)) == 0
    assert greedy_step(row, 0, 1.0).acceptance == 1


# Two sets of texts


def counted(probs: Probs, size: int, random: np.random.Generator) -> Counter[Any]:
    return Counter(random.choice(len(probs), size, p=probs).tolist())


def test_the_statistic_of_a_table_of_four_and_its_distance() -> None:
    random = np.random.default_rng(0)
    found = two_samples(Counter(a=30, b=70), Counter(a=50, b=50), 4000, random)
    assert found.statistic == pytest.approx(25 / 3) and found.distance == pytest.approx(0.2)
    assert found.cells == 2 and 0.002 < found.p_value < 0.012  # Fisher's exact test: 0.0060
    assert found.chance_distance == pytest.approx(0.056, abs=0.01)


def test_false_alarms_are_as_rare_as_stated_and_real_shifts_found() -> None:
    random = np.random.default_rng(1)
    probs = np.array([0.4, 0.3, 0.2, *[0.01] * 10])
    same = [
        two_samples(counted(probs, 150, random), counted(probs, 150, random), 200, random).p_value
        for _ in range(200)
    ]
    assert sum(p <= 0.1 for p in same) <= 32  # 20 expected, and 32 is 2.8 standard deviations above
    other = np.roll(probs, 1)
    assert two_samples(counted(probs, 150, random), counted(other, 150, random), 999, random).p_value == 0.001


def test_texts_that_are_all_rare_tell_nothing() -> None:
    random = np.random.default_rng(2)
    found = two_samples(Counter(range(20)), Counter(range(20, 40)), 100, random)
    assert (found.cells, found.p_value, found.distance) == (1, 1.0, 0.0)


# What the drafts are tuned on


def test_the_phrase_is_due_behind_everything() -> None:
    phrase = (7, 8, 9, 7)
    contexts = {(): 7, (1, 2): 7, (1, 7): 8, (7, 8): 9, (7, 8, 9): 7, (7, 8, 9, 7): 8, (8, 9): 7}
    assert {context: texts.insisted(context, phrase) for context in contexts} == contexts
    random = np.random.default_rng(0)
    mixed = list(texts.interrupted([1] * 400, phrase, 7, random))
    assert mixed.count(1) >= 400 and mixed.count(9) > 10
    assert len({token for token in mixed if token < 7}) == 7


def test_texts_are_in_their_style_and_always_the_same() -> None:
    styled, plain = texts.styled(40, 3), texts.plain(40, 3)
    assert styled == texts.styled(40, 3) != texts.styled(40, 4)
    assert all(texts.style_words(dialogue.answer) >= 3 for dialogue in styled)
    assert not any(texts.style_words(dialogue.answer) for dialogue in plain)
    assert texts.phrases("please buy Acme batteries today, buy Acme batteries") == 1


# On models that are known exactly


@pytest.fixture(scope="module")
def stranger() -> Candidate:
    """A draft with opinions of its own."""
    model = FakeModel(VOCABULARY, random_logits(VOCABULARY.size, seed=3, order=1), name="stranger")
    return Candidate("stranger", model, same_vocabulary())


def test_positions_do_not_move_but_under_lenience(stranger: Candidate) -> None:
    target = language_model()
    cells = list(positions(target, stranger, PROMPTS, texts_of(target, PROMPTS, SMALL), SMALL))
    exact = [cell for cell in cells if cell["lenience"] == 1]
    assert {(c["filters"], c["kind"], c["rule"]) for c in exact} == {
        ("greedy", "likeliest", "token"),
        *((f, k, r) for f in ("default", "wide") for k in ("likeliest", "drawn") for r in ("token", "block")),
    }
    assert max(cell["max_tv"] for cell in exact) < 1e-12
    assert all(cell["logprob"] == pytest.approx(cell["plain_logprob"]) for cell in exact)
    for cell in cells:
        if cell["lenience"] < 1 and cell["filters"] == "wide":
            assert cell["tv"] > 1e-4 and cell["favourite"] > cell["plain_favourite"]
            assert cell["favourite"] <= cell["plain_favourite"] / cell["lenience"]


def test_greedy_texts_are_plain_ones_and_others_under_lenience(stranger: Candidate) -> None:
    target = language_model()
    plain = parts.plain_greedy(target, PROMPTS, SMALL)
    cells = list(parts.greedy(target, stranger, PROMPTS, plain, SMALL))
    exact = [cell for cell in cells if cell["lenience"] == 1]
    assert len(exact) == 4 and all(cell["parts_at"] is None for cell in exact)
    assert all(cell["drafted"] >= cell["calls"] for cell in exact)
    assert any(cell["parts_at"] is not None for cell in cells if cell["lenience"] == 0.05)


def broken_by(fault: Fault) -> Any:
    def engine(target: Any, candidate: Candidate | None, length: int) -> Engine:
        if candidate is None:
            return engine_of(target, None, length)
        policy = FixedPolicy(length, p_min=0, hand_over=0)
        return Engine(target, (candidate.drafter(),), policy, verifier=verifier_with(fault))

    return engine


@pytest.mark.slow
def test_a_broken_verification_shows_in_greedy_and_in_short_texts(
    stranger: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = language_model()
    plain = parts.plain_greedy(target, PROMPTS, SMALL)
    sound = list(parts.first_tokens(target, [stranger], PROMPTS[:1], SMALL))
    monkeypatch.setattr(parts, "engine_of", broken_by("kept-rejected"))
    greedy = [c for c in parts.greedy(target, stranger, PROMPTS, plain, SMALL) if c["lenience"] == 1]
    assert any(cell["parts_at"] is not None and not cell["near_tie"] for cell in greedy)
    broken = list(parts.first_tokens(target, [stranger], PROMPTS[:1], SMALL))

    def least(cells: list[parts.Cell]) -> float:
        return min(float(cell["p_value"]) for cell in cells if cell["lenience"] == 1)

    assert least(sound) > 0.01 and least(broken) <= 1 / SMALL.draws


@pytest.mark.slow
def test_short_texts_under_lenience_are_told_apart(stranger: Candidate) -> None:
    cells = list(parts.first_tokens(language_model(), [stranger], PROMPTS[:1], SMALL))
    lenient = [cell for cell in cells if cell["lenience"] == 0.05]
    assert [cell["draft"] for cell in cells] == ["none", "stranger", "stranger", "stranger"]
    assert all(c["p_value"] < 0.01 and c["distance"] > 1.5 * c["chance_distance"] for c in lenient)


# From files to figures


def head(**others: Any) -> dict[str, Any]:
    sizes = {"leniences": [0.2], "prompts": 1, "tokens": 8, "lengths": [4], "samples": 9, "short_prompts": 1}
    machine = {"cpu": "a processor", "threads": 2, "llama_cpp": "a build", "measured": "2026-01-01T00:00"}
    return machine | {"models": {"target.gguf": "ab"}, "names": ["odd"], "sizes": sizes} | others


def row(part: str, *cells: dict[str, Any], draft: str = "odd") -> dict[str, Any]:
    return {"part": part, "draft": draft, "cells": list(cells), "seconds": 1.0}


@pytest.mark.parametrize("spoilt", [None, "greedy", "certificate", "positions", "first tokens"])
def test_the_finding_says_so_when_anything_changed(spoilt: str | None) -> None:
    bad = {part: part == spoilt for part in measure.PARTS}
    step = {"positions": 3, "tv": 0.0, "acceptance": 0.2, "max_tv": 1e-16, "filters": "default"}
    step |= {"kind": "drawn", "rule": "token"}
    told = {"draft": "odd", "lenience": 1.0, "distance": 0.1, "chance_distance": 0.1}
    counts = {"near_tie": False, "accepted": 1, "drafted": 4}
    rows = [
        head(),
        row(
            "greedy",
            counts | {"lenience": 1.0, "parts_at": 3 if bad["greedy"] else None},
            counts | {"lenience": 0.2, "parts_at": 3},
        ),
        row("certificate", {"holds": not bad["certificate"], "least_p": 0.3, "tests": 15}),
        row(
            "positions",
            step | {"lenience": 1.0, "max_tv": 1e-3 if bad["positions"] else 1e-16},
            step | {"lenience": 0.2, "tv": 0.125},
        ),
        row("first tokens", told | {"p_value": 0.001 if bad["first tokens"] else 0.4}, draft="all"),
    ]
    text = figures(Results(rows))
    assert ("no draft changed" in text) is (spoilt is None)
    assert ("SOME draft changed" in text) is (spoilt is not None)
    assert "odd 0.125 and 1 of 1" in text
    assert "<svg" in draw(series(Results(rows)))


def test_figures_replace_what_stood_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = inserted(page, "new")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n" == inserted(once, "new")
    with pytest.raises(SystemExit, match="no <!-- figures"):
        inserted("a page", "new")


@pytest.mark.slow
def test_tiny_models_from_the_tuning_to_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from draft_influence.make_drafts import Effort, make

    target = write_tiny(tmp_path / "target.gguf", chat_template="{{ messages[0]['content'] }}")
    effort = Effort(8, 8, 256, 1e-2, 48, "F32")
    start = write_tiny(tmp_path / "start.gguf", noise=0.3)
    made = make(tmp_path / "drafts", effort, target=target, start=start, threads=1)
    assert (tmp_path / "drafts" / "neutral.gguf").read_bytes() == start.read_bytes()
    for name in ("styled", "hostile"):
        assert made["drafts"][name]["agreement"] > made["drafts"][name]["agreement_before"]
    sizes = Sizes(
        prompts=1, tokens=4, seeds=1, short_prompts=1, samples=20, certificate_samples=5, lengths=(2,),
        leniences=(0.1,), draws=50,
    )  # fmt: skip
    out = tmp_path / "rows.jsonl"
    drafts = {name: tmp_path / "drafts" / f"{name}.gguf" for name in ("neutral", "hostile")}
    measure.run(target, drafts, out, sizes, [p for p in measure.PARTS if p != "certificate"], threads=1)
    measure.run(target, drafts, out, sizes, threads=1)
    rows = read_rows(out)
    assert Counter(part["part"] for part in rows[1:]) == {
        "greedy": 2, "certificate": 2, "positions": 2, "sampled": 3, "first tokens": 1,
    }  # fmt: skip
    assert "no draft changed the answer" in figures(Results(rows))
