"""Every policy over stored recordings, at any costs, in seconds: what the choices themselves are worth.

    python benchmarks/policy/replay.py RECORDINGS.jsonl… --costs costs.json… [--every N] [--warm]

Costs are those of `outrider costs --costs FILE`, or a file of live.py, whose measured curves are taken.
For each of them: the automatic choice, lookup or draft model alone and every fixed setting, against the
hindsight bound; what an informed decoder could reach (limit.py); what becomes of the automatic choice
when it is given wrong costs, and with draft models that are always wrong or the target itself; and how
well its estimates come true.

Every recording starts as a process does, with a policy that knows the costs and nothing of the pair; with
`--warm` policies go on learning from one recording to the next, as those of a session do. The automatic
choice is stated both ways. What is always learned over all recordings: the estimates' reliability, what the
informed decoder knows, and how wrong costs and draft models are found out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, geometric_mean, run_program, table
from outrider.core.contracts import Policy
from outrider.costs import CallCosts
from outrider.costs.store import PairCosts
from outrider.lab.recording import Offers, Recording
from outrider.lab.replay import Replayed
from outrider.policy.auto import AutoPolicy
from policy.bound import hindsight_bound
from policy.choices import AUTO, Choice, autos, settings
from policy.curves import WRONG, read_costs
from policy.limit import informed_limit
from policy.recorded import read_recordings
from policy.summary import best_single

DRAFT = "draft"
FIRST = 5
"""prompts within which a policy is to find out that what it was given is wrong"""
DEPARTURE = 12
SURE = 0.95


@dataclass(frozen=True, slots=True)
class Scene:
    """Recordings and what their calls cost in truth."""

    recordings: Sequence[Recording]
    costs: CallCosts
    drafts: dict[str, CallCosts]
    warm: bool = False
    """whether a policy goes on learning from one recording to the next"""

    @classmethod
    def of(cls, recordings: Sequence[Recording], pair: PairCosts, *, warm: bool = False) -> Scene:
        """With the draft model where there are offers of one and costs for it."""
        has_draft = pair.draft is not None and all(DRAFT in r.offers for r in recordings)
        return cls(recordings, pair.target, {DRAFT: pair.draft} if has_draft and pair.draft else {}, warm)

    @property
    def pair(self) -> PairCosts:
        return PairCosts(self.costs, self.drafts.get(DRAFT))

    def policy(self, choice: Choice, given: PairCosts | None = None) -> Policy:
        """A fresh one, that starts from the costs `given`."""
        pair = given or self.pair
        believed = CallCosts.from_json(pair.target.as_json())
        drafts = {DRAFT: CallCosts.from_json(pair.draft.as_json())} if pair.draft and self.drafts else {}
        return choice.policy(believed, drafts)

    def run(self, choice: Choice, given: PairCosts | None = None) -> tuple[list[Replayed], Policy]:
        """Replay all recordings; the policy of the last one is given back."""
        policy, found = self.policy(choice, given), []
        for i, recording in enumerate(self.recordings):
            if i and not self.warm:
                policy = self.policy(choice, given)
            found.append(choice.replay(recording, policy, self.costs, self.drafts))
        return found, policy

    def waited(self, replayed: Sequence[Replayed]) -> list[float]:
        """Speed-ups of all that is waited for: the target's reading of the prompt counts on both sides."""
        read_s = [self.costs.prefill_s(len(r.prompt)) for r in self.recordings]
        return [(r.plain_s + s) / (r.seconds + s) for r, s in zip(replayed, read_s, strict=True)]

    def bounds(self) -> list[float]:
        return [hindsight_bound(r, self.costs, self.drafts) for r in self.recordings]


def main() -> None:
    parser = argument_parser(__doc__, out=False, every=1)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--costs", nargs="+", type=Path, required=True)
    parser.add_argument("--warm", action="store_true", help="learn from one recording to the next")
    arguments = parser.parse_args()
    by_id = {r.id: r for path in arguments.recordings for r in read_recordings(path) if r.tokens}
    recordings = list(by_id.values())[:: arguments.every]  # of one that was made twice the last
    if not recordings:
        sys.exit("there are no recordings in these files")
    for path in arguments.costs:
        scene = Scene.of(recordings, read_costs(path), warm=arguments.warm)
        print(f"## {len(recordings)} recordings at {path.name}{', warm' if scene.warm else ''}\n")
        for line in report(scene):
            print(line, flush=True)


