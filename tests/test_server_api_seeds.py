"""A seed repeats an answer with drafts, on every endpoint; what cannot repeat says so."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from outrider.backends.fake import random_logits
from outrider.core.data import DraftToken, Request
from outrider.policy.fixed import FixedPolicy
from serving import HERMES, Serving, serving, user
from test_server_api_tolerant import CHAT, GENERATE, LLAMA, MESSAGES, OLLAMA, RESPONSES, TEXT, text_of

PROMPT = "ab ab ab"
SAMPLED = {"temperature": 1.0, "seed": 42, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user(PROMPT), "max_tokens": 24, **SAMPLED},
    TEXT: {"prompt": PROMPT, "max_tokens": 24, **SAMPLED},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 24, **SAMPLED},
    MESSAGES: {"messages": user(PROMPT), "max_tokens": 24, **SAMPLED},
    LLAMA: {"prompt": PROMPT, "n_predict": 24, **SAMPLED},
    OLLAMA: {"messages": user(PROMPT), "stream": False, "options": SAMPLED | {"num_predict": 24}},
    GENERATE: {"prompt": PROMPT, "stream": False, "options": SAMPLED | {"num_predict": 24}},
}


class Fickle:
    """Drafts a token at some positions, at others in the next request."""

    name = "fickle"
    is_free = True

    def __init__(self) -> None:
        self._num_begun = self._num_asked = 0

    def begin(self, sequence: int, request: Request) -> None:
        del sequence, request
        self._num_begun += 1

    def observe(self, sequence: int, tokens: Sequence[int]) -> None: ...

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        del sequence, prefix
        self._num_asked += 1
        if self._num_asked % (self._num_begun % 5 + 1) == 0:
            yield DraftToken(self._num_asked % 256, self.name, acceptance=0.5)

    def end(self, sequence: int) -> None: ...

    def reset(self) -> None: ...


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    """Drafts that change from request to request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.answering", lambda vocabulary: random_logits(vocabulary.size, order=1))
        policy = FixedPolicy(draft_max=4, p_min=0.0, hand_over=0.0)
        with serving(template=HERMES, drafters=[Fickle()], policy=policy) as running:
            yield running


@pytest.mark.parametrize("path", ASKED)
def test_a_seed_repeats_whatever_is_drafted(served: Serving, path: str) -> None:
    def ask(**more: Any) -> Any:
        response = served.post(path, **ASKED[path] | more)
        assert response.status_code == 200, response.text
        return response.json()

    def texts(**more: Any) -> set[str]:
        return {text_of(path, ask(**more)) for _ in range(4)}

    whole = ask()
    assert whole["outrider"]["notices"] == []
    assert texts() == texts(speculation={"policy": "plain"}) == {text_of(path, whole)}
    assert len(texts(speculation={"rule": "token"})) > 1, "these drafts change nothing: the test is blind"


def test_what_cannot_repeat_says_so_and_has_no_fingerprint(served: Serving) -> None:
    prints = set()
    for path in (CHAT, TEXT):
        for more, repeats in (
            ({}, True),
            ({"speculation": {"rule": "auto"}}, True),
            ({"speculation": {"policy": "plain", "rule": "token"}}, True),
            ({"speculation": {"rule": "block"}, "temperature": 0}, True),
            ({"speculation": {"rule": "block"}, "seed": None}, True),
            ({"speculation": {"rule": "block"}}, False),
        ):
            body = served.post(path, **ASKED[path] | more).json()
            said = [line for line in body["outrider"]["notices"] if line.startswith("seed: ")]
            assert (body["system_fingerprint"] is not None, said == []) == (repeats, repeats), more
            prints.add(body["system_fingerprint"])
    with serving() as other:
        prints.add(other.service.fingerprint)
    assert len(prints) == 2, "one for the model, and none"


def test_the_fingerprint_tells_how_the_model_is_run(tmp_path: Any) -> None:
    """Another file or another type of the KV is another fingerprint: its answers are others."""
    from outrider import Session
    from outrider.backends.gguf.options import LoadOptions
    from outrider.server.service import Service
    from tiny_gguf import write_tiny

    def fingerprint(name: str, **options: Any) -> str:
        file = tmp_path / name
        if not file.exists():
            write_tiny(file, seed=len(name))
        loaded = LoadOptions(threads=1, **options)
        with Session.load(file, context_length=64, options=loaded, policy=FixedPolicy()) as session:
            return Service(session).fingerprint

    assert fingerprint("a.gguf") == fingerprint("a.gguf")
    assert (
        len({fingerprint("a.gguf"), fingerprint("bb.gguf"), fingerprint("a.gguf", cache_type_k="q8_0")}) == 3
    )
