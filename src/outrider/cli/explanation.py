"""`--explain`: what was chosen and why, on one screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from outrider.cli.output import readable
from outrider.cli.report import estimate_line, source_name
from outrider.cli.tables import print_rows
from outrider.policy.forced import FORCED
from outrider.session.explain import Choices, Explanation

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
            "what a grammar leaves no choice about is drafted without a model; it is accepted unless the "
            "target spells it with other tokens"
        )
    if explanation.acceptance:
        rows["judged right"] = ", ".join(
            f"{source_name(name)} {share:.0%} of the tokens that the target came to "
            f"(Brier score of the estimates {explanation.brier[name]:.3f})"
            for name, share in explanation.acceptance.items()
        )
    rows["chosen"] = "; ".join(_choice(name, made) for name, made in explanation.choices.items()) or "nothing"
    if explanation.estimate:
        rows["speed-up"] = estimate_line(explanation.estimate)
    if explanation.advice:
        rows["would help"] = "; ".join(explanation.advice)
    print_rows(console, rows.items())


def _print_curve(console: Console, explanation: Explanation) -> None:
    """What a call costs by its tokens, as bars, in plain steps."""
    calls_s = explanation.target_calls_s
    widest = max(calls_s.values())
    for size, seconds in calls_s.items():
        bar = "#" * max(1, round(_BAR_COLUMNS * seconds / widest))
        line = f"  {size:>3} tokens  {seconds * 1000:7.1f} ms  {seconds / calls_s[1]:5.2f}  {bar}"
        console.print(Text(readable(line)))
    if abs(explanation.drift - 1) > 0.1:
        console.print(Text(f"  calls take {explanation.drift:.2f} of the time measured before: followed"))


def _break_even_line(shares: dict[int, float | None]) -> str:
    parts = [
        f"{size} at {share:.0%}" if share is not None else f"{size} never" for size, share in shares.items()
    ]
    return "drafts of " + ", ".join(parts) + " acceptance"


def _choice(name: str, made: Choices) -> str:
    who = " + ".join(source_name(source) for source in name.split(" + "))
    steps = f"{who} {made.steps} step{'s' if made.steps != 1 else ''}"
    if not made.drafted_tokens:
        return steps
    return (
        f"{steps} ({made.drafted_tokens / made.steps:.1f} drafted, "
        f"{made.accepted_tokens / made.steps:.1f} accepted each)"
    )
