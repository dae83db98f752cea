"""A session generates text with a target model and its drafters; its caller holds a running generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, cast

from outrider.backends.bitwise import BitwiseModel, Price
from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.core.contracts import Drafter, Model, Policy
from outrider.core.data import Completion, Grammar, Request, StepRecord, Update
from outrider.core.errors import PromptError, SettingError
from outrider.core.params import SamplingParams, Verification
from outrider.costs.other_programs import OtherPrograms
from outrider.costs.store import BUSY
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engine import Engine
from outrider.engine.tiers import KvTiers
from outrider.models.chat import ChatTemplate
from outrider.session.keeping import SAVE_S, Keeping
from outrider.session.learned import AutoSettings, Learned
from outrider.session.schemas import Schema, parser_of, read_schema

if TYPE_CHECKING:
    from outrider.constraints import Compiled, Compiler

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "…"}`."""

DEFAULT_CONTEXT_TOKENS = 4096

_MAX_NOTICES = 200
"""A session may see any number of grammars, each with something to say."""


class Generation:
    """A running generation: iterate over it for the text as it comes.

    `completion` is there when the iteration has ended; `parse` makes its `parsed` of a complete one.
    `cancel` ends it after the current step; so do leaving the loop early, `close`, and the end of a `with`.
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
        """End the generation after the current step (one that has not begun: after its first); its
        completion says "cancelled"."""
        self._cancelled = True
        if self._request_id is not None:
            self._engine.cancel(self._request_id)

    def close(self) -> None:
        """End the generation now. What there is of it is in `records`."""
        self._updates.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The finished generation; runs it to its end first."""
        for _ in self:
            pass
        if self._completion is None:
            raise SettingError("generation", "it was broken off by an error", "Start another one.")
        return self._completion


