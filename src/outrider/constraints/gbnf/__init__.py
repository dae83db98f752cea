"""GBNF, llama.cpp's grammar language."""

from outrider.constraints.gbnf.writer import gbnf_to_lark

__all__ = ["gbnf_to_lark"]
