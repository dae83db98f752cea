"""Load a GGUF model, decode one token and then a batch of 32, the way any program would.

    first_decode.py MODEL

Exits 0 when both calls work and 1 with a reason when llama.cpp refuses. On a machine that its
build does not suit, llama.cpp kills the process instead: run this as a child and look at its signal.
"""

from __future__ import annotations

import os
import resource
import sys

import llama_cpp

_CONTEXT_TOKENS = 64
_BATCH_TOKENS = 32


def main(path: str) -> None:
    """Exit with a reason unless the model at `path` loads and decodes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death here is an answer, not a case for a core file
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = _CONTEXT_TOKENS
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"llama.cpp cannot make a context for {path}")
    for num_tokens in (1, _BATCH_TOKENS):
        # Token 1 exists in every vocabulary; a single token and a batch take different kernels.
        tokens = (llama_cpp.llama_token * num_tokens)(*[1] * num_tokens)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, num_tokens))
        if status != 0:
            sys.exit(f"llama.cpp cannot decode {num_tokens} tokens of {path} (status {status})")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: first_decode.py MODEL")
    main(sys.argv[1])
