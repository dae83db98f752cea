"""How much faster is the automatic choice in fact, and how near to what hindsight allows?

    python benchmarks/policy/live.py PROMPTS.jsonl… --out live.jsonl [--model TARGET.gguf] \
        [--draft DRAFT.gguf] [--fixed 2,4:0,8:0.75]

Each prompt is answered plainly, by the automatic policy and with any `--fixed` settings (LENGTH or
LENGTH:P_MIN), in `--repetitions` rounds of shuffled order, greedily and from a cold cache. Without
`--model` the embedded default is the target. The costs of both models' calls are measured first. Every
repetition is a session of its own, whose policy goes on learning from prompt to prompt and meets each
of them once.

Then what the draft model would have offered along the policy's own text is recorded beside the results
(OUT.recordings.jsonl), and at what the calls took in those minutes the hindsight bound, the policy and
every fixed setting are replayed. README.md defines the rows. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Prompt, Row, append, argument_parser, describe, load_prompts, resume, run_program, turn
from outrider import LoadOptions, Pair, Request, Session, SessionOptions
from outrider.core.errors import SettingError
from outrider.costs.calibrate import calibrate
from outrider.costs.store import PairCosts
from outrider.policy.fixed import FixedPolicy
from outrider.session.session import settings_of
from policy.bench import Bench, Plan, draft_of
from policy.choices import Choice, fixed
from policy.curves import WRONG, as_row
from policy.recorded import as_json
from policy.summary import token_s

SAME = ("threads", "context", "tokens", "repetitions", "modes", "told", "busy", "settings", "models", "cpu")
"""What all rows of a file share."""


def measure_costs(session: Session, seconds: float, *, on_gpu: bool = False) -> PairCosts:
    drafter = draft_of(session)
    target = calibrate(session.target, seconds=seconds, on_gpu=on_gpu)
    if drafter is None:
        return PairCosts(target)
    return PairCosts(target, calibrate(drafter.model, seconds=seconds, rows="last", on_gpu=on_gpu))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that keep a core busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def fixed_settings(text: str) -> list[Choice]:
    found = []
    for part in filter(None, text.split(",")):
        length, _, p_min = part.partition(":")
        policy = (int(length), 0, float(p_min or FixedPolicy().p_min))
        try:
            FixedPolicy(*policy)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        found.append(fixed(policy[0], policy[2]))
    return found


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: give 1 or more")
    return number


def parse() -> argparse.Namespace:
    parser = argument_parser(
        __doc__, prompts=True, pair=True, repetitions=3, tokens=128, threads=2, context=4096, seed=0
    )
    parser.add_argument("--fixed", type=fixed_settings, default=[], metavar="LENGTH[:P_MIN],…")
    parser.add_argument("--llama-library", default="", help="the native library to use")
    parser.add_argument("--calibration", type=float, default=12.0, metavar="SECONDS", help="for each model")
    parser.add_argument(
        "--wrong-costs", dest="told", choices=list(WRONG), help="tell the policy costs that are wrong"
    )
    parser.add_argument("--busy", type=int, default=0, help="processes that each load a core meanwhile")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while a prompt is measured")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    prompts = load_prompts(arguments.prompts)
    random.Random(arguments.seed).shuffle(prompts)  # categories and the machine's moods unrelated
    plan = Plan(arguments.tokens, arguments.repetitions, arguments.fixed, arguments.seed, arguments.told)
    options = LoadOptions(threads=arguments.threads, library=arguments.llama_library)
    pair = Pair.load(arguments.model, arguments.draft, options=options)
    with Session.open(
        pair, SessionOptions(arguments.context, policy=FixedPolicy())
    ) as session:  # the policies come later
        head = describe(*(weights.path for weights in pair.models))
        head |= {name: getattr(arguments, name) for name in SAME if hasattr(arguments, name)}
        head |= {"modes": [mode.name for mode in plan.modes], "settings": in_force(session)}
        done = {row["id"] for row in resume(arguments.out, head, SAME) if row["kind"] == "prompt"}
        resume(recordings_of(arguments.out), head, SAME)
        waiting = [prompt for prompt in prompts if prompt.id not in done]
        check_room(session, waiting, arguments)
        if waiting:
            with turn(arguments.lock):
                on_gpu = pair.target.library.uses_gpu(pair.target.options)
                costs = measure_costs(session, arguments.calibration, on_gpu=on_gpu)
            append(arguments.out, as_row(costs))
            bench = Bench(session, None if pair.draft is None else pair.draft.alignment, costs, plan)
            with load(arguments.busy):
                run(bench, waiting, arguments.out, arguments.lock)


def in_force(session: Session) -> Row:
    """The load settings, read back from the models."""
    found = settings_of(session, Request((0,)), 0)
    return {
        role: {name: _without_folder(name, value) for name, value in found[role].items() if name != "path"}
        for role in ("target", "draft")
        if role in found
    }


def _without_folder(name: str, value: object) -> object:
    return Path(str(value)).name if name == "library" else value


def recordings_of(out: Path) -> Path:
    return out.with_suffix(".recordings.jsonl")


def check_room(session: Session, prompts: list[Prompt], arguments: argparse.Namespace) -> None:
    """Refuse before anything is measured what would not fit in the end."""
    lengths = [len(session.encode(prompt.messages)) for prompt in prompts]
    needed = max(lengths, default=0) + arguments.tokens
    if needed > arguments.context:
        sys.exit(f"the longest prompt and its answer have {needed} tokens: give -c {needed} or more")


def run(bench: Bench, prompts: list[Prompt], out: Path, lock: Path | None) -> None:
    for number, prompt in enumerate(prompts, 1):
        with turn(lock):
            row, recording = bench.measure(prompt)
        append(recordings_of(out), as_json(recording))  # first: a row says that the prompt is done
        append(out, row)
        print(f"{number}/{len(prompts)} {line(row)}", flush=True)


def line(row: Row) -> str:
    plain_s, auto_s = (median(map(token_s, row["runs"][mode])) for mode in ("plain", "auto"))
    share = row["bound_s"] / row["text_tokens"] / auto_s
    equal = "" if row["equal"] else ", texts differ"
    return (
        f"{row['id']} {row['category']}: {plain_s / auto_s:.2f}x of "
        f"{1 / plain_s:.1f} tokens/s, {share:.0%} of the bound{equal}"
    )


if __name__ == "__main__":
    run_program(main)
