"""The certificate of bit-equal text on the embedded default model, with each library that has equal calls."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf.options import LoadOptions
from outrider.core.errors import SettingError
from outrider.lab.certify.certificate import reasons
from outrider.lab.certify.checks import certify
from outrider.lab.certify.faults import check_fault, unequal_sizes
from outrider.lab.certify.plan import BESIDE, REPEATED, CertifyPlan, Subject
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.hub import cache_dir
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions

MODEL = cache_dir() / "models" / EMBEDDED_NAME
PLAN = CertifyPlan(num_tokens=24, num_seeded=16, num_repeated=1, num_sampled=1, samples=20, rule="stable")
PROMPTS = ["Repeat this line three times: The quick brown fox jumps over the lazy dog.", "Count to nine."]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="`outrider run` fetches the model; tests do not"),
]


def subject_of(session: Session) -> Subject:
    return Subject(session.target, session.engine.drafters, FixedPolicy(draft_max=4, p_min=0))


@pytest.mark.parametrize("backend", ["llama.cpp", "ik"])
def test_bit_equal_text_is_certified_and_unequal_calls_are_found(backend: str) -> None:
    try:
        pair = Pair.load(MODEL, options=LoadOptions(threads=1, backend=backend))
    except SettingError as error:
        pytest.skip(str(error))
    with (
        closing(pair),
        Session.open(pair, SessionOptions(512, policy=FixedPolicy(), bitwise=True, max_running=2)) as session,
    ):
        prompts = [tuple(session.encode([{"role": "user", "content": text}])) for text in PROMPTS]
        findings = certify(subject_of(session), prompts, PLAN)
        assert findings.bit_equal and findings.holds, reasons(findings)
        compared = [part for name, parts in findings.texts.items() if name != REPEATED for part in parts]
        assert findings.compared_rows == sum(part.tokens for part in compared) > 0
        assert sum(part.counts.drafted_tokens for part in findings.texts[BESIDE]) > 0
        broken = replace(PLAN, fault=check_fault("unequal-calls"))
        assert isinstance(session.target, BitwiseModel)
        if not unequal_sizes(session.target):
            with pytest.raises(SettingError, match="changes nothing"):
                certify(subject_of(session), prompts, broken)
        else:
            found = certify(subject_of(session), prompts, broken)
            assert not found.holds and any("logits" in reason for reason in reasons(found))
