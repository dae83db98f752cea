"""What the files bring in use: held-out prompts, on which every draft is checked."""

from __future__ import annotations

from collections import defaultdict

from outrider.backends.gguf.options import LoadOptions
from outrider.core.errors import PromptError
from outrider.core.notices import notify
from outrider.core.params import SamplingParams
from outrider.lab.check import CheckRequest, Report, check
from outrider.lab.distill.plan import DistillPlan
from outrider.lab.distill.questions import asked
from outrider.lab.distill.run import Distilled, Progress
from outrider.lab.models import ModelFile, find_models
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS
from outrider.models.hub import HubOptions

SECONDS = 120.0
"""for the target's answers, and again for each draft on them"""
_MAX_ANSWERS = 400


def measure_held_out(
    file: ModelFile, plan: DistillPlan, made: Distilled, progress: Progress
) -> Report | None:
    """The draft after training and before it, and the one that it was continued from, on greedy answers to
    held-out prompts of every category in turn. None where too little could be recorded: a notice says why.

    Raises ModelFileError, OutOfMemory or BackendError.
    """
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for question in asked(plan.data).held_out:
        prompts[question.category].append(question.prompt)
    greedy = SamplingParams(temperature=0.0, seed=plan.training.seed)
    paths = [made.report.draft.path, str(made.first), *([str(plan.continued)] if plan.continued else [])]
    room, trained = plan.context + 2 * ANSWER_TOKENS, file.card.context_length
    request = CheckRequest(
        target=file,
        drafts=tuple(find_models(paths, hub=HubOptions(offline=True))),
        workloads=tuple(
            Workload(category, tuple(some), greedy, plan.data.max_tokens, "held out")
            for category, some in prompts.items()
        ),
        seconds=SECONDS,
        max_answers=_MAX_ANSWERS,
        context_length=min(room, trained) if trained else room,
        options=LoadOptions(threads=plan.threads),
    )
    try:
        return check(request, progress)
    except PromptError as error:
        notify(f"no report: {error.why}")
        return None
