"""Training on the draft's own text: it continues the target's answers, and the target's most likely tokens
there are the labels.

DistillSpec (arXiv 2310.08461, section 4) found this to matter more than any choice of loss. Under exact
verification a draft is verified after what the target accepted, so it is a share of the steps here, not all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.core.contracts import Model
from outrider.core.data import Logits
from outrider.lab.comparison import teacher_forced
from outrider.lab.distill.answers import MIN_LOG, Example, Tokens
from outrider.lab.distill.corpus import Text, text_of
from outrider.lab.distill.network import Cache, Network
from outrider.models.vocab.subset import Subset

_CONTINUED_TOKENS = 24
"""More than is ever drafted at once on most machines."""


def top_tokens(rows: Logits, top: int) -> tuple[Tokens, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Of rows of logits (n, vocabulary): the `top` most likely tokens (n, top), the natural logarithms
    of their probabilities (n, top), and the probability of all others together (n,)."""
    logits = torch.from_numpy(rows)
    found = logits.topk(min(top, rows.shape[1]), dim=-1)
    log_probs = found.values - logits.logsumexp(-1, keepdim=True)
    others = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    clamped = log_probs.clamp(min=MIN_LOG)
    return found.indices.to(torch.int32).numpy(), clamped.half().numpy(), others.half().numpy()


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Texts that the draft itself continued from the beginnings of `examples`, `num_texts` of up to
    `max_tokens` for a step. The target labels them in its first sequence, which is empty before and after."""

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
        """Tokens drawn from the draft after each beginning, in the target's ids, up to an end token."""
        subset, ends = self.subset, self.target.vocabulary.ends_generation
        longest = max(map(len, begun))
        device = network.weights["token_embd.weight"].device
        cache = Cache(torch.tensor([longest - len(tokens) for tokens in begun], device=device))
        new = np.zeros((len(begun), longest), dtype=np.int64)
        for line, tokens in zip(new, begun, strict=True):
            line[longest - len(tokens) :] = subset.to_draft[tokens]
        drawn = np.zeros((len(begun), 0), dtype=np.int64)
        for _ in range(_CONTINUED_TOKENS):
            with torch.inference_mode():
                states = network.states(torch.from_numpy(new).to(device), cache)
                logits = network.logits(states[:, -1]).double().cpu()
                if subset.has_other:
                    logits[:, -1] = -torch.inf
                sums = logits.softmax(-1).cumsum(-1).numpy()
            places = random.random(len(begun)) * sums[:, -1]
            new = (sums <= places[:, None]).sum(axis=1, keepdims=True)
            drawn = np.concatenate([drawn, new], axis=1)
        texts = []
        for tokens in subset.to_target[drawn].tolist():
            last = next((i for i, token in enumerate(tokens, 1) if ends(token)), len(tokens))
            texts.append(tokens[:last])
        return texts

    def _label(self, example: Example, begun: Tokens, own: Sequence[int]) -> Example:
        tokens = (*begun.tolist(), *own[:-1])
        found = teacher_forced(self.target, tokens, len(begun) - 1)
        rows = np.concatenate([rows.copy() for rows in found])
        self.target.truncate(0, 0)
        ids, log_probs, others = top_tokens(rows, example.ids.shape[1])
        return replace(
            example, prompt=begun, answer=np.asarray(own, dtype=np.int32),
            ids=ids, log_probs=log_probs, rest=others, temperature=1.0,
        )  # fmt: skip
