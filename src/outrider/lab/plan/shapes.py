"""What a call has to read and to compute of a model: from a GGUF header, or of a known name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.lab.plan.catalogue import Catalogue, ModelFields, unknown

HEADS = ("mtp", "eagle", "eagle3")
"""drafts that are a layer on the target's hidden states"""
_EAGLE3_TOKENS = 32_000
"""the vocabulary of usual EAGLE-3 heads"""
_STATE_BYTES = 128 * 4
"""of a value's width in a layer of linear attention: as many keys, in 32 bits"""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model by its sizes.

    `dense_…` are the weights that every call reads, the output layer among them, the embedding not where it
    is only looked up; `expert_…` those of one expert, over all layers. `kv_values` are the values of K and V
    of a token in the layers that see all of a text, `window_kv_values` those in layers that see the last
    `window_tokens`, in `kv_bits` each; `state_bytes` are kept of a sequence whatever its length.
    `attention_width` is heads times width of a head, over all layers that see all of a text,
    `window_attention_width` over the others.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    dense_parameters: float
    dense_bytes: float
    memory_bytes: float
    kv_values: float
    attention_width: float = 0.0
    expert_parameters: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 0
    experts_used: int = 0
    window_tokens: int = 0
    window_kv_values: float = 0.0
    window_attention_width: float = 0.0
    state_bytes: float = 0.0
    kv_bits: float = 16.0
    operations: str = "f16"
    embedding_parameters: float = 0.0
    hub: str = ""
    type: str = ""
    head_bits: float = 0.0
    """of its MTP layer or an EAGLE head; 0: as of its other weights"""
    is_head: bool = False

    @property
    def parameters(self) -> float:
        return self.dense_parameters + self.embedding_parameters + self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """Those that one token is multiplied by."""
        return self.dense_parameters + self.experts_used * self.expert_parameters

    def distinct_experts(self, num_tokens: int) -> float:
        """How many experts of a layer `num_tokens` are expected to use: each uses `experts_used` different
        ones, any as likely as any other, whatever the other tokens use.

        Tokens of one text agree more than that, so fewer are used.
        """
        if not self.experts:
            return 0.0
        missed = (1 - self.experts_used / self.experts) ** num_tokens
        return self.experts * (1 - missed)

    def kv_bytes(self, context: int) -> float:
        """Of a sequence with `context` tokens."""
        seen = min(context, self.window_tokens)
        values = self.kv_values * context + self.window_kv_values * seen
        return values * self.kv_bits / 8 + self.state_bytes


def shape_of(fields: ModelFields, name: str, known: Catalogue, weights: str = "") -> ModelShape:
    """The shape of a model by its fields, its weights all of the type `weights` where that is given."""
    kind = known.weight_type(weights or fields.type)
    expert_kind = known.weight_type(weights or fields.expert_type or fields.type)
    matrices = 3 if fields.gated else 2
    dense_layers = fields.dense_layers if fields.experts else fields.layers
    inner = (fields.dense_inner or fields.inner) if fields.experts else fields.inner
    routed = fields.layers - dense_layers
    full, windowed, linear = fields.full_layers, fields.windowed_layers, fields.linear_layers
    attention, kv, heads = _attention(fields)
    full_attention, full_kv, full_heads = _attention(fields.of_full_layers())
    linear_attention = fields.width * (2 * fields.linear_key_width + 3 * fields.linear_value_width)
    mixers = full * full_attention + windowed * attention + linear * linear_attention
    shared = routed * fields.width * (matrices * fields.shared_inner + fields.experts)
    output = fields.width * fields.vocabulary
    dense = mixers + dense_layers * matrices * fields.width * inner + shared + output
    expert = routed * matrices * fields.width * fields.inner if fields.experts else 0
    embedding = 0 if fields.tied else output
    output_bits = kind.output_bits or kind.bits
    dense_bytes = ((dense - output) * kind.bits + output * output_bits) / 8
    expert_bytes = expert * expert_kind.bits / 8
    return ModelShape(
        name=name,
        layers=fields.layers,
        width=fields.width,
        vocabulary=fields.vocabulary,
        dense_parameters=dense,
        dense_bytes=dense_bytes,
        memory_bytes=dense_bytes + fields.experts * expert_bytes + embedding * output_bits / 8,
        kv_values=full_kv * full,
        attention_width=full_heads * full,
        expert_parameters=expert,
        expert_bytes=expert_bytes,
        experts=fields.experts,
        experts_used=fields.experts_used,
        window_tokens=fields.window_tokens,
        window_kv_values=kv * windowed,
        window_attention_width=heads * windowed,
        state_bytes=linear * fields.linear_value_width * _STATE_BYTES,
        operations=kind.operations,
        embedding_parameters=embedding,
        hub=fields.hub,
        type=weights or fields.expert_type or fields.type,
        head_bits=output_bits,
    )


