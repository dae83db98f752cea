"""`outrider run`: one prompt, its answer as it comes, and the readout."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from outrider.cli.opening import (
    explanation_of,
    library_line,
    load_pair,
    measure_for_later,
    open_session,
)
from outrider.cli.output import INCOMPLETE, INTERRUPTED, print_notes, write_json
from outrider.cli.plans import plan_run
from outrider.cli.prompt import read_prediction, read_prompt
from outrider.cli.report import (
    as_json,
    failure_as_json,
    print_comparison,
    print_explanation,
    print_incomplete,
    print_readout,
    request_settings,
)
from outrider.cli.settings import RunSettings
from outrider.cli.stream import TokenPrinter, show
from outrider.core.data import Completion, Request
from outrider.core.errors import ConstraintError, PromptError
from outrider.drafters.model import ModelDrafter
from outrider.lab.comparison import Comparison, compare, is_deterministic
from outrider.lab.recording import Recording, record_offers
from outrider.lab.recording import as_json as recording_json
from outrider.policy import AutoPolicy
from outrider.session import Message, Pair, Session
from outrider.session.generation import Generation
from outrider.session.readout import read_out
from outrider.session.trace import write_trace


def run_or_chat(settings: RunSettings) -> int:
    """Do what `run` is asked for, a conversation under --interactive; returns the exit status."""
    if settings.interactive:
        from outrider.cli.chat import chat

        return chat(settings)
    return run(settings)


def run(settings: RunSettings) -> int:
    """Generate once; returns the exit status."""
    errors = Console(stderr=True, highlight=False)
    plan = plan_run(settings, "the prompt" if settings.prompt_is_piped else None)
    prompt = read_prompt(settings.prompt_argument, settings.prompt, settings.file, escape=settings.escape)
    prediction = read_prediction(settings.prediction) if settings.prediction else None
    pair = load_pair(plan.pair, errors)
    tokens = pair.encode(_conversation(settings, pair, prompt, errors))
    pair = pair.for_prompt(len(tokens), plan.pair.opening)
    request = plan.request(tokens, pair.target.vocabulary, pair.template)
    with open_session(plan.pair, pair, len(tokens) + plan.answer_tokens, errors) as session:
        request = replace(request, prediction=session.read_prediction(prediction))
        if plan.grammar is not None:
            session.compile(plan.grammar)
        print_notes(errors, session.notices)
        completion, comparison = _generate(settings, session, request, errors), None
        if settings.compare and completion.finish_reason != "cancelled":
            comparison = _compare(settings, session, request, completion, errors)
        _report(settings, session, pair, request, completion, comparison, errors)
        is_provisional = session.is_provisional
    interrupted = completion.finish_reason == "cancelled" or (settings.compare and comparison is None)
    if interrupted:
        return INTERRUPTED
    if is_provisional and not settings.quiet:
        measure_for_later(plan.pair, errors)
    return INCOMPLETE if plan.grammar is not None and not completion.is_complete else 0


def print_late_notices(session: Session, errors: Console) -> None:
    """Say what was found out while generating, once."""
    policy = session.engine.policy
    if isinstance(policy, AutoPolicy):
        print_notes(errors, policy.notices)
        session.notices += policy.notices
        policy.notices = []


def _conversation(settings: RunSettings, pair: Pair, prompt: str, errors: Console) -> str | list[Message]:
    """The prompt as a conversation where the model has a template for one."""
    if settings.raw or pair.template is None:
        if settings.system is not None:
            why = (
                "--raw uses no chat template" if settings.raw else f"{pair.target.name} has no chat template"
            )
            raise PromptError("system message", why, "Put it into the prompt itself.")
        if not settings.raw:
            why = f"{pair.target.name} has no chat template (a base model)"
            print_notes(errors, [f"{why}: continuing the text"])
        return prompt
    system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    return [*system, {"role": "user", "content": prompt}]


def _generate(settings: RunSettings, session: Session, request: Request, errors: Console) -> Completion:
    generation = Generation(session.engine, request)
    printer = None if settings.print_json else TokenPrinter(settings, errors)
    try:
        completion = show(generation, printer)
    except BaseException as error:
        if settings.trace:
            write_trace(settings.trace, generation.records)
        if settings.print_json and isinstance(error, ConstraintError):
            write_json(failure_as_json(error))
        raise
    if settings.trace:
        write_trace(settings.trace, generation.records, _recordings(session, request, completion, errors))
    return completion


def _recordings(
    session: Session, request: Request, completion: Completion, errors: Console
) -> list[dict[str, Any]]:
    """The answer and what each draft model would have offered at every position of it, for a replay."""
    if not completion.tokens:
        return []
    models = [drafter for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
    with errors.status("recording what the draft model offers"):
        offers = {
            drafter.name: record_offers(drafter.model, drafter.alignment, request.prompt, completion.tokens)
            for drafter in models
        }
    recording = Recording("0", "run", request.prompt, completion.tokens, completion.finish_reason, offers)
    return [recording_json(recording)]


def _compare(
    settings: RunSettings, session: Session, request: Request, completion: Completion, errors: Console
) -> Comparison | None:
    """Measure against plain decoding; None when Ctrl-C broke it off."""
    try:
        with errors.status("comparing") as status:
            return compare(
                session.engine,
                request,
                completion,
                repetitions=settings.repetitions,
                progress=lambda done, total: status.update(f"comparing: {done} of {total} runs"),
            )
    except KeyboardInterrupt:
        print_notes(errors, ["the comparison was interrupted"])
        return None


def _report(
    settings: RunSettings,
    session: Session,
    pair: Pair,
    request: Request,
    completion: Completion,
    comparison: Comparison | None,
    errors: Console,
) -> None:
    readout = comparison.speculative if comparison else read_out(completion)
    run = comparison.speculative_completion if comparison else completion
    explanation = explanation_of(session, run)
    if not settings.print_json:
        print_incomplete(errors, completion, request.grammar)
    if settings.print_json:
        in_force = request_settings(settings, session, request, completion)
        result = as_json(session, in_force, readout, run, comparison)
        if explanation:
            result |= {"explanation": asdict(explanation)}
        write_json(result)
    elif not settings.quiet:
        errors.print()
        target, draft = pair.target.name, pair.draft_name
        # An estimate has nothing to add to a measurement.
        estimate = comparison is None
        library = library_line(pair, session)
        print_readout(
            errors, readout, target, draft, explanation, request.grammar, estimate=estimate, library=library
        )
        if comparison:
            print_comparison(errors, comparison, deterministic=is_deterministic(request))
    if settings.explain and explanation and not settings.print_json:
        errors.print()
        print_explanation(errors, explanation)
    if not settings.quiet:
        print_late_notices(session, errors)
