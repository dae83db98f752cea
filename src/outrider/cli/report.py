"""The readout as people read it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.compare import Comparison
from outrider.readout import DrafterCounts, Readout

SOURCE_STYLES = {"target": "", "draft": "green", "lookup": "cyan"}
"""How `--show-source` colours a token, by who produced it."""

_NAMES = {"draft": "draft model", "lookup": "lookup"}


def print_legend(console: Console) -> None:
    """Which colour stands for which source."""
    legend = Text("tokens by: ", style="dim")
    for source, style in SOURCE_STYLES.items():
        legend.append(_NAMES.get(source, source), style=style or "bold")
        legend.append("  ")
    console.print(legend)


def print_readout(console: Console, readout: Readout, target: str, draft: str | None) -> None:
    """Counts and times, one subject a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("models", f"target {target}" + (f", draft {draft}" if draft else ", no draft model"))
    table.add_row("prompt", _prompt_line(readout))
    table.add_row("answer", _answer_line(readout))
    table.add_row("target calls", _calls_line(readout))
    table.add_row("draft calls", str(readout.draft_calls))
    if readout.drafted_tokens:
        table.add_row("drafted", _acceptance_line(readout))
        for name, counts in readout.drafters.items():
            table.add_row(f"  {_NAMES.get(name, name)}", _drafter_line(counts))
    table.add_row("time", _time_line(readout))
    if readout.burst_latency_s:
        latency = readout.burst_latency_s
        table.add_row(
            "between bursts", f"p50 {_ms(latency.p50)}, p95 {_ms(latency.p95)}, max {_ms(latency.max)}"
        )
    console.print(table)


def _prompt_line(readout: Readout) -> str:
    evaluated = readout.prompt_tokens - 1 - readout.reused_tokens
    line = f"{readout.prompt_tokens} tokens"
    if readout.reused_tokens:
        line += f" ({readout.reused_tokens} kept from before)"
    if readout.prefill_s > 0 and evaluated > 0:
        line += f", encoded in {readout.prefill_s:.2f} s ({evaluated / readout.prefill_s:.0f} tokens/s)"
    return f"{line}, {readout.prefill_calls} prefill calls"


def _answer_line(readout: Readout) -> str:
    ended = {
        "stop": "it ended",
        "length": "token limit",
        "context": "the context is full: give a larger one with -c",
        "cancelled": "interrupted",
    }[readout.finish_reason]
    return (
        f"{readout.generated_tokens} tokens in {readout.decode_s:.2f} s "
        f"({readout.tokens_per_s:.1f} tokens/s); {ended}"
    )


def _calls_line(readout: Readout) -> str:
    return (
        f"{readout.target_calls}: {readout.tokens_per_target_call:.2f} tokens per call, "
        f"{readout.target_calls_saved:.0%} of the calls saved"
    )


def _acceptance_line(readout: Readout) -> str:
    return (
        f"{readout.drafted_tokens} tokens, {readout.accepted_tokens} accepted "
        f"({_percent(readout.acceptance_rate)})"
    )


def _drafter_line(counts: DrafterCounts) -> str:
    positions = " ".join(_percent(share) for share in counts.acceptance_by_position)
    return (
        f"{counts.drafted_tokens} drafted, {counts.accepted_tokens} accepted "
        f"({_percent(counts.acceptance_rate)}); by position {positions}"
    )


def _time_line(readout: Readout) -> str:
    time = readout.time_s
    parts = {"draft": time.draft, "verify": time.verify, "sampling": time.sampling, "other": time.other}
    shares = ", ".join(
        f"{name} {seconds:.2f} s ({seconds / readout.decode_s if readout.decode_s else 0:.0%})"
        for name, seconds in parts.items()
    )
    return f"{shares}; outside model calls {readout.overhead:.1%}"


def print_comparison(console: Console, comparison: Comparison, *, greedy: bool) -> None:
    """Speed-up with its spread, and whether the outputs are equal."""
    speedup, plain = comparison.speedup, comparison.plain
    console.print(
        f"[bold]against plain decoding[/] ({speedup.repetitions} runs of each, in turn): "
        f"[bold]{speedup.decode_median:.2f}x[/] decoding "
        f"({speedup.decode_low:.2f} to {speedup.decode_high:.2f}), "
        f"{speedup.median:.2f}x with the prompt ({speedup.low:.2f} to {speedup.high:.2f}); "
        f"plain: {plain.tokens_per_s:.1f} tokens/s, {plain.target_calls} target calls",
        highlight=False,
    )
    console.print(_equality_line(comparison, greedy), highlight=False)


def _equality_line(comparison: Comparison, greedy: bool) -> str:
    divergence = comparison.divergence
    if comparison.equal:
        return "The output is the same, token for token."
    if not greedy:
        return "The outputs differ, as two samples do, not their distribution; --temp 0 compares texts."
    if divergence is None:
        return "[yellow]Runs of the same kind differ among themselves: this backend is not deterministic.[/]"
    return (
        f"[yellow]The outputs differ from token {divergence.position} on, where plain decoding prefers "
        f"its own by a logit margin of {divergence.margin:.4f}[/] (a batch rounds differently)."
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
