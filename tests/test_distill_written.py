"""The bundled prompts: what they expand to; and which prompts train."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.errors import SettingError
from outrider.lab.prompts import HELD_OUT_SHARE, Prompt, conversation_hash, is_held_out
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written_prompts import FIELD, Written, written_prompts

ENOUGH = 12_000


@pytest.fixture(scope="module")
def prompts() -> list[Written]:
    return written_prompts(ENOUGH)


def said(entry: Written) -> str:
    """The whole of what is sent."""
    return json.dumps(entry.prompt.messages)


def asked(messages: Any) -> str:
    """The text of the last turn."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"])


def test_no_prompt_and_no_id_comes_twice(prompts: list[Written]) -> None:
    assert len({said(entry) for entry in prompts}) == len({entry.prompt.id for entry in prompts}) == ENOUGH


def test_the_categories_take_even_shares(prompts: list[Written]) -> None:
    counts = Counter(entry.category for entry in prompts)
    assert len(counts) >= 12
    assert max(counts.values()) - min(counts.values()) <= 1


def test_all_slots_are_filled_and_turns_alternate(prompts: list[Written]) -> None:
    some_with_system = some_with_follow_ups = 0
    for entry in prompts:
        roles = [message["role"] for message in entry.prompt.messages if isinstance(message, dict)]
        some_with_system += roles[0] == "system"
        some_with_follow_ups += bool(entry.prompt.follow_ups)
        roles = roles[roles[0] == "system" :]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert "{passage" not in said(entry)
        assert not any(FIELD.search(text) for text in entry.prompt.follow_ups)
    assert 0.05 * ENOUGH < some_with_system < 0.4 * ENOUGH
    assert 0.15 * ENOUGH < some_with_follow_ups < 0.6 * ENOUGH


def test_no_prompt_is_one_that_is_measured(prompts: list[Written]) -> None:
    built_in = [prompt for name in BUILT_IN for prompt in load_workload(name).prompts]
    measured = {asked(prompt.messages) for prompt in built_in}
    measured |= {text for prompt in built_in for text in prompt.follow_ups}
    assert len(measured) > 50
    for entry in prompts:
        assert measured.isdisjoint({asked(entry.prompt.messages), *entry.prompt.follow_ups})


@pytest.mark.parametrize("count", [0, -3, 10**12])
def test_a_count_that_cannot_be_had_is_refused(count: int) -> None:
    with pytest.raises(SettingError, match=r"there are [0-9,]{6,}"):
        written_prompts(count)


# Training or held out


def chat(text: str, **changes: object) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})
    return replace(Prompt("a", messages), **changes)  # type: ignore[arg-type]


def test_about_the_share_is_held_out_and_always_the_same() -> None:
    prompts = [chat(f"What is {i} times {i % 7}?") for i in range(4000)]
    held_out = [is_held_out(prompt) for prompt in prompts]
    assert held_out == [is_held_out(prompt) for prompt in prompts]
    assert sum(held_out) / 4000 == pytest.approx(HELD_OUT_SHARE, abs=0.015)
    assert sum(is_held_out(prompt, 0.5) for prompt in prompts) / 4000 == pytest.approx(0.5, abs=0.04)
    assert not any(is_held_out(prompt, 0) for prompt in prompts)
    assert all(is_held_out(prompt, 1) for prompt in prompts)
    assert all(is_held_out(p, 0.5) for p, held in zip(prompts, held_out, strict=True) if held)


def test_the_side_of_a_conversation_does_not_change() -> None:
    """Held-out sets of earlier versions stay held out."""
    assert conversation_hash(Prompt("x", "Tell me  of\nLisbon")) == "b80bed9a48f0155349d9c3d6c9cffcf9"


def test_the_same_conversation_falls_on_the_same_side() -> None:
    plain = conversation_hash(chat("Tell me about Lisbon."))
    turns = (
        {"content": "Be brief.", "role": "system"},
        {"content": "Tell me about Lisbon.", "role": "user", "x": 1},
    )
    for same in (
        chat("  tell me about LISBON.\n"), chat("Tell  me\tabout Lisbon."), Prompt("c", turns),
        chat("Tell me about Lisbon.", id="b", follow_ups=("And Porto?",), max_tokens=5),
    ):  # fmt: skip
        assert conversation_hash(same) == plain
