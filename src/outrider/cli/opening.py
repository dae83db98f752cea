"""Models loaded and sessions opened as a plan says, with what is shown meanwhile."""

from __future__ import annotations

from rich.console import Console

from outrider.backends.gguf import show_log
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.plans import PairPlan
from outrider.core.data import Completion
from outrider.drafters.corpus import indexing
from outrider.policy import AutoPolicy
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair, Session
from outrider.session.explain import Explanation, explain
from outrider.session.keeping import Keeping
from outrider.session.loading import Room


def load_pair(plan: PairPlan, errors: Console, max_sequences: int = 1, capacity_tokens: int = 0) -> Pair:
    """Load the models that were asked for, or the embedded default, where the contexts of so many sequences
    and tokens over all of them will find room."""
    room = room_of(plan, max_sequences, capacity_tokens)
    show_log(plan.settings.verbose)
    with LoadInterrupt(), errors.status("loading") as status:
        return Pair.load(
            plan.target,
            plan.draft,
            options=plan.options,
            draft_options=plan.draft_options,
            hub=plan.hub,
            template=plan.template,
            room=room,
            measuring=lambda what, part: status.update(f"choosing the library, once ({what}): {part:.0%}"),
        )


def room_of(plan: PairPlan, max_sequences: int, capacity_tokens: int) -> Room:
    """The contexts of a pair, of so many sequences and tokens over all of them."""
    return Room(plan.settings.ctx_size, plan.settings.ctx_size_draft, max_sequences, capacity_tokens)


def open_session(
    plan: PairPlan,
    pair: Pair,
    tokens: int,
    errors: Console,
    *,
    max_running: int = 1,
    kept_sequences: int = 0,
    capacity_tokens: int = 0,
    max_gap_s: float | None = None,
    keeping: Keeping | None = None,
) -> Session:
    """Open contexts that hold `tokens`, unless their size was given, for `max_running` requests at once; the
    others as in `Pair.open`."""
    context = plan.settings.ctx_size
    if context is None:
        context = min(max(tokens, DEFAULT_CONTEXT_TOKENS), pair.target.trained_context)
    with LoadInterrupt(), errors.status("opening") as status:
        return pair.open(
            context,
            plan.settings.ctx_size_draft,
            lookup=plan.settings.lookup,
            corpus=plan.corpus,
            progress=lambda *progress: status.update(f"indexing the corpus: {indexing(*progress)}"),
            policy=plan.policy,
            measuring=lambda what, part: status.update(f"{what}: {part:.0%}"),
            bitwise=plan.settings.bitwise,
            max_running=max_running,
            kept_sequences=kept_sequences,
            capacity_tokens=capacity_tokens,
            max_gap_s=max_gap_s,
            keeping=keeping,
        )


def library_line(pair: Pair, session: Session) -> str:
    """What runs the models and why that, and whether texts are bit-equal."""
    return pair.target.library_line + ("; bit-equal text" if session.bitwise else "")


def explanation_of(session: Session, completion: Completion) -> Explanation | None:
    """Why the automatic policy drafted as it did; None for other policies."""
    policy = session.engine.policy
    return explain(completion.records, policy) if isinstance(policy, AutoPolicy) else None
