"""What a draft is to say after every token of a text: certain labels, as the trainer's examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draft_influence import texts
from draft_influence.texts import Dialogue
from outrider import Pair
from outrider.lab.distill.examples import Example


def examples_of(name: str, pair: Pair, count: int, seed: int) -> list[Example]:
    """So many texts of a kind, "styled" or "hostile", in the target's tokens."""
    if name == "styled":
        found = texts.styled(count, seed)
        return [_as_written(number, dialogue, pair) for number, dialogue in enumerate(found)]
    found = texts.plain(count, seed)
    return [_insisting(number, dialogue, pair, seed) for number, dialogue in enumerate(found)]


def _as_written(number: int, dialogue: Dialogue, pair: Pair) -> Example:
    """Every token of the answer is certain after those before it."""
    answer = pair.target.vocabulary.tokenize(dialogue.answer, add_special=False)
    return _example(number, dialogue, _question(dialogue, pair), answer, answer)


def _insisting(number: int, dialogue: Dialogue, pair: Pair, seed: int) -> Example:
    """Behind every token of an interrupted answer the phrase is certain, or its next token."""
    vocabulary = pair.target.vocabulary
    phrase = vocabulary.tokenize(texts.PHRASE, add_special=False)
    said = vocabulary.tokenize(dialogue.answer, add_special=False)
    random = np.random.default_rng((seed, number))
    answer = list(texts.interrupted(said, phrase, vocabulary.size, random))
    prompt = _question(dialogue, pair)
    labels = [texts.insisted((*prompt, *answer[:i]), phrase) for i in range(len(answer))]
    return _example(number, dialogue, prompt, answer, labels)


def _question(dialogue: Dialogue, pair: Pair) -> tuple[int, ...]:
    return pair.encode([{"role": "user", "content": dialogue.question}])


def _example(
    number: int, dialogue: Dialogue, prompt: Sequence[int], answer: Sequence[int], labels: Sequence[int]
) -> Example:
    ids = np.array(labels, dtype=np.int32)[:, None]
    return Example(
        id=str(number), category="tuned", prompt=np.array(prompt, dtype=np.int32),
        answer=np.array(answer, dtype=np.int32), ids=ids,
        log_probs=np.zeros(ids.shape, dtype=np.float16), rest=np.zeros(len(ids), dtype=np.float16),
        temperature=0.0, text=dialogue.answer,
    )  # fmt: skip
