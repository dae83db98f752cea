"""A distillation from end to end: answers, first weights, costs, training, the file, what it brings in
use."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pydantic_core import to_jsonable_python
from torch.nn.functional import cosine_similarity, embedding

from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores
from outrider.backends.tuning import costs_of
from outrider.core.contracts import Vocabulary
from outrider.core.errors import PromptError, SettingError
from outrider.core.files import write_whole
from outrider.core.notices import collect_notices, notify
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.expected_speed import StepCosts
from outrider.drafters.model import ModelDrafter
from outrider.lab.check import Report as Checked
from outrider.lab.check import check
from outrider.lab.distill.answers import Asked, Example, asked, generate, open_target, read_examples
from outrider.lab.distill.checkpoint import (
    Checkpoint,
    Shape,
    keep_layers,
    pretrained_calibration,
    read_gguf,
    restrict,
    write_gguf,
)
from outrider.lab.distill.corpus import Evaluation, Text, acceptance, batch_of, text_of
from outrider.lab.distill.network import Network, device_of, keep_freed_memory
from outrider.lab.distill.plan import USUAL_LAYERS, USUAL_VOCABULARY, DistillPlan, claim
from outrider.lab.distill.train import OnPolicy, Trainer
from outrider.lab.loaded import LoadedTarget, Loader
from outrider.lab.models import find_models
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions, file_sha256
from outrider.models.vocab.subset import Subset, choose_subset, coverage
from outrider.policy.state import PretrainedCalibration
from outrider.session.loading import load_weights

SCHEMA = "outrider.distill/1"
MEASURING_SECONDS = 120.0
"""for the target's answers to held-out prompts, and again for each draft on them"""
_MAX_ANSWERS = 400
_OWN_TEXTS = 32
"""of the draft in a step on its own text"""
_CONTEXT_TOKENS = 512
_DRAFT_SECONDS = 5.0


Progress = Callable[..., None]
"""Called with a stage, how far it is (0-1; None: unknown) and perhaps a line about it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a distillation found: shares are 0 to 1, speed-ups factors, times seconds. `coverage` is the share
    of the held-out answers' tokens that the draft knows, `trained_tokens` counts labelled positions as often
    as they were trained on. Of the evaluations in `history` that of `best_step` was kept. `measured`: the
    draft and the same untrained ("first"), as `outrider check` judges them on held-out prompts; None where no
    report was asked for."""

    outrider: str
    target: str
    settings: Mapping[str, Any]
    path: str
    file_bytes: int
    shape: Shape
    parameters: int
    known_tokens: int
    target_tokens: int
    training_answers: int
    training_tokens: int
    held_out_answers: int
    coverage: float
    steps: int
    best_step: int
    trained_tokens: int
    history: Sequence[Evaluation]
    seconds: float
    notices: Sequence[str] = ()
    measured: Checked | None = None

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def distill(plan: DistillPlan, progress: Progress) -> Report:
    """Train a draft for a target on its own answers, and write it and what it brings to `plan.out`.

    Raises InputError and its kinds for what cannot be used, BackendError when a call fails.
    """
    questions = asked(plan.settings)
    claim(plan)
    keep_freed_memory()
    torch.set_num_threads(plan.threads or physical_cores())
    with collect_notices() as notices:
        report = _made(plan, questions, progress)
        measured = None if plan.settings.no_report else _measure(plan, questions, report.path, progress)
    notify(*notices)
    report = replace(report, notices=notices, measured=measured)
    if not plan.settings.no_report:
        write_whole(plan.report, json.dumps(report.as_json(), indent=1) + "\n", "report")
    return report


