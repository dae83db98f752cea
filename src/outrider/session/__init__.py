"""The Python API: a target, its draft and its chat template, loaded and ready to generate.

`Pair` holds weights and tokenizers; `Pair.open` gives it KV caches of a chosen size and drafters, which
makes a `Session`. A session also works on models of any other backend, given to it directly.
"""

from outrider.session.pair import Pair
from outrider.session.session import DEFAULT_CONTEXT_TOKENS, Message, Session, encode
from outrider.session.settings import describe_policy, settings_of

__all__ = ["DEFAULT_CONTEXT_TOKENS", "Message", "Pair", "Session", "describe_policy", "encode", "settings_of"]
