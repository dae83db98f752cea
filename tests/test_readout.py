"""Every count and time of the readout, worked out by hand."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from engines import GREEDY, PROMPT, VOCABULARY, ScriptedDrafter, language_model, model_drafter, oracle
from outrider import Generation
from outrider.backends.fake import FakeModel, random_logits
from outrider.cli.report import estimate_line, print_readout
from outrider.cli.screen import Screen
from outrider.core.data import Completion, Draft, DraftToken, DraftWork, FinishReason, Request, StepRecord
from outrider.costs import CallCosts, CallPoint
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.session.readout import Estimate, estimate_speedup, explain, read_out
from recordings import FLAT
from simulated import Simulated


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


# The estimated speed-up of an answer: on simulated machines whose true speed-up is known

CALL_S = {1: 0.1, 2: 0.14, 4: 0.2, 8: 0.3}
DRAFT_TOKENS, ACCEPTED, OWN_S, DRAFTING_S = 3, 2, 0.004, 0.01


def step(slowness: float = 1.0, *, drafts: bool = False, position: int = 50) -> StepRecord:
    """A step whose call takes `slowness` times what it takes at rest."""
    num_drafted = DRAFT_TOKENS if drafts else 0
    sources = ("lookup",) * num_drafted
    return StepRecord(
        request=0,
        step=0,
        kind="decode",
        position=position,
        num_evaluated=1 + num_drafted,
        draft=Draft(tuple(DraftToken(i, source, 0.5) for i, source in enumerate(sources))),
        num_accepted=ACCEPTED if drafts else 0,
        tokens=(7,) * (1 + ACCEPTED if drafts else 1),
        work=DraftWork(),
        draft_s=DRAFTING_S if drafts else 0.0,
        verify_s=CALL_S[1 + num_drafted] * slowness,
        sampling_s=OWN_S,
        other_s=0.0,
        end_s=0.0,
        batch_tokens=1 + num_drafted,
        batch_drafted=num_drafted,
    )


def policy_of(steps: list[StepRecord]) -> AutoPolicy:
    """A policy whose costs were measured at rest and have seen the steps."""
    policy = AutoPolicy()
    costs = CallCosts([CallPoint(n, seconds) for n, seconds in CALL_S.items()])
    for record in steps:
        costs.observe(record.num_evaluated, record.verify_s, context=record.position)
    policy.state.costs = costs
    return policy


def estimated(steps: list[StepRecord]) -> tuple[Estimate | None, str | None]:
    return estimate_speedup(steps, policy_of(steps))


def speedup(num_plain: int, num_drafted: int, slowness: float = 1.0) -> float:
    """Of an answer of so many steps whose calls take `slowness` times what they take at rest."""
    plain_s, draft_s = CALL_S[1] * slowness + OWN_S, CALL_S[4] * slowness + OWN_S + DRAFTING_S
    return (
        (num_plain + num_drafted * (1 + ACCEPTED)) * plain_s / (num_plain * plain_s + num_drafted * draft_s)
    )


def test_at_rest_it_is_what_the_steps_took() -> None:
    found, unknown = estimated([step(drafts=i % 3 == 0) for i in range(60)])
    assert found and unknown is None
    assert found.speedup == pytest.approx(speedup(40, 20), rel=1e-3)
    assert found.low < found.speedup < found.high < 1.1 * found.low


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_without_drafts_is_no_slower_however_busy_the_machine_is(seed: int) -> None:
    """45 calls for 50 tokens beside another process were once called 0.43x (0.39 to 0.46)."""
    rng = np.random.default_rng(seed)
    found, _ = estimated([step(slowness) for slowness in 1 + rng.pareto(1.2, 45)])
    assert found and found.speedup == pytest.approx(1.0, abs=0.01)


def machine(
    kind: str, rng: np.random.Generator, num_steps: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How much longer than at rest each call takes; 2.5 times on average where the machine is busy."""
    if kind == "quiet":
        return rng.normal(1, 0.03, num_steps)
    if kind == "busy":
        return 1 + rng.exponential(1.5, num_steps)
    phases = np.repeat(rng.choice([1.0, 4.0], num_steps), rng.integers(1, 20, num_steps))[:num_steps]
    return phases * rng.normal(1, 0.05, num_steps)


@pytest.mark.parametrize(
    ("kind", "least_given"),
    [("quiet", 1.0), pytest.param("busy", 0.0, marks=pytest.mark.slow), ("phases", 0.0)],
)
def test_a_number_is_within_a_tenth_of_the_truth_or_not_given(kind: str, least_given: float) -> None:
    """80 answers of 120 steps, a third of them with drafts."""
    errors = []
    for seed in range(80):
        slowness = machine(kind, np.random.default_rng(seed), 120)
        steps = [step(s, drafts=i % 3 == 0) for i, s in enumerate(slowness)]
        found, unknown = estimated(steps)
        assert (found is None) == (unknown is not None)
        if found:
            errors.append(abs(found.speedup / speedup(80, 40, slowness.mean()) - 1))
    assert len(errors) >= least_given * 80
    assert sum(error > 0.1 for error in errors) <= 0.02 * 80


def test_what_drafts_slow_down_is_not_taken_for_plain_decoding() -> None:
    """After a larger call the next one takes longer, and a step has more to do beside its call."""
    drafts = [i % 3 == 0 for i in range(60)]
    after = [False, *drafts]
    steps = [step(1.1 if before else 1.0, drafts=now) for now, before in zip(drafts, after, strict=False)]
    steps = [replace(s, other_s=OWN_S) if before else s for s, before in zip(steps, after, strict=False)]
    plain_s = (40 + 20 * (1 + ACCEPTED)) * (CALL_S[1] + OWN_S)
    found, _ = estimated(steps)
    assert found and found.speedup == pytest.approx(plain_s / sum(s.total_s for s in steps), rel=0.005)


