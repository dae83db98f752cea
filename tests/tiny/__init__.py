"""What tiny models of each architecture are made of; `tiny_gguf` writes them."""
