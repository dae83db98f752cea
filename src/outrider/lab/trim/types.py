"""Which types of weights are fast here: measured on small copies of the model, in the library in use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf.constants import GGMLQuantizationType

from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.retyping import can_make, row_bytes
from outrider.core.contracts import Model
from outrider.core.errors import ModelFileError
from outrider.costs.calibrate import measure_side_by_side
from outrider.lab.trim.cut import Cut, write_cut
from outrider.lab.trim.source import OUTPUT, Source, Tensor
from outrider.models.vocab.subset import Subset, tokenizer_fields

Type = GGMLQuantizationType

TRIED = (Type.Q8_0, Type.Q6_K, Type.Q5_K, Type.Q5_0, Type.Q4_1, Type.Q4_K, Type.IQ4_NL, Type.Q4_0)
"""Types that weights may change to, the most precise first. Below four bits a small model loses too much."""
_COMMON = Type.Q8_0
"""fits every model's rows; what others are compared with"""
_PROBE_BYTES = 48 << 20
"""of a copy's layers at least: more than a processor keeps near"""
_PROBE_TOKENS = (2048, 16384)
_CONTEXT_TOKENS = 128
_MIN_SAVED_RATIO = 0.05
"""of a weight's time: for less no type changes, and of types that differ by less the most precise is taken"""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a weight costs in a call over one token: seconds by type. `options` are the load options that it
    was measured with."""

    weight_s: Mapping[Type, float]
    options: LoadOptions

    def step_s(
        self,
        source: Source,
        whole_s: float,
        tokens: int,
        layers: Collection[int],
        types: Mapping[str, Type],
    ) -> float:
        """What a step would take with so many tokens, these layers and types, where the source's takes
        `whole_s`."""
        saved_s = 0.0
        for name, tensor, layer in source.multiplied():
            rows = tensor.data.shape[0]
            kept = tokens if layer is None else rows if layer in layers else 0
            before_s = self.weight_s.get(tensor.kind)
            after_s = self.weight_s.get(types.get(name, tensor.kind))
            if before_s is not None and after_s is not None:
                saved_s += tensor.columns * (rows * before_s - kept * after_s)
        return max(whole_s - saved_s, 0.02 * whole_s)

    def fastest(self, source: Source) -> dict[str, Type]:
        """For each matrix that is multiplied with the type that is fastest here, where it is another."""
        found = {}
        for name, tensor, _ in source.multiplied():
            known = [t for t in TRIED if t in self.weight_s and row_bytes(t, tensor.columns)]
            fitting = {kind: self.weight_s[kind] for kind in known}
            own_s = self.weight_s.get(tensor.kind)
            if own_s is None or not fitting:
                continue
            enough_s = min(fitting.values()) / (1 - _MIN_SAVED_RATIO)
            best = next(t for t, weight_s in fitting.items() if weight_s <= enough_s)
            if fitting[best] < (1 - _MIN_SAVED_RATIO) * own_s:
                found[name] = best
        return found


def measure_types(
    source: Source,
    options: LoadOptions,
    folder: Path,
    progress: Callable[[float], None] = lambda _part: None,
    seconds: float = 5.0,
) -> Speeds:
    """Time copies of a few of the layers, each with all matrices of one type as far as their rows fit it, in
    turn; with repacked weights and without, where `options` leave that open. The copies lie in `folder` for
    the time. Raises SettingError where the disk has no room, ModelFileError where the library runs none."""
    tried = [False, True] if options.extra_buffer_types else [False]
    with TemporaryDirectory(prefix=".trim-", dir=folder) as place:
        copies = _write_copies(source, Path(place))
        found = []
        for number, repacked in enumerate(tried):
            given = replace(options, extra_buffer_types=repacked)

            def report(part: float, done: int = number) -> None:
                progress((done + part) / len(tried))

            found.append(_speeds(source, copies, given, seconds / len(tried), report))
    return min(found, key=lambda speeds: min(speeds.weight_s.values()))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy whose matrices are of `kind`, `weights` of them beside those of the common type."""

    path: Path
    kind: Type
    weights: int
    tokens: int


