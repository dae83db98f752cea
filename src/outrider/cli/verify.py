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
from outrider.cli.prompt import encodable, read_prompt, unescape
from outrider.cli.report import structure_line
from outrider.cli.screen import Rows, Screen
from outrider.cli.settings import VerifySettings
from outrider.core.data import Request
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import check_writable
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.lab.certify.certificate import (
    Certificate,
    as_json,
    certify,
    model_files,
    reasons,
    write_certificate,
)
from outrider.lab.certify.plan import (
    BESIDE,
    BUILT_IN,
    GREEDY,
    REPEATED,
    STABLE,
    CertifyPlan,
    Findings,
    Subject,
)
from outrider.lab.certify.texts import Compared, Difference
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
"""The stages, as progress names them"""

_QUICK_PROMPTS = 4
_QUICK_BUILT_IN = tuple(BUILT_IN[i] for i in (1, 2, 4, 9))
"""A code edit, an extraction, a translation and something to invent."""


def make_plan(settings: VerifySettings, verification: Verification) -> CertifyPlan:
    """How much to test, and under what grammar. Raises SettingError or GrammarError."""
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
        fault=settings.inject,
    )


def _place(settings: VerifySettings) -> Path | None:
    """The certificate's file; None if it is not written. Raises SettingError."""
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
    prompts = [_encode(pair, text, raw=settings.raw) for text in texts]
    sampling = SamplingParams(temperature=0)
    greedy = Request(prompts[0], sampling, verification=Verification(plan.rule), grammar=plan.grammar)
    tokens = max(map(len, prompts)) + UNLIMITED_TOKENS + 1
    with open_session(pair_plan, pair, tokens, errors) as session:
        if plan.grammar is not None:
            session.compile(plan.grammar)
        errors.note(*session.notices)
        with LoadInterrupt(), errors.progress() as report:

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
    engine = session.engine
    draft = next((drafter.model for drafter in engine.drafters if isinstance(drafter, ModelDrafter)), None)
    alignment = None if pair.draft is None else pair.draft.alignment
    return Subject(session.target, engine.drafters, engine.policy, draft, alignment, engine.constrain)


def _models(pair: Pair, show: Progress) -> dict[str, Any]:
    cards = {"target": (pair.target.name, pair.target_card)}
    if pair.draft is not None:
        cards["draft"] = (pair.draft.weights.name, pair.draft.card)
    models: dict[str, Any] = {}
    for role, (name, card) in cards.items():
        show("hashing", len(models) / len(cards))
        facts = {"quantization": card.quantization, "architecture": card.architecture}
        models[role] = {"name": name, **facts, "files": model_files(card.path)}
    return models


def _texts(settings: VerifySettings) -> list[str]:
    texts = [encodable(unescape(text), "prompt") for text in settings.prompts]
    if settings.prompts_file is not None:
        lines = read_prompt(None, None, settings.prompts_file, escape=False).splitlines()
        texts += [line for line in lines if line.strip()]
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise PromptError(f"prompt {number}", "it is empty", "Give it some text, or leave it out.")
    if not texts:
        return list(_QUICK_BUILT_IN if settings.quick else BUILT_IN)
    return texts[:_QUICK_PROMPTS] if settings.quick else texts


def _encode(pair: Pair, text: str, *, raw: bool) -> tuple[int, ...]:
    return pair.encode(text if raw or pair.template is None else [{"role": "user", "content": text}])


# The certificate as people read it

_SHOWN_TIES = 4
_TEXT_ROWS = {
    GREEDY: ("greedy", ""),
    BESIDE: ("", "while another request runs: "),
    REPEATED: ("same seed", "twice: "),
    STABLE: ("seed-stable", "with and without drafts: "),
}
"""label and beginning of the lines about texts"""


def print_verdict(certificate: Certificate, place: Path | None) -> None:
    """The verdict, then what it rests on."""
    console = Screen()
    console.print(_headline(certificate))
    console.rows([*_rows(certificate), ("certificate", str(place or ""))], width=11)


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


