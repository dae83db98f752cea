"""`outrider run`: one prompt, its answer as it comes, and the readout."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.cli.interrupt import Interrupt, LoadInterrupt
from outrider.cli.output import readable, write
from outrider.cli.prompt import encodable, read_prompt
from outrider.cli.report import SOURCE_STYLES, print_comparison, print_legend, print_readout
from outrider.cli.settings import RunSettings
from outrider.compare import Comparison, compare, is_deterministic
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Piece, Request, TokenLogprob
from outrider.core.errors import PromptError, SettingError
from outrider.files import check_writable
from outrider.models.hub import HubOptions
from outrider.readout import read_out
from outrider.session import DEFAULT_CONTEXT_TOKENS, Generation, Message, Pair, Session, settings_of
from outrider.trace import write_trace

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

_UNLIMITED_TOKENS = 2048
"""Room for an answer of unknown length, where the context is sized by itself."""


def run(settings: RunSettings) -> int:
    """Generate once; returns the exit status."""
    errors = Console(stderr=True, highlight=False)
    check_settings(settings)
    prompt = read_prompt(settings.prompt_argument, settings.prompt, settings.file, escape=settings.escape)
    pair = load_pair(settings, errors)
    tokens = pair.encode(_conversation(settings, pair, prompt, errors))
    request = settings.request(tokens, pair.target.vocabulary)
    with open_session(settings, pair, len(tokens)) as session:
        print_notices(session, errors)
        completion = _generate(settings, session, request, errors)
        comparison = None
        if settings.compare and completion.finish_reason != "cancelled":
            comparison = _compare(settings, session, request, completion, errors)
        _report(settings, session, pair, request, completion, comparison, errors)
    interrupted = completion.finish_reason == "cancelled" or (settings.compare and comparison is None)
    return INTERRUPTED if interrupted else 0


def check_settings(settings: RunSettings) -> None:
    """Refuse what cannot work before anything is loaded."""
    settings.sampling()
    settings.max_tokens()
    settings.policy()
    settings.verification()
    settings.check_contexts()
    settings.target_reference()
    settings.draft_reference()
    encodable(settings.system or "", "system message")
    settings.load_options(draft=True)
    settings.load_options()
    if "" in (settings.stop or ()):
        raise SettingError("-r", "an empty text would end every answer at once", "Leave it out.")
    if settings.logprobs is not None and not settings.json:
        raise SettingError("--logprobs", "they are part of the JSON output", "Add --json.")
    if settings.repetitions < 1:
        raise SettingError("--repetitions", f"{settings.repetitions} is too few", "Give 1 or more.")
    if settings.trace:
        check_writable(settings.trace, "trace")


def load_pair(settings: RunSettings, errors: Console) -> Pair:
    """Load the models that were asked for, or the embedded default."""
    with LoadInterrupt(), errors.status("loading"):
        return Pair.load(
            settings.target_reference(),
            settings.draft_reference(),
            options=settings.load_options(),
            draft_options=settings.load_options(draft=True),
            hub=HubOptions(token=settings.hf_token, offline=settings.offline),
        )


def open_session(settings: RunSettings, pair: Pair, prompt_tokens: int) -> Session:
    """Open contexts that hold prompt and answer, unless their size was given."""
    context = settings.ctx_size
    if context is None:
        wanted = prompt_tokens + (settings.max_tokens() or _UNLIMITED_TOKENS) + 1
        context = min(max(wanted, DEFAULT_CONTEXT_TOKENS), pair.target.trained_context)
    with LoadInterrupt():
        return pair.open(
            context,
            settings.ctx_size_draft,
            lookup=settings.lookup,
            policy=settings.policy(),
        )


def print_notices(session: Session, errors: Console) -> None:
    """Say what was switched off, and why."""
    for notice in session.notices:
        errors.print(Text(readable(f"note: {notice}"), style="yellow"))


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
            errors.print(Text(readable(f"note: {why}: continuing the text"), "yellow"))
        return prompt
    system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    return [*system, {"role": "user", "content": prompt}]


def _generate(settings: RunSettings, session: Session, request: Request, errors: Console) -> Completion:
    generation = Generation(session.engine, request)
    printer = None if settings.json else TokenPrinter(settings, errors)
    try:
        return show(generation, printer)
    finally:
        if settings.trace:
            write_trace(settings.trace, generation.records)


def show(generation: Generation, printer: TokenPrinter | None) -> Completion:
    """Run a generation to its end or to Ctrl-C, printing the text as it comes."""
    with Interrupt() as interrupt:
        for update in generation:
            if printer:
                printer.print(update.pieces)
            if interrupt.asked:
                generation.cancel()
        completion = generation.completion
    if printer:
        printer.end(completion)
    return completion


class TokenPrinter:
    """Writes text to standard output as it comes, coloured by source where that is wanted."""

    def __init__(self, settings: RunSettings, errors: Console) -> None:
        self._console = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._coloured = settings.show_source
        self._printed = 0
        if self._coloured and not self._console.color_system:
            errors.print(
                Text("note: --show-source needs a terminal with colours: none is used", style="yellow")
            )
            self._coloured = False
        if self._coloured:
            print_legend(errors)

    def print(self, pieces: tuple[Piece, ...]) -> None:
        """Show the pieces of one step."""
        write(
            "".join(self._dressed(piece.text, SOURCE_STYLES.get(piece.source, "magenta")) for piece in pieces)
        )
        self._printed += sum(len(piece.text) for piece in pieces)

    def end(self, completion: Completion) -> None:
        """Show what was still held back, and end the line."""
        write(self._dressed(completion.text[self._printed :], "") + "\n")
        self._printed = 0

    def _dressed(self, text: str, style: str) -> str:
        if self._console.is_terminal:
            text = readable(text)
        if self._coloured and text:
            # Not through the console, which would turn tabs into spaces.
            text = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
        return text


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
        errors.print(Text("note: the comparison was interrupted", style="yellow"))
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
    if settings.json:
        in_force = request_settings(settings, session, request, completion)
        write(json.dumps(_as_json(session, in_force, completion, comparison)) + "\n")
    elif not settings.quiet:
        errors.print()
        print_readout(errors, readout, pair.target.name, pair.draft.name if pair.draft else None)
        if comparison:
            print_comparison(errors, comparison, deterministic=is_deterministic(request))


def request_settings(
    settings: RunSettings, session: Session, request: Request, completion: Completion
) -> dict[str, Any]:
    """The effective settings of the run, models and request."""
    return settings_of(session, request, completion.seed) | {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "ignore_end": request.ignore_end,
        "raw": settings.raw,
    }


def _as_json(
    session: Session, settings: dict[str, Any], completion: Completion, comparison: Comparison | None
) -> dict[str, Any]:
    """The object that --json prints; the README documents its keys."""
    readout = comparison.speculative if comparison else read_out(completion)
    shown = comparison.speculative_completion if comparison else completion
    result = {"text": shown.text, **readout.as_json(), "settings": settings, "notices": session.notices}
    if shown.logprobs:
        vocabulary = session.target.vocabulary
        result["logprobs"] = [_logprob_json(scored, vocabulary) for scored in shown.logprobs]
    if comparison:
        result |= {
            "plain": comparison.plain.as_json(),
            "speedup": asdict(comparison.speedup),
            "equal": comparison.equal,
            "divergence": asdict(comparison.divergence) if comparison.divergence else None,
        }
    return result


def _logprob_json(scored: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        text = piece.decode("utf-8", errors="replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}

    top = [entry(token, logprob) for token, logprob in scored.top]
    return entry(scored.token, scored.logprob) | {"forced": scored.forced, "top_logprobs": top}
