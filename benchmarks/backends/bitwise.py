"""Is bit-equal text equal, whatever is drafted and whatever else runs, and what does it cost?

    python benchmarks/backends/bitwise.py PROMPTS.jsonl… --out bitwise.jsonl --model TARGET.gguf \
        [--draft DRAFT.gguf] [--library FILE] [--answers 200] [-n 200] [--sequences 8] [--load 2]

Every answer is generated plainly under the flag, alone. Then it is generated with drafts: alone, and as one
of `--sequences` at once, which begin some steps apart while `--load` other requests come and go. Answers take
turns in who drafts and how far, and in greedy decoding and sampling by the seed-stable rule. Every token that
is not plain decoding's counts. Then `--priced` prompts are answered with the flag and without, in turn,
plainly and with the automatic choice. README.md defines the rows. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import (
    Prompt,
    Row,
    append,
    argument_parser,
    describe,
    in_turn,
    load_prompts,
    positive,
    read_rows,
    resume,
    run_program,
)
from outrider import LoadOptions, Request, SamplingParams
from outrider.core.data import Completion
from outrider.core.params import Drafting, Verification
from outrider.engine import Engine
from outrider.session import Pair, Session
from policy.live import in_force

SAME = ("answers", "tokens", "sequences", "load", "priced", "rounds", "seed", "models", "cpu")
"""What all rows of a file share."""
WAYS = {
    "auto": Drafting(),
    "lookup": Drafting("lookup"),
    "model": Drafting("model"),
    "fixed 4": Drafting("fixed", 4),
    "fixed 16": Drafting("fixed", 16),
    "prediction": Drafting("lookup", 12),
}
"""Who drafts and how far; under "prediction" most of the plain text is given as the expected answer."""
_MAX_APART = 12
"""steps between the beginnings of answers that run at once"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to be generated: its prompt's id, who drafts, and the request without drafts."""

    prompt: int
    way: str
    plain: Request

    def drafted(self, text: Sequence[int]) -> Request:
        """The request with drafts; `text` is its plain text."""
        request = replace(self.plain, speculate=True, drafting=WAYS[self.way])
        return replace(request, prediction=tuple(text[1:])) if self.way == "prediction" else request


def parse() -> argparse.Namespace:
    parser = argument_parser(
        __doc__, prompts=True, tokens=200, sequences=8, rounds=5, threads=2, context=2048, seed=0
    )
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--library", default="", metavar="FILE")
    parser.add_argument("--answers", type=positive, default=200)
    parser.add_argument("--load", type=positive, default=2, metavar="REQUESTS")
    parser.add_argument("--priced", type=positive, default=12, metavar="PROMPTS")
    return parser.parse_args()


# Equality