def _made(plan: DistillPlan, questions: Asked, progress: Progress) -> Report:
    started, path = perf_counter(), plan.out / f"{plan.file.name}-draft.gguf"
    with open_target(plan) as target:
        vocabulary = target.model.vocabulary
        first_draft(plan, [], vocabulary)  # one that cannot be made is refused before hours of answers
        _answer(target, questions, plan, progress)
        material = read_material(plan, questions, vocabulary)
        if not plan.settings.on_policy:
            target.model.close()  # its vocabulary is still read
        provenance = _provenance(plan, material)
        write = partial(
            write_gguf, subset=material.subset, target=vocabulary, window=material.window,
            quantization=plan.settings.quant, embedding_quantization=plan.settings.embedding_quant,
        )  # fmt: skip
        write(material.draft, plan.first, provenance=provenance)
        progress("measuring what calls cost", None)
        of_draft = _curve(plan, plan.first, "last", seconds=_DRAFT_SECONDS, fresh=True)
        costs = StepCosts.of(_curve(plan, plan.file.path, "all"), of_draft)
        trainer = _train(target, material, costs, plan, progress)
        provenance |= {"tokens": trainer.trained_tokens, "steps": trainer.best_step}
        write(trainer.best(), path, provenance=provenance, prior=_prior(trainer))
    subset, training, held_out = material.subset, material.training, material.held_out
    return Report(
        outrider=version("outrider"),
        target=plan.file.name,
        settings=plan.as_json(),
        path=str(path),
        file_bytes=path.stat().st_size,
        shape=material.draft.shape,
        parameters=sum(weights.size for weights in material.draft.weights.values()),
        known_tokens=subset.size - subset.has_other,
        target_tokens=len(subset.to_draft),
        training_answers=len(training),
        training_tokens=sum(len(example.answer) for example in training),
        held_out_answers=len(held_out),
        coverage=coverage(subset, (example.answer for example in held_out)),
        steps=trainer.step,
        best_step=trainer.best_step,
        trained_tokens=trainer.trained_tokens,
        history=trainer.history,
        seconds=perf_counter() - started,
    )


def _curve(plan: DistillPlan, path: Path, rows: Rows, **measured: Any) -> CallCosts:
    options = LoadOptions(threads=plan.threads)
    with closing(load_weights(read_card(path), options, measure=True)) as weights:
        return costs_of(weights.open(_CONTEXT_TOKENS), rows=rows, **measured)


def _answer(target: LoadedTarget, questions: Asked, plan: DistillPlan, progress: Progress) -> None:
    everything = [*questions.held_out, *questions.training]
    total = sum(len(question.turns) for question in everything)
    tokens: list[int] = []
    reasons: list[str] = []
    started = perf_counter()

    def on_done(why: str, count: int) -> None:
        tokens.append(count)
        reasons.extend([why] if why else [])
        done, speed = len(tokens), sum(tokens) / (perf_counter() - started)
        progress("the target answers", done / total, f"{done} of {total} answers, {speed:.0f} tokens/s")

    generate(
        target, everything, plan.answers_folder, max_tokens=plan.settings.max_tokens, seed=plan.settings.seed,
        on_done=on_done,
    )  # fmt: skip
    if reasons:
        notify(f"prompts that were skipped: {len(reasons)}, the first because {reasons[0]}")


def _provenance(plan: DistillPlan, material: Material) -> dict[str, str | int]:
    files = ", ".join(Path(name).name for name in plan.settings.prompts)
    temperatures = ", ".join(f"{t:g}" for t in plan.settings.temperatures)
    data = f"{len(material.training)} answers of the teacher to "
    data += f"{files or 'the prompts that come with Outrider'}, temperatures {temperatures}"
    return {
        "teacher": plan.file.card.name,
        "teacher_sha256": file_sha256(plan.file.path),
        "data": data,
        "tokens": 0,  # label positions trained on, each as often as it was
        "steps": 0,
        "seed": plan.settings.seed,
        "version": version("outrider"),
    }