def _attention(fields: ModelFields) -> tuple[float, float, float]:
    """Of a layer: parameters of attention, values of K and V of a token, and heads times their width."""
    width, heads = fields.width, fields.heads
    if fields.kv_rank:  # compressed: DeepSeek-V2's MLA
        nope, rope, value = fields.nope_width, fields.rope_width, fields.value_width
        query, rank = width * heads * (nope + rope), fields.q_rank
        if rank:
            query = rank * (width + heads * (nope + rope))
        down = width * (fields.kv_rank + rope)
        up = fields.kv_rank * heads * (nope + value)
        return query + down + up + heads * value * width, fields.kv_rank + rope, heads * (nope + rope)
    head = fields.head_width or width // heads
    kv = 2 * (fields.kv_heads or heads) * head
    queries = 3 if fields.gated_attention else 2  # with the output's matrix
    return width * (queries * heads * head + kv), kv, heads * head


def head_of(target: ModelShape, kind: str) -> ModelShape:
    """The draft that is one more layer of a target: its MTP layer, or an EAGLE head. Its logits are those of
    the target's output layer; an EAGLE-3 head has its own, over fewer tokens."""
    per_layer, has_output = 1 / target.layers, kind == "eagle3"
    vocabulary = _EAGLE3_TOKENS if has_output else target.vocabulary
    bytes_each = target.head_bits / 8 or target.dense_bytes / target.dense_parameters
    own = (target.dense_parameters - target.width * target.vocabulary) * per_layer
    own += (3 if has_output else 2) * target.width**2
    output = target.width * vocabulary
    return replace(
        target,
        name=kind,
        layers=1,
        vocabulary=vocabulary,
        dense_parameters=own + output,
        dense_bytes=(own + output) * bytes_each,
        memory_bytes=(own + has_output * output) * bytes_each
        + target.experts * target.expert_bytes * per_layer,
        kv_values=(target.kv_values + target.window_kv_values) * per_layer,
        attention_width=(target.attention_width + target.window_attention_width) * per_layer,
        expert_parameters=target.expert_parameters * per_layer,
        expert_bytes=target.expert_bytes * per_layer,
        window_kv_values=0.0,
        window_attention_width=0.0,
        state_bytes=0.0,
        embedding_parameters=0.0,
        hub="",
        is_head=True,
    )


def find_shape(reference: str, known: Catalogue, weights: str = "", kv_type: str = "f16") -> ModelShape:
    """The shape that is meant: NAME[:TYPE], or a GGUF file. `weights` is the type of a known model where none
    is named; `kv_type` that of K and V.

    Raises SettingError, with the nearest names, and ModelFileError.
    """
    path = Path(reference).expanduser()
    name, _, own = reference.rpartition(":")
    is_known = known.spelled("models", reference) in known.tables["models"]  # gpt-oss:20b is a name
    if not path.exists() and name and not is_known:
        path = Path(name).expanduser()
    else:
        name, own = reference, ""
    if path.suffix == ".gguf" and path.exists():
        found = _of_gguf(path)
    elif (spelled := known.spelled("models", name.removesuffix(".gguf"))) in known.tables["models"]:
        named = f"{spelled}:{own.lower()}" if own else spelled
        found = shape_of(known.model(spelled), named, known, own.lower() or weights)
    elif path.suffix == ".gguf":
        found = _of_gguf(path)  # which says what is wrong with it
    else:
        raise unknown("model", name, known.tables["models"])
    return replace(found, kv_bits=known.weight_type(kv_type).bits)


def _of_gguf(path: Path) -> ModelShape:
    from outrider.models.gguf import check_whole, read_card  # not needed for known names

    card = read_card(path)
    check_whole(card)
    layout, width, vocabulary = card.layout, card.embedding_length or 0, card.num_tokens or 0
    experts = card.expert_count if card.expert_used_count else 0
    routed = sum(size for name, size in layout.tensors.items() if "_exps." in name)
    expert = routed / experts if experts else 0.0
    dense = card.bytes_per_token - card.expert_used_count * expert if experts else card.bytes_per_token
    idle = card.parameters - card.active_parameters
    expert_parameters = idle / (experts - card.expert_used_count) if experts > card.expert_used_count else 0.0
    has_output = "output.weight" in layout.tensors
    embedding = width * vocabulary if has_output else 0
    whole = [layer for layer in layout.layers if not layer.has_window]
    windowed = [layer for layer in layout.layers if layer.has_window]
    return ModelShape(
        name=path.stem,
        layers=card.block_count or len(layout.layers),
        width=width,
        vocabulary=vocabulary,
        dense_parameters=card.parameters - experts * expert_parameters - embedding,
        dense_bytes=dense,
        memory_bytes=card.file_bytes,
        kv_values=sum(layer.key_values + layer.value_values for layer in whole),
        attention_width=layout.attention * len(whole),
        expert_parameters=expert_parameters,
        expert_bytes=expert,
        experts=experts,
        experts_used=card.expert_used_count,
        window_tokens=card.sliding_window or 0,
        window_kv_values=sum(layer.key_values + layer.value_values for layer in windowed),
        window_attention_width=layout.attention * len(windowed),
        operations="f16" if card.quantization in ("F16", "BF16", "F32") else "i8",
        embedding_parameters=embedding,
        hub=str(path),
        type=card.quantization.lower(),
    )
