"""Files of heads: what they need of their target, and whether it has that. Headers are read, and the map of
a head's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.core.errors import ModelFileError
from outrider.models.constants import Keys
from outrider.models.gguf import ModelCard, ModelKind
from outrider.models.header import Header, TensorInfo, read_header
from outrider.models.reference import local_shards

CHAINED = ("hy_v3", "mimo2", "step35")
"""Architectures of which llama.cpp runs several MTP layers: of others it ends the process."""
NUM_LAYERS = 3
"""whose inputs an EAGLE-3 head reads: llama.cpp takes no other number"""
LAYERS_KEY, WIDTH_KEY = "eagle3.target_layers", "eagle3.target_hidden_size"
BLOCK_LAYERS_KEY, BLOCK_SIZE_KEY = "dflash.target_layers", "dflash.block_size"
CANDIDATES_KEY = "dflash.selector_top_k"
DRAFTED_TABLE = "d2t"
"""the tensor that names the tokens a head gives logits of, in their order"""
MARKOV, CONFIDENCE, SELECTOR = "markov_w1.weight", "conf_proj.weight", "selector_hidden.weight"
"""the tensors by which DSpark is known, what it has besides, and DFlash2"""
_LAYERS_KEYS: dict[ModelKind, str] = {"eagle3": LAYERS_KEY, "dflash": BLOCK_LAYERS_KEY}
Tensors = dict[str, TensorInfo]
"""those of a file, by name"""


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A file of heads that fits its target. `target_layers`: those whose inputs it reads (the number of all:
    what comes out of the last); MTP layers read the target's last state."""

    path: Path
    kind: ModelKind
    target_layers: tuple[int, ...] = ()


def read_head(head: ModelCard, target: ModelCard) -> HeadFile:
    """A file of heads for this target. Raises ModelFileError for one of another model, or damaged."""
    header = read_header(local_shards(head.path)[0])
    tensors = {tensor.name: tensor for tensor in header.tensors}
    layers: tuple[int, ...] = ()
    if head.kind in _LAYERS_KEYS:
        layers = header.numbers(_LAYERS_KEYS[head.kind], head.path)
        fault = (_fault_of_eagle if head.kind == "eagle3" else _fault_of_block)(head, header, tensors, layers)
        if fault := fault or _fault_of_tokens(head, header, tensors):
            raise ModelFileError(str(head.path), fault, "Download it again, or convert it anew.")
    if why := (_mtp_misfit if head.kind == "mtp" else _misfit)(head, target, header, tensors, layers):
        raise ModelFileError(str(head.path), why, "Name the file that was made for this model, or -md auto.")
    return HeadFile(head.path, head.kind, layers)


def why_no_head(head: ModelCard, target: ModelCard) -> str:
    """Why a file of heads does not belong to this target; empty if it does."""
    try:
        read_head(head, target)
    except ModelFileError as error:
        return error.why
    return ""


def _trunk(card: ModelCard) -> tuple[str, int, int]:
    return card.architecture, (card.block_count or 0) - card.mtp_layers, card.embedding_length or 0


def _mtp_misfit(
    head: ModelCard, target: ModelCard, _header: Header, tensors: Tensors, _layers: Sequence[int]
) -> str:
    made_for, needed = _trunk(head), _trunk(target)
    if made_for != needed:
        what, has = (f"{name} of {layers} layers, {width} wide" for name, layers, width in (made_for, needed))
        return f"it was made for a model of kind {what}, and the target is {has}"
    if found := tensors.get(DRAFTED_TABLE):
        known = f"{DRAFTED_TABLE}: {found.num_parameters} tokens of {head.num_tokens}"
        return f"its MTP layers have a reduced vocabulary ({known}), which is not supported"
    if head.mtp_layers > 1 and head.architecture not in CHAINED:
        return f"it holds {head.mtp_layers} MTP layers, and llama.cpp runs one of kind {head.architecture}"
    return ""


def _misfit(
    head: ModelCard, target: ModelCard, header: Header, tensors: Tensors, layers: Sequence[int]
) -> str:
    _, num_layers, needed = _trunk(target)
    name, width = target.path.name, head.embedding_length
    if head.kind == "eagle3":
        width = header.number(WIDTH_KEY)
    elif head.kind == "assistant":
        width = header.number(f"{head.architecture}.embedding_length_out")
        if target.architecture != "gemma4":
            return f"it was made for Gemma 4, and the target is of kind {target.architecture}"
    if width != needed:
        return f"it reads states of {width} values, and those of {name} have {needed}"
    if max(layers, default=0) > num_layers:
        return f"it reads layer {max(layers)}, and {name} has {num_layers}"
    if head.num_tokens != target.num_tokens:
        return f"it knows {head.num_tokens} tokens, and {name} {target.num_tokens}"
    borrows = not {"token_embd.weight", "output.weight"} <= {*tensors}
    if head.kind == "eagle3" and borrows and head.embedding_length != width:
        return f"it takes embeddings or output from its target, which are not {head.embedding_length} wide"
    return ""


def _fault_of_eagle(head: ModelCard, _header: Header, _tensors: Tensors, layers: Sequence[int]) -> str:
    if len(layers) == NUM_LAYERS and head.block_count == 1 and min(layers) >= 0:
        return ""
    return f"it reads {len(layers)} layers of its target with {head.block_count} of its own, not 3 with 1"


def _fault_of_block(head: ModelCard, header: Header, tensors: Tensors, layers: Sequence[int]) -> str:
    size, mask = header.number(BLOCK_SIZE_KEY), header.number(Keys.Tokenizer.MASK_ID)
    candidates = header.number(CANDIDATES_KEY) or 0
    if not layers or min(layers) < 0:
        return "it does not say which layers of its target it reads"
    if (size is None and MARKOV in tensors) or (size is not None and size < 2):
        return f"it drafts blocks of {size or 'no known number of'} tokens"
    if mask is None or not 0 <= mask < (head.num_tokens or 0):
        named = "it names no mask token" if mask is None else f"its mask token is {mask}"
        return f"{named}, and it knows {head.num_tokens} tokens"
    if bool(candidates) != (SELECTOR in tensors):
        return f"it speaks of {candidates} candidates for a place, which its tensors do not choose from"
    return ""


def _fault_of_tokens(head: ModelCard, header: Header, tensors: Tensors) -> str:
    """What is wrong with the tables of tokens, past whose ends the library would read or write."""
    num_tokens, size = head.num_tokens or 0, None
    if (table := tensors.get("token_embd.weight")) and table.shape[-1] < num_tokens:
        return f"it has embeddings for {table.shape[-1]} of its {num_tokens} tokens"
    if found := tensors.get(DRAFTED_TABLE):
        size = found.num_parameters
        if found.type_name != "I64" or len(found.shape) != 1:
            return "the map of its tokens (d2t) is not a list of 64-bit numbers"
        ids = np.fromfile(head.path, "<i8", size, offset=header.data_byte + found.offset_bytes)
        if not len(ids) or ids.min() < 0 or ids.max() >= num_tokens or len(np.unique(ids)) < size:
            return f"the map of its tokens (d2t) names some twice, or some that are none of its {num_tokens}"
    if (output := tensors.get("output.weight")) and size not in (None, output.shape[-1]):
        return f"it has outputs for {output.shape[-1]} tokens, and its map (d2t) names {size}"
    return ""