def _rows(certificate: Certificate) -> Rows:
    findings, grammar = certificate.findings, certificate.plan.grammar
    names = [f"{role} {model['name']}" for role, model in certificate.models.items()]
    if findings.stand_in:
        names.append("for the samples the target's own logits, disturbed, take a draft model's place")
    counts, drafts = findings.counts, findings.drafts
    redrafted = "of a drafter that read the text afresh"
    redrafted = f"{drafts.same} of {drafts.compared} as {redrafted}" if drafts else ""
    took = (
        f"{certificate.duration_s:.0f} s, {counts['target_calls']} target calls for {counts['tokens']} "
        f"tokens; {counts['drafted_tokens']} tokens drafted, {counts['accepted_tokens']} accepted"
    )
    return [
        *(("because", reason) for reason in reasons(findings)),
        ("models", ", ".join(names)),
        ("structure", structure_line(grammar) if grammar else None),
        *(_text_row(name, parts) for name, parts in findings.texts.items()),
        ("logits", _logits_line(findings) if findings.bit_equal else None),
        ("drafts", redrafted),
        ("sampled", _sampled_line(certificate)),
        ("acceptance", _decisions_line(findings) if findings.decisions else None),
        ("took", took),
    ]


def _text_row(name: str, parts: tuple[Compared, ...]) -> tuple[str, list[str]]:
    label, what = _TEXT_ROWS[name]
    found = [(part.prompt, difference) for part in parts for difference in part.differences]
    ties = sorted((one for one in found if one[1].near_tie), key=lambda one: -_margin(one[1]))
    said = []
    if failed := len(found) - len(ties):
        said.append(f"{failed} differ" + ("" if any(part.rows for part in parts) else " beyond rounding"))
    if ties:
        noun = "near-tie" if len(ties) == 1 else "near-ties"
        widest = f"{len(ties)} {noun} that rounding flips (widest {_margin(ties[0][1]):.3f})"
        said.append(widest if failed else f"the same but for {widest}")
    tokens = sum(part.tokens for part in parts)
    lines = [f"{what}{len(parts)} texts, {tokens} tokens: {', '.join(said) or 'the same, token for token'}"]
    if name == GREEDY:
        lines += [
            f"prompt {prompt + 1}, token {tie.position + 1}: {tie.speculative_text!r} for "
            f"{tie.plain_text!r}, ahead by {tie.speculative_margin:.4f} with drafts, "
            f"{tie.plain_margin:.4f} the other way without"
            for prompt, tie in ties[:_SHOWN_TIES]
        ]
        if len(ties) > _SHOWN_TIES:
            lines.append(f"and {len(ties) - _SHOWN_TIES} more, in the certificate")
    return label, lines


def _margin(tie: Difference) -> float:
    return max(tie.speculative_margin or 0.0, tie.plain_margin or 0.0)


def _logits_line(findings: Findings) -> str:
    differing = sum(part.rows.differing for part in findings.all_texts if part.rows is not None)
    line = f"{findings.compared_rows} positions, with drafts and without: "
    return line + (f"other bits at {differing}" if differing else "the same bits")


def _decisions_line(findings: Findings) -> str:
    acceptance = [test for test in findings.decisions if test.kind == "acceptance"]
    rejected = sum(test.rejected for test in findings.decisions)
    power = ", ".join(
        f"{test.rule} " + ("none" if test.detectable_error is None else f"{test.detectable_error:.1%}")
        for test in acceptance
    )
    count = sum(test.decisions for test in acceptance)
    return (
        f"{count} decisions about drafts, and what followed them: "
        + (f"{rejected} of {len(findings.decisions)} tests reject" if rejected else "as each rule has it")
        + f"; an error of the acceptance ratio is found with probability 0.95 from: {power}"
    )


def _sampled_line(certificate: Certificate) -> str:
    tests, plan = certificate.findings.sampled, certificate.plan
    if not tests:
        return "not tested: nothing is drafted"
    places = sorted({test.behind_tokens for test in tests} - {0})
    after = f" after up to {places[-1]} tokens of the answer" if places else ""
    least, rejected = min(test.p_value for test in tests), sum(test.rejected for test in tests)
    certain = sum(test.cells == 1 for test in tests)
    return (
        f"{len(tests)} tests of {plan.samples} texts{after}: "
        + (f"{rejected} reject" if rejected else "none rejects")
        + f" (least p {least:.2g}; significance {plan.significance:g} over all, Holm)"
        + (f"; {certain} too certain to test anything" if certain else "")
    )
