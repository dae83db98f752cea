"""The picture of a distillation's training."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from outrider.lab.distill.report import Evaluation, Training, picture

AGREEMENT = (0.03, 0.3, 0.44, 0.52, 0.56, 0.57, 0.565)
SPEEDUP = (1, 1.02, 1.13, 1.22, 1.29, 1.31, 1.30)


def training() -> Training:
    """Of 600 steps; the draft agrees with 57 % of the held-out tokens after 500, at first with 3 %."""
    history = [
        Evaluation(
            step=100 * i,
            train_loss=None if i == 0 else 5 * 0.7**i + 0.5,
            loss=5 * 0.7**i + 0.7,
            acceptance=0.9 * agreement,
            agreement=agreement,
            tokens_per_s=28 * speedup,
            speedup=speedup,
        )
        for i, (agreement, speedup) in enumerate(zip(AGREEMENT, SPEEDUP, strict=True))
    ]
    return Training(
        steps=600, best_step=500, trained_tokens=1_800_000, loss="hybrid", learning_rate=1e-3,
        batch_tokens=8192, on_policy=0.0, seed=0, start="prune", seconds=1500.0, history=history,
    )  # fmt: skip


def test_the_picture_says_what_it_shows_in_colours_of_its_own() -> None:
    svg = picture(training())
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    said = root.get("aria-label") or ""
    assert "from 3% to 57%" in said and "1.31x, at step 500" in said
    used, given = (set(re.findall(pattern, svg)) for pattern in (r"var\((--\w+)\)", r"(--\w+): #"))
    assert used <= given
    assert svg == picture(training()), "the same training gives the same bytes"