def report(scene: Scene) -> Iterator[str]:
    """All tables for one set of costs."""
    one_s = scene.costs.call_s(1, context=0)
    curve = ", ".join(f"V({n}) {scene.costs.call_s(n, context=0) / one_s:.2f}" for n in (2, 4, 8, 16))
    d = f", d {scene.drafts[DRAFT].call_s(1, context=0) / one_s:.2f}" if scene.drafts else ", no draft model"
    yield f"V(1) {1000 * one_s:.1f} ms, {curve}{d}\n"
    bounds = scene.bounds()
    automatic, _ = scene.run(AUTO)
    learned, policy = replace(scene, warm=True).run(AUTO)
    yield from compare(scene, bounds, automatic, learned)
    if isinstance(policy, AutoPolicy):
        yield from categories(scene, bounds, automatic, learned, policy)
        yield from reliability(policy, learned)
    yield from robustness(replace(scene, warm=True))


def compare(
    scene: Scene, bounds: list[float], automatic: list[Replayed], learned: list[Replayed]
) -> Iterator[str]:
    """Each choice against plain decoding and against the bound; `learned` is the automatic one of a policy
    that went on learning."""
    has_draft, lines = bool(scene.drafts), []
    fixed = {choice.name: scene.run(choice)[0] for choice in settings(has_draft)}
    others = {choice.name: scene.run(choice)[0] for choice in autos(has_draft) if choice is not AUTO}
    both = {AUTO.name: automatic, f"{AUTO.name}, warm": learned}
    for name, found in {**both, **others, **fixed}.items():
        shares = [bound / r.seconds for bound, r in zip(bounds, found, strict=True)]
        speedups = [r.speedup for r in found]
        waited = f"{geometric_mean(scene.waited(found)):.3f}x"
        lines.append(
            [
                name,
                f"{geometric_mean(speedups):.3f}x",
                waited,
                f"{min(speedups):.2f}x",
                f"{geometric_mean(shares):.1%}",
            ]
        )
    bound = geometric_mean(r.plain_s / b for r, b in zip(automatic, bounds, strict=True))
    lines.append(["bound", f"{bound:.3f}x", "", "", "100.0%"])
    yield from table(["choice", "speed-up", "with the prompt", "lowest", "of the bound"], lines)
    times = {name: [r.seconds for r in found] for name, found in fixed.items()}
    single, best_s = best_single(times)
    ours = [r.seconds for r in automatic]
    regrets = [
        mine / min(theirs) - 1 for mine, theirs in zip(ours, zip(*times.values(), strict=True), strict=True)
    ]
    within = sum(regret <= 0.08 for regret in regrets) / len(regrets)
    yield (
        f"Best single setting: {single}; automatic {best_s / geometric_mean(ours):.3f}x of its speed. "
        f"Against the best for each prompt: within 8% for {within:.0%}, "
        f"median {median(regrets):+.1%}, largest {max(regrets):+.1%}.\n"
    )


