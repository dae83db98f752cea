"""Bit-equal text on loaded weights: which calls give equal bits and what that costs, as it was found before
or as a few calls find now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace

from pydantic import TypeAdapter

from outrider.backends.bitwise import BitwiseModel, Equality, find_equality, measure_price
from outrider.backends.gguf.model import Weights
from outrider.backends.tuning.curves import Loaded, spare_cores, subject_of
from outrider.core.errors import OutOfMemory, SettingError
from outrider.costs.calibrate import Progress
from outrider.costs.store import costs_dir, remembered
from outrider.models.cache import read_entry

MAX_DEFAULT_PRICE = 0.02
"""Where neither plain steps nor prompts take this much longer, equal bits are the default."""
_CONTEXT_TOKENS = 512
_EQUALITY = TypeAdapter(Equality)


def open_target(
    weights: Weights,
    context_length: int,
    *,
    max_sequences: int = 1,
    capacity_tokens: int = 0,
    bitwise: bool | None = None,
    measure: bool = True,
    measuring: Callable[[str, float], None] | None = None,
) -> tuple[Loaded, Equality | None]:
    """KV caches on a target's weights, of `context_length` tokens for each sequence and `capacity_tokens` in
    all (0: as many as they may have).

    With `bitwise` a model that makes equal calls alone, which has as many sequences as fit into the capacity,
    and what is known of its calls. By default (None) the same where one sequence has all to itself and equal
    bits, as was found out earlier or (`measure`) is now, cost next to nothing and find the memory. Raises
    SettingError where they are asked for and no calls are equal, OutOfMemory.
    """

    def progress(part: float) -> None:
        if measuring is not None:
            measuring("finding out which calls give equal bits, once", part)

    if bitwise or (bitwise is None and max_sequences == 1 and not _why_not(weights)):
        found = known_equality(weights, progress, hasty=not bitwise, measure=bool(bitwise) or measure)
        if bitwise and found.sizes is None:
            why = f"{weights.library.title} cannot give equal bits with {weights.name}: {found.reason}"
            raise SettingError("--bitwise", why, "Choose another --backend or -fa, or decode without it.")
        price = found.price
        if bitwise or (price is not None and max(price.step, price.prompt) < MAX_DEFAULT_PRICE):
            lanes = max(capacity_tokens // context_length, 1) if capacity_tokens else max_sequences
            try:
                lanes = min(max_sequences, lanes)
                return _lanes(weights, found, context_length, lanes, capacity_tokens), found
            except OutOfMemory:  # it takes a little more than a shared context
                if bitwise:
                    raise
    return weights.open(context_length, max_sequences=max_sequences, capacity_tokens=capacity_tokens), None


def known_equality(
    weights: Weights, progress: Progress, *, hasty: bool = False, measure: bool = True
) -> Equality:
    """For which calls these weights give equal bits, here and under these options: looked up, or (`measure`)
    found out in some seconds and kept. `hasty`: in a few calls where single tokens need padding, of which
    nothing is then said. Raises BackendError when a call fails."""
    about = "nearly free" if hasty else "equal calls"
    with closing(weights.open(_CONTEXT_TOKENS)) as model:
        subject, spare = subject_of(model, "all"), spare_cores(model)
    asked = {"about": about, "flash_attention_asked": weights.options.flash_attention}
    subject = replace(subject, settings={**subject.settings, **asked})
    place = costs_dir() / f"equal-{subject.key()}.json"
    if not measure:
        try:
            return _EQUALITY.validate_python(read_entry(place))
        except ValueError:
            return Equality(None, "it is not known yet")
    return remembered(
        place,
        lambda: _find(weights, progress, hasty=hasty),
        read=_EQUALITY.validate_python,
        write=lambda found: {"model": weights.name, "about": about, **asdict(found)},
        spare_cores=spare,
    )


def _find(weights: Weights, progress: Progress, *, hasty: bool) -> Equality:
    """The first kind of attention without padding, else the first with any equal calls (not if `hasty`)."""
    if reason := _why_not(weights):
        return Equality(None, reason)
    options = weights.options
    attentions = [options.flash_attention]
    if options.flash_attention == "auto":
        with closing(weights.open(_CONTEXT_TOKENS)) as model:
            attentions.append("on" if model.flash_attention == "off" else "off")
    best = Equality(None, "it cannot be opened")
    for attention in attentions:
        try:
            # A quantized cache needs flash attention, and some libraries are not right with it.
            opened = weights.open(_CONTEXT_TOKENS, options=replace(options, flash_attention=attention))
        except SettingError:
            continue
        with closing(opened) as model:
            found = find_equality(model, hasty=hasty or best.sizes is not None, progress=progress)
        is_unpadded = found.sizes is not None and found.sizes.sizes[0] == 1
        if is_unpadded or not best.sizes:
            best = replace(found, flash_attention=attention)
        if is_unpadded:
            break
    if not best.sizes:
        return best
    with (
        closing(weights.open(_CONTEXT_TOKENS)) as plain,
        closing(_lanes(weights, best, _CONTEXT_TOKENS)) as equal,
    ):
        return replace(best, price=measure_price(plain, equal))


def _why_not(weights: Weights) -> str:
    if not weights.rewinding.is_free:
        return "it cannot forget tokens freely"
    if weights.window_tokens and weights.library.keeps_windows:
        return "tokens that left its sliding window give way to others, out of order"
    return ""


def _lanes(
    weights: Weights, found: Equality, context_length: int, max_sequences: int = 1, capacity_tokens: int = 0
) -> BitwiseModel:
    assert found.sizes is not None
    options = replace(weights.options, flash_attention=found.flash_attention)
    return BitwiseModel(
        lambda length: weights.open(length, options=options),
        found.sizes,
        context_length=context_length,
        max_sequences=max_sequences,
        capacity_tokens=capacity_tokens,
    )
