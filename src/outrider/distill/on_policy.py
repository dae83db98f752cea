"""Training on the draft's own text: it continues the target's answers, and the target's most likely tokens
there are the labels.

DistillSpec (arXiv 2310.08461, section 4) found this to matter more than any choice of loss. Under exact
verification a draft is verified after what the target accepted, so it is a share of the steps here, not all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.core.contracts import Model
from outrider.core.data import Span
from outrider.distill.corpus import Text, text_of
from outrider.distill.examples import Example
from outrider.distill.generate import top_tokens
from outrider.distill.network import Network, TorchModel
from outrider.distill.subset import Subset
from outrider.lab.teacher_forced import teacher_forced

_CONTINUED_TOKENS = 24
"""More than is ever drafted at once on most machines."""


class OnPolicy:
    """Texts that the draft itself continued, for one step at a time.

    `examples`: those of training; `target`: makes the target's calls, one at a time in its first sequence,
    which is empty before and afterwards; `texts`: how many a step has, of up to `max_tokens`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        target: Model,
        subset: Subset,
        *,
        texts: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        self._examples = [example for example in examples if len(example.answer) > 1]
        self._target = target
        self._subset = subset
        self._texts = texts
        self._max_tokens = min(max_tokens, target.context_length)
        self._seed = seed

    def texts(self, network: Network, step: int) -> list[Text]:
        """What the draft makes of some answers' beginnings; depends on the seed, the step and its weights.

        None where no answer has two tokens.
        """
        if not self._examples:
            return []
        random = np.random.default_rng((self._seed, step, 1))
        picked = [self._examples[i] for i in random.integers(len(self._examples), size=self._texts)]
        begun = [_begun(example, random) for example in picked]
        begun = [tokens[-max(1, self._max_tokens - _CONTINUED_TOKENS) :] for tokens in begun]
        continued = self._continue(network, begun, random)
        found = []
        for example, tokens, own in zip(picked, begun, continued, strict=True):
            labelled = self._label(replace(example, temperature=1.0), tokens, own)
            if labelled is not None:
                found.append(labelled)
        return found

    def _continue(
        self, network: Network, begun: Sequence[npt.NDArray[np.int32]], random: np.random.Generator
    ) -> list[list[int]]:
        """Tokens drawn from the draft after each beginning, in the target's ids, up to the end of the
        answer; none that it does not know."""
        longest = max(len(tokens) for tokens in begun) + _CONTINUED_TOKENS
        model = TorchModel("draft", network, self._target.vocabulary, len(begun), longest)
        rows = model.decode(
            [Span(i, tuple(self._subset.to_draft[tokens].tolist()), 0, 1) for i, tokens in enumerate(begun)]
        )
        drawn: list[list[int]] = [[] for _ in begun]
        for _ in range(_CONTINUED_TOKENS):
            logits = torch.from_numpy(np.concatenate(rows))
            if self._subset.has_other:
                logits[:, -1] = -torch.inf
            sums = logits.double().softmax(-1).cumsum(-1).numpy()
            places = random.random(len(begun)) * sums[:, -1]
            for line, (below, place) in enumerate(zip(sums, places, strict=True)):
                drawn[line].append(int(np.searchsorted(below, place, side="right")))
            if len(drawn[0]) == _CONTINUED_TOKENS:
                break
            rows = model.decode([Span(i, (own[-1],), model.length(i), 1) for i, own in enumerate(drawn)])
        return [self._up_to_end(self._subset.to_target[own].tolist()) for own in drawn]

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        ends = (
            i for i, token in enumerate(tokens, start=1) if self._target.vocabulary.ends_generation(token)
        )
        return tokens[: next(ends, len(tokens))]

    def _label(self, example: Example, begun: npt.NDArray[np.int32], own: Sequence[int]) -> Text | None:
        """The text with what the target held likely at each of the draft's own tokens."""
        target = self._target
        tokens = (*begun.tolist(), *own[:-1])
        found = teacher_forced(target, tokens, len(begun) - 1)
        rows = np.concatenate([rows.copy() for rows in found])
        ids, log_probs, rest = top_tokens(rows, example.ids.shape[1])
        target.truncate(0, 0)
        answer = np.asarray(own, dtype=np.int32)
        made = replace(example, prompt=begun, answer=answer, ids=ids, log_probs=log_probs, rest=rest)
        return text_of(made, self._subset, self._max_tokens)


def _begun(example: Example, random: np.random.Generator) -> npt.NDArray[np.int32]:
    """An answer's beginning, of random length, after its prompt."""
    cut = int(random.integers(len(example.answer)))
    return np.concatenate([example.prompt, example.answer[:cut]])
