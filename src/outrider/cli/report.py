"""The readout as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.text import Text

from outrider.cli.screen import Screen
from outrider.cli.settings import RunSettings
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Grammar, Request, TokenLogprob
from outrider.core.errors import ConstraintError
from outrider.core.numbers import counted, time
from outrider.drafters.registry import DRAFTERS
from outrider.lab.comparison import Comparison
from outrider.policy.forced import FORCED
from outrider.session import Session, settings_of
from outrider.session.explain import Choices, Explanation
from outrider.session.readout import DrafterCounts, Readout

SOURCE_STYLES = {"target": "", **{kind.name: kind.color for kind in DRAFTERS}, "grammar": "dim"}
"""The colours of `--show-source`"""

_NAMES = {**{kind.name: kind.title for kind in DRAFTERS}, "grammar": "forced text"}

_CUT_OFF = {
    "length": "the token limit (-n) cut it off",
    "context": "the context is full, -c gives a larger one",
    "cancelled": "it was interrupted",
    "stop": "a stop text (-r) ended it",
}


def source_name(source: str) -> str:
    """A source of tokens, for people."""
    return _NAMES.get(source, source)


def print_incomplete(console: Screen, completion: Completion, grammar: Grammar | None) -> None:
    """Say why an output was cut off before its grammar ends."""
    if grammar is None or completion.is_complete:
        return
    what = "JSON" if grammar.kind in ("json_schema", "json") else "text"
    why = _CUT_OFF.get(completion.finish_reason, completion.finish_reason)
    console.note(f"the {what} is incomplete: {why}")


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
    """Counts and times, one subject a line.

    Args:
        console: Where to.
        readout: The counts and times.
        target: Its name.
        draft: The name of the draft model; None for none.
        explanation: Why the automatic policy drafted as it did; None under another policy.
        grammar: What the output was limited to, if anything.
        estimate: Whether to show the estimated speed-up.
        library: What runs the models, and why.
    """
    limited, latency = grammar is not None, readout.burst_latency_s
    drawn = f" ({readout.drawn_tokens} drafted tokens were sampled)" if readout.drawn_tokens else ""
    is_estimated = estimate and explanation and readout.generated_tokens
    console.rows(
        [
            ("models", f"target {target}, " + (f"draft {draft}" if draft else "no draft model")),
            ("library", library),
            ("prompt", _prompt_line(readout)),
            ("answer", _answer_line(readout, limited=limited)),
            ("target calls", _calls_line(readout)),
            ("structure", structure_line(grammar) if grammar else None),
            ("calls saved", _saved_line(readout) if limited else None),
            ("draft calls", _draft_calls_line(readout, explanation) if draft else None),
            *_drafted(readout),
            ("rule", readout.rule + drawn),
            ("time", _time_line(readout, limited=limited) if readout.generated_tokens else None),
            ("speed-up", estimate_line(explanation) if is_estimated and explanation else None),
            (
                "between bursts",
                f"p50 {time(latency.p50)}, p95 {time(latency.p95)}, max {time(latency.max)}"
                if latency
                else None,
            ),
        ]
    )


def _drafted(readout: Readout) -> list[tuple[str, str]]:
    rows = [(f"  {source_name(name)}", _drafter_line(name, it)) for name, it in readout.drafters.items()]
    if len(rows) == 1:
        return [("drafted", f"{rows[0][1]} (all by {rows[0][0].strip()})")]
    whole = _acceptance_line(readout.drafted_tokens, readout.accepted_tokens)
    return [("drafted", whole), *rows] if rows else []


def _draft_calls_line(readout: Readout, explanation: Explanation | None) -> str:
    """The draft model's calls; if there were none, the acceptance from which it would pay."""
    needed = explanation.draft_must_be_right if explanation else None
    if readout.draft_calls or needed is None:
        return str(readout.draft_calls)
    return f"0: to pay at these call costs, {needed:.0%} of its tokens would have to be accepted (--explain)"


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
    ended = {
        "stop": "complete" if limited and readout.complete else "it ended by itself",
        "length": "token limit (-n)",
        "context": "the context is full, -c gives a larger one",
        "cancelled": "interrupted",
    }[readout.finish_reason]
    return (
        f"{counted(readout.generated_tokens, 'token')} in {time(readout.decode_s)} "
        f"({readout.tokens_per_s:.1f} tokens/s); {ended}"
    )


