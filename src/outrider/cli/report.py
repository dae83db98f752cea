"""The readout as people read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.cli.output import print_notes, print_rows, readable
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
from outrider.session.readout import DrafterCounts, Latency, Readout

SOURCE_STYLES = {"target": "", **{kind.name: kind.color for kind in DRAFTERS}, "grammar": "dim"}
"""How `--show-source` colours a token, by who produced it."""

_NAMES = {**{kind.name: kind.title for kind in DRAFTERS}, "grammar": "forced text"}

_CUT_OFF = {
    "length": "the token limit (-n) cut it off",
    "context": "the context is full, -c gives a larger one",
    "cancelled": "it was interrupted",
    "stop": "a stop text (-r) ended it",
}


def source_name(source: str) -> str:
    """A source of tokens, as people read it."""
    return _NAMES.get(source, source)


def print_incomplete(console: Console, completion: Completion, grammar: Grammar | None) -> None:
    """Say why an output is only the beginning of what its grammar asks for."""
    if grammar is None or completion.is_complete:
        return
    what = "JSON" if grammar.kind in ("json_schema", "json") else "text"
    why = _CUT_OFF.get(completion.finish_reason, completion.finish_reason)
    print_notes(console, [f"the {what} is incomplete: {why}"])


def print_legend(console: Console) -> None:
    """The colour of each source."""
    legend = Text("tokens by: ", style="dim")
    for source, style in SOURCE_STYLES.items():
        legend.append(source_name(source), style=style or "bold")
        legend.append("  ")
    console.print(legend)


def print_readout(
    console: Console,
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
    rows = {
        "models": f"target {target}, " + (f"draft {draft}" if draft else "no draft model"),
        **({"library": library} if library else {}),
        "prompt": _prompt_line(readout),
        "answer": _answer_line(readout, limited=grammar is not None),
        "target calls": _calls_line(readout),
    }
    if grammar:
        rows["structure"] = structure_line(grammar)
        rows["calls saved"] = _saved_line(readout)
    if draft:
        rows["draft calls"] = _draft_calls_line(readout, explanation)
    if readout.drafted_tokens:
        rows["drafted"] = _acceptance_line(readout.drafted_tokens, readout.accepted_tokens)
        for name, counts in readout.drafters.items():
            rows[f"  {source_name(name)}"] = _drafter_line(name, counts)
        if len(readout.drafters) == 1:
            name, line = rows.popitem()
            rows["drafted"] = f"{line} (all by {name.strip()})"
    drawn = f" ({readout.drawn_tokens} drafted tokens were sampled)" if readout.drawn_tokens else ""
    rows["rule"] = readout.rule + drawn
    if readout.generated_tokens:
        rows["time"] = _time_line(readout, limited=grammar is not None)
    if estimate and explanation and readout.generated_tokens:
        rows["speed-up"] = estimate_line(explanation)
    if readout.burst_latency_s:
        rows["between bursts"] = _latency_line(readout.burst_latency_s)
    print_rows(console, rows.items())


def _draft_calls_line(readout: Readout, explanation: Explanation | None) -> str:
    """Calls of the draft model; where there were none, the acceptance at which it would pay."""
    needed = explanation.draft_must_be_right if explanation else None
    if readout.draft_calls or needed is None:
        return str(readout.draft_calls)
    return f"0: to pay at these call costs, {needed:.0%} of its tokens would have to be accepted (--explain)"


def estimate_line(explanation: Explanation) -> str:
    """The speed-up as far as one run shows it."""
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
    """What the output was limited to, and what it is exact relative to where that is not plain decoding."""
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
    return f"{counted(drafted, 'token')}, {accepted} accepted" + (
        f" ({accepted / drafted:.0%})" if drafted else ""
    )


def _drafter_line(name: str, counts: DrafterCounts) -> str:
    shares = ("-" if share is None else f"{share:.0%}" for share in counts.acceptance_by_position)
    positions = " ".join(shares).rstrip(" -")
    line = f"{_acceptance_line(counts.drafted_tokens, counts.accepted_tokens)}; by position {positions}"
    if name == FORCED and counts.accepted_tokens < counts.drafted_tokens:
        line += "; the target spells the rest with other tokens"
    return line


def _time_line(readout: Readout, *, limited: bool) -> str:
    spent_s = readout.time_s
    parts = {
        "draft": spent_s.draft,
        "verify": spent_s.verify,
        "sampling": spent_s.sampling,
        "other": spent_s.other,
    }
    shares = ", ".join(
        f"{name} {time(seconds)} ({seconds / readout.decode_s if readout.decode_s else 0:.0%})"
        for name, seconds in parts.items()
    )
    line = f"{shares}; {readout.overhead:.1%} of it outside model calls"
    spent = f"{time(spent_s.constraint)} ({readout.constraint_share:.1%})"
    return line + (f"; masks and forced text took {spent} of it" if limited else "")


def _latency_line(latency: Latency) -> str:
    return f"p50 {time(latency.p50)}, p95 {time(latency.p95)}, max {time(latency.max)}"


def print_comparison(console: Console, comparison: Comparison, *, deterministic: bool) -> None:
    """Speed-up with its spread, and whether the outputs are equal."""
    speedup, plain = comparison.speedup, comparison.plain
    runs = f"{counted(speedup.repetitions, 'run')} of each, in turn"
    rows = {
        "plain decoding": f"{plain.tokens_per_s:.1f} tokens/s, {counted(plain.target_calls, 'target call')}",
        "speed-up": (
            f"{speedup.decode_median:.2f}x ({speedup.decode_low:.2f} to {speedup.decode_high:.2f}); "
            f"with the prompt {speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}); {runs}"
        ),
        "output": _equality_line(comparison, deterministic),
    }
    print_rows(console, rows.items())


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


# `--explain`: what was chosen and why, on one screen.

_BAR_COLUMNS = 28


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The cost curve, what drafts must reach, what they reached, what was chosen, and what would help."""
    console.print(Text("why", style="bold"))
    _print_curve(console, explanation)
    rows = {"lookup pays": _break_even_line(explanation.break_even_lookup)}
    if explanation.break_even_draft is not None and explanation.draft_step_s is not None:
        share = explanation.draft_step_s / explanation.target_calls_s[1]
        line = _break_even_line(explanation.break_even_draft)
        rows["draft pays"] = f"{line}; a step of it costs {share:.2f} of the target's"
    if FORCED in explanation.acceptance:
        rows["forced text"] = (
            "where a grammar leaves no choice, text is drafted without a model; the target accepts it unless "
            "it spells the text with other tokens"
        )
    if explanation.acceptance:
        rows["accepted"] = ", ".join(
            f"{source_name(name)} {share:.0%} of the drafted tokens that the target reached"
            for name, share in explanation.acceptance.items()
        )
    rows["chosen"] = "; ".join(_choice(name, made) for name, made in explanation.choices.items()) or "nothing"
    rows["speed-up"] = estimate_line(explanation)
    if explanation.advice:
        rows["would help"] = "; ".join(explanation.advice)
    print_rows(console, rows.items())


