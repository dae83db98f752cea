"""GGUF models through the C API of llama.cpp or ik_llama.cpp, whichever library is there."""