def _calls_line(readout: Readout) -> str:
    if not readout.target_calls:
        return "0"
    return (
        f"{readout.target_calls}, {readout.tokens_per_target_call:.2f} tokens per call "
        f"({readout.target_calls_saved:.0%} fewer calls than one per token)"
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


def _saved_line(readout: Readout) -> str:
    saved = {source_name(name): counts.calls_saved for name, counts in readout.drafters.items()}
    return ", ".join(f"{count} by {name}" for name, count in saved.items() if count) or "none"


def _acceptance_line(drafted: int, accepted: int) -> str:
    return f"{counted(drafted, 'token')}, {accepted} accepted ({accepted / max(drafted, 1):.0%})"


def _drafter_line(name: str, counts: DrafterCounts) -> str:
    shares = ("-" if share is None else f"{share:.0%}" for share in counts.acceptance_by_position)
    positions = " ".join(shares).rstrip(" -")
    line = f"{_acceptance_line(counts.drafted_tokens, counts.accepted_tokens)}; by position {positions}"
    if name == FORCED and counts.accepted_tokens < counts.drafted_tokens:
        line += "; the target spells the rest with other tokens"
    return line


def _time_line(readout: Readout, *, limited: bool) -> str:
    spent_s = readout.time_s
    parts = {name: getattr(spent_s, name) for name in ("draft", "verify", "sampling", "other")}
    shares = ", ".join(
        f"{name} {time(seconds)} ({seconds / readout.decode_s if readout.decode_s else 0:.0%})"
        for name, seconds in parts.items()
    )
    line = f"{shares}; {readout.overhead:.1%} of it outside model calls"
    spent = f"{time(spent_s.constraint)} ({readout.constraint_share:.1%})"
    return line + (f"; masks and forced text took {spent} of it" if limited else "")


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
    if comparison.speculative.lossy:
        return f"differs from token {divergence.position if divergence else 0} on: --lenience allows it"
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

_FORCED_TEXT = (
    "where a grammar leaves no choice, text is drafted without a model; the target accepts it unless it "
    "spells the text with other tokens"
)


def print_explanation(console: Screen, explanation: Explanation) -> None:
    """The costs of calls, the acceptance needed and reached, the choices, and advice."""
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
            ("forced text", _FORCED_TEXT if FORCED in explanation.acceptance else None),
            ("accepted", accepted),
            ("chosen", chosen or "nothing"),
            ("speed-up", estimate_line(explanation)),
            ("would help", "; ".join(explanation.advice)),
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


def as_json(
    session: Session,
    settings: dict[str, Any],
    readout: Readout,
    run: Completion,
    comparison: Comparison | None,
) -> dict[str, Any]:
    """The result of a run, with a comparison the median one."""
    result = {"text": run.text, **readout.as_json(), "settings": settings, "notices": session.notices}
    if run.logprobs:
        vocabulary = session.target.vocabulary
        result["logprobs"] = [_logprob(scored, vocabulary) for scored in run.logprobs]
    if comparison:
        result |= {
            "plain": comparison.plain.as_json(),
            "speedup": asdict(comparison.speedup),
            "equal": comparison.equal,
            "divergence": asdict(comparison.divergence) if comparison.divergence else None,
        }
    return result


def failure_as_json(error: ConstraintError) -> dict[str, Any]:
    """What a constrained output that could not continue left."""
    return {
        "text": error.text,
        "complete": False,
        "finish_reason": "error",
        "generated_tokens": len(error.tokens),
        "error": str(error),
    }


def _logprob(scored: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        text = piece.decode("utf-8", errors="replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}

    top = [entry(token, logprob) for token, logprob in scored.top]
    return entry(scored.token, scored.logprob) | {"forced": scored.forced, "top_logprobs": top}
