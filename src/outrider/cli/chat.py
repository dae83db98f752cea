"""`outrider chat`: a conversation whose KV is kept between turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from outrider.cli.opening import explanation_of, library_line, load_pair, open_session
from outrider.cli.plans import RunPlan, plan_run
from outrider.cli.prompt import ask, read_file, read_prompt
from outrider.cli.report import print_explanation, print_incomplete, print_readout
from outrider.cli.screen import Screen
from outrider.cli.settings import NOT_IN_CHAT, RunSettings
from outrider.cli.stream import TokenPrinter, show
from outrider.core.data import Completion, StepRecord
from outrider.core.errors import ConstraintError, InputError, OutriderError, PromptError, SettingError
from outrider.core.files import write_whole
from outrider.core.numbers import counted
from outrider.core.schema import settings_of
from outrider.models.hub import cache_dir
from outrider.session import Message, Pair, Session
from outrider.session.generation import Generation
from outrider.session.readout import Readout, read_out, write_trace

_HELP = 'Type a message. Alt-Enter or """: several lines. /help: commands. /exit or Ctrl-D: leave.'


def chat(settings: RunSettings) -> int:
    """Hold a conversation until its end; returns the exit status."""
    errors = Screen(stderr=True)
    for name in sorted(settings.model_fields_set & NOT_IN_CHAT - {"interactive"}):
        flag = settings_of(type(settings))[name].flag
        raise SettingError(flag, "not available in a conversation", "Leave it out, or use outrider run.")
    plan, first = plan_run(settings, "the messages"), None
    if settings.prompt_argument is not None or settings.prompt is not None:
        first = read_prompt(settings.prompt_argument, settings.prompt, None, escape=settings.escape)
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
        errors.note(*session.notices)
        conversation = _Conversation(plan, pair, session, errors)
        errors.say(_HELP, "dim")
        if first is not None:
            conversation.say(first)
        conversation.hold()
    return 0


class _Command(NamedTuple):
    """A line that starts with /; `act` is given what follows the name."""

    argument: str
    help: str
    act: Callable[[_Conversation, str], None]


