"""A running generation, and the prompts and schemas it is asked for with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Self, cast

from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Grammar, Request, StepRecord, Update
from outrider.core.errors import GrammarError, PromptError, SettingError
from outrider.engine import Engine
from outrider.models.chat import ChatTemplate

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "…"}`."""


class Generation:
    """A running generation: iterate over it for the text as it comes, then read `completion`.

    `parse` makes `Completion.parsed` of a complete answer. `cancel` ends the generation after the current
    step; leaving the loop early, `close` and the end of a `with` end it too.
    """

    def __init__(
        self, engine: Engine, request: Request, parse: Callable[[Completion], Any] | None = None
    ) -> None:
        self._engine = engine
        self._parse = parse
        self._updates = engine.stream(request)
        self._request_id: int | None = None
        self._cancelled = False
        self._completion: Completion | None = None
        self.records: list[StepRecord] = []

    def __iter__(self) -> Iterator[Update]:
        try:
            while (update := self._next()) is not None:
                yield update
        except GeneratorExit:  # the loop was left: its place must not stay taken
            self.cancel()
            raise

    def _next(self) -> Update | None:
        try:
            update = next(self._updates)
        except StopIteration as end:
            self._completion = end.value or self._completion  # asked again, an ended generator has none
            if self._parse and self._completion and self._completion.is_complete:
                self._completion = replace(self._completion, parsed=self._parse(self._completion))
                self._parse = None
            return None
        self._request_id = update.record.request
        self.records.append(update.record)
        if self._cancelled:
            self._engine.cancel(self._request_id)
        return update

    def cancel(self) -> None:
        """End the generation after the current step, at the earliest after its first."""
        self._cancelled = True
        if self._request_id is not None:
            self._engine.cancel(self._request_id)

    def close(self) -> None:
        """End the generation now; `records` has what was done."""
        self._updates.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The finished generation; waits for its end."""
        for _ in self:
            pass
        if self._completion is None:
            raise SettingError("generation", "an error interrupted it", "Start another one.")
        return self._completion


def encode(
    vocabulary: Vocabulary, template: ChatTemplate | None, prompt: str | Sequence[Message] | Sequence[int]
) -> tuple[int, ...]:
    """The tokens of a text, or of a conversation under `template`; tokens (integers of any kind) are returned
    as they are. Raises PromptError for anything else, an empty prompt, or a conversation without a
    template."""
    if not isinstance(prompt, str | Sequence) and not hasattr(prompt, "__array__"):
        why = f"it is a {type(prompt).__name__}"
        raise PromptError("prompt", why, "Give a text, a conversation, or tokens.")
    if isinstance(prompt, str):
        tokens = vocabulary.tokenize(prompt)
    elif all(isinstance(token, Integral) for token in prompt):
        tokens = [int(token) for token in cast("Sequence[int]", prompt)]
    elif template is None:
        raise PromptError("conversation", "the model has no chat template", "Give the prompt as one text.")
    else:
        tokens = template.tokenize(template.render(cast("Sequence[Message]", prompt)), vocabulary)
    if not tokens:
        raise PromptError("prompt", "it is empty", "Give some text.")
    return tuple(tokens)


Schema = type[Any] | Mapping[str, Any] | str
"""A Pydantic model, or a JSON schema as plain data or text."""


def read_schema(schema: Schema) -> tuple[str, Callable[[str], Any]]:
    """The text of a schema, and a parser for its answers. Objects of a Pydantic model have no other fields
    than its own, unless it allows them. Raises GrammarError for anything else, and for what JSON cannot
    hold."""
    if isinstance(schema, str):
        return schema, json.loads
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        from outrider.constraints.json_schema import closed  # loads slowly, and few requests need it

        model: Any = schema
        return json.dumps(closed(model.model_json_schema())), model.model_validate_json
    if not isinstance(schema, Mapping):
        why = f"{schema!r} is neither a Pydantic model nor a JSON schema"
        raise GrammarError("schema", why, "Give a class with model_json_schema(), a mapping or JSON text.")
    try:
        return json.dumps(schema), json.loads
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError("schema", f"JSON cannot hold it ({error})", "Give plain data.") from None


def parser_of(
    grammar: Grammar, vocabulary: Vocabulary, parse: Callable[[str], Any]
) -> Callable[[Completion], Any]:
    """A parser for answers under the schema's grammar: of the whole text, or of what follows the grammar's
    `after`; None where that is missing."""

    def parse_completion(completion: Completion) -> Any:
        if grammar.after is None:
            return parse(completion.text)
        spelled = b""
        for token in completion.tokens:
            if not vocabulary.ends_generation(token):  # control tokens show no text, but have a spelling
                is_control = vocabulary.is_control(token)
                spelled += vocabulary.spelling(token) if is_control else vocabulary.piece(token)
        _, trigger, answer = spelled.partition(grammar.after.encode())
        return parse(answer.decode()) if trigger else None

    return parse_completion
