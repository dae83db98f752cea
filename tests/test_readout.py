"""Every count and time of the readout, worked out by hand."""

import io
import json
import re
from dataclasses import replace

import pytest

from engines import GREEDY, VOCABULARY, ScriptedDrafter, oracle
from outrider import Generation
from outrider.backends.fake import FakeModel, random_logits
from outrider.cli.report import print_readout
from outrider.cli.screen import Screen
from outrider.core.data import Completion, Draft, DraftToken, DraftWork, FinishReason, Request, StepRecord
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.policy.fixed import FixedPolicy
from outrider.session.readout import read_out


def record(
    draft: tuple[str, ...] = (),
    num_accepted: int = 0,
    num_tokens: int = 1,
    *,
    kind: str = "decode",
    work: DraftWork | None = None,
    end_s: float = 0.0,
) -> StepRecord:
    """A step whose draft came from these sources; its times are powers of two, so that sums tell."""
    return StepRecord(
        request=0,
        step=0,
        kind="prefill" if kind == "prefill" else "decode",
        position=0,
        num_evaluated=1,
        draft=Draft(tuple(DraftToken(i, source, 0.5) for i, source in enumerate(draft))),
        num_accepted=num_accepted,
        tokens=(7,) * num_tokens,
        work=work or DraftWork(),
        draft_s=1.0,
        verify_s=2.0,
        sampling_s=4.0,
        other_s=8.0,
        end_s=end_s,
    )


def completion(*records: StepRecord, finish_reason: FinishReason = "stop") -> Completion:
    tokens = tuple(token for record in records if record.kind == "decode" for token in record.tokens)
    return Completion("text", tokens, finish_reason, 11, 5, 3, "rule", records)


RECORDS = (
    record(kind="prefill", num_tokens=0),
    record(kind="prefill", num_tokens=0, work=DraftWork(0, 0.0, 1, 32.0)),
    record(("draft",) * 3, 3, 4, work=DraftWork(3, 0.5, 2, 16.0), end_s=1.0),
    record(("lookup",) * 2, 1, 2, end_s=2.0),
    record((), 0, 1, end_s=5.0),
    record(("lookup", "draft"), 1, 1, work=DraftWork(1, 0.25), end_s=5.5),
)


def test_calls_and_tokens() -> None:
    readout = read_out(completion(*RECORDS))
    assert (readout.prompt_tokens, readout.reused_tokens, readout.generated_tokens) == (11, 5, 8)
    assert (readout.prefill_calls, readout.draft_prefill_calls) == (2, 3)
    assert (readout.target_calls, readout.draft_calls) == (4, 4)
    assert (readout.tokens_per_target_call, readout.target_calls_saved) == (2.0, 0.5)
    assert readout.finish_reason == "stop"


def test_acceptance_over_all_and_for_each_drafter() -> None:
    readout = read_out(completion(*RECORDS))
    assert (readout.drafted_tokens, readout.accepted_tokens, readout.acceptance_rate) == (7, 5, 5 / 7)
    assert readout.acceptance_by_position == (1.0, 1 / 3, 1.0)
    draft, lookup = readout.drafters["draft"], readout.drafters["lookup"]
    assert list(readout.drafters) == ["draft", "lookup"]
    assert (draft.drafted_tokens, draft.accepted_tokens, draft.acceptance_rate) == (4, 3, 0.75)
    assert draft.acceptance_by_position == (1.0, 0.5, 1.0)
    assert (lookup.drafted_tokens, lookup.accepted_tokens, lookup.acceptance_rate) == (3, 2, 2 / 3)
    assert lookup.acceptance_by_position[:2] == (1.0, 0.0) and not any(lookup.acceptance_by_position[2:])


def test_times() -> None:
    readout = read_out(completion(*RECORDS))
    time = readout.time_s
    assert (time.draft, time.draft_model, time.verify, time.sampling, time.other) == (4, 0.75, 8, 16, 32)
    assert readout.decode_s == 60
    assert readout.prefill_s == 15 + (15 + 32) + 16
    assert readout.prefill_s + readout.decode_s == sum(record.total_s for record in RECORDS)
    assert readout.tokens_per_s == 8 / 60
    assert readout.overhead == pytest.approx((60 - 8 - 0.75) / 60)