def _prior(trainer: Trainer) -> PretrainedCalibration:
    """What to expect of the draft's acceptance, by its predictions along the held-out answers. Where it
    predicts a token that it does not know, it offers nothing."""
    answers = (zip(a.confidences, a.matches, strict=True) for a in trainer.predictions())
    offered = ([(float(sure), bool(correct)) for sure, correct in answer if sure] for answer in answers)
    return pretrained_calibration(ModelDrafter.name, offered)


def _train(
    target: LoadedTarget, material: Material, costs: StepCosts, plan: DistillPlan, progress: Progress
) -> Trainer:
    """Train, until an interrupt at most: what is best so far is kept then, where that is better than
    nothing."""
    wanted, own = plan.settings, None
    if wanted.on_policy:
        own = OnPolicy(
            material.training, target.model, material.subset, _OWN_TEXTS, wanted.ctx_size, wanted.seed
        )
    quantizations = wanted.quant, wanted.embedding_quant
    training, held_out = (material.texts(s, wanted.ctx_size) for s in (material.training, material.held_out))
    trainer = Trainer(material.draft, training, held_out, costs, wanted, quantizations, own)

    def on_step(trainer: Trainer) -> None:
        best = max(trainer.history, key=lambda found: found.rank)
        line = f"step {trainer.step}, loss {trainer.last_loss:.3f}; best: "
        line += f"agrees {best.agreement:.1%}, expected {best.speedup:.2f}x plain"
        progress("training", trainer.done, line)

    try:
        trainer.run(on_step)
    except KeyboardInterrupt:
        if not trainer.best_step:
            raise
        notify(
            f"the training was interrupted at step {trainer.step}; the draft is that of {trainer.best_step}"
        )
    return trainer


def _measure(plan: DistillPlan, questions: Asked, made: str, progress: Progress) -> Checked | None:
    """The draft after and before training, on greedy answers to held-out prompts of every category in turn.
    None where too little could be recorded: a notice says why."""
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for question in questions.held_out:
        prompts[question.category].append(question.prompt)
    greedy = SamplingParams(temperature=0.0, seed=plan.settings.seed)
    room, trained = plan.settings.ctx_size + 2 * ANSWER_TOKENS, plan.file.card.context_length
    options, hub = LoadOptions(threads=plan.threads), HubOptions(offline=True)
    workloads = [
        Workload(category, tuple(some), greedy, plan.settings.max_tokens, "held out")
        for category, some in prompts.items()
    ]
    loader = Loader(options, options, hub, min(room, trained) if trained else room)
    drafts = find_models([made, str(plan.first)], hub=hub)
    given = plan.file, drafts, workloads, loader, progress
    try:
        report = check(*given, seconds=MEASURING_SECONDS, max_answers=_MAX_ANSWERS)
    except PromptError as error:
        notify(f"no report: {error.why}")
        return None
    notify(*report.notices)
    return report


# What a training begins with: the answers of both sides, the tokens that the draft knows, and its first
# weights. Which layers are best differs much between models and numbers of layers, and so does what is left
# without the others: it is tried out on some of the answers.

_TEXTS, _TEXT_TOKENS = 12, 128
"""that are judged: enough to tell a good choice from a bad one"""
_DIVISIONS = 8
"""of the layers into first and last ones that are tried, about: neighbours differ little"""


@dataclass(frozen=True, slots=True)
class Material:
    """The untrained draft, the tokens that it knows, and the answers of both sides. It reads the last
    `window` tokens of a prompt, 0: all."""

    draft: Checkpoint
    subset: Subset
    training: list[Example]
    held_out: list[Example]
    window: int

    def texts(self, examples: Sequence[Example], max_tokens: int) -> list[Text]:
        """Answers in the draft's ids after what it reads of their prompts, cut to their last `max_tokens`;
        empty ones are left out."""
        seen = (replace(example, prompt=example.prompt[-self.window :]) for example in examples)
        found = (text_of(example, self.subset, max_tokens) for example in seen)
        return [text for text in found if text is not None]


