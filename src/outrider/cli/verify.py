"""`outrider verify`: the tests of the certificate, their verdict, and the certificate itself."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider import __version__
from outrider.cli.grammar import read_grammar
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.opening import load_pair, open_session
from outrider.cli.output import bars_or_lines, print_notes, write_json
from outrider.cli.plans import UNLIMITED_TOKENS, PairPlan, plan_pair
from outrider.cli.prompt import encodable, read_prompt, unescape
from outrider.cli.settings import VerifySettings
from outrider.cli.verify_report import print_verdict
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import check_writable
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.lab.certify.certificate import Certificate, as_json, model_files, write_certificate
from outrider.lab.certify.checks import certify
from outrider.lab.certify.faults import check_fault
from outrider.lab.certify.plan import BUILT_IN, CertifyPlan, Subject
from outrider.lab.loaded import Progress
from outrider.lab.machine import machine, versions
from outrider.session import Pair, Session, settings_of

DEFAULT_OUTPUT = Path("outrider-verify.json")

_TITLES = {
    "hashing": "models' hashes",
    "greedy": "greedy texts",
    "beside": "two at once",
    "seeds": "seeded texts",
    "drafts": "drafts of heads",
    "sampled": "samples",
}
"""Stages of the tests, as the bars call them."""

_QUICK_PROMPTS = 4
_QUICK_BUILT_IN = tuple(BUILT_IN[i] for i in (1, 2, 4, 9))
"""A code edit, an extraction, a translation and something to invent."""


def make_plan(settings: VerifySettings, verification: Verification) -> CertifyPlan:
    """How much is tested, and under what grammar. Raises SettingError and GrammarError."""
    plan = CertifyPlan(num_tokens=32, num_seeded=16, num_repeated=1, num_sampled=1, samples=300, repeats=12)
    if not settings.quick:
        plan = CertifyPlan()
    if settings.tokens is not None:
        if settings.tokens < 1:
            raise SettingError(f"-n {settings.tokens}", "it asks for nothing", "Give 1 or more.")
        plan = replace(plan, num_tokens=settings.tokens, num_seeded=min(settings.tokens, plan.num_seeded))
    is_piped = settings.prompts_file is not None and str(settings.prompts_file) == "-"
    return replace(
        plan,
        grammar=read_grammar(settings, "the prompts" if is_piped else None),
        seed=settings.test_seed,
        rule=verification.rule,
        lenience=verification.lenience,
        fault=None if settings.inject is None else check_fault(settings.inject),
    )


def _place(settings: VerifySettings) -> Path | None:
    """Where the certificate is written; None for nowhere. Raises SettingError."""
    if settings.output is None and settings.print_json:
        return None
    path = settings.output or DEFAULT_OUTPUT
    if settings.prompts_file is not None and _same_file(path, settings.prompts_file):
        raise SettingError(str(path), "it holds the prompts", "Name another file (--output).")
    check_writable(path, "certificate")
    return path


def verify(settings: VerifySettings) -> int:
    """Test and certify; returns the exit status: 0 where everything holds, else 1."""
    errors = Console(stderr=True, highlight=False)
    place = _place(settings)
    pair_plan = plan_pair(settings, greedy=False)
    if settings.bitwise:
        pair_plan = replace(pair_plan, opening=replace(pair_plan.opening, max_running=2))
    plan, texts = make_plan(settings, pair_plan.verification), _texts(settings)
    certificate = _certify(settings, pair_plan, plan, texts, place, errors)
    if place is not None:
        try:
            write_certificate(place, certificate)
        except SettingError:  # what took minutes is shown nevertheless
            print_verdict(certificate, None)
            raise
    if settings.print_json:
        write_json(as_json(certificate))
    else:
        print_verdict(certificate, place)
    return 0 if certificate.holds else 1


def _certify(
    settings: VerifySettings,
    pair_plan: PairPlan,
    plan: CertifyPlan,
    texts: list[str],
    place: Path | None,
    errors: Console,
) -> Certificate:
    """Load the models and run every test on them."""
    started, before = datetime.now(UTC), perf_counter()
    if not errors.is_terminal:
        errors.print("loading the models")
    pair = load_pair(pair_plan, errors)
    prompts = [_encode(pair, text, raw=settings.raw) for text in texts]
    _spare_models(place, pair)
    sampling = SamplingParams(temperature=0)
    greedy = Request(prompts[0], sampling, verification=plan.verification, grammar=plan.grammar)
    tokens = max(map(len, prompts)) + UNLIMITED_TOKENS + 1
    with open_session(pair_plan, pair, tokens, errors) as session:
        if plan.grammar is not None:
            session.compile(plan.grammar)
        print_notes(errors, session.notices)
        with LoadInterrupt(), bars_or_lines(errors) as report:

            def show(stage: str, part: float | None) -> None:
                report(_TITLES.get(stage, stage), part or 0.0)

            models = _models(pair, show)
            findings = certify(_subject(session, pair), prompts, plan, show)
        return Certificate(
            plan=plan,
            findings=findings,
            prompts=tuple(texts),
            models=models,
            versions=versions(__version__),
            machine=machine(),
            settings=settings_of(session, greedy, plan.seed),
            started=started.isoformat(timespec="seconds"),
            duration_s=perf_counter() - before,
        )


def _subject(session: Session, pair: Pair) -> Subject:
    """What a request to this session would be generated with."""
    engine = session.engine
    draft = next((drafter.model for drafter in engine.drafters if isinstance(drafter, ModelDrafter)), None)
    alignment = None if pair.draft is None else pair.draft.alignment
    return Subject(session.target, engine.drafters, engine.policy, draft, alignment, engine.constrain)


def _same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _spare_models(place: Path | None, pair: Pair) -> None:
    """Refuse to write the certificate over a model."""
    for weights in pair.models:
        if place is not None and _same_file(place, weights.path):
            raise SettingError(str(place), "it is the model itself", "Name another file (--output).")


def _models(pair: Pair, show: Progress) -> dict[str, Any]:
    """Names and hashes of target and draft."""
    cards = {"target": (pair.target.name, pair.target_card)}
    if pair.draft is not None:
        cards["draft"] = (pair.draft.weights.name, pair.draft.card)
    total = sum(card.file_bytes for _, card in cards.values())
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        show("hashing", done / max(total, 1))

    models: dict[str, Any] = {}
    for role, (name, card) in cards.items():
        facts = {"quantization": card.quantization, "architecture": card.architecture}
        models[role] = {"name": name, **facts, "files": model_files(card.path, count)}
    return models


def _texts(settings: VerifySettings) -> list[str]:
    """The prompts that were given, or the built-in ones."""
    texts = [encodable(unescape(text), "prompt") for text in settings.prompts]
    if settings.prompts_file is not None:
        texts += _read_prompts(settings.prompts_file)
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise PromptError(f"prompt {number}", "it is empty", "Give it some text, or leave it out.")
    if not texts:
        return list(_QUICK_BUILT_IN if settings.quick else BUILT_IN)
    return texts[:_QUICK_PROMPTS] if settings.quick else texts


def _read_prompts(path: Path) -> list[str]:
    """One prompt a line; blank lines are passed over."""
    lines = read_prompt(None, None, path, escape=False).split("\n")
    if path.suffix != ".jsonl":
        return [line.rstrip("\r") for line in lines if line.strip()]
    return [_from_json(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def _from_json(line: str, where: str) -> str:
    """A prompt of a JSON line: a string, an object's `prompt`, or the first of its `turns`."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(where, f"not JSON ({error})", "Write one JSON value a line.") from None
    if isinstance(value, dict):
        turns = value.get("turns")
        value = value.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(value, str):
        raise PromptError(where, "it holds no prompt", 'Write a string, or {"prompt": "…"}.')
    return encodable(value, where)


def _encode(pair: Pair, text: str, *, raw: bool) -> tuple[int, ...]:
    return pair.encode(text if raw or pair.template is None else [{"role": "user", "content": text}])
