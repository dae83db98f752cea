"""ik_llama.cpp compiled for the CPU of this machine, in the user's cache."""

from outrider.backends.native.build import IK, NativeBuild, Progress, build_native, hint_once, native_library

__all__ = ["IK", "NativeBuild", "Progress", "build_native", "hint_once", "native_library"]
