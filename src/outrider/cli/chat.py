"""`outrider chat`: a conversation whose KV is kept between turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.cli.plans import RunPlan, load_pair, open_session, plan_run
from outrider.cli.prompt import read_line, read_prompt
from outrider.cli.report import ENDED, explanation_of, print_explanation, print_incomplete
from outrider.cli.screen import Screen
from outrider.cli.settings import TextSettings
from outrider.cli.stream import TokenPrinter, show
from outrider.core.data import Completion
from outrider.core.errors import ConstraintError, InputError, PromptError
from outrider.models.hub import cache_dir
from outrider.session.generation import Generation, Message
from outrider.session.readout import read_out
from outrider.session.session import Session

_HELP = (
    "Type a message; Alt-Enter starts a new line. /explain: what was chosen for the last answer, and why. "
    "/reset: start over. /exit or Ctrl-D: leave."
)


def chat(settings: TextSettings) -> int:
    """Hold a conversation until its end; returns the exit status."""
    errors = Screen(stderr=True)
    plan, first = plan_run(settings), None
    if settings.prompt_argument is not None or settings.prompt is not None:
        first = read_prompt(settings.prompt_argument, settings.prompt, None, escape=settings.escape)
    pair = load_pair(plan.pair, errors)
    if pair.template is None:
        what, why = f"a conversation with {pair.target.name}", "it has no chat template (a base model)"
        raise PromptError(what, why, "Use outrider run.")
    with open_session(plan.pair, pair, plan.answer_tokens, errors) as session:
        if plan.grammar is not None:
            session.compile(plan.grammar)
        errors.note(*session.notices)
        conversation = _Conversation(plan, session, errors)
        errors.say(_HELP, "dim")
        if first is not None:
            conversation.say(first)
        conversation.hold()
    return 0


class _Conversation:
    """The turns so far, and the last answer."""

    def __init__(self, plan: RunPlan, session: Session, errors: Screen) -> None:
        self._plan, self._session, self._errors = plan, session, errors
        system = plan.settings.system
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._num_system = len(self._messages)
        self._last: Completion | None = None
        self._printer = TokenPrinter(plan.settings, errors)

    def hold(self) -> None:
        read = read_line
        if is_typed := sys.stdin.isatty():
            read = _line_editor(cache_dir() / "chat_history" if self._plan.settings.history else None)
        with suppress(EOFError):
            while True:
                if is_typed:
                    self._errors.print()
                try:
                    line = read()
                except KeyboardInterrupt:
                    if not is_typed:
                        raise
                    self._note("Ctrl-C once more, Ctrl-D or /exit: leave.")
                    line = read()
                if line.startswith("/"):
                    self._carry_out(line.strip())
                elif line.strip():
                    self.say(line)

    def _carry_out(self, command: str) -> None:
        if command == "/exit":
            raise EOFError
        if command == "/help":
            self._note(_HELP)
        elif command == "/reset":
            self._messages = self._messages[: self._num_system]
            self._note("a new conversation")
        elif command == "/explain":
            self._explain()
        else:
            more = "/help lists the commands. To send a message that starts with /, type a space first."
            self._errors.say(f"There is no {command}. {more}", "yellow")

    def _explain(self) -> None:
        if self._last is None:
            self._note("no answer yet")
        elif (explanation := explanation_of(self._session, self._last)) is None:
            self._note("nothing is drafted (--policy plain)")
        else:
            print_explanation(self._errors, explanation)

    def say(self, message: str) -> None:
        """Answer a message, or take it back with a warning if it does not fit or its answer cannot
        continue."""
        self._messages.append({"role": "user", "content": message})
        try:
            request = self._plan.request(self._session.encode(self._messages), self._session)
            self._last = show(Generation(self._session.engine, request), self._printer)
        except (InputError, ConstraintError) as error:  # too long, refused by the template, or a dead end
            self._messages.pop()
            self._errors.say(f"{error} /reset starts a new conversation.", "yellow")
            return
        print_incomplete(self._errors, self._last, self._plan.grammar)
        self._messages.append({"role": "assistant", "content": self._last.text})
        if not self._plan.settings.quiet:
            self._print_summary(self._last)

    def _print_summary(self, completion: Completion) -> None:
        readout = read_out(completion)
        ended = f"; {ENDED[readout.finish_reason]}" if readout.finish_reason in ENDED else ""
        self._note(
            f"[{readout.generated_tokens} tokens, {readout.tokens_per_s:.1f} tokens/s, "
            f"{readout.tokens_per_target_call:.2f} per target call; "
            f"{readout.reused_tokens} of {readout.prompt_tokens} prompt tokens kept{ended}]"
        )

    def _note(self, text: str) -> None:
        self._errors.say(text, "dim")


def _line_editor(history: Path | None) -> Callable[[], str]:
    """Reads messages from the terminal: pasted text of any size, several lines, and a history that only its
    owner can read. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C on an empty line."""
    from prompt_toolkit import PromptSession  # loads slowly
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    kept: InMemoryHistory | FileHistory = InMemoryHistory()
    if history is not None:
        with suppress(OSError):  # else one of this conversation alone
            history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(history, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            kept = FileHistory(history)
    # What is typed is not part of an answer that is written to a file.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    session = PromptSession[str]("> ", key_bindings=keys, history=kept, output=output, enable_suspend=True)
    return session.prompt
