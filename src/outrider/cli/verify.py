"""`outrider verify`: tests, their verdict, and the certificate."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.text import Text

from outrider import __version__
from outrider.cli.grammar import read_grammar
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import write_json
from outrider.cli.plans import UNLIMITED_TOKENS, PairPlan, load_pair, open_session, plan_pair
from outrider.cli.prompt import read_file, unescape
from outrider.cli.report import structure_line
from outrider.cli.screen import Cell, Screen
from outrider.cli.settings import VerifySettings
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import check_writable
from outrider.core.numbers import readable
from outrider.core.params import SamplingParams, Verification
from outrider.lab.certify.certificate import (
    BUILT_IN,
    Certificate,
    as_json,
    certify,
    lines,
    model_files,
    write_certificate,
)
from outrider.lab.certify.sampled import CertifyPlan
from outrider.lab.machine import machine, versions
from outrider.session.options import Progress
from outrider.session.pair import Pair
from outrider.session.session import settings_of

DEFAULT_OUTPUT = Path("outrider-verify.json")

_QUICK_PROMPTS = 4
_QUICK_BUILT_IN = tuple(BUILT_IN[i] for i in (1, 2, 4, 9))
"""A code edit, an extraction, a translation and something to invent."""


def make_plan(settings: VerifySettings, verification: Verification) -> CertifyPlan:
    """How much to test, and under what grammar. Raises SettingError or GrammarError."""
    plan = CertifyPlan(num_tokens=32, num_seeded=16, num_repeated=1, num_sampled=1, samples=300, repeats=12)
    if not settings.quick:
        plan = CertifyPlan()
    if settings.tokens is not None:
        plan = replace(plan, num_tokens=settings.tokens, num_seeded=min(settings.tokens, plan.num_seeded))
    return replace(
        plan,
        grammar=read_grammar(settings),
        seed=settings.test_seed,
        rule=verification.rule,
        fault=settings.inject,
    )


def _place(settings: VerifySettings) -> Path | None:
    if settings.output is None and settings.print_json:
        return None
    path = settings.output or DEFAULT_OUTPUT
    if path.is_file() and path.suffix != ".json":  # it may be the prompts, or a model
        raise SettingError(str(path), "it exists, and is no .json file", "Name another file (--output).")
    check_writable(path, "certificate")
    return path


def verify(settings: VerifySettings) -> int:
    """Test and certify; returns the exit status: 0 if everything holds, else 1."""
    errors = Screen(stderr=True)
    place = _place(settings)
    settings = settings.model_copy(update={"policy": settings.policy or "fixed"})
    pair_plan = plan_pair(settings, greedy=False)
    if settings.bitwise:
        pair_plan = replace(pair_plan, opening=replace(pair_plan.opening, max_running=2))
    plan, texts = make_plan(settings, pair_plan.verification), _texts(settings)
    certificate = _certify(settings, pair_plan, plan, texts, errors)
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
    return 0 if certificate.findings.holds else 1


def _certify(
    settings: VerifySettings, pair_plan: PairPlan, plan: CertifyPlan, texts: list[str], errors: Screen
) -> Certificate:
    started, before = datetime.now(UTC), perf_counter()
    if not errors.is_terminal:
        errors.say("loading the models")
    pair = load_pair(pair_plan, errors)
    is_raw = settings.raw or pair.template is None
    prompts = [pair.encode(text if is_raw else [{"role": "user", "content": text}]) for text in texts]
    sampling = SamplingParams(temperature=0)
    greedy = Request(prompts[0], sampling, verification=Verification(plan.rule), grammar=plan.grammar)
    tokens = max(map(len, prompts)) + UNLIMITED_TOKENS + 1
    with open_session(pair_plan, pair, tokens, errors) as session:
        if plan.grammar is not None:
            session.compile(plan.grammar)
        errors.note(*session.notices)
        with LoadInterrupt(), errors.progress() as report:
            models = _models(pair, report)
            findings = certify(session.engine, prompts, plan, report)
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


def _models(pair: Pair, report: Progress) -> dict[str, Any]:
    cards = {"target": (pair.target.name, pair.target_card)}
    if pair.draft is not None:
        cards["draft"] = (pair.draft.weights.name, pair.draft.card)
    models: dict[str, Any] = {}
    for role, (name, card) in cards.items():
        report("models' hashes", len(models) / len(cards))
        facts = {"quantization": card.quantization, "architecture": card.architecture}
        models[role] = {"name": name, **facts, "files": model_files(card.path)}
    return models


def _texts(settings: VerifySettings) -> list[str]:
    texts = list(map(unescape, settings.prompts))
    if settings.prompts_file is not None:
        lines = read_file(settings.prompts_file).splitlines()
        texts += [line for line in lines if line.strip()]
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise PromptError(f"prompt {number}", "it is empty", "Give it some text, or leave it out.")
    if not texts:
        return list(_QUICK_BUILT_IN if settings.quick else BUILT_IN)
    return texts[:_QUICK_PROMPTS] if settings.quick else texts


# The certificate as people read it


def print_verdict(certificate: Certificate, place: Path | None) -> None:
    """The verdict, then what it rests on."""
    console, plan = Screen(), certificate.plan
    console.print(_headline(certificate))
    names = [f"{role} {model['name']}" for role, model in certificate.models.items()]
    if certificate.findings.stand_in:
        names.append("for the samples the target's own logits, disturbed, take a draft model's place")
    rows: list[tuple[str, Cell]] = [("models", ", ".join(names))]
    rows += [("structure", structure_line(plan.grammar))] if plan.grammar else []
    for line in lines(certificate.findings):
        rows.append((line.label, Text(readable(line.text), "" if line.holds else "red")))
    counts = certificate.findings.counts
    took = (
        f"{certificate.duration_s:.0f} s, {counts['target_calls']} target calls for {counts['tokens']} "
        f"tokens; {counts['drafted_tokens']} tokens drafted, {counts['accepted_tokens']} accepted"
    )
    console.rows([*rows, ("took", took), ("certificate", str(place or ""))], width=11)


def _headline(certificate: Certificate) -> Text:
    plan, findings = certificate.plan, certificate.findings
    if not findings.holds:
        verdict, style, why = "DOES NOT HOLD", "bold red", "speculation changes the output"
        if replace(findings, drafts=None).holds:
            why = "a head drafts wrongly"
    elif not findings.speculates:
        verdict, style = "HOLDS, BUT NOTHING WAS SPECULATED", "bold yellow"
        why = "this target decoded plainly"
    elif not findings.counts["drafted_tokens"]:
        verdict, style = "HOLDS, BUT NO TEXT MET A DRAFT", "bold yellow"
        why = "give longer answers (-n) or other prompts"
    else:
        verdict, style, why = "HOLDS", "bold green", "speculation did not change the output"
        if findings.bit_equal:
            why = "speculation gives plain decoding's text, bit for bit"
    if plan.fault:
        why += f" (fault injected: {plan.fault})"
    return Text(verdict, style=style).append(f": {why}", "not bold")
