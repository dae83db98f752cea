"""What does each verification rule accept, at each temperature, and what could be accepted at most?

    python benchmarks/exactness/acceptance.py TARGET DRAFT PROMPTS.jsonl[:EVERY] … --out acceptance.jsonl

Every prompt is answered under each rule with the draft model alone and a fixed draft length, live. At
every position that was judged, both distributions are known, so the row also holds the means of: Σ min(p, q)
(no rule that judges token by token accepts a drawn token more often), p(argmax q) (what the most likely
token gets), and (1 - TV) / (1 + TV) (what the seed-stable rule is promised).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, load_prompts, run_program
from outrider import FixedPolicy, Pair, Request, SamplingParams, Verification, read_out
from outrider.core.data import Draft, Verdict
from outrider.core.params import DraftSampling, Rule
from outrider.engine import Engine
from outrider.sampling import LazyDistributions, probability
from outrider.verify import Verifier, excess

SETTINGS: tuple[tuple[Rule, DraftSampling], ...] = (
    ("token", "greedy"),
    ("token", "sampled"),
    ("block", "sampled"),
    ("stable", "sampled"),
    ("auto", "auto"),
)


class Overlaps(Verifier):
    """A Verifier that notes, for each judged position, how far the two distributions overlap."""

    seen: list[tuple[float, float]]

    @property
    def compares(self) -> bool:
        return True  # so that the draft's distributions are there for most likely tokens too

    def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        verdict = super().verify(target, draft, position)
        offered = draft.probs or draft.greedy_probs
        for i in range(min(len(offered), verdict.num_accepted + 1)):
            best = int(offered[i].tokens[np.argmax(offered[i].probs)])
            Overlaps.seen.append(
                (1 - float(excess(target[i], offered[i]).sum()), probability(target[i], best))
            )
        return verdict


def measure(engine: Engine, request: Request) -> dict[str, Any]:
    Overlaps.seen = []
    engine.reset()
    readout = read_out(engine.generate(request))
    overlap, likeliest = np.array(Overlaps.seen or [(np.nan, np.nan)]).T
    lengths = [r for r in readout.acceptance_by_position if r is not None]
    return {
        "rule": request.verification.rule,
        "draft_sampling": request.verification.draft_sampling,
        "temperature": request.sampling.temperature,
        "generated": readout.generated_tokens,
        "target_calls": readout.target_calls,
        "drafted": readout.drafted_tokens,
        "drawn": readout.drawn_tokens,
        "accepted": readout.accepted_tokens,
        "by_position": [round(rate, 4) for rate in lengths],
        "overlap": overlap.round(4).tolist(),
        "likeliest": likeliest.round(4).tolist(),
        "overhead": round(readout.overhead, 5),
    }


def main() -> None:
    parser = argument_parser(__doc__, prompts=True, tokens=64)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--rules", nargs="+", choices=get_args(Rule), default=list(get_args(Rule)))
    arguments = parser.parse_args()
    policy = FixedPolicy(arguments.draft_max, p_min=0)
    rows: list[dict[str, Any]] = [describe(arguments.target, arguments.draft)]
    with Pair.load(arguments.target, arguments.draft).open(2048, lookup=False) as session:
        engine = Engine(session.target, session.engine.drafters, policy, verifier=Overlaps.of)
        for number, asked in enumerate(load_prompts(arguments.prompts)):
            prompt = session.encode(asked.messages)
            for temperature in arguments.temperatures:
                for rule, drawing in SETTINGS:
                    if rule not in arguments.rules:
                        continue
                    sampling = SamplingParams(temperature=temperature, seed=number)
                    verification = Verification(rule=rule, draft_sampling=drawing)
                    request = Request(
                        prompt, sampling, arguments.tokens, ignore_end=True, verification=verification
                    )
                    rows.append({"prompt": number, **measure(engine, request)})
            print(f"prompt {number} done", file=sys.stderr)
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    report(rows[1:])


def report(rows: list[dict[str, Any]]) -> None:
    for temperature, rule, drawing in sorted(
        {(r["temperature"], r["rule"], r["draft_sampling"]) for r in rows}
    ):
        key = (temperature, rule, drawing)
        own = [r for r in rows if (r["temperature"], r["rule"], r["draft_sampling"]) == key]
        overlap = np.concatenate([r["overlap"] for r in own])
        likeliest = np.concatenate([r["likeliest"] for r in own])
        generated, calls = sum(r["generated"] for r in own), sum(r["target_calls"] for r in own)
        print(
            f"T={temperature} {rule:6} {drawing:8} tokens/call {generated / calls:.3f}  accepted/drafted "
            f"{sum(r['accepted'] for r in own) / sum(r['drafted'] for r in own):.3f}  first "
            f"{np.mean([r['by_position'][0] for r in own]):.3f}  Σmin {overlap.mean():.3f}  "
            f"p(argmax q) {likeliest.mean():.3f}  (1-TV)/(1+TV) {(overlap / (2 - overlap)).mean():.3f}  "
            f"own time {np.median([r['overhead'] for r in own]):.2%}"
        )


if __name__ == "__main__":
    run_program(main)
