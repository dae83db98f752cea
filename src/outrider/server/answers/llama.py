"""Completions as llama-server has them: the whole object, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from outrider.core.data import Completion, Update
from outrider.server.answers.choice import Answer, Choice, account_of
from outrider.server.errors import llama_error
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.llama import LlamaFields
from outrider.server.service import Service


class LlamaAnswer(Answer):
    """The answer to one request of llama-server's; of several prompts or choices a list."""

    def __init__(self, service: Service, body: LlamaFields, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._body = body
        self._reads_only = body.n_predict == 0
        self._with_tokens = bool(body.return_tokens or body.stream)
        self._tokens: list[list[int]] = [[] for _ in self.choices]
        self._scored: list[list[dict[str, Any]]] = [[] for _ in self.choices]

    def take(self, choice: Choice, outcome: Update | Completion) -> None:
        choice.take(outcome)
        if isinstance(outcome, Update):
            self._tokens[choice.index] += filter(choice.is_text, outcome.record.tokens)
        self._scored[choice.index] += choice.take_logprobs(with_ids=True)

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        found = [self._whole(choice, choice.content, self._tokens[choice.index]) for choice in self.choices]
        return found if len(found) > 1 else found[0]

    def next(self, choice: Choice, outcome: Update | Completion) -> Iterator[dict[str, Any]]:
        length, num_tokens = len(choice.content), len(self._tokens[choice.index])
        self.take(choice, outcome)
        content, tokens = choice.content[length:], self._tokens[choice.index][num_tokens:]
        if isinstance(outcome, Completion):
            yield self._whole(choice, content, [])
        elif content and not self._reads_only:
            chunk = {
                "index": choice.index,
                "content": content,
                "tokens": tokens,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": choice.counts["generated_tokens"],
                "tokens_evaluated": len(choice.request.prompt),
            }
            yield chunk | self._taken(choice)

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        return llama_error(500, body)

    def _taken(self, choice: Choice) -> dict[str, Any]:
        """Probabilities that nobody has got yet, where they were asked for."""
        found, self._scored[choice.index] = self._scored[choice.index], []
        return {"completion_probabilities": found} if self._body.n_probs else {}

    def _whole(self, choice: Choice, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        completion, account = choice.completion, account_of(choice, self.service.policy)
        is_limited = choice.finish_reason == "length"
        sampling: dict[str, Any] = asdict(choice.request.sampling)
        settings = {name: value for name, value in sampling.items() if not isinstance(value, tuple)}
        settings |= {"n_predict": -1 if self._body.n_predict is None else self._body.n_predict}
        found = {
            "index": choice.index,
            "content": "" if self._reads_only else content,
            "tokens": list(tokens) if self._with_tokens and not self._reads_only else [],
            "id_slot": -1,
            "stop": True,
            "model": self.service.name,
            "tokens_predicted": 0 if self._reads_only else account["generated_tokens"],
            "tokens_evaluated": completion.prompt_tokens,
            "generation_settings": settings | {"n_ctx": self.service.context_tokens, "seed": completion.seed},
            "prompt": self.service.text_of(choice.request.prompt),
            "has_new_line": "\n" in choice.content,
            "truncated": completion.finish_reason == "context",
            "stop_type": "limit" if is_limited else "word" if completion.stop is not None else "eos",
            "stopping_word": completion.stop or "",
            "tokens_cached": completion.reused_tokens,
            "timings": _timings(completion, account),
            **self._taken(choice),
            "outrider": account | {"notices": list(self.plan.notices)},
        }
        wanted = self._body.response_fields
        return found if wanted is None else _picked(found, wanted)


def _timings(completion: Completion, account: dict[str, Any]) -> dict[str, Any]:
    """How long prompt and answer took, in llama-server's words; of drafts also how many were accepted."""
    times, found = account["times"], dict[str, Any]()
    for name, number, seconds in (
        ("prompt", completion.prompt_tokens - completion.reused_tokens, times["prefill_s"]),
        ("predicted", account["generated_tokens"], times["decode_s"]),
    ):
        found |= {
            f"{name}_n": number,
            f"{name}_ms": seconds * 1000,
            f"{name}_per_token_ms": seconds * 1000 / max(number, 1),
            f"{name}_per_second": number / seconds if seconds else 0.0,
        }
    drafted = {"draft_n": account["drafted_tokens"], "draft_n_accepted": account["accepted_tokens"]}
    return {"cache_n": completion.reused_tokens} | found | drafted


def _picked(found: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Fields by their names; `a/b` is the field b of the object a, under this name. Others are left out."""
    picked: dict[str, Any] = {}
    for path in wanted:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            picked[path] = value
    return picked


_MISSING = object()
