"""`outrider chat`: a conversation that keeps its KV between turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.cli.output import print_notes, readable
from outrider.cli.plans import RunPlan, plan_run
from outrider.cli.prompt import ask, read_prompt
from outrider.cli.report import print_explanation, print_incomplete, print_readout
from outrider.cli.run import explanation_of, library_line, load_pair, open_session
from outrider.cli.settings import RunSettings
from outrider.cli.stream import Shown, TokenPrinter, show
from outrider.core.data import StepRecord
from outrider.core.errors import ConstraintError, InputError, PromptError, SettingError
from outrider.session import Message, Pair, Session
from outrider.session.generation import Generation
from outrider.session.trace import write_trace

_HELP = "Type a message. /readout: counts of the last answer. /reset: start over. /exit or Ctrl-D: leave."


def chat(settings: RunSettings) -> int:
    """Hold a conversation until its end; returns the exit status."""
    errors = Console(stderr=True, highlight=False)
    _check(settings)
    plan = plan_run(settings, "the messages")
    first = _first_message(settings)
    pair = load_pair(plan.pair, errors)
    if pair.template is None:
        raise PromptError(
            f"a conversation with {pair.target.name}",
            "it has no chat template (a base model)",
            "Use outrider run.",
        )
    with open_session(plan.pair, pair, plan.answer_tokens, errors) as session:
        if plan.grammar is not None:
            session.compile(plan.grammar)
        print_notes(errors, session.notices)
        conversation = _Conversation(plan, pair, session, errors)
        errors.print(Text(_HELP, style="dim"))
        if first is not None:
            conversation.say(first)
        conversation.hold()
    return 0


def _check(settings: RunSettings) -> None:
    for name, given in (
        ("--compare", settings.compare),
        ("--json", settings.print_json),
        ("--raw", settings.raw),
    ):
        if given:
            raise SettingError(name, "a conversation has no use for it", "Leave it out, or use outrider run.")
    if settings.prediction is not None:
        raise SettingError("--prediction", "it is about one answer", "Leave it out, or use outrider run.")
    if settings.file is not None:
        raise SettingError("-f", "a conversation reads what you type", "Use -p for a first message.")


def _first_message(settings: RunSettings) -> str | None:
    """What the command line opens the conversation with; None for nothing."""
    if settings.prompt_argument is None and settings.prompt is None:
        return None
    return read_prompt(settings.prompt_argument, settings.prompt, None, escape=settings.escape)


class _Conversation:
    """The turns so far, and what became of the last one."""

    def __init__(self, plan: RunPlan, pair: Pair, session: Session, errors: Console) -> None:
        self._plan = plan
        self._settings = settings = plan.settings
        self._pair = pair
        self._session = session
        self._errors = errors
        self._system: list[Message] = []
        if settings.system:
            self._system = [{"role": "system", "content": settings.system}]
        self._messages: list[Message] = list(self._system)
        self._last: Shown | None = None
        self._records: list[StepRecord] = []
        self._printer = TokenPrinter(settings, errors)

    def hold(self) -> None:
        """Read messages until the end of input or /exit."""
        while (line := self._read()) is not None:
            message = line.strip()
            if message == "/exit":
                return
            if message == "/reset":
                self._messages = list(self._system)
                self._errors.print(Text("a new conversation", style="dim"))
            elif message == "/readout":
                self._print_readout()
            elif message.startswith("/") and message.split()[0] in ("/help", "/?"):
                self._errors.print(Text(_HELP, style="dim"))
            elif message:
                self.say(line)

    def _read(self) -> str | None:
        if sys.stdin.isatty():
            self._errors.print()
        try:
            return ask("> ")
        except EOFError:
            return None

    def say(self, message: str) -> None:
        """Answer one message. One that does not fit, or whose answer cannot go on, is taken back, and why
        is said."""
        self._messages.append({"role": "user", "content": message})
        try:
            prompt = self._session.encode(self._messages)
            request = self._plan.request(prompt, self._session.target.vocabulary)
            generation = Generation(self._session.engine, request)
            self._last = show(generation, self._printer)
        except InputError as error:  # too long, or the template refuses it
            self._take_back(f"{error} /reset starts a new conversation.")
            return
        except ConstraintError as error:
            self._trace(generation.records)
            self._take_back(str(error))
            return
        completion = self._last.completion
        print_incomplete(self._errors, completion, self._plan.grammar)
        self._messages.append({"role": "assistant", "content": completion.text})
        self._trace(completion.records)
        if not self._settings.quiet:
            self._print_summary(self._last)

    def _take_back(self, why: str) -> None:
        self._messages.pop()
        self._errors.print(Text(readable(why), style="yellow"))

    def _trace(self, records: Sequence[StepRecord]) -> None:
        if self._settings.trace:
            self._records += records
            write_trace(self._settings.trace, self._records)

    def _print_summary(self, shown: Shown) -> None:
        readout = shown.readout()
        ended = {"length": "; token limit", "cancelled": "; interrupted"}.get(readout.finish_reason, "")
        self._errors.print(
            Text(
                f"[{readout.generated_tokens} tokens, {readout.tokens_per_s:.1f} tokens/s, "
                f"{readout.tokens_per_target_call:.2f} per target call; "
                f"{readout.reused_tokens} of {readout.prompt_tokens} prompt tokens kept{ended}]",
                style="dim",
            )
        )
        if readout.finish_reason == "context":
            self._errors.print(
                Text(
                    f"The context of {self._session.target.context_length} tokens is full. "
                    "/reset starts a new conversation; a larger context (-c) holds a longer one.",
                    style="yellow",
                )
            )

    def _print_readout(self) -> None:
        if self._last is None:
            self._errors.print(Text("nothing was answered yet", style="dim"))
            return
        draft = self._pair.draft.name if self._pair.draft else None
        explanation = explanation_of(self._session, self._last.completion)
        readout, target = self._last.readout(), self._pair.target.name
        library = library_line(self._pair, self._session)
        print_readout(self._errors, readout, target, draft, explanation, self._plan.grammar, library=library)
        if self._settings.explain and explanation:
            print_explanation(self._errors, explanation)
