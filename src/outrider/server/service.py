"""What serves one model."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import HTTPConnection

from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import OutriderError
from outrider.core.notices import collect_notices, notify
from outrider.core.params import Verification
from outrider.core.settings import sampling_params
from outrider.drafters.model import ModelDrafter
from outrider.formats import format_of
from outrider.models.gguf import ModelCard, read_card
from outrider.models.infill import Infill, find_infill
from outrider.policy.auto import AutoPolicy
from outrider.server.errors import Problem, invalid_field, problem_of
from outrider.server.keys import Caller
from outrider.server.metrics import Metrics
from outrider.server.settings import ServeSettings
from outrider.server.worker import Worker

if TYPE_CHECKING:
    from outrider.session.session import Session

_Result = TypeVar("_Result")

_PREPARING_THREADS = 4
"""Templates, tokenizers and schemas take milliseconds; a few threads, so that a slow one delays no other."""


class Service:
    """One model and what serves it: a worker for the session's engine, and threads that prepare requests.
    `verification` is how drafts are verified where a request does not say. `release` frees the model when the
    service is closed; by default it stays its owner's."""

    def __init__(
        self,
        session: Session,
        settings: ServeSettings | None = None,
        *,
        verification: Verification | None = None,
        metrics: Metrics | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session
        self.settings = settings = settings or ServeSettings()
        self.metrics = metrics or Metrics(session.target.name)
        observe = self.metrics.observe_steps
        self.worker = Worker(session, max_waiting=settings.max_waiting, observe=observe)
        self._release = release
        self.names = tuple(name for name in (settings.alias, session.target.name) if name)
        """what clients may call the model"""
        self.name = self.names[0]
        self.vocabulary = session.target.vocabulary
        self.template = session.template
        self.context_tokens = session.target.context_length
        """of a prompt and its answer together"""
        self.defaults = sampling_params(settings)
        self.verification = verification or Verification()
        self.format = format_of(session.template, session.target.vocabulary)
        self.controls = ControlTokens(session.target.vocabulary)
        setup = f"{session.identity} {session.bitwise}".encode()
        self.fingerprint = f"outrider-{version('outrider')}-{sha256(setup).hexdigest()[:12]}"
        """OpenAI's `system_fingerprint`: what, beside the request, an answer with a seed depends on"""
        self._notices = tuple(session.notices)
        self.started_unix_s = int(time.time())
        self._threads = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="prepare")

    def start(self) -> None:
        self.worker.start()

    def close(self) -> None:
        """End the threads. Closing twice is harmless where the model stays its owner's."""
        self.worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._release()

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about models and machine that still hold; later ones are about single requests."""
        return tuple(line for line in self._notices if line in self.session.notices)

    @property
    def draft_name(self) -> str | None:
        drafters = self.session.engine.drafters
        return next((d.model.name for d in drafters if isinstance(d, ModelDrafter)), None)

    @property
    def policy(self) -> AutoPolicy | None:
        """The policy, where it decides by what calls cost."""
        policy = self.session.engine.policy
        return policy if isinstance(policy, AutoPolicy) else None

    @property
    def policy_name(self) -> str:
        """Who drafts where a request says nothing: "auto", or "fixed" lengths."""
        return "fixed" if self.policy is None else "auto"

    @cached_property
    def infill(self) -> Infill | None:
        """The tokens by which the model fills in a middle; None where it cannot."""
        return find_infill(self.vocabulary, self.metadata)

    @cached_property
    def card(self) -> ModelCard | None:
        """What the target's file says of it; None for a model that is not from a file."""
        return None if self._weights is None else read_card(self._weights.path)

    def metadata(self, key: str) -> str:
        """A value of the target's GGUF file as text; empty where it is absent."""
        return "" if self._weights is None else str(self._weights.metadata(key))

    @property
    def _weights(self) -> Any:
        return getattr(getattr(self.session.target, "inner", self.session.target), "weights", None)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens as they are spelled."""
        return b"".join(map(self.spelled, tokens)).decode("utf-8", errors="replace")

    def spelled(self, token: int) -> bytes:
        """The text of a token, or the vocabulary's spelling of one that has no text."""
        return self.vocabulary.piece(token) or self.vocabulary.spelling(token)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises Problem for a token that the vocabulary lacks."""
        if max(tokens, default=0) >= (size := self.vocabulary.size):
            why = f"token {max(tokens)} is unknown. The vocabulary has 0 to {size - 1}."
            raise invalid_field(param, why, code="invalid_prompt")

    def check_prompt(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """The prompt, if it fits. Raises Problem."""
        if not tokens:
            raise invalid_field(param, "it has no tokens. Give some text.", code="invalid_prompt")
        self.check_tokens(tokens, param)
        if len(tokens) >= self.context_tokens:
            most = self.context_tokens - 1
            raise self._too_long(param, f"A prompt may have {most}, and this one has {len(tokens)}")
        return tuple(tokens)

    @property
    def max_characters(self) -> int:
        """A text with more characters cannot fit into the context, however it is tokenized."""
        return self.context_tokens * self.controls.longest_bytes

    def check_length(self, text: str, param: str) -> None:
        """Raises Problem for a text that cannot fit, before seconds are spent on tokenizing it."""
        if len(text) > self.max_characters:
            raise self._too_long(param, f"A text of {len(text):,} characters has more")

    def _too_long(self, param: str, why: str) -> Problem:
        # OpenAI's clients know a prompt that is too long by these words and this code.
        known = f"this model's maximum context length is {self.context_tokens} tokens."
        return invalid_field(param, f"{known} {why}. Shorten it.", code="context_length_exceeded")

    def compile(self, grammar: Grammar, param: str) -> None:
        """Compile a grammar ahead of the engine. Raises Problem."""
        try:
            notify(*self.session.compile(grammar).notices)
        except OutriderError as error:
            raise problem_of(error, param) from None

    async def prepared(self, make: Callable[[], _Result]) -> tuple[_Result, list[str]]:
        """The result of slow work, done in a thread, and what was noticed meanwhile: what was not enforced,
        not read, not used."""

        def collected() -> tuple[_Result, list[str]]:
            with collect_notices() as notices:
                return make(), notices

        return await asyncio.get_running_loop().run_in_executor(self._threads, collected)


_MARK = "\ufdd0"
"""A code point that never becomes a character."""
_WRITTEN_MARK = re.compile(r"\\ufdd0", re.IGNORECASE)
"""The mark as ASCII JSON writes it."""
_READ_BY_TEMPLATES = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""Templates look for these in earlier answers; they open no turn."""


