"""Training on the draft's own text: it continues the target's answers, and the target's most likely tokens
there are the labels.

DistillSpec (arXiv 2310.08461, section 4) found this to matter more than any choice of loss. Under exact
verification a draft is verified after what the target accepted, so it is a share of the steps here, not all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.core.contracts import Model
from outrider.core.data import Span
from outrider.lab.distill.corpus import Text, text_of
from outrider.lab.distill.examples import Example, Tokens
from outrider.lab.distill.generate import top_tokens
from outrider.lab.distill.network import Network, TorchModel
from outrider.lab.teacher_forced import teacher_forced
from outrider.models.vocab.subset import Subset

_CONTINUED_TOKENS = 24
"""More than is ever drafted at once on most machines."""


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Texts that the draft itself continued, for one step at a time.

    `examples`: those of training; `target`: makes the target's calls, one at a time in its first sequence,
    which is empty before and afterwards; `num_texts`: how many a step has, of up to `max_tokens`.
    """

    examples: Sequence[Example]
    target: Model
    subset: Subset
    num_texts: int
    max_tokens: int
    seed: int

    def texts(self, network: Network, step: int) -> list[Text]:
        """What the draft makes of some answers' beginnings; depends on the seed, the step and its weights.
        Empty where no answer has two tokens."""
        examples = [example for example in self.examples if len(example.answer) > 1]
        if not examples:
            return []
        random = np.random.default_rng((self.seed, step, 1))
        picked = [examples[i] for i in random.integers(len(examples), size=self.num_texts)]
        max_tokens = min(self.max_tokens, self.target.context_length)
        begun = []
        for example in picked:
            cut = int(random.integers(len(example.answer)))
            tokens = np.concatenate([example.prompt, example.answer[:cut]])
            begun.append(tokens[-max(1, max_tokens - _CONTINUED_TOKENS) :])
        found = []
        for example, tokens, own in zip(picked, begun, self._continue(network, begun, random), strict=True):
            labelled = text_of(self._label(example, tokens, own), self.subset, max_tokens)
            if labelled is not None:
                found.append(labelled)
        return found

    def _continue(
        self, network: Network, begun: Sequence[Tokens], random: np.random.Generator
    ) -> list[list[int]]:
        """Tokens drawn from the draft after each beginning, in the target's ids, up to the end of the
        answer; none that it does not know."""
        vocabulary, subset = self.target.vocabulary, self.subset
        longest = max(len(tokens) for tokens in begun) + _CONTINUED_TOKENS
        model = TorchModel("draft", network, vocabulary, len(begun), longest)
        drawn: list[list[int]] = [[] for _ in begun]
        spans = [Span(i, tuple(subset.to_draft[tokens].tolist()), 0, 1) for i, tokens in enumerate(begun)]
        for _ in range(_CONTINUED_TOKENS):
            logits = torch.from_numpy(np.concatenate(model.decode(spans)))
            if subset.has_other:
                logits[:, -1] = -torch.inf
            sums = logits.double().softmax(-1).cumsum(-1).numpy()
            places = random.random(len(begun)) * sums[:, -1]
            for own, below, place in zip(drawn, sums, places, strict=True):
                own.append(int(np.searchsorted(below, place, side="right")))
            spans = [Span(i, (own[-1],), model.length(i), 1) for i, own in enumerate(drawn)]
        texts = []
        for own in drawn:
            tokens = subset.to_target[own].tolist()
            ends = (i for i, token in enumerate(tokens, start=1) if vocabulary.ends_generation(token))
            texts.append(tokens[: next(ends, len(tokens))])
        return texts

    def _label(self, example: Example, begun: Tokens, own: Sequence[int]) -> Example:
        """The continued text with what the target held likely at each of the draft's own tokens."""
        tokens = (*begun.tolist(), *own[:-1])
        found = teacher_forced(self.target, tokens, len(begun) - 1)
        rows = np.concatenate([rows.copy() for rows in found])
        self.target.truncate(0, 0)
        ids, log_probs, others = top_tokens(rows, example.ids.shape[1])
        return replace(
            example, prompt=begun, answer=np.asarray(own, dtype=np.int32),
            ids=ids, log_probs=log_probs, rest=others, temperature=1.0,
        )  # fmt: skip