class _Conversation:
    """The turns so far, and the last answer."""

    def __init__(self, plan: RunPlan, pair: Pair, session: Session, errors: Screen) -> None:
        self._plan = plan
        self._settings = settings = plan.settings
        self._pair = pair
        self._session = session
        self._errors = errors
        self._messages: list[Message] = []
        if settings.system:
            self._messages = [{"role": "system", "content": settings.system}]
        self._num_system = len(self._messages)
        self._attached = ""
        self._last: Completion | None = None
        self._records: list[StepRecord] = []
        self._printer = TokenPrinter(settings, errors)

    def hold(self) -> None:
        read = self._reader()
        with suppress(EOFError):
            while True:
                line = read("> ")
                name, _, rest = line.strip().partition(" ")
                if line.startswith("/"):
                    self._carry_out(name, rest.strip())
                elif name:
                    self.say(line)

    def _reader(self) -> Callable[[str], str]:
        if not sys.stdin.isatty():
            return ask
        from outrider.cli.terminal_input import TerminalInput  # loads slowly

        typed = TerminalInput(cache_dir() / "chat_history" if self._settings.history else None)

        def read(question: str) -> str:
            self._errors.print()
            try:
                return typed.read(question)
            except KeyboardInterrupt:
                self._note("Ctrl-C once more, Ctrl-D or /exit: leave.")
            return typed.read(question)

        return read

    def _carry_out(self, name: str, argument: str) -> None:
        command = _COMMANDS.get(name)
        if command is None:
            near = get_close_matches(name, _COMMANDS, 1)
            hint = f"Did you mean {near[0]}?" if near else "/help lists the commands."
            self._warn(
                f"There is no {name}. {hint} To send a message that starts with /, type a space first."
            )
        elif bool(argument) and not command.argument:
            self._warn(f"{name} takes no argument.")
        elif not argument and command.argument:
            self._warn(f"{name} needs a {command.argument}.")
        else:
            try:
                command.act(self, argument)
            except OutriderError as error:
                self._warn(str(error))

    # Commands

    def help(self, _: str = "") -> None:
        self._note(_HELP)
        for name, command in _COMMANDS.items():
            self._note(f"  {name + ' ' + command.argument:16}{command.help}")

    def reset(self, _: str) -> None:
        self._messages = self._messages[: self._num_system]
        self._note("a new conversation")

    def undo(self, _: str) -> None:
        message = self._last_message()
        del self._messages[message:]
        left = (len(self._messages) - self._num_system + 1) // 2
        self._note(f"{counted(left, 'message')} of yours left")

    def again(self, _: str) -> None:
        message = self._last_message()
        text = self._messages[message]["content"]
        del self._messages[message:]
        self.say(str(text))

    def read(self, file: str) -> None:
        text = read_file(Path(file).expanduser())
        self._attached += f"{text.rstrip()}\n\n"
        self._note(f"{len(text):,} characters go before your next message")

    def save(self, file: str) -> None:
        document = json.dumps({"messages": self._messages}, ensure_ascii=False, indent=1) + "\n"
        write_whole(Path(file).expanduser(), document, "conversation")
        self._note(f"{len(self._messages)} messages written to {file}")

    def readout(self, _: str) -> None:
        if self._last is None:
            self._note("no answer yet")
            return
        draft = self._pair.draft_name
        explanation = explanation_of(self._session, self._last)
        readout, target = read_out(self._last), self._pair.target.name
        library = library_line(self._pair, self._session)
        print_readout(self._errors, readout, target, draft, explanation, self._plan.grammar, library=library)
        if self._settings.explain and explanation:
            print_explanation(self._errors, explanation)

    def explain(self, _: str) -> None:
        explanation = None if self._last is None else explanation_of(self._session, self._last)
        if explanation is None:
            self._note("no answer yet" if self._last is None else "nothing is drafted (--policy plain)")
        else:
            print_explanation(self._errors, explanation)

    def leave(self, _: str) -> None:
        raise EOFError

    def _last_message(self) -> int:
        for place in reversed(range(len(self._messages))):
            if self._messages[place]["role"] == "user":
                return place
        raise PromptError("conversation", "no message yet", "Type one.")

    # Answers

    def say(self, message: str) -> None:
        """Answer a message, or take it back with a warning if it does not fit or its answer cannot
        continue."""
        self._messages.append({"role": "user", "content": self._attached + message})
        try:
            prompt = self._session.encode(self._messages)
            request = self._plan.request(prompt, self._session)
            generation = Generation(self._session.engine, request)
            self._last = show(generation, self._printer)
        except InputError as error:  # too long, or the template refuses it
            self._take_back(f"{error} /reset starts a new conversation.")
            return
        except ConstraintError as error:
            self._trace(generation.records)
            self._take_back(str(error))
            return
        self._attached = ""
        completion = self._last
        print_incomplete(self._errors, completion, self._plan.grammar)
        self._messages.append({"role": "assistant", "content": completion.text})
        self._trace(completion.records)
        if not self._settings.quiet:
            self._print_summary(read_out(completion))

    def _take_back(self, why: str) -> None:
        self._messages.pop()
        self._warn(why)

    def _trace(self, records: Sequence[StepRecord]) -> None:
        if self._settings.trace:
            self._records += records
            try:
                write_trace(self._settings.trace, self._records)
            except SettingError as error:  # the conversation is worth more than its trace
                self._warn(str(error))

    def _print_summary(self, readout: Readout) -> None:
        ended = {"length": "; token limit", "cancelled": "; interrupted"}.get(readout.finish_reason, "")
        self._note(
            f"[{readout.generated_tokens} tokens, {readout.tokens_per_s:.1f} tokens/s, "
            f"{readout.tokens_per_target_call:.2f} per target call; "
            f"{readout.reused_tokens} of {readout.prompt_tokens} prompt tokens kept{ended}]"
        )
        if readout.finish_reason == "context":
            self._warn(
                f"The context of {self._session.target.context_length} tokens is full. "
                "/reset starts a new conversation; a larger context (-c) holds a longer one."
            )

    def _note(self, text: str) -> None:
        self._errors.say(text, "dim")

    def _warn(self, text: str) -> None:
        self._errors.say(text, "yellow")


_COMMANDS = {
    "/help": _Command("", "list the commands", _Conversation.help),
    "/reset": _Command("", "start over", _Conversation.reset),
    "/undo": _Command("", "forget the last message and its answer", _Conversation.undo),
    "/again": _Command("", "answer the last message once more", _Conversation.again),
    "/read": _Command("FILE", "put a file before your next message", _Conversation.read),
    "/save": _Command("FILE", "write the conversation to a file", _Conversation.save),
    "/readout": _Command("", "show the counts of the last answer", _Conversation.readout),
    "/explain": _Command("", "show what was chosen for the last answer, and why", _Conversation.explain),
    "/exit": _Command("", "leave; Ctrl-D does too", _Conversation.leave),
}
