"""The answers that a distillation needs, made on all nodes of a cluster and stored here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from outrider.core.errors import BackendError
from outrider.core.notices import notify
from outrider.fleet.ray.joining import ENVIRONMENT, find_nodes
from outrider.fleet.ray.machines import at_hand
from outrider.lab.distill.examples import Example, example_path, read_example, write_example
from outrider.lab.distill.generate import generate, open_target
from outrider.lab.distill.plan import DistillPlan, claim_answers
from outrider.lab.distill.questions import Question, asked
from outrider.lab.distill.run import Progress, passed_over
from outrider.lab.models import ModelFile
from outrider.models.hub import HubOptions

SHARD = 32
"""Questions that are answered together, however many nodes there are: near-ties of batched calls fall alike
for the same questions beside each other."""
_MAX_RETRIES = 5
"""of a shard whose node dies"""


def answer(file: ModelFile, plan: DistillPlan, reference: str, hub: HubOptions, progress: Progress) -> None:
    """Have every question of a plan answered that has no answer in its folder yet.

    An answer depends on its question, the plan's seed and the questions of its shard, not on the node. A node
    that dies costs the shard under way. Raises BackendError where no node can go on, and what is wrong with
    the target's file.
    """
    claim_answers(plan)
    nodes, left_out = find_nodes((), lambda _backend: None)
    notify(*(f"{node}: {why}" for node, why in left_out.items()))
    task = ray.remote(
        num_cpus=min(node.cpus for node in nodes),
        max_retries=_MAX_RETRIES,
        label_selector={"ray.io/node-id": f"in({','.join(node.id for node in nodes)})"},
        runtime_env={"env_vars": ENVIRONMENT},
    )(_answers)
    questions = asked(plan.data)
    everything = [*questions.held_out, *questions.training]
    running: list[Any] = []
    for at in range(0, len(everything), SHARD):
        shard = everything[at : at + SHARD]
        running.append(task.remote(file, plan, reference, hub, shard, _stored(plan.answers_folder, shard)))
    total, why_not = len(running), list[str]()
    while running:
        done = total - len(running)
        progress("the target answers", done / total, f"{done} of {total} shards of {SHARD} questions")
        [ready], running = ray.wait(running)
        try:
            examples, reasons = ray.get(ready)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            why = str(error).splitlines()[0]
            raise BackendError(file.name, f"no node is left that answers ({why})", "Run it again.") from None
        for example in examples:
            write_example(plan.answers_folder, example)
        why_not += reasons
    passed_over(why_not)


def _stored(folder: Path, shard: Sequence[Question]) -> list[Example]:
    """The answers of a shard that are there."""
    turns = (replace(q, turn=turn) for q in shard for turn in range(1 + len(q.prompt.follow_ups)))
    paths = (example_path(folder, question.id) for question in turns)
    return [read_example(path) for path in paths if path.exists()]


def _answers(
    file: ModelFile,
    plan: DistillPlan,
    reference: str,
    hub: HubOptions,
    questions: Sequence[Question],
    stored: Sequence[Example],
) -> tuple[list[Example], list[str]]:
    """The task: the answers of a shard that are not `stored`, and why others are passed over."""
    reasons: list[str] = []
    with (
        TemporaryDirectory(prefix="outrider-") as name,
        open_target(at_hand(file, [reference], hub), plan) as target,
    ):
        folder = Path(name)
        for example in stored:
            write_example(folder, example)
        known = set(folder.glob("*.npz"))
        generate(
            target, questions, folder, max_tokens=plan.data.max_tokens, seed=plan.training.seed,
            on_done=lambda why, _tokens: reasons.append(why) if why else None,
        )  # fmt: skip
        return [read_example(path) for path in sorted({*folder.glob("*.npz")} - known)], reasons