class Session:
    """Generates text with a target model and its drafters.

    >>> from outrider.backends.fake import FakeModel, FakeVocabulary, scripted_logits
    >>> from outrider.core.params import SamplingParams
    >>> from outrider.drafters.suffix import SuffixDrafter
    >>> vocabulary = FakeVocabulary("abcdefgh, ")
    >>> target = FakeModel(vocabulary, scripted_logits(vocabulary, "abc, "))
    >>> session = Session(target, [SuffixDrafter()])
    >>> completion = session.generate("abc, abc, ", max_tokens=12, sampling=SamplingParams(temperature=0))
    >>> completion.text
    'abc, abc, ab'
    >>> sum(record.kind == "decode" for record in completion.records)
    2

    `notices` are lines that the user should see: what was switched off, and why.
    """

    def __init__(
        self,
        target: Model,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        *,
        template: ChatTemplate | None = None,
        notices: Sequence[str] = (),
        learned: Learned | None = None,
        max_running: int | None = None,
        max_gap_s: float | None = None,
        bitwise_price: Price | None = None,
        kv_tiers: KvTiers | None = None,
    ) -> None:
        self.target = target
        self.kv_tiers = kv_tiers
        """where KV goes that leaves the target, and comes back from"""
        self.template = template
        self._drafters = tuple(drafters)
        self._learned = learned
        self._compiler: Compiler | None = None
        self.engine = Engine(
            target,
            drafters,
            policy,
            constrain=lambda grammar: self.compile(grammar).start(),
            max_running=max_running,
            max_gap_s=max_gap_s,
            kv_store=kv_tiers,
        )
        said = (*notices, *(learned.notices if learned else ()), *self.engine.notices)
        self.notices = list(dict.fromkeys(said))
        self.bitwise_price = bitwise_price
        """how much longer calls take so that texts are bit-equal; None where they are not, or it is not
        known"""

    @property
    def bitwise(self) -> bool:
        """Whether a greedy or seed-stable text is that of plain decoding bit for bit, whatever is drafted and
        whatever else runs."""
        return isinstance(self.target, BitwiseModel)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        context_length: int = DEFAULT_CONTEXT_TOKENS,
        options: LoadOptions | None = None,
        policy: Policy | AutoSettings | None = None,
        corpus: Sequence[str | Path] = (),
        bitwise: bool | None = None,
        keeping: Keeping | None = None,
    ) -> Session:
        """Load a target (None: the embedded default, with its own draft) and, if given, a draft model
        ("none": no draft at all); `corpus` are files and folders that drafts may be looked up in. Without a
        policy drafting is automatic. `bitwise` and `keeping` as in `Pair.open`.

        Paths, `hf:owner/repo[:quant]` and `hf:owner/repo/file.gguf` are understood. Raises the
        errors of `outrider.core.errors` that their names say.
        """
        from outrider.session.loading import Room
        from outrider.session.pair import Pair  # which makes sessions

        pair = Pair.load(model, draft, options=options, room=Room(context_length))
        try:
            return pair.open(context_length, policy=policy, corpus=corpus, bitwise=bitwise, keeping=keeping)
        except BaseException:
            pair.close()
            raise

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a text as it is, or of a conversation under the chat template."""
        return encode(self.target, self.template, prompt)

    def stream(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        speculate: bool = True,
        verification: Verification | None = None,
        logprobs: int | None = None,
        prediction: str | None = None,
        grammar: Grammar | None = None,
        schema: Schema | None = None,
    ) -> Generation:
        """Start generating from a text, a conversation or tokens. The settings are Request's;
        `prediction` is an answer that much of the real one is expected to be like.

        `schema` limits the output to JSON and parses it (`Completion.parsed`): a Pydantic model gives an
        object of it, a JSON schema plain data. `grammar` beside it says how (its `text` does not matter);
        with an `after`, what follows it is parsed.
        Raises GrammarError for what cannot be enforced, InputError for what makes no sense.
        """
        parse = None
        for name, value, kind in (
            ("max_tokens", max_tokens, int),
            ("sampling", sampling, SamplingParams),
            ("verification", verification, Verification),
            ("grammar", grammar, Grammar),
            ("prediction", prediction, str),
        ):
            if value is not None and not isinstance(value, kind):
                way_out = f"Give one of type {kind.__name__}, or None."
                raise SettingError(name, f"it is a {type(value).__name__}", way_out)
        if schema is not None:
            text, parse_text = read_schema(schema)
            grammar = replace(grammar or Grammar("json_schema"), kind="json_schema", text=text)
            parse = parser_of(grammar, self.target.vocabulary, parse_text)
        request = Request(
            prompt=encode(self.target, self.template, prompt),
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_end=ignore_end,
            speculate=speculate,
            verification=verification or Verification(),
            logprobs=logprobs,
            grammar=grammar,
            prediction=self.read_prediction(prediction),
        )
        return Generation(self.engine, request, parse)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar for the target's vocabulary, or find it among the last ones. What of it is not
        enforced becomes a notice. Raises GrammarError."""
        from outrider.constraints import Compiler  # loads slowly, and few requests need it

        if self._compiler is None:
            self._compiler = Compiler(self.target.vocabulary)
        compiled = self._compiler.compile(grammar)
        new = [notice for notice in compiled.notices if notice not in self.notices]
        self.notices += new[: max(_MAX_NOTICES - len(self.notices), 0)]
        return compiled

    def read_prediction(self, prediction: str | None) -> tuple[int, ...]:
        """The tokens of an expected answer, for a Request. It is read as text, whatever it spells. Where
        drafts are of no use, a notice says so."""
        if prediction is None:
            return ()
        notice = "the prediction is not used: no drafter of this session follows one"
        if not any(isinstance(drafter, PredictionDrafter) for drafter in self.engine.drafters):
            self.notices += [] if notice in self.notices else [notice]
        return tuple(self.target.vocabulary.tokenize(prediction, add_special=False))

    def generate(self, prompt: str | Sequence[Message] | Sequence[int], **settings: Any) -> Completion:
        """Generate to the end; the settings are those of `stream`."""
        return self.stream(prompt, **settings).completion

    @property
    def measured_busy(self) -> bool:
        """Whether what calls cost was measured while other programs were busy: see `measure_again`."""
        return self._learned is not None and self._learned.measured_busy

    def measure_again(self, others: OtherPrograms, progress: Callable[[float], None]) -> bool:
        """Measure again what calls cost, where nothing runs and `others` were quiet lately: some seconds,
        after which no KV is stored any more. True when it was done. `progress` is called with the part that
        is done of each model; what it raises ends it, and leaves the costs as they were."""
        if self._learned is None or self.engine.num_running or self._learned.is_disturbed(others):
            return False
        self.engine.reset(texts=False)
        self._learned.measure_again(lambda _what, part: progress(part))
        kept = [line for line in self.notices if line not in self._learned.notices and line != BUSY]
        self.notices = [*kept, *self._learned.notices]
        return True

    def close(self) -> None:
        """Keep what was learned, and KV that is to outlive the session; free the models' memory, weights
        included. Closing twice is harmless."""
        if self.kv_tiers is not None:
            self.kv_tiers.will_close(monotonic() + SAVE_S)
            self.engine.reset(texts=False)
            self.kv_tiers.close()
            self.kv_tiers = None
        if self._learned is not None:
            self._learned.keep()
            self._learned = None
        for drafter in self._drafters:  # the engine may have set some aside
            if isinstance(drafter, EarlierDrafter):
                drafter.keep()
            if isinstance(drafter, ModelDrafter):
                close_model(drafter.model)
        close_model(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def close_model(model: Model) -> None:
    """Free a model's memory, weights included."""
    native = model.inner if isinstance(model, BitwiseModel) else model
    model.close()
    if isinstance(native, GgufModel):
        native.weights.close()


def encode(
    target: Model | Weights, template: ChatTemplate | None, prompt: str | Sequence[Message] | Sequence[int]
) -> tuple[int, ...]:
    """Tokens of a text as it is, or of a conversation under `template`; tokens (integers of any kind) stay
    what they are.

    Raises PromptError for anything else, an empty prompt, or a conversation without a template.
    """
    vocabulary = target.vocabulary
    if not isinstance(prompt, str | Sequence) and not hasattr(prompt, "__array__"):
        why = f"it is a {type(prompt).__name__}"
        raise PromptError("prompt", why, "Give a text, a conversation, or tokens.")
    if isinstance(prompt, str):
        tokens = vocabulary.tokenize(prompt)
    elif all(isinstance(token, Integral) for token in prompt):
        tokens = [int(token) for token in cast("Sequence[int]", prompt)]
    elif template is None:
        why = f"{target.name} has no chat template"
        raise PromptError("conversation", why, "Give the prompt as one text.")
    else:
        tokens = template.tokenize(template.render(cast("Sequence[Message]", prompt)), vocabulary)
    if not tokens:
        raise PromptError("prompt", "it is empty", "Give some text.")
    return tuple(tokens)