def _print_curve(console: Console, explanation: Explanation) -> None:
    """What a call costs by its tokens, as bars, in plain steps."""
    calls_s = explanation.target_calls_s
    widest = max(calls_s.values())
    console.print(Text("  a call over       takes  in plain steps", style="dim"))
    for size, seconds in calls_s.items():
        bar = "#" * max(1, round(_BAR_COLUMNS * seconds / widest))
        line = f"  {size:>3} tokens  {seconds * 1000:7.1f} ms  {seconds / calls_s[1]:5.2f}  {bar}"
        console.print(Text(readable(line)))
    if abs(explanation.drift - 1) > 0.1:
        console.print(
            Text(f"  calls take {explanation.drift:.2f} of the time measured before, which the costs follow")
        )


def _break_even_line(shares: dict[int, float | None]) -> str:
    parts = [
        f"{size} at {share:.0%}" if share is not None else f"{size} never" for size, share in shares.items()
    ]
    return "drafts of " + ", ".join(parts) + " acceptance"


def _choice(name: str, made: Choices) -> str:
    who = " + ".join(source_name(source) for source in name.split(" + "))
    steps = f"{who} {counted(made.steps, 'step')}"
    if not made.drafted_tokens:
        return steps
    return (
        f"{steps} ({made.drafted_tokens / made.steps:.1f} drafted, "
        f"{made.accepted_tokens / made.steps:.1f} accepted each)"
    )


# The object that `outrider run --json` prints; the README documents its keys.


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
    """The result of a run: of a comparison's median one, where there was a comparison."""
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
    """What is left of a constrained output that could not go on."""
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