class ControlTokens:
    """Keeps control tokens that a client spells out text: no client can forge a turn by writing `<|im_end|>`.
    The template's own are read as such. A mark is put after the first character of each that a client
    spells; the template leaves the mark alone, and the rendered text is split there before it is tokenized.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def escape(self, value: Any) -> Any:
        """A client's plain data, with a mark in each control token that its texts spell."""
        if isinstance(value, str):
            return self._pattern.sub(rf"\1{_MARK}", value.replace(_MARK, "\ufffd"))
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(part) for key, part in value.items()}
        return [self.escape(part) for part in value] if isinstance(value, list) else value

    @staticmethod
    def split(rendered: str) -> list[str]:
        """A rendered text, split at its marks."""
        return _WRITTEN_MARK.sub(_MARK, rendered).split(_MARK)

    def count(self, text: str) -> int:
        """How many control tokens a text spells."""
        return sum(1 for _ in self._pattern.finditer(text))

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of the vocabulary's longest token."""
        tokens = range(self._vocabulary.size)
        return max(len(self._vocabulary.piece(t) or self._vocabulary.spelling(t)) for t in tokens)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The first character of each control token that is spelled out, overlapping ones too."""
        vocabulary = self._vocabulary
        spellings = {
            vocabulary.spelling(token).decode("utf-8", errors="ignore")
            for token in range(vocabulary.size)
            if vocabulary.is_control(token)
        }
        found = sorted(spellings.difference(_READ_BY_TEMPLATES, [""]), key=len, reverse=True)
        return re.compile(rf"(?=(?:{'|'.join(map(re.escape, found))}))(.)" if found else r"(?!)()", re.DOTALL)


def caller_of(connection: HTTPConnection) -> Caller:
    """Who asks, as the guard found out."""
    return getattr(connection.state, "caller", None) or Caller()