def categories(
    scene: Scene,
    bounds: list[float],
    automatic: list[Replayed],
    learned: list[Replayed],
    policy: AutoPolicy,
) -> Iterator[str]:
    """The automatic choice by category, and the informed decoder's shares beside its own; `learned` is that
    of `policy`, which went on learning."""
    draft = (DRAFT, scene.drafts[DRAFT]) if scene.drafts else None
    limits = [informed_limit(r, policy.state, scene.costs, draft) for r in scene.recordings]
    names = list(dict.fromkeys(r.category for r in scene.recordings))
    waited, lines = scene.waited(automatic), []
    for name in (*names, "all"):
        group = [i for i, r in enumerate(scene.recordings) if name in ("all", r.category)]
        speedups = [automatic[i].speedup for i in group]
        columns = (
            [automatic[i].plain_s / bounds[i] for i in group],
            [bounds[i] / automatic[i].seconds for i in group],
            [bounds[i] / limits[i][1] for i in group],
            [bounds[i] / limits[i][0] for i in group],
        )
        bound, *shares = map(geometric_mean, columns)
        line = [
            name,
            str(len(group)),
            f"{geometric_mean(speedups):.3f}x",
            f"{geometric_mean(waited[i] for i in group):.3f}x",
        ]
        line += [
            f"{geometric_mean(learned[i].speedup for i in group):.3f}x",
            f"{min(speedups):.2f}x",
            f"{bound:.2f}x",
        ]
        lines.append(line + [f"{share:.1%}" for share in shares])
    header = [
        "category",
        "prompts",
        "speed-up",
        "with the prompt",
        "warm",
        "lowest",
        "bound",
        "of the bound",
        "informed",
        "as it expects",
    ]
    yield from table(header, lines)


def reliability(policy: AutoPolicy, replayed: Sequence[Replayed]) -> Iterator[str]:
    """Estimated and real acceptance of the tokens that were verified, in ten bins."""
    yield "Estimated acceptance against what came (tokens that the target verified):\n"
    for name in sorted(policy.state.verified):
        bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
        for record in (record for one in replayed for record in one.records):
            verified = zip(
                record.draft.sources, record.draft.acceptance, range(len(record.tokens)), strict=False
            )
            for source, estimate, i in verified:
                if source == name:
                    bins[min(int(10 * estimate), 9)].append((estimate, i < record.num_accepted))
        brier = fmean((estimate - came) ** 2 for found in bins for estimate, came in found)
        means = [[f"{fmean(values):.2f}" for values in zip(*found, strict=True)] for found in bins if found]
        yield from table(
            [f"{name}, Brier {brier:.4f}", *(estimated for estimated, _ in means)],
            [
                ["accepted", *(accepted for _, accepted in means)],
                ["tokens", *(str(len(found)) for found in bins if found)],
            ],
        )


def robustness(scene: Scene) -> Iterator[str]:
    """The automatic choice where something is not as it was given, and what it makes of it in time."""
    cases: list[tuple[str, Scene, PairCosts | None]] = [("as it is", scene, None)]
    cases += [
        (f"given {name}", scene, wrong(scene.pair))
        for name, wrong in WRONG.items()
        if scene.drafts or "draft" not in name
    ]
    if scene.drafts:
        liar = [with_draft(r, wrong=True) for r in scene.recordings]
        twin = [with_draft(r, wrong=False) for r in scene.recordings]
        cases.append(("draft always wrong", replace(scene, recordings=liar), None))
        cases.append(
            ("draft is the target", replace(scene, recordings=twin, drafts={DRAFT: scene.costs}), None)
        )
    lines = []
    for name, case, given in cases:
        speedups = [r.speedup for r in case.run(AUTO, given)[0]]
        first, rest = speedups[:FIRST], speedups[FIRST:] or speedups
        worst, low = min(speedups), sum(speedup < 0.95 for speedup in speedups)
        lines.append(
            [
                name,
                f"{geometric_mean(speedups):.3f}x",
                f"{geometric_mean(first):.3f}x",
                f"{geometric_mean(rest):.3f}x",
            ]
        )
        lines[-1] += [f"{worst:.2f}x", str(low)]
    header = ["", "speed-up", f"first {FIRST} prompts", "the rest", "lowest", "below 0.95x"]
    yield from table(header, lines)


def with_draft(recording: Recording, *, wrong: bool) -> Recording:
    """The recording with a draft model that is sure of itself: never right, or always."""
    answer = recording.tokens
    tokens = tuple(token + 1 for token in answer) if wrong else answer
    path = tuple((token, SURE) for token in tokens[:1] * DEPARTURE)
    departures = dict.fromkeys(range(len(answer)), path) if wrong else {}
    offers = Offers(tokens, (SURE,) * len(answer), departures)
    return replace(recording, offers={DRAFT: offers})


if __name__ == "__main__":
    run_program(main)
