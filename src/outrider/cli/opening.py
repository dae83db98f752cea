"""Load models and open sessions by a plan, with progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from outrider.backends.gguf.log import show_log
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.plans import PairPlan
from outrider.cli.screen import Screen
from outrider.core.data import Completion
from outrider.costs.other_programs import is_quiet
from outrider.policy.auto import AutoPolicy
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair, Session
from outrider.session.explain import Explanation, explain


def load_pair(plan: PairPlan, errors: Screen) -> Pair:
    """Load the models, after checking that the session to come fits in memory."""
    show_log(plan.settings.verbose)
    with LoadInterrupt(), errors.progress() as progress:
        progress("loading")
        return Pair.load(
            plan.target,
            plan.draft,
            options=plan.options,
            draft_options=plan.draft_options,
            hub=plan.hub,
            template=plan.template,
            opening=plan.opening,
            progress=progress,
        )


def open_session(plan: PairPlan, pair: Pair, tokens: int, errors: Screen) -> Session:
    """Open contexts of the given size, or else for `tokens`."""
    options = plan.opening
    if options.context_length is None:
        length = min(max(tokens, DEFAULT_CONTEXT_TOKENS), pair.target.trained_context)
        options = replace(options, context_length=length)
    with LoadInterrupt(), errors.progress() as progress:
        progress("opening")
        session = Session.open(pair, options, progress)
    session.notices[:0] = plan.notices
    return session


def measure_for_later(plan: PairPlan, errors: Screen) -> None:
    """After an answer, measure what it was made without: the faster library, costs, whether equal bits are
    free. Only in a terminal, where a person can interrupt it, and on a quiet machine."""
    if not errors.is_terminal or not is_quiet(0.0):
        return
    errors.say("measuring once, for later runs, what calls cost here (Ctrl-C skips it)", "dim")
    with suppress(KeyboardInterrupt):
        later = replace(plan, opening=replace(plan.opening, corpus=(), measure=True))
        open_session(later, load_pair(later, errors), 0, errors).close()


def library_line(pair: Pair, session: Session) -> str:
    """The library that runs the models, why it was chosen, and whether text is bit-equal."""
    return pair.target.library_line + ("; bit-equal text" if session.bitwise else "")


def explanation_of(session: Session, completion: Completion) -> Explanation | None:
    """The automatic policy's explanation; None under another one."""
    policy = session.engine.policy
    return explain(completion.records, policy) if isinstance(policy, AutoPolicy) else None
