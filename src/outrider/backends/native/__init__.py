"""ik_llama.cpp compiled for the CPU of this machine, in the user's cache."""

from outrider.backends.native.place import IK, native_library

__all__ = ["IK", "native_library"]
