"""`outrider serve`: check everything, load everything, then serve until a signal comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.backends.gguf.libraries import build_id
from outrider.cli.plans import PairPlan, load_pair, open_session, plan_pair
from outrider.cli.screen import Screen
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.notices import collect_notices
from outrider.core.params import Drafting
from outrider.core.settings import sampling_params
from outrider.policy.auto import AutoPolicy
from outrider.server.assembly import assemble, log_to_stderr
from outrider.server.keys import KeyRing, key_ring
from outrider.server.metrics import Metrics
from outrider.server.models import Model, Models, keep_few_heaps
from outrider.server.running import Server, address_of, bind, check_tls
from outrider.server.service import Service
from outrider.server.settings import Configuration, ServeSettings, is_loopback
from outrider.session.loading import resolve_models
from outrider.session.options import DEFAULT_CONTEXT_TOKENS
from outrider.session.pair import Pair
from outrider.session.session import Session

LOG = logging.getLogger("outrider.server")


def serve(configuration: Configuration) -> int:
    """Serve until a signal comes; returns the exit status. Wrong settings, files and addresses are found
    before a model is loaded; who connects meanwhile waits."""
    settings = configuration.settings
    settings.check()
    plans = {name: (each, _plan(each)) for name, each in (configuration.models or {"": settings}).items()}
    with collect_notices() as notices:
        ring = key_ring(settings)
    if settings.tls_cert and settings.tls_key:
        check_tls(settings.tls_cert, settings.tls_key)
    log_to_stderr(as_json=settings.log_json)
    errors = Screen(stderr=True, quiet=settings.log_json, soft_wrap=True)
    several = _several(settings, plans) if configuration.models else None
    sockets = bind(settings.host, settings.port)
    try:
        served, overview, notes = several or _one(settings, plans[""][1], errors)
        app = assemble(served, settings, ring)
        overview |= _overview(settings, ring, address_of(sockets, tls=settings.tls_cert is not None))
        said = [*configuration.notices, *notices, *notes]
        ready = partial(_announce, settings, overview, said, errors)
        server = Server(app, settings, drain=served.drain, ready=ready)
        with closing(served):
            server.run(sockets)
        return 0
    finally:
        for opened in sockets:
            opened.close()


def _plan(settings: ServeSettings) -> PairPlan:
    plan = plan_pair(settings, greedy=sampling_params(settings).is_greedy)
    opening = replace(
        plan.opening,
        max_running=settings.max_running,
        kept_sequences=settings.num_kept,
        capacity_tokens=settings.kv_tokens or 0,
        max_gap_s=settings.max_gap and settings.max_gap / 1000,
        keeping=settings.keeping,
    )
    return replace(plan, opening=opening)


_Served = tuple[Models, dict[str, str], Sequence[str]]
"""models, their overview, and notices about them"""


def _one(settings: ServeSettings, plan: PairPlan, errors: Screen) -> _Served:
    service, pair = _opened(settings, plan, errors)
    service.start()
    return Models.of(service), _overview_of_model(settings, service.session, pair), service.notices


def _opened(
    settings: ServeSettings, plan: PairPlan, errors: Screen, metrics: Metrics | None = None
) -> tuple[Service, Pair]:
    pair = load_pair(plan, errors)
    try:
        session = open_session(plan, pair, DEFAULT_CONTEXT_TOKENS, errors)
    except BaseException:
        pair.close()
        raise
    target = session.target
    counted = metrics or Metrics(target.name, build_id(), context_tokens=str(target.context_length))
    return Service(
        session, settings, verification=plan.verification, metrics=counted, release=session.close
    ), pair


def _several(settings: ServeSettings, plans: Mapping[str, tuple[ServeSettings, PairPlan]]) -> _Served:
    """Models to load on demand. A file of a folder that cannot be used gets a notice; raises ModelFileError
    for any other."""
    keep_few_heaps()
    found, notices = [], []
    metrics = Metrics(", ".join(plans), build_id())
    for name, (own, plan) in plans.items():
        try:
            if plan.target is None or not plan.target.startswith("hf:"):
                resolve_models(plan.target, plan.draft, plan.hub)
        except ModelFileError as error:
            if settings.models_dir is None or Path(error.what).parent != settings.models_dir:
                raise  # the user named it
            notices.append(f"{error.what} is not served: {error.why}")
            continue
        load = partial(_load, name, own, plan, metrics)
        found.append(Model(tuple(dict.fromkeys(filter(None, (name, own.alias)))), load))
    if not found:
        raise SettingError(f"--models-dir {settings.models_dir}", notices[0], "Name another folder.")
    models = Models(
        found,
        max_loaded=settings.models_max,
        idle_s=settings.idle,
        any_model=settings.any_model,
        metrics=metrics,
    )
    idle = "" if settings.idle is None else f", unloaded after {settings.idle:g} s without a request"
    overview = {
        "models": ", ".join(models.first_names),
        "loaded": f"{settings.models_max} at a time, when asked for{idle}",
    }
    return models, overview, notices


def _load(name: str, settings: ServeSettings, plan: PairPlan, metrics: Metrics) -> Service:
    own = settings.model_copy(update={"alias": name})
    service, _ = _opened(own, plan, Screen(stderr=True, quiet=True), metrics)
    for notice in service.session.notices:
        LOG.info("note", extra={"fields": {"model": name, "note": notice}})
    return service


def _overview_of_model(settings: ServeSettings, session: Session, pair: Pair) -> dict[str, str]:
    target, engine = session.target, session.engine
    named = f" as {settings.alias}" if settings.alias else ""
    draft = f"draft {pair.draft_name}" if pair.draft_name else "no draft model"
    names = ", ".join(drafter.name for drafter in engine.drafters) or "nobody"
    chooses = isinstance(engine.policy, AutoPolicy) and isinstance(engine.policy.limits, Drafting)
    how = "as far as it pays" if chooses else "by fixed lengths"
    return {
        "models": f"target {target.name}{named}, {draft}",
        "context": f"{target.context_length} tokens a request, {settings.max_running} requests at once, "
        f"{target.capacity_tokens} KV cells for all",
        "drafts": f"by {names}, {how}" if engine.drafters else "none: plain decoding",
        **({"bits": "text equals plain decoding's, bit for bit"} if session.bitwise else {}),
    }


def _overview(settings: ServeSettings, ring: KeyRing, address: str) -> dict[str, str]:
    return {
        "address": f"{address}/v1" + (f", page at {address}/" if settings.page else ", no page"),
        "access": _access(settings, ring),
        **({"log": "requests, with their bodies"} if settings.log_prompts else {}),
    }


def _access(settings: ServeSettings, ring: KeyRing) -> str:
    if ring:
        return f"{len(ring.keys)} API key" + ("s" if len(ring.keys) > 1 else "")
    if is_loopback(settings.host):
        return "no API key: whoever is on this machine"
    return "NO API key (--no-auth): whoever reaches this address"


def _announce(
    settings: ServeSettings, overview: dict[str, str], notices: Sequence[str], errors: Screen
) -> None:
    if settings.log_json:
        LOG.info("started", extra={"fields": overview | {"notices": list(notices)}})
        return
    errors.note(*notices)
    for name, value in overview.items():
        errors.say(f"{name:<10}{value}")
    errors.say("ready (Ctrl-C drains and ends; twice: at once)")
