"""The readout as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.text import Text

from outrider.cli.screen import Rows, Screen
from outrider.cli.settings import RunSettings
from outrider.core.data import Completion, Grammar, Request
from outrider.core.errors import ConstraintError
from outrider.core.numbers import counted, time
from outrider.drafters.registry import DRAFTERS
from outrider.lab.comparison import Comparison
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FORCED
from outrider.session.readout import Choices, DrafterCounts, Explanation, Readout, explain, read_out
from outrider.session.session import Session, settings_of

SOURCE_STYLES = {"target": "", **{kind.name: kind.color for kind in DRAFTERS}, "grammar": "dim"}
"""The colours of `--show-source`"""

_NAMES = {**{kind.name: kind.title for kind in DRAFTERS}, "grammar": "forced text"}

ENDED = {
    "length": "token limit (-n)",
    "context": "the context is full, -c gives a larger one",
    "cancelled": "interrupted",
}
"""Why an answer ended before the model ended it"""


def source_name(source: str) -> str:
    """A source of tokens, for people."""
    return _NAMES.get(source, source)


def print_incomplete(console: Screen, completion: Completion, grammar: Grammar | None) -> None:
    """Say why an output was cut off before its grammar ends."""
    if grammar is None or completion.is_complete:
        return
    what = "JSON" if grammar.kind in ("json_schema", "json") else "text"
    console.note(f"the {what} is incomplete: {ENDED.get(completion.finish_reason, 'a stop text (-r)')}")


def print_legend(console: Screen) -> None:
    """The colour of each source."""
    legend = Text("tokens by: ", style="dim")
    for source, style in SOURCE_STYLES.items():
        legend.append(source_name(source), style=style or "bold")
        legend.append("  ")
    console.print(legend)


def print_readout(
    console: Screen,
    readout: Readout,
    target: str,
    draft: str | None,
    explanation: Explanation | None = None,
    grammar: Grammar | None = None,
    *,
    estimate: bool = True,
    library: str = "",
) -> None:
    """Counts and times, one subject a line. `explanation` is the automatic policy's; `estimate`: whether to
    show the estimated speed-up; `library`: what runs the models, and why."""
    spent_s, calls = readout.time_s, str(readout.draft_calls)
    if not readout.draft_calls and explanation and (needed := explanation.draft_must_be_right) is not None:
        calls += (
            f": to pay at these call costs, {needed:.0%} of its tokens would have to be accepted (--explain)"
        )
    targets = f"{readout.target_calls}, {readout.tokens_per_target_call:.2f} tokens per call "
    targets += f"({readout.target_calls_saved:.0%} fewer calls than one per token)"
    saved = {source_name(name): counts.calls_saved for name, counts in readout.drafters.items()}
    drawn = f" ({readout.drawn_tokens} drafted tokens were sampled)" if readout.drawn_tokens else ""
    shares = ", ".join(
        f"{name} {time(seconds)} ({seconds / (readout.decode_s or 1):.0%})"
        for name, seconds in asdict(spent_s).items()
        if name in ("draft", "verify", "sampling", "other")
    )
    spent = f"{shares}; {readout.overhead:.1%} of it outside model calls"
    if grammar:
        masks = f"{time(spent_s.constraint)} ({readout.constraint_share:.1%})"
        spent += f"; masks and forced text took {masks} of it"
    rows: Rows = [
        ("models", f"target {target}, " + (f"draft {draft}" if draft else "no draft model")),
        ("library", library),
        ("prompt", _prompt_line(readout)),
        ("answer", _answer_line(readout, limited=grammar is not None)),
        ("target calls", targets if readout.target_calls else "0"),
        ("draft calls", calls if draft else None),
        *_drafted(readout),
        ("rule", readout.rule + drawn),
    ]
    if grammar:
        counts = ", ".join(f"{count} by {name}" for name, count in saved.items() if count)
        rows = [*rows, ("structure", structure_line(grammar)), ("calls saved", counts or "none")]
    if readout.generated_tokens:
        shown = estimate_line(explanation) if estimate and explanation else None
        rows = [*rows, ("time", spent), ("speed-up", shown)]
    console.rows(rows)


def explanation_of(session: Session, completion: Completion) -> Explanation | None:
    """The automatic policy's explanation; None under another one."""
    policy = session.engine.policy
    return explain(completion.records, policy) if isinstance(policy, AutoPolicy) else None


