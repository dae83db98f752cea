"""Libraries compiled on this machine: ik_llama.cpp for its CPU, llama.cpp for its NVIDIA cards."""

from outrider.backends.native.cuda import cuda_library
from outrider.backends.native.place import IK, MAINLINE, native_library

__all__ = ["IK", "MAINLINE", "cuda_library", "native_library"]
