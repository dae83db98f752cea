"""Every kind of model on every library that runs it: texts that repeat themselves, so that lookup drafts are
accepted and rejected in turn, are those of plain decoding.

What a model can take back is asked of the model itself.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends import FILES, IK, MAINLINE, NATIVE, Native, over
from cli_helpers import Call
from engines import GREEDY, asked, run
from kinds import KINDS
from outrider import Session
from outrider.cli import verify
from outrider.cli.settings import VerifySettings
from outrider.core.contracts import Model
from outrider.core.data import Completion, Request
from outrider.core.errors import BackendError
from outrider.core.params import Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.engine import Engine
from outrider.lab.certify.sampled import CertifyPlan
from outrider.policy.fixed import FixedPolicy

LONG = FixedPolicy(draft_max=8, p_min=0.0)
CONTEXT = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "river": {"type": "string", "maxLength": 6, "pattern": "^[a-z ]*$"},
        "numbers": {"type": "array", "items": {"enum": [1, 12, 123]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["colour", "river", "numbers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Native]:
    """A library whose models repeat themselves."""
    native = Native(
        FILES[request.param], tmp_path_factory.mktemp("repeating"), repeating=True, confidence=6.0
    )
    yield native
    native.close()


QUICK = [(name, kind) for name in MAINLINE[:1] for kind in ("dense", "window", "hybrid", "delta net")]
"""One for each way in which a model is taken back."""
every_kind = over(*KINDS, names=NATIVE, quick=QUICK)


def requests(seed: int, count: int = 4) -> list[Request]:
    """Prompts of letters, of several lengths."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(97, 123, 12 + 5 * i).tolist()) for i in range(count)]
    return [asked(p, max_tokens=80, sampling=GREEDY, ignore_end=True, logprobs=8) for p in prompts]


def plain(backend: Native, kind: str, wanted: Sequence[Request]) -> list[Completion]:
    """What each of them is answered alone, a token a call."""
    with closing(backend.open(kind, CONTEXT)) as model:
        engine = Engine(model)
        return [engine.generate(request) for request in wanted]


def assert_like(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, as far as they go, of the same probabilities: a state that is a little wrong seldom
    changes a token."""
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]
        best = [
            [[p for _, p in token.top] for token in of.logprobs[: len(one.tokens)]] for of in (one, other)
        ]
        np.testing.assert_allclose(best[0], best[1], rtol=0, atol=2e-3)


def speculating(model: Model) -> Engine:
    return Engine(model, [SuffixDrafter()], LONG)


def assert_drafted(model: Model, completions: Sequence[Completion]) -> None:
    """Drafts were accepted and rejected, wherever something can be taken back, and never longer than that."""
    drafted = [
        (len(record.draft), record.num_accepted)
        for completion in completions
        for record in completion.records
        if record.draft
    ]
    if not model.rewinding.is_possible:
        assert not drafted
        return
    assert any(accepted == length for length, accepted in drafted)
    assert any(accepted < length for length, accepted in drafted)
    assert max(length for length, _ in drafted) <= model.rewinding.max_rejected


@every_kind
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_lookup_drafts_change_no_text(backend: Native, kind: str, num_sequences: int) -> None:
    wanted = requests(seed=num_sequences)
    texts = plain(backend, kind, wanted)
    with closing(backend.open(kind, CONTEXT, max_sequences=num_sequences)) as model:
        engine, completions = speculating(model), list[Completion]()
        for start in range(0, len(wanted), num_sequences):
            completions += run(engine, *wanted[start : start + num_sequences])
        assert_like(completions, texts)
        assert [len(completion.tokens) for completion in completions] == [80] * 4
        assert_drafted(model, completions)


@every_kind
def test_a_call_that_fails_and_a_request_that_is_cancelled_change_no_other(
    backend: Native, kind: str
) -> None:
    wanted = requests(seed=5)
    texts = plain(backend, kind, wanted)
    with closing(backend.open(kind, CONTEXT, max_sequences=4)) as model:
        engine = speculating(model)
        ids = [engine.submit(request) for request in wanted]
        for _ in range(6):
            engine.step()
        with backend.failing(model), pytest.raises(BackendError):
            engine.step()
        cancelled = engine.cancel(ids[1])
        assert cancelled is not None and 0 < len(cancelled.tokens) < 80
        assert_like([cancelled], texts[1:2])
        first, *others = run(engine)
        [again] = run(engine, wanted[1])  # in the sequence that was given up
        assert_like([first, again, *others], texts)


@every_kind
def test_structured_text_is_that_of_plain_decoding(backend: Native, kind: str) -> None:
    def answer(session: Session) -> Completion:
        return session.generate(range(97, 121), max_tokens=120, sampling=GREEDY, schema=SCHEMA, logprobs=8)

    with closing(backend.open(kind, CONTEXT)) as model:
        expected = answer(Session(model))
    with closing(backend.open(kind, CONTEXT)) as model:
        found = answer(Session(model, [SuffixDrafter()], LONG))
        json.loads(found.text)
        assert_like([found], [expected])
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        num_calls = sum(record.kind == "decode" for record in found.records)
        assert (num_calls < len(found.tokens)) == model.rewinding.is_possible


@pytest.mark.slow
@over(*KINDS, names=(*MAINLINE[:1], *IK))
def test_the_certificate_of_a_command_holds(
    backend: Native, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outrider: Call
) -> None:
    """Greedy texts, texts of a seed, and samples against the distribution that plain decoding has."""
    made, make_plan = KINDS[kind], verify.make_plan

    def small(settings: VerifySettings, verification: Verification) -> CertifyPlan:
        return replace(make_plan(settings, verification), samples=100, significance=1e-4)

    monkeypatch.setattr(verify, "make_plan", small)
    arguments = ["verify", "-m", backend.path(kind), "--llama-library", backend.file.path, "-t", 1, "-c", 256]
    drafting = ["--policy", "fixed", "--draft-max", 8, "--draft-p-min", 0]
    arguments += ["--quick", "-n", 60, "--no-bitwise", *drafting, "--json"]
    arguments += ["--no-swa-full"] if not made.full_window else []
    arguments += ["-p", "the river and the road " * 3, "-p", "a b c d a b c d", "-p", "abacabadabacaba"]
    monkeypatch.chdir(tmp_path)
    outcome = outrider(*map(str, arguments))
    assert outcome.status == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["verdict"] == "holds" and document["speculates"] is True
    outcome = outrider(*map(str, arguments), "--inject", "short-rewind")
    assert outcome.status == 1, outcome.err
    assert json.loads(outcome.out)["verdict"] == "does not hold"
