"""What a training needs: the target's answers on both sides of the split, and the draft's first weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.contracts import Vocabulary
from outrider.core.errors import PromptError, SettingError
from outrider.distill.checkpoint import Checkpoint, read_gguf
from outrider.distill.corpus import Text, text_of
from outrider.distill.examples import Example, example_path, read_example, read_examples
from outrider.distill.plan import DistillPlan
from outrider.distill.questions import Asked, Question, is_held_out
from outrider.distill.starting import first_draft
from outrider.distill.subset import Subset
from outrider.lab.models import ModelFile


@dataclass(frozen=True, slots=True)
class Material:
    """The untrained draft, the target's tokens that it knows, and the answers of both sides. `vocabulary` is
    the target's, of use as long as that is open. The draft reads the last `window` tokens of a prompt, 0:
    all of them.
    """

    draft: Checkpoint
    subset: Subset
    training: list[Example]
    held_out: list[Example]
    vocabulary: Vocabulary
    window: int

    def texts(self, examples: Sequence[Example], max_tokens: int) -> list[Text]:
        """Answers in the draft's ids after what it reads of their prompts, cut to their last `max_tokens`;
        empty ones are left out."""
        seen = (replace(example, prompt=example.prompt[-self.window :]) for example in examples)
        found = (text_of(example, self.subset, max_tokens) for example in seen)
        return [text for text in found if text is not None]


def check_draft(file: ModelFile, vocabulary: Vocabulary, plan: DistillPlan) -> None:
    """Refuse a draft that cannot be made of this target before it answers for hours. Raises as `first_draft`
    does, and SettingError for safetensors of a reduced vocabulary."""
    _, subset = first_draft(read_gguf(file.path), plan.draft, [], vocabulary, plan.training.seed)
    if plan.draft.safetensors and subset.has_other:
        reason = f"other engines need all {vocabulary.size:,} tokens, and the draft knows {subset.size - 1:,}"
        raise SettingError("--safetensors", reason, "Add --vocabulary 0, or leave it out.")


def read_material(file: ModelFile, vocabulary: Vocabulary, questions: Asked, plan: DistillPlan) -> Material:
    """The answers to a plan's questions, and the draft before training. Raises PromptError when one side has
    none, and as `first_draft` does."""
    training, held_out = (
        list(_answers(side, plan.answers_folder)) for side in (questions.training, questions.held_out)
    )
    known = {example.id for example in training}
    training += (example for folder in plan.data.more for example in other_answers(folder, known))
    if not training or not held_out:
        why = f"{len(training)} answers to train on, {len(held_out)} held out"
        raise PromptError("prompts", why, "Give more prompts, or shorter ones.")
    draft, subset = first_draft(read_gguf(file.path), plan.draft, training, vocabulary, plan.training.seed)
    window = plan.draft.window if subset.has_other else 0
    return Material(draft, subset, training, held_out, vocabulary, window)


def other_answers(folder: Path, known: Collection[str]) -> Iterator[Example]:
    """Answers of other runs that this one may train on: none that measures, none that it has itself."""
    for example in read_examples(folder):
        if example.id not in known and example.conversation and not is_held_out(example.conversation):
            yield example


def _answers(questions: Sequence[Question], folder: Path) -> Iterator[Example]:
    """The answers to questions and their follow-ups; those passed over have none."""
    for question in questions:
        for turn in range(1 + len(question.prompt.follow_ups)):
            path = example_path(folder, replace(question, turn=turn).id)
            if path.exists():
                yield read_example(path)