def estimate_line(explanation: Explanation) -> str:
    """The estimated speed-up."""
    estimate = explanation.estimate
    if estimate is None:
        return f"unknown: {explanation.estimate_unknown}; --compare measures it"
    return (
        f"about {estimate.speedup:.2f}x over plain decoding ({estimate.low:.2f} to {estimate.high:.2f}), "
        "estimated; --compare measures it"
    )


def _prompt_line(readout: Readout) -> str:
    read = readout.read_tokens
    line = counted(readout.prompt_tokens, "token")
    if readout.reused_tokens:
        line += f" ({readout.reused_tokens} kept from before)"
    if read < readout.prompt_tokens - 1 - readout.reused_tokens:
        line += f", {read} of them read"
    if readout.prefill_s > 0 and read > 0:
        line += f" in {time(readout.prefill_s)} ({read / readout.prefill_s:.0f} tokens/s)"
    return f"{line}, {counted(readout.prefill_calls, 'prefill call')}" if readout.prefill_calls else line


def _answer_line(readout: Readout, *, limited: bool) -> str:
    by_itself = "complete" if limited and readout.complete else "it ended by itself"
    ended = ENDED.get(readout.finish_reason, by_itself)
    return (
        f"{counted(readout.generated_tokens, 'token')} in {time(readout.decode_s)} "
        f"({readout.tokens_per_s:.1f} tokens/s); {ended}"
    )


def structure_line(grammar: Grammar) -> str:
    """What the output was limited to, and what it is exact relative to if not to plain decoding."""
    from outrider.constraints.sources import KINDS  # loads slowly, and few runs need it

    line = KINDS[grammar.kind].texts
    if grammar.kind in ("json_schema", "json"):
        line += f", {grammar.style}"
    if grammar.after is not None:
        line += f", after {grammar.after!r}"
    if grammar.lenient:
        line += ", lenient"
    if grammar.fast_forward == "canonical":
        return line + "; fast-forward canonical: exact relative to the canonical tokenization"
    return line + ("; fast-forward off" if grammar.fast_forward == "off" else "")


def _drafted(readout: Readout) -> list[tuple[str, str]]:
    rows = [(f"  {source_name(name)}", _drafter_line(name, it)) for name, it in readout.drafters.items()]
    if len(rows) == 1:
        return [("drafted", f"{rows[0][1]} (all by {rows[0][0].strip()})")]
    whole = _acceptance_line(readout.drafted_tokens, readout.accepted_tokens)
    return [("drafted", whole), *rows] if rows else []


def _acceptance_line(drafted: int, accepted: int) -> str:
    return f"{counted(drafted, 'token')}, {accepted} accepted ({accepted / max(drafted, 1):.0%})"


def _drafter_line(name: str, counts: DrafterCounts) -> str:
    shares = ("-" if share is None else f"{share:.0%}" for share in counts.acceptance_by_position)
    positions = " ".join(shares).rstrip(" -")
    line = f"{_acceptance_line(counts.drafted_tokens, counts.accepted_tokens)}; by position {positions}"
    if name == FORCED and counts.accepted_tokens < counts.drafted_tokens:
        line += "; the target spells the rest with other tokens"
    return line


def print_comparison(console: Screen, comparison: Comparison, *, deterministic: bool) -> None:
    """The speed-up with its spread, and whether the texts are equal."""
    speedup, plain = comparison.speedup, comparison.plain
    runs = f"{counted(speedup.repetitions, 'run')} of each, in turn"
    speed = f"{plain.tokens_per_s:.1f} tokens/s, {counted(plain.target_calls, 'target call')}"
    gained = (
        f"{speedup.decode_median:.2f}x ({speedup.decode_low:.2f} to {speedup.decode_high:.2f}); "
        f"with the prompt {speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}); {runs}"
    )
    same = _equality_line(comparison, deterministic)
    console.rows([("plain decoding", speed), ("speed-up", gained), ("output", same)])


