"""What a training needs: the untrained draft, the tokens it knows, and the answers of both sides."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from outrider.backends.gguf.model import GgufModel
from outrider.core.contracts import Vocabulary
from outrider.core.errors import PromptError, SettingError
from outrider.lab.distill.checkpoint import Checkpoint, read_gguf
from outrider.lab.distill.corpus import Text, text_of
from outrider.lab.distill.depth import best_layers
from outrider.lab.distill.examples import Example, example_path, read_example, read_examples
from outrider.lab.distill.export import check_head_types
from outrider.lab.distill.head import HeadCheckpoint, check_target, first_head, head_text, read_target
from outrider.lab.distill.plan import DistillPlan, kept
from outrider.lab.distill.questions import Asked
from outrider.lab.distill.starting import first_draft
from outrider.lab.distill.states import states_folder
from outrider.lab.held_out import is_held_out
from outrider.lab.models import ModelFile
from outrider.models.vocab.subset import Subset


@dataclass(frozen=True, slots=True)
class Material:
    """The untrained draft, the target's tokens that it knows, and the answers of both sides. `vocabulary` is
    the target's, of use as long as that is open. The draft reads the last `window` tokens of a prompt, 0:
    all of them. `states`: where those of the target lie that a head reads.
    """

    draft: Checkpoint
    subset: Subset
    training: list[Example]
    held_out: list[Example]
    vocabulary: Vocabulary
    window: int
    states: Path | None = None

    def texts(self, examples: Sequence[Example], max_tokens: int) -> list[Text]:
        """Answers in the draft's ids after what it reads of their prompts, cut to their last `max_tokens`;
        empty ones are left out."""
        if self.states is not None:
            heads = (head_text(example, self.subset, max_tokens, self.states) for example in examples)
            return [text for text in heads if text is not None]
        seen = (replace(example, prompt=example.prompt[-self.window :]) for example in examples)
        found = (text_of(example, self.subset, max_tokens) for example in seen)
        return [text for text in found if text is not None]


def check_draft(file: ModelFile, target: GgufModel, plan: DistillPlan) -> None:
    """Refuse a draft that cannot be made of this target before it answers for hours."""
    draft, subset = _first(file, plan, [], target.vocabulary, [])
    if isinstance(draft, HeadCheckpoint):
        check_target(target.weights, draft.layers)
        check_head_types(plan.draft.quantization, plan.draft.embedding_quantization)
    if plan.draft.safetensors and subset.has_other:
        tokens, known = target.vocabulary.size, subset.size - 1
        reason = f"other engines need all {tokens:,} tokens, and the draft knows {known:,}"
        raise SettingError("--safetensors", reason, "Add --vocabulary 0, or leave it out.")


def _first(
    file: ModelFile,
    plan: DistillPlan,
    examples: Sequence[Example],
    vocabulary: Vocabulary,
    notices: list[str],
) -> tuple[Checkpoint, Subset]:
    """The untrained draft, and the tokens it knows; without examples its layers are any. A notice says which
    were chosen."""
    if plan.draft.kind == "eagle3":
        return first_head(read_target(file.path), plan.draft, examples, vocabulary)

    def choose(model: Checkpoint, subset: Subset) -> Sequence[int]:
        layers, count = model.shape.layers, plan.draft.layers
        if count > layers:
            raise SettingError(f"--layers {count}", f"it has {layers} layers", f"Give 1 to {layers}.")
        if not examples:
            return range(count)
        best = partial(best_layers, model, subset, examples, count)
        numbers = range(layers)  # raises ValueError for one that there is not
        found = kept(
            plan.out / "layers.json", best, lambda found: [*map(numbers.index, found)], "layers", "Remove it."
        )
        notices.append(f"its layers are {', '.join(map(str, found))} of {layers}")
        return found

    return first_draft(read_gguf(file.path), plan.draft, examples, vocabulary, plan.training.seed, choose)


def read_material(
    file: ModelFile, vocabulary: Vocabulary, questions: Asked, plan: DistillPlan, notices: list[str]
) -> Material:
    """Raises PromptError when one side has no answers."""
    sides: list[list[Example]] = []
    for side in (questions.training, questions.held_out):
        turns = (replace(q, turn=turn) for q in side for turn in range(1 + len(q.prompt.follow_ups)))
        paths = (example_path(plan.answers_folder, question.id) for question in turns)
        sides.append([read_example(path) for path in paths if path.exists()])  # none if passed over
    training, held_out = sides
    known = {example.id for example in training}
    training += (example for folder in plan.data.more for example in other_answers(folder, known))
    if not training or not held_out:
        why = f"{len(training)} answers to train on, {len(held_out)} held out"
        raise PromptError("prompts", why, "Give more prompts, or shorter ones.")
    draft, subset = _first(file, plan, training, vocabulary, notices)
    window = plan.draft.window if subset.has_other else 0
    states = states_folder(plan.answers_folder, draft.layers) if isinstance(draft, HeadCheckpoint) else None
    return Material(draft, subset, training, held_out, vocabulary, window, states)


def other_answers(folder: Path, known: Collection[str]) -> Iterator[Example]:
    """Answers of other runs that this one may train on: none that measures, none that it has itself."""
    for example in read_examples(folder):
        if example.id not in known and example.conversation and not is_held_out(example.conversation):
            yield example
