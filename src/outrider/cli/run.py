"""`outrider run`: one prompt, its answer as it comes, and the readout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from outrider.cli.opening import explanation_of, library_line, load_pair, measure_for_later, open_session
from outrider.cli.output import INCOMPLETE, INTERRUPTED, write_json
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
from outrider.cli.screen import Screen
from outrider.cli.settings import RunSettings
from outrider.cli.stream import TokenPrinter, show
from outrider.core.data import Completion, Request
from outrider.core.errors import ConstraintError, PromptError
from outrider.lab.comparison import Comparison, compare, is_deterministic
from outrider.policy.auto import AutoPolicy
from outrider.session import Message, Pair, Session
from outrider.session.generation import Generation
from outrider.session.readout import read_out, write_trace


def run(settings: RunSettings) -> int:
    """Generate once; returns the exit status."""
    errors = Screen(stderr=True)
    plan = plan_run(settings, "the prompt" if settings.prompt_is_piped else None)
    prompt = read_prompt(settings.prompt_argument, settings.prompt, settings.file, escape=settings.escape)
    prediction = read_prediction(settings.prediction) if settings.prediction else None
    pair = load_pair(plan.pair, errors)
    tokens = pair.encode(_conversation(settings, pair, prompt, errors))
    pair = pair.for_prompt(len(tokens), plan.pair.opening)
    with open_session(plan.pair, pair, len(tokens) + plan.answer_tokens, errors) as session:
        request = replace(plan.request(tokens, session), prediction=session.read_prediction(prediction))
        if plan.grammar is not None:
            session.compile(plan.grammar)
        errors.note(*session.notices)
        answering = _Run(settings, pair, session, request, errors)
        completion, comparison = answering.generate(), None
        if settings.compare and completion.finish_reason != "cancelled":
            comparison = answering.compare(completion)
        answering.report(completion, comparison)
        is_provisional = session.is_provisional
    if completion.finish_reason == "cancelled" or (settings.compare and comparison is None):
        return INTERRUPTED
    if is_provisional and not settings.quiet:
        measure_for_later(plan.pair, errors)
    return INCOMPLETE if plan.grammar is not None and not completion.is_complete else 0


def _conversation(settings: RunSettings, pair: Pair, prompt: str, errors: Screen) -> str | list[Message]:
    """The prompt as a conversation, if the model has a chat template."""
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


@dataclass(frozen=True, slots=True)
class _Run:
    settings: RunSettings
    pair: Pair
    session: Session
    request: Request
    errors: Screen

    def generate(self) -> Completion:
        settings = self.settings
        generation = Generation(self.session.engine, self.request)
        printer = None if settings.print_json else TokenPrinter(settings, self.errors)
        try:
            completion = show(generation, printer)
        except BaseException as error:
            if settings.trace:
                write_trace(settings.trace, generation.records)
            if settings.print_json and isinstance(error, ConstraintError):
                write_json(failure_as_json(error))
            raise
        if settings.trace:
            write_trace(settings.trace, generation.records)
        return completion

    def compare(self, completion: Completion) -> Comparison | None:
        """Measure against plain decoding; None after Ctrl-C."""
        try:
            with self.errors.status("comparing") as status:
                return compare(
                    self.session.engine,
                    self.request,
                    completion,
                    repetitions=self.settings.repetitions,
                    progress=lambda done, total: status.update(f"comparing: {done} of {total} runs"),
                )
        except KeyboardInterrupt:
            self.errors.note("the comparison was interrupted")
            return None

    def report(self, completion: Completion, comparison: Comparison | None) -> None:
        settings, session, request, errors = self.settings, self.session, self.request, self.errors
        readout = comparison.speculative if comparison else read_out(completion)
        run = comparison.speculative_completion if comparison else completion
        explanation = explanation_of(session, run)
        if settings.print_json:
            in_force = request_settings(settings, session, request, completion)
            result = as_json(session, in_force, readout, run, comparison)
            write_json(result | ({"explanation": asdict(explanation)} if explanation else {}))
        else:
            print_incomplete(errors, completion, request.grammar)
        if not settings.print_json and not settings.quiet:
            errors.print()
            print_readout(
                errors,
                readout,
                self.pair.target.name,
                self.pair.draft_name,
                explanation,
                request.grammar,
                estimate=comparison is None,  # it has nothing to add to a measurement
                library=library_line(self.pair, session),
            )
            if comparison:
                print_comparison(errors, comparison, deterministic=is_deterministic(request))
        if settings.explain and explanation and not settings.print_json:
            errors.print()
            print_explanation(errors, explanation)
        if not settings.quiet and isinstance(session.engine.policy, AutoPolicy):
            errors.note(*session.engine.policy.notices)  # found out while generating
