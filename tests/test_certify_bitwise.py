"""The certificate of bit-equal text: no near-tie is excused, and the bits of the logits count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import test_certify
from engines import VOCABULARY, ScriptedDrafter, oracle
from outrider.backends.bitwise import TRIED, BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel
from outrider.cli.verify import print_verdict
from outrider.core.data import Logits, Span
from outrider.core.errors import SettingError
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine
from outrider.lab.certify.certificate import BESIDE, GREEDY, REPEATED, as_json, certify, reasons
from outrider.lab.certify.faults import unequal_sizes
from rounded import RoundedModel, Rounding
from test_certify import EAGER, LANGUAGE, PROMPTS, Shaky, certificate_of

QUICK = replace(test_certify.QUICK, num_seeded=16, num_repeated=2, samples=40)
PADDED = Rounding((1,)), TRIED[1:]
"""single tokens have another kernel"""
SHORT = Rounding((7,)), TRIED[:7]
"""long calls have another kernel"""
ONE_RULE = replace(QUICK, rule="token")
NEEDED = replace(ONE_RULE, fault="unequal-calls")


def bitwise(rounding: Rounding, sizes: Sequence[int], num_sequences: int = 1) -> BitwiseModel:
    return BitwiseModel(
        lambda length: RoundedModel(VOCABULARY, LANGUAGE, rounding, context_length=length, max_sequences=1),
        EqualSizes(tuple(sizes)),
        context_length=256,
        max_sequences=num_sequences,
    )


def subject(model: BitwiseModel | FakeModel) -> Engine:
    drafters = (SuffixDrafter(min_match=1), ScriptedDrafter(oracle(LANGUAGE, 3)))
    return Engine(model, drafters, EAGER)


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("kernels", [PADDED, SHORT])
def test_equal_calls_hold_bit_for_bit(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = certify(subject(bitwise(*kernels, num_sequences)), PROMPTS, QUICK)
    assert findings.holds and reasons(findings) == []
    assert len(findings.texts.get(BESIDE, ())) == (2 if num_sequences == 2 else 0)
    tokens = sum(part.tokens for name, parts in findings.texts.items() if name != REPEATED for part in parts)
    document = as_json(certificate_of(findings))
    assert document["kind"] == "bit-equal"
    assert document["compared_logits"] == tokens
    assert sum(part.counts["accepted_tokens"] for part in findings.all_texts) > 0
    print_verdict(certificate_of(findings, QUICK), None)
    said = " ".join(capsys.readouterr().out.split())
    assert "bit for bit" in said and f"{tokens} positions, with drafts and without: the same bits" in said
    assert ("while another request runs" in said) == (num_sequences == 2)


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("kernels", [PADDED, SHORT])
def test_unequal_calls_are_found(
    kernels: tuple[Rounding, Sequence[int]], num_sequences: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bitwise(*kernels, num_sequences)
    findings = certify(subject(model), PROMPTS, NEEDED)
    assert not findings.holds and any(
        "other bits at" in reason and "first in greedy" in reason for reason in reasons(findings)
    )
    document = as_json(certificate_of(findings, NEEDED))
    assert document["verdict"] == "does not hold" and document["plan"]["fault"] == "unequal-calls"
    rows = [part["rows"] for part in document["texts"][GREEDY]]
    assert any(0 < row["differing"] <= row["positions"] and row["first"] is not None for row in rows)
    print_verdict(certificate_of(findings, NEEDED), None)
    assert "DOES NOT HOLD" in capsys.readouterr().out
    assert model.sizes.sizes == tuple(kernels[1])  # the fault is gone with the test


class Whispering(FakeModel):
    """In calls over several tokens every logit is off by its last bit, and no token is ever another one."""

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found = super().decode(spans)
        if sum(len(span.tokens) for span in spans) > 1:
            for rows in found:
                rows[:] = np.nextafter(rows, np.float32(np.inf))
        return found


def test_bits_that_differ_fail_where_every_text_is_equal() -> None:
    model = BitwiseModel(
        lambda length: Whispering(VOCABULARY, LANGUAGE, context_length=length, max_sequences=1),
        EqualSizes((1, 2, 3, 4, 5)),
        context_length=256,
    )
    findings = certify(subject(model), PROMPTS, ONE_RULE)
    assert not any(part.differences for part in findings.all_texts)
    assert not findings.holds and all(reason.startswith("logits: ") for reason in reasons(findings))


def test_a_near_tie_is_no_excuse() -> None:
    def make(length: int) -> FakeModel:
        return Shaky(*range(0, 256, 3), context_length=length, max_sequences=1)

    parts = certify(subject(make(256)), PROMPTS, ONE_RULE).texts[GREEDY]
    assert all(part.holds for part in parts) and any(part.differences for part in parts)
    kept = BitwiseModel(make, EqualSizes((1, 2, 3, 4, 5)), context_length=256)
    findings = certify(subject(kept), PROMPTS, ONE_RULE)
    assert not findings.holds and "differ, first in prompt" in reasons(findings)[0]
    assert not any(tie.near_tie for part in findings.texts[GREEDY] for tie in part.differences)


def test_the_fault_is_refused_where_it_cannot_show() -> None:
    with pytest.raises(SettingError, match="Add --bitwise"):
        certify(subject(FakeModel(VOCABULARY, LANGUAGE)), PROMPTS, NEEDED)
    whole = bitwise(Rounding(()), TRIED)
    assert unequal_sizes(whole) == ()
    with pytest.raises(SettingError, match="changes nothing"):
        certify(subject(whole), PROMPTS, NEEDED)
    with pytest.raises(SettingError, match="nothing is drafted"):
        certify(Engine(bitwise(*PADDED)), PROMPTS, NEEDED)
    unable = Engine(bitwise(*PADDED), (SuffixDrafter(min_match=50),), EAGER)
    with pytest.raises(SettingError, match="no draft was checked"):
        certify(unable, PROMPTS, NEEDED)
