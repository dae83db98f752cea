"""The answers that a distillation needs, made on all nodes of a cluster and stored here, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from outrider.core.errors import BackendError, OutriderError
from outrider.fleet.ray.files import send
from outrider.fleet.ray.joining import ENVIRONMENT, find_nodes, on_node
from outrider.fleet.ray.machines import Node
from outrider.lab.copies import MissingFile, at_hand
from outrider.lab.distill.examples import Example, example_path, read_example, write_example
from outrider.lab.distill.generate import Teacher, generate, open_teacher
from outrider.lab.distill.plan import DistillPlan, claim_answers
from outrider.lab.distill.questions import Question, asked
from outrider.lab.distill.run import Progress
from outrider.lab.models import ModelFile
from outrider.models.hub import HubOptions

SHARD = 32
"""Questions that are answered together, however many nodes there are: near-ties of batched calls fall alike
for the same questions beside each other."""
_MAX_ATTEMPTS = 5


def answer(
    file: ModelFile, plan: DistillPlan, reference: str, hub: HubOptions, progress: Progress
) -> list[str]:
    """Have every question of a plan answered that has no answer in its folder yet; lines for the user.

    An answer depends on its question, the plan's seed and the questions of its shard, not on the node. A node
    that dies costs the answers under way. Raises BackendError where no node can go on, and what is wrong with
    the target's file.
    """
    claim_answers(plan)
    nodes, left_out = find_nodes((), lambda _backend: None)
    questions = asked(plan.data)
    everything = [*questions.held_out, *questions.training]
    shards = [everything[at : at + SHARD] for at in range(0, len(everything), SHARD)]
    answering = _Answering(file, plan, reference, hub, progress, deque(enumerate(shards)), nodes)
    answering.run()
    return [*(f"{node}: {why}" for node, why in left_out.items()), *answering.notices]


@dataclass
class _Answering:
    file: ModelFile
    plan: DistillPlan
    reference: str
    hub: HubOptions
    progress: Progress
    waiting: deque[tuple[int, list[Question]]]
    nodes: list[Node]

    def __post_init__(self) -> None:
        self.notices: list[str] = []
        self._folder = self.plan.answers_folder
        self._total = sum(1 + len(q.prompt.follow_ups) for _, shard in self.waiting for q in shard)
        self._done = 0
        self._passed_over: list[str] = []
        self._failures: dict[int, int] = {}
        self._actors: dict[str, Any] = {}
        self._running: dict[Any, tuple[Node, tuple[int, list[Question]]]] = {}

    def run(self) -> None:
        try:
            while self.waiting or self._running:
                self._hand_out()
                if not self._running:
                    raise BackendError(self.file.name, "no node is left that answers", "Run it again.")
                ready, _ = ray.wait([*self._running], timeout=1.0)
                for items in ready:
                    self._take(items)
        finally:
            for actor in self._actors.values():
                ray.kill(actor)
        if self._passed_over:
            count, first = len(self._passed_over), self._passed_over[0]
            self.notices.append(f"prompts that were passed over: {count}, the first since {first}")

    def _hand_out(self) -> None:
        busy = {node.id for node, _ in self._running.values()}
        for node in self.nodes:
            if node.id in busy or not self.waiting:
                continue
            if node.id not in self._actors:
                make = ray.remote(num_cpus=node.cpus, runtime_env={"env_vars": ENVIRONMENT})(_Answerer)
                where = on_node(node.id)
                self._actors[node.id] = make.options(scheduling_strategy=where).remote(
                    self.file, self.plan, self.reference, self.hub
                )
            number, shard = self.waiting.popleft()
            stored = self._stored(shard)
            method = self._actors[node.id].answers.options(num_returns="streaming")
            self._running[method.remote(shard, stored)] = node, (number, shard)

    def _stored(self, shard: Sequence[Question]) -> list[Example]:
        """The answers of a shard that are there."""
        turns = (replace(q, turn=turn) for q in shard for turn in range(1 + len(q.prompt.follow_ups)))
        paths = (example_path(self._folder, question.id) for question in turns)
        return [read_example(path) for path in paths if path.exists()]

    def _take(self, items: Any) -> None:
        node, (number, shard) = self._running[items]
        try:
            found: Example | str = ray.get(next(items))
        except StopIteration:
            del self._running[items]
        except ray.exceptions.RayTaskError as error:
            del self._running[items]
            if not isinstance(error.cause, MissingFile):
                raise error.cause from None
            send(self.file, node.id, lambda part: self.progress(f"sending {self.file.name}", part))
            self.waiting.appendleft((number, shard))
        except ray.exceptions.RayError as error:  # the node or its process died
            del self._running[items]
            self._lost(node, number, shard, error)
        else:
            self._note(node, found)

    def _lost(self, node: Node, number: int, shard: list[Question], error: Exception) -> None:
        self.nodes.remove(node)
        self._actors.pop(node.id, None)
        self._failures[number] = self._failures.get(number, 0) + 1
        why = str(error).splitlines()[0]
        self.notices.append(f"node {node.name} was lost: {why}")
        if self._failures[number] >= _MAX_ATTEMPTS:
            raise BackendError(self.file.name, f"it ended {_MAX_ATTEMPTS} nodes ({why})")
        self.waiting.appendleft((number, shard))

    def _note(self, node: Node, found: Example | str) -> None:
        if isinstance(found, Example):
            write_example(self._folder, found)
        elif found:
            self._passed_over.append(found)
        self._done += 1
        done = min(self._done, self._total)
        on = f"{node.name}: " if len(self.nodes) > 1 else ""
        line = f"{on}{done} of {self._total} answers"
        self.progress("the target answers", done / self._total, line)


class _Answerer:
    """The target on a node, loaded once."""

    def __init__(self, file: ModelFile, plan: DistillPlan, reference: str, hub: HubOptions) -> None:
        self._file, self._plan, self._reference, self._hub = file, plan, reference, hub
        self._stack = ExitStack()
        self._teacher: Teacher | None = None

    def _open(self) -> Teacher:
        if self._teacher is None:
            file = at_hand(self._file, [self._reference], self._hub)
            plan = replace(self._plan, target=file.path)
            self._teacher = self._stack.enter_context(open_teacher(file, plan, []))
        return self._teacher

    def answers(self, questions: Sequence[Question], stored: Sequence[Example]) -> Iterator[Example | str]:
        """The answers of a shard that are not `stored`, or why one is passed over. Raises MissingFile."""
        teacher, plan = self._open(), self._plan
        with TemporaryDirectory(prefix="outrider-") as name:
            folder = Path(name)
            known = {example_path(folder, example.id) for example in stored}
            for example in stored:
                write_example(folder, example)
            passed_over: list[str] = []
            try:
                generate(
                    teacher.target, questions, folder, model=teacher.model, max_tokens=plan.data.max_tokens,
                    seed=plan.training.seed,
                    on_done=lambda why, _tokens: passed_over.append(why) if why else None,
                )  # fmt: skip
            except OutriderError:
                self._stack.close()
                self._teacher = None
                raise
            yield from passed_over
            for path in sorted({*folder.glob("*.npz")} - known):
                yield read_example(path)
