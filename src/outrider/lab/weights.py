"""What a model's file says about the memory that each of its tokens reads."""

from __future__ import annotations

from pathlib import Path

from gguf.constants import Keys

from outrider.models.gguf import ModelCard
from outrider.models.header import TensorInfo, read_header
from outrider.models.shards import local_shards

__all__ = ["bytes_read"]

_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_EXPERTS = "_exps."


def bytes_read(card: ModelCard) -> int:
    """Bytes of weights that a call over a single token reads: all, without the experts that the token passes
    by, and without the embedding where that is only looked up, not multiplied with.

    Raises ModelFileError for a file that can no longer be read.
    """
    headers = [read_header(file) for file in local_shards(Path(card.path))]
    tensors = [tensor for header in headers for tensor in header.tensors]
    used = headers[0].number(Keys.LLM.EXPERT_USED_COUNT.format(arch=card.architecture)) or 0
    has_output = any(tensor.name == _OUTPUT for tensor in tensors)
    per_parameter = card.file_bytes / max(card.parameters, 1)
    return sum(
        _active(tensor, used, per_parameter)
        for tensor in tensors
        if not (has_output and tensor.name == _EMBEDDING)
    )


def _active(tensor: TensorInfo, used: int, per_parameter: float) -> int:
    size = tensor.num_bytes
    whole = round(tensor.num_parameters * per_parameter) if size is None else size
    experts = tensor.shape[-1] if _EXPERTS in tensor.name and tensor.shape else 0
    return whole * used // experts if 0 < used < experts else whole
