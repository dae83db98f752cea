"""The Python API: `Pair` loads the weights and tokenizers of a target and its draft; `Session.open` adds KV
caches and drafters, and generates. A session also takes models of any other backend directly.
"""