def _write_copies(source: Source, folder: Path) -> list[_Copy]:
    layers = _few_layers(source)
    kinds = {tensor.kind for tensor in _of_layers(source, layers)} | {source.output.kind}
    wanted = [kind for kind in dict.fromkeys((_COMMON, *TRIED, *kinds)) if can_make(kind)]
    few, many = (min(count, source.vocabulary) for count in _PROBE_TOKENS)
    copies = []
    for kind, tokens in [(_COMMON, many), *((kind, few) for kind in wanted)]:
        types: dict[str, Type] = {OUTPUT: _COMMON} if row_bytes(_COMMON, source.output.columns) else {}
        weights = 0
        for tensor in _of_layers(source, layers):
            fits = bool(row_bytes(kind, tensor.columns))
            if fits or row_bytes(_COMMON, tensor.columns):
                types[tensor.name] = kind if fits else _COMMON
                weights += tensor.weights if fits else 0
        if weights:
            path = folder / f"{kind.name}-{tokens}.gguf"
            subset = _first_tokens(source, tokens)
            fields, _ = tokenizer_fields(source.fields, subset, source.vocabulary)
            write_cut(source, Cut(subset, layers, types), path, fields, is_sample=True)
            copies.append(_Copy(path, kind, weights, subset.size))
    return copies


def _first_tokens(source: Source, count: int) -> Subset:
    """The first tokens, and the last, among which control tokens are."""
    if count >= source.vocabulary:
        return Subset.whole(source.vocabulary)
    return Subset.of([*range(count - 2), source.vocabulary - 1], source.vocabulary)


def _few_layers(source: Source) -> tuple[int, ...]:
    num_weights = sum(tensor.weights for tensor in _of_layers(source, range(source.layers)))
    layer_bytes = row_bytes(_COMMON, 32) / 32 * num_weights / source.layers
    return tuple(range(min(source.layers, max(2, round(_PROBE_BYTES / max(layer_bytes, 1.0))))))


def _of_layers(source: Source, layers: Sequence[int]) -> list[Tensor]:
    """The matrices of these layers."""
    return [tensor for _, tensor, layer in source.multiplied() if layer in layers]


def _speeds(
    source: Source,
    copies: Sequence[_Copy],
    options: LoadOptions,
    seconds: float,
    progress: Callable[[float], None],
) -> Speeds:
    models: dict[Type | int, tuple[_Copy, Model]] = {}
    with ExitStack() as opened:
        for copy in copies:
            with suppress(ModelFileError):  # a type that this library does not know
                weights = opened.enter_context(closing(Weights(copy.path, options)))
                key = copy.kind if copy is not copies[0] else -1
                models[key] = copy, weights.open(_CONTEXT_TOKENS)
        if _COMMON not in models or -1 not in models:
            why = "small copies of it, by which types are compared, do not run here"
            raise ModelFileError(str(source.path), why, "Keep its types (--keep-types).")
        curves = measure_side_by_side(
            [model for _, model in models.values()], seconds=seconds, rows="last", sizes=(1, 1, 1),
            progress=progress,
        )  # fmt: skip
        taken_s = {key: curve.call_s(1, context=0) for key, curve in zip(models, curves, strict=True)}
    common, larger = models[_COMMON][0], models[-1][0]
    extra = (larger.tokens - common.tokens) * source.output.columns
    # At most what is left if nothing else took any time: a busy machine says more, or less than nothing.
    most_s = taken_s[_COMMON] / (common.weights + common.tokens * source.output.columns)
    base_s = min((taken_s[-1] - taken_s[_COMMON]) / extra if extra else most_s, most_s)
    base_s = base_s if base_s > 0 else most_s
    found = {}
    for key, (copy, _) in models.items():
        if isinstance(key, Type):
            found[key] = max(base_s + (taken_s[key] - taken_s[_COMMON]) / copy.weights, base_s / 10)
    return Speeds(found, options)