def _equality_line(comparison: Comparison, deterministic: bool) -> str:
    divergence = comparison.divergence
    if comparison.equal:
        return "the same, token for token"
    if not deterministic:
        return (
            "the two texts differ, as any two random samples do; the distribution is the same "
            "(--rule stable or --temp 0 makes the texts equal)"
        )
    if divergence is None:
        return "differs between runs of the same kind: this backend is not deterministic"
    if divergence.margin is None:
        return f"differs from token {divergence.position} on, where plain decoding rules the other token out"
    return (
        f"differs from token {divergence.position} on, where plain decoding prefers its own "
        f"by a margin of {divergence.margin:.4f}; a margin near 0 is rounding: "
        "calls over several tokens add up in another order"
    )


# `--explain`


def print_explanation(console: Screen, explanation: Explanation) -> None:
    """The costs of calls, the acceptance needed and reached, and the choices."""
    console.say("why", "bold")
    console.calls(explanation.target_calls_s)
    if abs(explanation.drift - 1) > 0.1:
        console.say(f"calls take {explanation.drift:.2f} of the time measured before; the costs follow it")
    draft_pays = None
    if explanation.break_even_draft is not None and explanation.draft_step_s is not None:
        share = explanation.draft_step_s / explanation.target_calls_s[1]
        line = break_even_line(explanation.break_even_draft)
        draft_pays = f"{line}; a step of it costs {share:.2f} of the target's"
    accepted = ", ".join(
        f"{source_name(name)} {share:.0%} of the drafted tokens that the target reached"
        for name, share in explanation.acceptance.items()
    )
    chosen = "; ".join(_choice(name, made) for name, made in explanation.choices.items())
    console.rows(
        [
            ("lookup pays", break_even_line(explanation.break_even_lookup)),
            ("draft pays", draft_pays),
            ("accepted", accepted),
            ("chosen", chosen or "nothing"),
            ("speed-up", estimate_line(explanation)),
        ]
    )


def break_even_line(shares: Mapping[int, float | None]) -> str:
    """The acceptance from which drafts pay, by length."""
    parts = [f"{size}: {'never' if share is None else f'{share:.0%}'}" for size, share in shares.items()]
    return f"acceptance by drafted tokens: {', '.join(parts)}"


def _choice(name: str, made: Choices) -> str:
    who = " + ".join(source_name(source) for source in name.split(" + "))
    steps = f"{who} {counted(made.steps, 'step')}"
    if not made.drafted_tokens:
        return steps
    return (
        f"{steps} ({made.drafted_tokens / made.steps:.1f} drafted, "
        f"{made.accepted_tokens / made.steps:.1f} accepted each)"
    )


# The object that `outrider run --json` prints (docs/json.md)


def as_json(
    settings: RunSettings, session: Session, request: Request, run: Completion, comparison: Comparison | None
) -> dict[str, Any]:
    """The result of a run, with a comparison the median one."""
    in_force = settings_of(session, request, run.seed) | {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "ignore_end": request.ignore_end,
        "raw": settings.raw,
    }
    readout = comparison.speculative if comparison else read_out(run)
    result = {"text": run.text, **readout.as_json(), "settings": in_force, "notices": session.notices}
    if comparison:
        result |= {
            "plain": comparison.plain.as_json(),
            "speedup": asdict(comparison.speedup),
            "equal": comparison.equal,
            "divergence": asdict(comparison.divergence) if comparison.divergence else None,
        }
    explanation = explanation_of(session, run)
    return result | ({"explanation": asdict(explanation)} if explanation else {})


def failure_as_json(error: ConstraintError) -> dict[str, Any]:
    """What a constrained output that could not continue left."""
    return {
        "text": error.text,
        "complete": False,
        "finish_reason": "error",
        "generated_tokens": len(error.tokens),
        "error": str(error),
    }
