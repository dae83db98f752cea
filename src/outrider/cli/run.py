"""`outrider run`: one prompt, its answer as it comes, and the readout."""

from __future__ import annotations

from dataclasses import replace

from outrider.cli.output import INCOMPLETE, INTERRUPTED, write_json
from outrider.cli.plans import load_pair, measure_for_later, open_session, plan_run
from outrider.cli.prompt import read_file, read_prompt
from outrider.cli.report import (
    as_json,
    explanation_of,
    failure_as_json,
    print_comparison,
    print_explanation,
    print_incomplete,
    print_readout,
)
from outrider.cli.screen import Screen
from outrider.cli.settings import RunSettings
from outrider.cli.stream import TokenPrinter, show
from outrider.core.data import Completion, Request
from outrider.core.errors import ConstraintError, PromptError
from outrider.lab.comparison import Comparison, compare
from outrider.policy.auto import AutoPolicy
from outrider.session.generation import Generation, Message
from outrider.session.pair import Pair
from outrider.session.readout import read_out
from outrider.session.session import Session


def run(settings: RunSettings) -> int:
    """Generate once; returns the exit status."""
    errors = Screen(stderr=True)
    plan = plan_run(settings)
    prompt = read_prompt(settings.prompt_argument, settings.prompt, settings.file, escape=settings.escape)
    prediction = read_file(settings.prediction) if settings.prediction else None
    pair = load_pair(plan.pair, errors)
    tokens = pair.encode(_conversation(settings, pair, prompt, errors))
    with open_session(plan.pair, pair, len(tokens) + plan.answer_tokens, errors) as session:
        request = replace(plan.request(tokens, session), prediction=session.read_prediction(prediction))
        if plan.grammar is not None:
            session.compile(plan.grammar)
        errors.note(*session.notices)
        completion, comparison = _generate(settings, session, request, errors), None
        is_over = completion.finish_reason != "cancelled"
        if settings.compare and is_over:
            comparison = _compare(settings, session, request, completion, errors)
            is_over = comparison is not None
        shown = comparison.speculative_completion if comparison else completion
        if settings.print_json:
            write_json(as_json(settings, session, request, shown, comparison))
        else:
            _report(settings, pair, session, request, shown, comparison, errors)
        if not settings.quiet and isinstance(session.engine.policy, AutoPolicy):
            errors.note(*session.engine.policy.notices)  # found out while generating
        is_provisional = session.is_provisional
    if not is_over:
        return INTERRUPTED
    if is_provisional and not settings.quiet:
        measure_for_later(plan.pair, errors)
    return INCOMPLETE if plan.grammar is not None and not completion.is_complete else 0


def _conversation(settings: RunSettings, pair: Pair, prompt: str, errors: Screen) -> str | list[Message]:
    if settings.raw or pair.template is None:
        lacking = (
            "--raw uses no chat template" if settings.raw else f"{pair.target.name} has no chat template"
        )
        if settings.system is not None:
            raise PromptError("system message", lacking, "Put it into the prompt itself.")
        if not settings.raw:
            errors.note(f"{lacking} (a base model): continuing the text")
        return prompt
    system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    return [*system, {"role": "user", "content": prompt}]


def _generate(settings: RunSettings, session: Session, request: Request, errors: Screen) -> Completion:
    generation = Generation(session.engine, request)
    try:
        return show(generation, None if settings.print_json else TokenPrinter(settings, errors))
    except ConstraintError as error:
        if settings.print_json:
            write_json(failure_as_json(error))
        raise


def _compare(
    settings: RunSettings, session: Session, request: Request, completion: Completion, errors: Screen
) -> Comparison | None:
    """Measure against plain decoding; None after Ctrl-C."""
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
        errors.note("the comparison was interrupted")
        return None


def _report(
    settings: RunSettings,
    pair: Pair,
    session: Session,
    request: Request,
    completion: Completion,
    comparison: Comparison | None,
    errors: Screen,
) -> None:
    explanation = explanation_of(session, completion)
    print_incomplete(errors, completion, request.grammar)
    if not settings.quiet:
        errors.print()
        print_readout(
            errors,
            comparison.speculative if comparison else read_out(completion),
            pair.target.name,
            pair.draft_name,
            explanation,
            request.grammar,
            estimate=comparison is None,  # it has nothing to add to a measurement
            library=pair.target.library_line + ("; bit-equal text" if session.bitwise else ""),
        )
        if comparison:
            keeps_text = request.verification.keeps_text(greedy=request.sampling.is_greedy)
            print_comparison(errors, comparison, deterministic=keeps_text)
    if settings.explain and explanation:
        errors.print()
        print_explanation(errors, explanation)