def planned(session: Session, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> list[Answer]:
    """All answers: every other one is sampled."""
    found = []
    ways = [way for way in WAYS if way != "model" or arguments.draft]
    for i, (prompt, way) in enumerate(
        islice(zip(cycle(prompts), cycle(ways), strict=False), arguments.answers)
    ):
        sampled = (i // len(ways)) % 2
        sampling = SamplingParams(temperature=0.8 if sampled else 0, seed=arguments.seed + i)
        request = Request(
            encode(session, prompt),
            sampling,
            max_tokens=arguments.tokens,
            verification=Verification("stable"),
            ignore_end=True,
            speculate=False,
        )
        found.append(Answer(prompt.id, way, request))
    return found


def encode(session: Session, prompt: Prompt) -> tuple[int, ...]:
    return tuple(session.encode(prompt.messages))


def compare(
    alone: Session, many: Session, batch: Sequence[Answer], load: int, rng: random.Random
) -> list[Row]:
    """A batch of answers: plainly and with drafts alone, then all at once under load."""
    texts, singles = [], []
    for answer in batch:
        alone.engine.reset()
        texts.append(alone.engine.generate(answer.plain).tokens)
        if rng.random() < 0.5:  # else what plain decoding stored is used again
            alone.engine.reset()
        singles.append(alone.engine.generate(answer.drafted(texts[-1])))
    requests = [answer.drafted(text) for answer, text in zip(batch, texts, strict=True)]
    together = at_once(many.engine, requests, load, rng)
    return [
        {
            "prompt": answer.prompt,
            "drafting": answer.way,
            "temperature": answer.plain.sampling.temperature,
            "tokens": len(text),
            "differing": {
                name: differing(text, other.tokens)
                for name, other in (("alone", single), ("at_once", shared))
            },
            "drafted": {name: drafted(other) for name, other in (("alone", single), ("at_once", shared))},
        }
        for answer, text, single, shared in zip(batch, texts, singles, together, strict=True)
    ]


def at_once(engine: Engine, requests: Sequence[Request], load: int, rng: random.Random) -> list[Completion]:
    """All answers, begun some steps apart while `load` others always run."""
    waiting = list(enumerate(requests))
    places: dict[int, int] = {}
    found: dict[int, Completion] = {}
    others: set[int] = set()
    pause = 0
    while len(found) < len(requests):
        while len(others) < load:
            others.add(engine.submit(passing(rng.choice(requests), rng)))
        if waiting and pause <= 0:
            place, request = waiting.pop(0)
            places[engine.submit(request)] = place
            pause = rng.randint(0, _MAX_APART)
        pause -= 1
        for update in engine.step():
            if update.error is not None:
                raise update.error
            if update.completion is not None:
                others.discard(update.record.request)
                if update.record.request in places:
                    found[places[update.record.request]] = update.completion
    for other in others:
        engine.cancel(other)
    return [found[i] for i in range(len(requests))]


def passing(request: Request, rng: random.Random) -> Request:
    """A request of somebody else: the beginning of a prompt, drawn without a promise, and soon over."""
    kept = rng.randint(1, len(request.prompt))
    sampling = SamplingParams(temperature=1.0, seed=rng.randrange(2**31))
    return Request(request.prompt[:kept], sampling, max_tokens=rng.randint(4, 64))


def differing(text: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip_longest(text, other))


def drafted(completion: Completion) -> int:
    return sum(len(record.draft) for record in completion.records)


# Price


def price(
    sessions: dict[str, Session], prompt: Prompt, arguments: argparse.Namespace, rng: random.Random
) -> Row:
    """One prompt with the flag and without, plainly and with drafts, in turn."""
    tokens = encode(sessions["bitwise"], prompt)
    request = Request(tokens, SamplingParams(temperature=0), arguments.tokens, ignore_end=True)
    turns = [(name, kind) for name in sessions for kind in ("plain", "auto")]
    runs: Row = {name: {"plain": [], "auto": []} for name in sessions}
    for _, (name, kind) in in_turn(turns, arguments.rounds, rng):
        engine = sessions[name].engine
        engine.reset()
        runs[name][kind].append(seconds(engine.generate(replace(request, speculate=kind == "auto"))))
    return {
        "kind": "price",
        "id": prompt.id,
        "category": prompt.category,
        "prompt_tokens": len(tokens),
    } | runs


def seconds(completion: Completion) -> Row:
    steps = [record.total_s - record.read_s for record in completion.records if record.kind == "decode"]
    prompt_s = sum(r.read_s if r.kind == "decode" else r.total_s for r in completion.records)
    return {"step_s": median(steps), "prompt_s": prompt_s, "token_s": sum(steps) / len(completion.tokens)}


def percent(rows: Sequence[Row], kind: str, field: str) -> float:
    """The median over prompts of how much longer it takes with the flag, in percent."""

    def middle(row: Row, name: str) -> float:
        return float(median(run[field] for run in row[name][kind]))

    return 100 * median(middle(row, "bitwise") / middle(row, "shared") - 1 for row in rows)


# The whole


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What a file's rows say, for people."""
    answers = [answer for row in rows if row["kind"] == "answers" for answer in row["answers"]]
    if answers:
        for name in ("alone", "at_once"):
            wrong = sum(answer["differing"][name] for answer in answers)
            guessed = sum(answer["drafted"][name] for answer in answers)
            tokens = sum(answer["tokens"] for answer in answers)
            yield f"{name}: {len(answers)} answers, {tokens} tokens, {guessed} drafted, {wrong} differ"
    priced = [row for row in rows if row["kind"] == "price"]
    if priced:
        parts = (
            ("plain steps", "plain", "step_s"),
            ("prompts", "plain", "prompt_s"),
            ("answers", "auto", "token_s"),
        )
        costs = (f"{what} {percent(priced, kind, field):+.1f} %" for what, kind, field in parts)
        yield f"price over {len(priced)} prompts: {', '.join(costs)}"


def main() -> None:
    arguments = parse()
    prompts = load_prompts(arguments.prompts)
    random.Random(arguments.seed).shuffle(prompts)
    head = describe(arguments.model, arguments.draft)
    head |= {name: getattr(arguments, name) for name in SAME if hasattr(arguments, name)}
    head |= {"threads": arguments.threads, "context": arguments.context}
    rows = resume(arguments.out, head, SAME)
    options = LoadOptions(threads=arguments.threads, library=arguments.library)
    pair = Pair.load(arguments.model, arguments.draft, options=options)
    alone = pair.open(arguments.context, bitwise=True)
    if not any(row["kind"] == "settings" for row in rows):
        row = {"kind": "settings", "library": pair.target.library_line, "settings": in_force(alone)}
        append(arguments.out, row | {"notices": [*pair.notices, *alone.notices]})
    measure_answers(
        arguments, pair, alone, prompts, {row["batch"] for row in rows if row["kind"] == "answers"}
    )
    sessions = {"bitwise": alone, "shared": pair.open(arguments.context, bitwise=False)}
    done = {row["id"] for row in rows if row["kind"] == "price"}
    for prompt in (prompt for prompt in prompts[: arguments.priced] if prompt.id not in done):
        row = price(sessions, prompt, arguments, random.Random(f"{arguments.seed} {prompt.id}"))
        append(arguments.out, row)
    print(*summary(read_rows(arguments.out)), sep="\n")


def measure_answers(
    arguments: argparse.Namespace, pair: Pair, alone: Session, prompts: Sequence[Prompt], done: set[int]
) -> None:
    """All batches of answers that are not `done`."""
    answers = planned(alone, prompts, arguments)
    size = arguments.sequences
    batches = [answers[i : i + size] for i in range(0, len(answers), size)]
    if len(done) == len(batches):
        return
    many = pair.open(arguments.context, bitwise=True, max_running=size + arguments.load)
    for number, batch in enumerate(batches):
        if number in done:
            continue
        rng = random.Random(f"{arguments.seed} {number}")
        found = compare(alone, many, batch, arguments.load, rng)
        append(arguments.out, {"kind": "answers", "batch": number, "answers": found})
        wrong = sum(sum(answer["differing"].values()) for answer in found)
        print(f"batch {number + 1} of {len(batches)}: {wrong} tokens differ", flush=True)
    many.target.close()


if __name__ == "__main__":
    run_program(main)
