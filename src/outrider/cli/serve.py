"""`outrider serve`: check everything, load everything, then serve until a signal comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.backends.gguf.libraries import build_id
from outrider.backends.machine import available_bytes
from outrider.cli.opening import load_pair, open_session
from outrider.cli.plans import PairPlan, plan_pair
from outrider.cli.screen import Screen
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.notices import collect_notices
from outrider.core.settings import sampling_params
from outrider.policy.auto import AutoPolicy
from outrider.server.assembly import assemble
from outrider.server.configuration import Configuration
from outrider.server.keys import KeyRing, key_ring
from outrider.server.logs import log_to_stderr
from outrider.server.metrics import AllMetrics, Metrics
from outrider.server.models import Model, Models, keep_few_heaps
from outrider.server.running import Server, address_of, bind, close, tls_context
from outrider.server.service import Service
from outrider.server.settings import ServeSettings, is_loopback
from outrider.server.worker import Turns
from outrider.session import DEFAULT_CONTEXT_TOKENS, Pair, Session
from outrider.session.drafts import resolve_models
from outrider.session.loading import Room

LOG = logging.getLogger("outrider.server")


def serve(configuration: Configuration) -> int:
    """Serve until a signal comes; returns the exit status. Wrong settings, files and addresses are found
    before a model is loaded; who connects meanwhile waits."""
    settings = configuration.settings
    settings.check()
    is_one = not configuration.models
    plans = {name: (each, _plan(each)) for name, each in (configuration.models or {"": settings}).items()}
    with collect_notices() as notices:
        ring = key_ring(settings)
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    log_to_stderr(as_json=settings.log_json)
    errors = Screen(stderr=True, quiet=settings.log_json, soft_wrap=True)
    several = None if is_one else _several(settings, plans)
    sockets = bind(settings.host, settings.port)
    said = [*configuration.notices, *notices]
    try:
        if several is None:
            served, overview = _one(settings, plans[""][1], errors)
            said += served.services()[0].notices
        else:
            served, overview, notes = several
            said += notes
        app = assemble(served, settings, ring)
        overview |= _overview(settings, ring, address_of(sockets, tls=tls is not None))
        ready = partial(_announce, settings, overview, said, errors)
        server = Server(app, settings, tls=tls, drain=served.drain, ready=ready)
        with closing(served):
            server.run(sockets)
        return server.status
    finally:
        close(sockets)


def _plan(settings: ServeSettings) -> PairPlan:
    plan = plan_pair(settings, greedy=sampling_params(settings).is_greedy)
    opening = replace(
        plan.opening,
        max_running=settings.max_running,
        kept_sequences=settings.num_kept,
        capacity_tokens=settings.kv_tokens or 0,
        max_gap_s=settings.max_gap_s,
        keeping=settings.keeping,
    )
    return replace(plan, opening=opening)


def _one(settings: ServeSettings, plan: PairPlan, errors: Screen) -> tuple[Models, dict[str, str]]:
    service, pair = _opened(settings, plan, errors)
    service.start()
    return Models.of(service), _overview_of_model(settings, service.session, pair)


def _opened(
    settings: ServeSettings,
    plan: PairPlan,
    errors: Screen,
    metrics: Metrics | None = None,
    turns: Turns | None = None,
) -> tuple[Service, Pair]:
    pair = load_pair(plan, errors)
    try:
        session = open_session(plan, pair, DEFAULT_CONTEXT_TOKENS, errors)
    except BaseException:
        pair.close()
        raise
    target = session.target
    return Service(
        session,
        settings,
        verification=plan.verification,
        metrics=metrics or Metrics(target.name, build_id(), context_tokens=str(target.context_length)),
        turns=turns,
        release=session.close,
    ), pair


_MEMORY_SHARE = 0.9
"""of the free memory, for all models together by default"""


def _several(
    settings: ServeSettings, plans: Mapping[str, tuple[ServeSettings, PairPlan]]
) -> tuple[Models, dict[str, str], list[str]]:
    """Models to load on demand, their overview, and notices about unusable files of a folder. Raises
    ModelFileError for any other unusable file."""
    keep_few_heaps()
    turns = Turns()
    limit = settings.models_memory
    memory = int(_MEMORY_SHARE * available_bytes() if limit is None else limit * 2**30)
    counted: dict[str, Metrics] = {}
    found, notices = [], []
    for name, (own, plan) in plans.items():
        metrics = Metrics(name, build_id())
        model = _model(name, own, plan, turns, metrics)
        try:
            if plan.target is None or not plan.target.startswith("hf:"):
                model.needed_bytes()
        except ModelFileError as error:
            if settings.models_dir is None or Path(error.what).parent != settings.models_dir:
                raise  # the user named it
            notices.append(f"{error.what} is not served: {error.why}")
            continue
        counted[name] = metrics
        found.append(model)
    if not found:
        raise SettingError(f"--models-dir {settings.models_dir}", notices[0], "Name another folder.")
    models = Models(
        found,
        max_loaded=settings.models_max,
        memory_bytes=memory,
        idle_s=settings.idle,
        any_model=settings.any_model,
        metrics=AllMetrics(counted),
    )
    idle = "" if settings.idle is None else f"after {settings.idle:g} s without a request, and "
    overview = {
        "models": ", ".join(models.first_names),
        "loaded": f"when asked for, up to {settings.models_max} in {memory / 2**30:.1f} GiB",
        "unloaded": f"{idle}when another one needs the room",
    }
    return models, overview, notices


def _model(name: str, settings: ServeSettings, plan: PairPlan, turns: Turns, metrics: Metrics) -> Model:
    own = settings.model_copy(update={"alias": name})

    def load() -> Service:
        service, _ = _opened(own, plan, Screen(stderr=True, quiet=True), metrics, turns)
        for notice in service.session.notices:
            LOG.info("note", extra={"fields": {"model": name, "note": notice}})
        return service

    def needed_bytes() -> int:
        named = resolve_models(plan.target, plan.draft, plan.hub)
        return Room(named.target, named.draft, plan.options, plan.draft_options, plan.opening).total_bytes

    return Model(tuple(dict.fromkeys(filter(None, (name, settings.alias)))), load, needed_bytes)


def _overview_of_model(settings: ServeSettings, session: Session, pair: Pair) -> dict[str, str]:
    target, engine = session.target, session.engine
    named = f" as {settings.alias}" if settings.alias else ""
    draft = f"draft {pair.draft_name}" if pair.draft_name else "no draft model"
    names = ", ".join(drafter.name for drafter in engine.drafters) or "nobody"
    chooses = isinstance(engine.policy, AutoPolicy) and engine.policy.fixed is None
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
        **_cache(settings),
        **({"log": "requests, with their bodies"} if settings.log_prompts else {}),
    }


def _cache(settings: ServeSettings) -> dict[str, str]:
    places = [] if not settings.cache_ram else ["memory, without a limit"]
    if settings.cache_ram > 0:
        places = [f"{settings.cache_ram} MiB of memory"]
    if settings.cache_dir is not None:
        places.append(f"{settings.cache_dir}, up to {settings.cache_disk:g} GiB")
    if not places:
        return {}
    also = "; earlier texts are remembered there" if settings.remember else ""
    return {"KV": f"what leaves the cache goes to {' and to '.join(places)}{also}"}


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
