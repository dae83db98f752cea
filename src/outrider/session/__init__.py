"""The Python API: a target, its draft and its chat template, loaded and ready to generate.

`Pair` holds weights and tokenizers; `Session.open` gives it KV caches of a chosen size and drafters. A
session also works on models of any other backend, given to it directly.
"""

from outrider.session.generation import Message
from outrider.session.options import DEFAULT_CONTEXT_TOKENS, SessionOptions
from outrider.session.pair import Pair
from outrider.session.session import Session
from outrider.session.settings import describe_policy, settings_of

__all__ = [
    "DEFAULT_CONTEXT_TOKENS",
    "Message",
    "Pair",
    "Session",
    "SessionOptions",
    "describe_policy",
    "settings_of",
]
