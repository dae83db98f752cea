"""What a training needs: the untrained draft, the tokens it knows, and the answers of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.contracts import Vocabulary
from outrider.core.errors import PromptError
from outrider.lab.distill.checkpoint import Checkpoint
from outrider.lab.distill.corpus import Text, text_of
from outrider.lab.distill.examples import Example, example_path, read_example
from outrider.lab.distill.plan import DistillPlan
from outrider.lab.distill.questions import Asked
from outrider.lab.distill.starting import first_draft
from outrider.models.vocab.subset import Subset


@dataclass(frozen=True, slots=True)
class Material:
    """The untrained draft, the target's tokens that it knows, and the answers of both sides. The draft reads
    the last `window` tokens of a prompt, 0: all of them."""

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
    """Raises PromptError when one side has no answers."""
    sides: list[list[Example]] = []
    for side in (questions.training, questions.held_out):
        turns = (replace(q, turn=turn) for q in side for turn in range(1 + len(q.prompt.follow_ups)))
        paths = (example_path(plan.answers_folder, question.id) for question in turns)
        sides.append([read_example(path) for path in paths if path.exists()])  # none if passed over
    training, held_out = sides
    if not training or not held_out:
        why = f"{len(training)} answers to train on, {len(held_out)} held out"
        raise PromptError("prompts", why, "Give more prompts, or shorter ones.")
    draft, subset = first_draft(plan, training, vocabulary)
    # What knows all tokens reads all: other engines would not know better.
    return Material(draft, subset, training, held_out, plan.draft.window if subset.has_other else 0)
