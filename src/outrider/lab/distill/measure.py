"""What the files bring in use: the target answers held-out prompts through llama.cpp, every draft offers
along these answers, and ways to draft are replayed over them at measured costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from outrider.backends.gguf import LoadOptions, device_names, physical_cores
from outrider.core.errors import PromptError
from outrider.core.params import SamplingParams
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.distill.plan import DistillPlan
from outrider.lab.distill.questions import asked
from outrider.lab.distill.report import Kind, Measured
from outrider.lab.distill.run import Distilled, Progress
from outrider.lab.judged import DraftReport, calls_of, judge, replayed
from outrider.lab.loaded import Loaded, LoadedTarget
from outrider.lab.models import ModelFile, find_models
from outrider.lab.predict import Expectation, expect, with_policy_times
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS, Answer, questions_of, record_answers
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN
from outrider.lab.subject import Subject, offers_along
from outrider.models.hub import HubOptions

_BATCH_QUESTIONS = 24
"""Questions that are asked together: an answer may be so long as suits the time left for them."""
_MIN_LEFT_SHARE = 0.1
"""of the time, for more questions to be begun"""


def measure_held_out(
    file: ModelFile,
    plan: DistillPlan,
    distilled: Distilled,
    progress: Progress,
    notices: list[str],
    *,
    seconds: float = 120.0,
) -> Measured | None:
    """The draft before and after training on held-out prompts, and the one that it was continued from.

    `seconds` are for the target's greedy answers, and again for each draft's offers. None where too little
    could be recorded, and why in `notices`. Raises ModelFileError, OutOfMemory or BackendError.
    """
    drafts: dict[Kind, Path] = {"trained": Path(distilled.report.draft.path), "first": distilled.first}
    if plan.continued is not None:
        drafts["continued"] = plan.continued
    options = LoadOptions(threads=plan.threads)
    with Loaded(file, options, notices, progress) as target:
        model = target.open(min(plan.context + 2 * ANSWER_TOKENS, target.weights.trained_context))
        loaded = LoadedTarget(file.name, model, target.template)
        subject = Subject(loaded, target.facts(), target.costs("all", DEFAULT_SECONDS), ())
        answers = _record(subject, plan, seconds, progress, notices)
        if not answers:
            notices.append("no report: the target's answers to the held-out prompts are too short to tell")
            return None
        subject = subject.corrected(answers)
        progress("replaying lookup", None)
        recordings = [answer.recording for answer in answers]
        lookup = expect(answers, with_policy_times(recordings, subject.prices()), (PLAIN, AUTO_LOOKUP))
        known = None
        reports: dict[Kind, DraftReport] = {}
        accepted: dict[Kind, float | None] = {}
        for kind, path in drafts.items():
            [draft] = find_models([str(path)], hub=HubOptions(offline=True))
            # Before training and after it a draft differs in nothing but what it predicts.
            costs = known if kind == "first" else None
            offers = offers_along(subject, draft, options, notices, progress, seconds=seconds, known=costs)
            known = known or offers.costs
            progress(f"replaying {draft.name}", None)
            found = replayed(subject, offers, (PLAIN, AUTO, AUTO_LOOKUP, AUTO_MODEL))
            reports[kind] = judge(subject, offers, found)
            accepted[kind] = None if found is None else _accepted(found)
    tokens = sum(len(answer.row.tokens) for answer in answers)
    return Measured(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        answers=len(answers),
        tokens=tokens,
        workloads=dict(Counter(answer.row.workload for answer in answers)),
        plain_tokens_per_s=tokens / sum(answer.row.decode_s for answer in answers),
        calls=calls_of(subject.costs),
        lookup=lookup.speedups(AUTO_LOOKUP),
        drafts=reports,
        accepted=accepted,
    )


def _accepted(found: Expectation) -> float | None:
    """Of the tokens that the automatic choice drafts without lookup."""
    drafted, correct = map(sum, zip(*found.counts[AUTO_MODEL.name], strict=True))
    return correct / drafted if drafted else None


def _record(
    subject: Subject, plan: DistillPlan, seconds: float, progress: Progress, notices: list[str]
) -> Sequence[Answer]:
    """Plain answers to a few held-out prompts of every category in turn, until the time is up."""
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for question in asked(plan.data).held_out:
        prompts[question.category].append(question.prompt)
    greedy = SamplingParams(temperature=0.0, seed=plan.training.seed)
    workloads = [
        Workload(category, tuple(some), greedy, plan.data.max_tokens, "held out")
        for category, some in prompts.items()
    ]
    try:
        questions, lines = questions_of(workloads, subject.target)
    except PromptError as error:
        notices.append(str(error))
        return []
    notices.extend(lines)
    found: list[Answer] = []
    started = perf_counter()
    for at in range(0, len(questions), _BATCH_QUESTIONS):
        left = seconds - (perf_counter() - started)
        if found and left < _MIN_LEFT_SHARE * seconds:
            break

        def report(part: float, left: float = left) -> None:
            progress("the target answers held-out prompts", 1 - left / seconds * (1 - part))

        some, _ = record_answers(
            subject.target,
            questions[at : at + _BATCH_QUESTIONS],
            subject.costs,
            seconds=max(left, _MIN_LEFT_SHARE * seconds),
            progress=report,
            left_out=notices.append,
        )
        found += some
    return found
