"""`outrider serve`: everything checked, then everything loaded, then served until a signal comes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from outrider.cli.output import print_notes, readable
from outrider.cli.plans import PairPlan, plan_pair
from outrider.cli.run import load_pair, open_session
from outrider.policy import AutoPolicy
from outrider.server.assembly import assemble
from outrider.server.keys import KeyRing, key_ring
from outrider.server.loading import Loading
from outrider.server.logs import log_to_stderr
from outrider.server.running import Server, address_of, bind, close, tls_context
from outrider.server.settings import Configuration, ServeSettings, is_loopback
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair, Session

LOG = logging.getLogger("outrider.server")


def serve(configuration: Configuration) -> int:
    """Serve until a signal comes; returns the exit status. What settings, the files that they name or the
    address get wrong is found before a model is loaded. Raises the errors of `outrider.core.errors`."""
    settings = configuration.settings
    settings.check()
    plan = plan_pair(settings, greedy=settings.temp == 0 or settings.top_k == 1)
    ring, notices = key_ring(settings)
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    log_to_stderr(as_json=settings.log_json)
    errors = Console(stderr=True, highlight=False, quiet=settings.log_json)
    sockets = bind(settings.host, settings.port)
    try:
        with ExitStack() as stack:
            with Loading(sockets, settings, tls) as loading:
                pair = load_pair(plan, errors, settings.max_running, settings.kv_tokens or 0)
                loading.doing = "opening contexts and measuring what calls cost here"
                session = stack.enter_context(_open(settings, plan, pair, errors))
            app, service = assemble(session, settings, ring, plan.verification)
            address = address_of(sockets, tls=tls is not None)

            def ready() -> None:
                said = [*configuration.notices, *notices, *session.notices]
                _announce(settings, _overview(settings, session, pair, ring, address), said, errors)

            server = Server(app, settings, tls=tls, drain=service.worker.drain, ready=ready)
            service.start()
            try:
                server.run(sockets)
            finally:
                service.close()
            return server.status
    finally:
        close(sockets)


def _open(settings: ServeSettings, plan: PairPlan, pair: Pair, errors: Console) -> Session:
    """Contexts and drafters for the requests that run at once, and for those whose KV is kept."""
    return open_session(
        plan,
        pair,
        DEFAULT_CONTEXT_TOKENS,
        errors,
        max_running=settings.max_running,
        kept_sequences=settings.kept_sequences,
        capacity_tokens=settings.kv_tokens or 0,
        max_pause_s=settings.max_pause,
    )


def _overview(
    settings: ServeSettings, session: Session, pair: Pair, ring: KeyRing, address: str
) -> dict[str, str]:
    """What is served, where and to whom, one subject a line."""
    target, engine = session.target, session.engine
    named = f" as {settings.alias}" if settings.alias else ""
    draft = f"draft {pair.draft_name}" if pair.draft_name else "no draft model"
    names = ", ".join(drafter.name for drafter in engine.drafters) or "nobody"
    how = "as far as it pays" if isinstance(engine.policy, AutoPolicy) else "by fixed lengths"
    return {
        "models": f"target {target.name}{named}, {draft}",
        "context": f"{target.context_length} tokens a request, {settings.max_running} requests at once, "
        f"{target.capacity_tokens} KV cells for all",
        "drafts": f"by {names}, {how}" if engine.drafters else "none: plain decoding",
        **({"bits": "texts equal plain decoding's bit for bit"} if session.bitwise else {}),
        "address": f"{address}/v1" + (f", page at {address}/" if settings.page else ", no page"),
        "access": _access(settings, ring),
        "metrics": _metrics(settings, ring),
        "limits": f"{settings.timeout:g} s, {settings.max_body} bytes a request; {settings.max_waiting} wait",
        "log": "requests, with their bodies" if settings.log_prompts else "requests, without their text",
    }


def _access(settings: ServeSettings, ring: KeyRing) -> str:
    if ring:
        return f"{len(ring.keys)} API key" + ("s" if len(ring.keys) > 1 else "")
    if is_loopback(settings.host):
        return "no API key: whoever is on this machine"
    return "NO API key (--no-auth): whoever reaches this address"


def _metrics(settings: ServeSettings, ring: KeyRing) -> str:
    if not settings.metrics:
        return "off"
    return "/metrics" + (", for keys with admin = true" if ring and not settings.metrics_open else "")


def _announce(
    settings: ServeSettings, overview: dict[str, str], notices: Sequence[str], errors: Console
) -> None:
    """Say what runs, and what was switched off and why: to people, or to whatever reads the log."""
    if settings.log_json:
        LOG.info("started", extra={"fields": overview | {"notices": list(notices)}})
        return
    print_notes(errors, notices)
    for name, value in overview.items():
        errors.print(Text(readable(f"{name:<10}{value}")), soft_wrap=True)
    errors.print(Text("ready (Ctrl-C drains and ends; twice: at once)"), soft_wrap=True)
