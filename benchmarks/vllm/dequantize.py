"""Write the embedded default model, dequantized, as a folder that vLLM serves: dequantize.py FILE.gguf FOLDER

Runs in vLLM's environment, with gguf and accelerate beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.is_quantized, model.hf_quantizer = False, None  # else it would not be written
    del model.config.quantization_config
    model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