def test_a_busy_machine_is_named() -> None:
    rng = np.random.default_rng(3)
    steps = [step(4 + rng.exponential(4), drafts=i % 2 == 0) for i in range(20)]
    found, unknown = estimated(steps)
    assert found is None and unknown and "x the measured time" in unknown
    line = estimate_line(explain(steps, policy_of(steps)))
    assert line.startswith("unknown: calls took ") and line.endswith("--compare measures it")


@pytest.mark.parametrize(("num_plain", "num_drafted"), [(0, 3), (0, 40), (2, 40)])
def test_answers_without_a_yardstick_have_a_wider_interval(num_plain: int, num_drafted: int) -> None:
    steps = [step(drafts=i >= num_plain) for i in range(num_plain + num_drafted)]
    found, _ = estimated(steps)
    assert found and found.speedup == pytest.approx(speedup(num_plain, num_drafted), rel=0.02)
    assert found.high / found.low > 1.15


def test_calls_that_are_shared_are_compared_with_shared_ones() -> None:
    """Two requests in one call: without drafts it would be a call over two tokens."""
    shared = [
        replace(step(drafts=i % 3 == 0), num_sequences=2, batch_tokens=8 if i % 3 == 0 else 2)
        for i in range(30)
    ]
    steps = [replace(s, batch_drafted=s.batch_tokens - 2, verify_s=CALL_S[s.batch_tokens]) for s in shared]
    found, _ = estimated(steps)
    plain_s = (20 + 10 * (1 + ACCEPTED)) * (CALL_S[2] + OWN_S)
    spent_s = sum(s.total_s for s in steps)
    assert found and found.speedup == pytest.approx(plain_s / spent_s, rel=0.05)


def test_nothing_is_estimated_from_nothing() -> None:
    assert estimated([]) == (None, "no token was generated")
    assert estimated([replace(step(), read_tokens=9)]) == (None, "its only call read the prompt too")
    assert estimate_speedup([step()], AutoPolicy()) == (None, "what calls cost is not known yet")
    assert estimated([step()] * 7) == (None, "so few tokens tell nothing")


def test_what_reading_the_prompt_took_is_no_part_of_what_was_chosen() -> None:
    first = replace(step(drafts=True), read_tokens=9, read_s=5.0)
    steps = [first, step(drafts=True), step()]
    choices = explain(steps, policy_of(steps)).choices
    assert choices["lookup"].seconds == pytest.approx(2 * step(drafts=True).total_s)
    assert choices["lookup"].steps == 2


@pytest.mark.parametrize(("step_s", "row"), [(0.02, r"0: .* [0-9]+% of its tokens"), (0.3, r"0\s*$")])
def test_why_a_draft_model_was_not_asked_is_said(step_s: float, row: str) -> None:
    """Reading the prompt takes it too long here; the other costs too much even if it were always right."""
    policy = Simulated(FLAT, step_s, prefill_s=100.0)
    engine = Engine(language_model(), [model_drafter(random_logits(VOCABULARY.size, seed=1))], policy)
    request = Request(PROMPT, GREEDY, max_tokens=12, ignore_end=True)
    completion = engine.generate(request)
    shown = io.StringIO()
    console = Screen(file=shown, width=200)
    print_readout(
        console, read_out(completion), "target", "draft", explain(completion.records, policy), estimate=False
    )
    assert re.search(rf"^draft calls +{row}", shown.getvalue(), re.MULTILINE)
    assert "estimated" not in shown.getvalue()


# What people see beside it: rows, and how far something is


def test_a_row_is_a_line_for_each_text_and_none_where_nothing_is_said() -> None:
    shown = io.StringIO()
    rows = [("one", "a"), ("two", ["b", "", "c [red]\x1b"]), ("three", None), ("four", ""), ("five", ())]
    Screen(file=shown, width=80).rows(rows, width=4)
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["one", "a"], ["two", "b"], ["c", "[red]"],
    ]  # fmt: skip


def test_progress_on_a_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with Screen(file=shown, force_terminal=True, width=80).progress() as report:
        report("running", 0.5, "a [red]name")
    text = shown.getvalue()
    assert "running" in text and "50%" in text and "[red]name" in text
    assert capsys.readouterr().out == ""


def test_progress_elsewhere_is_a_line_for_each_stage_and_every_ten_seconds() -> None:
    shown, now_s = io.StringIO(), 0.0
    with Screen(file=shown, width=80).progress(lambda: now_s) as report:
        report("loading")
        for second in range(25):
            now_s = float(second)
            report("running", second / 25, f"at {second}")
        report("writing", 0.0)
    assert shown.getvalue().splitlines() == [
        "running: 0%, at 0",
        "running: 40%, 15 s left, at 10",
        "running: 80%, 5.0 s left, at 20",
        "writing: 0%",
    ]


def test_the_time_left_follows_the_last_minutes() -> None:
    shown, now_s = io.StringIO(), 0.0
    with Screen(file=shown, width=80).progress(lambda: now_s) as report:
        for part in (0.0, 0.5, 0.5):  # half of it was there already
            now_s += 1.0
            report("training", part)
        for i in range(1, 301):
            now_s += 1.0
            report("training", 0.5 + i / 1000)
    assert shown.getvalue().splitlines()[-1].startswith("training: 80%, 3 min 2"), "200 s, nearly"
