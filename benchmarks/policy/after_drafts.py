r"""What a call over one token takes right after another one, and right after a call over a draft.

    python benchmarks/policy/after_drafts.py PROMPTS.jsonl… --out after_drafts.jsonl \
        [--model TARGET.gguf] [--draft DRAFT.gguf]

Each prompt is answered plainly and by the automatic policy, in turn. A row for each prompt has mean
milliseconds of calls over one token (plain decoding's, after one, after a draft) and of what a step does
beside its calls.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, argument_parser, describe, load_prompts, resume, run_program
from outrider import AutoSettings, Pair, SamplingParams, Session, SessionOptions, StepRecord

GREEDY = SamplingParams(temperature=0, seed=0)


def main() -> None:
    arguments = argument_parser(__doc__, prompts=True, pair=True, tokens=96, repetitions=4).parse_args()
    pair = Pair.load(arguments.model, arguments.draft)
    head = describe(*(weights.path for weights in pair.models)) | {"tokens": arguments.tokens}
    resume(arguments.out, head, ["tokens", "models"])
    with Session.open(pair, SessionOptions(4096, policy=AutoSettings())) as session:
        for prompt in load_prompts(arguments.prompts):
            steps: dict[bool, list[StepRecord]] = {False: [], True: []}
            for _ in range(arguments.repetitions):
                for speculate, found in steps.items():
                    session.engine.reset()
                    answer = session.generate(
                        prompt.messages, max_tokens=arguments.tokens, sampling=GREEDY, speculate=speculate
                    )
                    found += [record for record in answer.records if record.kind == "decode"]
            row = {"kind": "prompt", "id": prompt.id, **times(steps[False], steps[True])}
            append(arguments.out, row)
            print(row, flush=True)


def times(plain: list[StepRecord], drafting: list[StepRecord]) -> dict[str, float | None]:
    """Mean milliseconds; None where there was no such call."""
    after: dict[bool, list[float]] = {False: [], True: []}
    for before, record in pairwise(drafting):
        if record.num_evaluated == 1 and not record.read_tokens:
            after[before.num_evaluated > 1].append(record.verify_s)
    own = {
        "plain": plain,
        "no draft": [record for record in drafting if record.num_evaluated == 1],
        "draft": [record for record in drafting if record.num_evaluated > 1],
    }
    calls = {"plain": [r.verify_s for r in plain], "after one": after[False], "after a draft": after[True]}
    return {f"call {name}, ms": mean(found) for name, found in calls.items()} | {
        f"own {name}, ms": mean([r.sampling_s + r.other_s for r in found]) for name, found in own.items()
    }


def mean(seconds: list[float]) -> float | None:
    return round(1000 * fmean(seconds), 3) if seconds else None


if __name__ == "__main__":
    run_program(main)