def test_nothing_drafted_and_nothing_generated() -> None:
    plain = read_out(completion(record(), record(end_s=1.0)))
    assert (plain.acceptance_rate, plain.acceptance_by_position, plain.drafters) == (None, (), {})
    assert (plain.tokens_per_target_call, plain.target_calls_saved) == (1.0, 0.0)
    nothing = read_out(completion(RECORDS[0], finish_reason="cancelled"))
    assert (nothing.generated_tokens, nothing.target_calls, nothing.tokens_per_s) == (0, 0, 0.0)
    assert (nothing.tokens_per_target_call, nothing.target_calls_saved, nothing.overhead) == (0, 0, 0)


def test_a_run_of_the_engine_adds_up_and_is_plain_data() -> None:
    logits = random_logits(VOCABULARY.size, seed=11, order=3)
    model = FakeModel(VOCABULARY, logits)
    engine = Engine(model, [ScriptedDrafter(oracle(logits, 2))], FixedPolicy(draft_max=4))
    done = engine.generate(Request((0, 1) * 20, GREEDY, max_tokens=30, ignore_end=True))
    readout = read_out(done)
    assert readout.prefill_calls + readout.target_calls == len(model.calls)
    assert (readout.target_calls, readout.generated_tokens) == (10, 30)
    assert (readout.drafted_tokens, readout.accepted_tokens) == (9 * 4 + 2, 10 * 2)
    assert readout.decode_s + readout.prefill_s == pytest.approx(sum(r.total_s for r in done.records))
    assert done.records[-1].end_s >= readout.decode_s + readout.prefill_s - 1e-6
    assert json.loads(json.dumps(readout.as_json()))["drafters"]["scripted"]["accepted_tokens"] == 20


def test_calls_saved_and_the_time_of_a_constraint() -> None:
    ended = record(("grammar",) * 3, 3, 3)  # over with its last drafted token: the call stands for that one
    joined = record(("grammar", "lookup"), 2, 3)
    deferred = record(("lookup",), 0, 0)  # cost a call and brought nothing
    records = [replace(r, constraint_s=0.25) for r in (ended, joined, deferred, record())]
    readout = read_out(completion(*records))
    saved = {name: counts.calls_saved for name, counts in readout.drafters.items()}
    assert saved == {"grammar": 3, "lookup": 1}
    assert sum(saved.values()) == readout.generated_tokens - readout.target_calls + 1
    assert readout.time_s.constraint == 1.0 and readout.constraint_share == 1.0 / readout.decode_s
    assert read_out(completion(*RECORDS)).time_s.constraint == 0


def test_a_prompt_whose_reading_was_interrupted_counts_what_was_read() -> None:
    engine = Engine(FakeModel(VOCABULARY, random_logits(VOCABULARY.size), context_length=1024))
    prompt = (0, 1) * PREFILL_CHUNK_TOKENS
    generation = Generation(engine, Request(prompt, GREEDY, max_tokens=8))
    for _ in generation:
        generation.cancel()
    readout = read_out(generation.completion)
    assert (readout.prompt_tokens, readout.finish_reason) == (len(prompt), "cancelled")
    assert readout.read_tokens == generation.records[0].num_evaluated < len(prompt) - 1
    shown = io.StringIO()
    print_readout(Screen(file=shown, width=200), readout, "target", None)
    assert re.search(r"prompt +\d+ tokens, \d+ of them read in .*, 1 prefill call *\n", shown.getvalue())
    whole = read_out(engine.generate(Request(prompt, GREEDY, max_tokens=8)))
    assert whole.read_tokens == len(prompt) - 1 - whole.reused_tokens


def test_forced_text_that_was_not_accepted_is_explained() -> None:
    shown = io.StringIO()
    readout = read_out(completion(record(("grammar",) * 3, 1, 2)))
    print_readout(Screen(file=shown, width=200), readout, "target", None, None)
    assert "forced text" in shown.getvalue() and "spells the rest with other tokens" in shown.getvalue()
