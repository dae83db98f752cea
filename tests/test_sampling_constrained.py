"""A sampler under a constraint: what is not allowed is barred before anything else chooses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from outrider.backends.fake import FakeVocabulary
from outrider.core.contracts import Constraint
from outrider.core.data import Mask
from outrider.core.errors import ConstraintError
from outrider.core.params import SamplingParams
from outrider.sampling import RequestSampler

VOCABULARY = FakeVocabulary("abcdefg")
SIZE = VOCABULARY.size
AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def sampler(mask: Mask | None, params: SamplingParams = AS_IT_IS) -> RequestSampler:
    constraint = SimpleNamespace(allowed=lambda _drafted: mask)
    return RequestSampler(params, VOCABULARY, (), cast(Constraint, constraint))


rows = arrays.arrays(np.float32, SIZE, elements=st.floats(-50, 50, width=32))
masks = arrays.arrays(np.bool_, SIZE, elements=st.booleans()).filter(lambda mask: bool(mask.any()))


@given(row=rows, mask=masks)
def test_a_mask_bars_what_it_does_not_allow_and_leaves_the_rest(row: np.ndarray, mask: Mask) -> None:
    before = row.copy()
    adjusted = sampler(mask).adjust(row, ())
    assert (adjusted[mask] == row[mask]).all() and (adjusted[~mask] == -np.inf).all()
    assert (row == before).all()
    p = sampler(mask).distribution(row, ())
    assert set(p.tokens.tolist()) <= set(np.flatnonzero(mask).tolist())


@given(row=rows, mask=masks, k=st.integers(1, SIZE))
def test_top_k_counts_allowed_tokens(row: np.ndarray, mask: Mask, k: int) -> None:
    p = sampler(mask, replace(AS_IT_IS, top_k=k)).distribution(row, ())
    assert len(p.tokens) == min(k, int(mask.sum()))


def test_bias_and_mask_together() -> None:
    mask = np.array([True, True] + [False] * (SIZE - 2))
    params = replace(AS_IT_IS, temperature=0, logit_bias=((1, 9.0), (5, 99.0)))
    assert sampler(mask, params).distribution(np.zeros(SIZE, np.float32), ()).tokens.tolist() == [1]


def test_bans_that_leave_nothing_of_the_mask() -> None:
    mask = np.array([True] + [False] * (SIZE - 1))
    with pytest.raises(ConstraintError, match="none is left"):
        sampler(mask, replace(AS_IT_IS, banned=(0,))).distribution(np.zeros(SIZE, np.float32), ())