def read_material(plan: DistillPlan, questions: Asked, vocabulary: Vocabulary) -> Material:
    """Raises PromptError when one side has no answers, and what `first_draft` raises."""
    training, held_out = (read_examples(plan.answers_folder, side) for side in questions)
    if not training or not held_out:
        why = f"{len(training)} answers to train on, {len(held_out)} held out"
        raise PromptError("prompts", why, "Give more prompts, or shorter ones.")
    draft, subset = first_draft(plan, training, vocabulary)
    # What knows all tokens reads all: other engines would not know better.
    return Material(draft, subset, training, held_out, plan.settings.window if subset.has_other else 0)


def first_draft(
    plan: DistillPlan, examples: Sequence[Example], vocabulary: Vocabulary
) -> tuple[Checkpoint, Subset]:
    """The untrained draft that a plan asks for, and the tokens of the target's `vocabulary` that it knows.
    Without examples its layers are any; a notice says which were chosen.

    Raises ModelFileError and SettingError for a base that cannot be read or does not go with the target.
    """
    base = read_gguf(plan.base or plan.file.path)
    have = base.shape.layers
    count = plan.settings.layers or min(USUAL_LAYERS, have)
    if base.shape.vocabulary != vocabulary.size:
        reason = f"it knows {base.shape.vocabulary} tokens, the target {vocabulary.size}"
        raise SettingError(str(plan.base), reason, "Start from a model with the target's own tokenizer.")
    if count > have:
        raise SettingError(f"--layers {count}", f"it has {have} layers", f"Give 1 to {have}.")
    subset = _tokens_used(examples, vocabulary, plan.settings.vocabulary)
    reduced = restrict(base, subset)
    if not examples:
        return keep_layers(reduced, range(count)), subset

    layers = best_layers(reduced, subset, examples, count)
    notify(f"its layers are {', '.join(map(str, layers))} of {have}")
    return keep_layers(reduced, layers), subset


def _tokens_used(examples: Sequence[Example], vocabulary: Vocabulary, size: int | None) -> Subset:
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.answer, minlength=vocabulary.size)
    size = USUAL_VOCABULARY if size is None else size
    return choose_subset(vocabulary, counts, size or vocabulary.size)


def best_layers(model: Checkpoint, subset: Subset, examples: Sequence[Example], count: int) -> list[int]:
    """The `count` layers of `model`, whose tokens are those of `subset`, with which most drafts drawn along
    the answers of `examples` would be accepted.

    Tried are the first few with the last few, and the layers that change their input most, by the cosine of
    the states before and after (ShortGPT, arXiv 2403.03853).
    """
    some = examples[:: -(-len(examples) // _TEXTS)]
    texts = [text for example in some if (text := text_of(example, subset, _TEXT_TOKENS))]
    batch = batch_of(texts, device_of())
    network = Network.of(model, batch.tokens.device)

    def accepted(layers: Sequence[int]) -> float:
        same = next((at for at, layer in enumerate(layers) if at != layer), len(layers))
        x = states[same]  # of the layers before, none is missing
        for layer in layers[same:]:
            x = network.layer(layer, x)
        ends = network.normed(x).flatten(0, 1)[batch.places]
        return float(acceptance(network.logits(ends), batch.labels).mean())

    with torch.no_grad():
        states = [embedding(batch.tokens, network.weights["token_embd.weight"])]
        for layer in range(model.shape.layers):
            states.append(network.layer(layer, states[-1]))
        changes = pairwise(x.flatten(0, 1)[batch.places] for x in states)
        influences = [1 - float(cosine_similarity(*change, dim=-1).mean()) for change in changes]
        return max(_candidates(influences, count), key=accepted)


def _candidates(influences: Sequence[float], count: int) -> Iterator[list[int]]:
    layers = range(len(influences))
    yield sorted(sorted(layers, key=lambda layer: -influences[layer])[:count])
    for first in range(1, count, max(1, count // _DIVISIONS)):
        yield [*layers[:first], *layers[len(layers) - (count - first) :]]
