"""A target, its draft and its chat template, loaded and ready to generate: the Python API.

`Pair` holds weights and tokenizers; `open` gives it KV caches of a chosen size and drafters, which
makes a `Session`. A session also works on models of any other backend, given to it directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.bitwise import BitwiseModel, Price
from outrider.chat import ChatTemplate
from outrider.core.contracts import Constraint, Drafter, Model, Policy
from outrider.core.data import Completion, Grammar, Request
from outrider.core.errors import PromptError
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.corpus import CorpusDrafter, Progress, open_corpus
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import MAX_PAUSE_S, Engine
from outrider.generation import Generation
from outrider.learned import AutoSettings, Learned, Measuring
from outrider.loading import load_draft, load_weights, template_of, why_no_draft
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import HubOptions
from outrider.models.pair import resolve_pair
from outrider.policy import AutoPolicy, FixedPolicy
from outrider.policy.auto import LONGEST_DRAFT
from outrider.schemas import Schema, parser_of, read_schema
from outrider.tuning import open_target
from outrider.vocab import Alignment, align

if TYPE_CHECKING:
    from outrider.constraints import Compiled, Compiler

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "…"}`."""

DEFAULT_CONTEXT_TOKENS = 4096

_MAX_NOTICES = 200
"""A session may see any number of grammars, each with something to say."""


class Session:
    """Generates text with a target model and its drafters.

    >>> from outrider.backends.fake import FakeModel, FakeVocabulary, scripted_logits
    >>> from outrider.core.params import SamplingParams
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

    bitwise_price: Price | None = None
    """how much longer calls take so that texts are bit-equal; None where they are not, or it is not known"""

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
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self.target = target
        self.template = template
        self._drafters = tuple(drafters)
        self._learned = learned
        self._compiler: Compiler | None = None
        self.engine = Engine(
            target,
            drafters,
            policy,
            constrain=self._constrain,
            max_running=max_running,
            max_pause_s=max_pause_s,
        )
        self.notices = [*notices, *self.engine.notices]

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
    ) -> Session:
        """Load a target (None: the embedded default, with its own draft) and, if given, a draft model
        ("none": no draft at all); `corpus` are files and folders that drafts may be looked up in. Without a
        policy drafting is automatic. `bitwise` as in `Pair.open`.

        Paths, `hf:owner/repo[:quant]` and `hf:owner/repo/file.gguf` are understood. Raises the
        errors of `outrider.core.errors` that their names say.
        """
        pair = Pair.load(model, draft, options=options)
        try:
            return pair.open(context_length, policy=policy, corpus=corpus, bitwise=bitwise)
        except BaseException:
            pair.close()
            raise

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a text as it stands, or of a conversation under the chat template."""
        return encode(self.target, self.template, prompt)

    def stream(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
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
        with an `after`, what is behind that is parsed.
        Raises GrammarError for what cannot be enforced.
        """
        parse = None
        if schema is not None:
            text, parse_text = read_schema(schema)
            grammar = replace(grammar or Grammar("json_schema"), kind="json_schema", text=text)
            parse = parser_of(grammar, self.target.vocabulary, parse_text)
        request = Request(
            prompt=_as_tokens(prompt) or self.encode(cast("str | Sequence[Message]", prompt)),
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop=tuple(stop),
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

    def _constrain(self, grammar: Grammar) -> Constraint:
        return self.compile(grammar).start()

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

    def close(self) -> None:
        """Keep what was learned, and free the models' memory, weights included. Closing twice is harmless."""
        if self._learned is not None:
            self._learned.keep()
            self._learned = None
        for drafter in self._drafters:  # the engine may have set some aside
            if isinstance(drafter, ModelDrafter):
                _close(drafter.model)
        _close(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _text(reference: str | Path | None) -> str | None:
    return None if reference is None else str(reference)


def _close(model: Model) -> None:
    native = model.inner if isinstance(model, BitwiseModel) else model
    model.close()
    if isinstance(native, GgufModel):
        native.weights.close()


def _as_tokens(prompt: str | Sequence[Message] | Sequence[int]) -> tuple[int, ...]:
    """The prompt if it is one of tokens (integers of any kind), else nothing."""
    if isinstance(prompt, str) or not all(isinstance(token, Integral) for token in prompt):
        return ()
    return tuple(int(token) for token in cast("Sequence[int]", prompt))


def encode(
    target: Model | Weights, template: ChatTemplate | None, prompt: str | Sequence[Message]
) -> tuple[int, ...]:
    """Tokens of a text as it stands, or of a conversation under `template`.

    Raises PromptError for an empty prompt, or for a conversation without a template.
    """
    vocabulary = target.vocabulary
    if isinstance(prompt, str):
        tokens = vocabulary.tokenize(prompt)
    elif len(prompt) == 0:
        tokens = []
    elif template is None:
        raise PromptError("conversation", f"{target.name} has no chat template", "Give a plain text (--raw).")
    else:
        tokens = template.tokenize(template.render(prompt), vocabulary)
    if not tokens:
        raise PromptError("prompt", "it is empty", "Give some text (-p, -f, or standard input).")
    return tuple(tokens)


@dataclass(frozen=True, slots=True)
class Pair:
    """Loaded weights of a target and, possibly, of a draft whose tokenizer lines up.

    Sessions that are opened on a pair share its weights: closing one of them closes the pair.
    """

    target: Weights
    draft: Weights | None
    alignment: Alignment | None
    target_card: ModelCard
    draft_card: ModelCard | None
    template: ChatTemplate | None
    notices: tuple[str, ...]

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        options: LoadOptions | None = None,
        draft_options: LoadOptions | None = None,
        hub: HubOptions | None = None,
        measuring: Measuring | None = None,
    ) -> Pair:
        """Resolve the references, load the files, and line up the tokenizers. Which native library is the
        faster one for a file is measured once, in a few seconds (`measuring` is called meanwhile).

        Raises HubError, ModelFileError, OutOfMemory or VocabularyMismatch.
        """
        notices: list[str] = []
        target_path, draft_path = resolve_pair(_text(model), _text(draft), hub or HubOptions())
        target_card = read_card(target_path)
        draft_card = None if draft_path is None else read_card(draft_path)
        target = load_weights(
            target_path, target_card, options or LoadOptions(), notices, measuring=measuring
        )
        weights, alignment = None, None
        try:
            template = template_of(target, target_card)
            if draft_path is not None and draft_card is not None:
                chosen = draft_options or options or LoadOptions()
                weights = load_draft(target, draft_path, draft_card, chosen, notices, measuring=measuring)
                alignment = align(target.vocabulary, weights.vocabulary)
                if useless := why_no_draft(target, weights):
                    notices.append(useless)
                    weights.close()
                    weights, alignment = None, None
        except BaseException:
            target.close()
            if weights is not None:
                weights.close()
            raise
        return cls(target, weights, alignment, target_card, draft_card, template, tuple(notices))

    def close(self) -> None:
        """Free the weights, and the KV caches of sessions on them. Closing twice is harmless."""
        for weights in (self.draft, self.target):
            if weights is not None:
                weights.close()

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a text as it stands, or of a conversation under the chat template."""
        return encode(self.target, self.template, prompt)

    def open(
        self,
        context_length: int = DEFAULT_CONTEXT_TOKENS,
        draft_context_length: int = 0,
        *,
        lookup: bool = True,
        corpus: Sequence[str | Path] = (),
        progress: Progress | None = None,
        policy: Policy | AutoSettings | None = None,
        measuring: Measuring | None = None,
        max_running: int = 1,
        kept_sequences: int = 0,
        capacity_tokens: int = 0,
        max_pause_s: float = MAX_PAUSE_S,
        bitwise: bool | None = None,
    ) -> Session:
        """Give the models KV caches and the session its drafters.

        Without a policy, or with AutoSettings, drafting is automatic: what calls cost is looked up, or
        measured once in a few seconds (`measuring` is told).

        Contexts are in tokens per sequence: 0 takes what the target was trained with, and for
        the draft the target's. `lookup` is about the text so far and the session's earlier ones,
        `corpus` are files and folders, which are indexed first (`progress` is told). Up to `max_running`
        requests run at once; the KV of `kept_sequences` more is kept for others that begin alike, and
        all together hold `capacity_tokens` (0: enough for those that run). A prompt that is read holds up
        the others for `max_pause_s` at a time.

        `bitwise`: greedy and seed-stable texts are those of plain decoding under the same setting, bit for
        bit, whatever is drafted and whatever else runs (`docs/batched_numerics.md`); None: where a single
        request runs at once and it costs next to nothing. Each sequence then has a context of its own.
        Raises OutOfMemory, and SettingError for a corpus that cannot be used, or where `bitwise` is asked
        for and the native library cannot give equal bits.
        """
        notices = list(self.notices)
        trained = self.target.trained_context
        if context_length > trained:
            notices.append(
                f"{self.target.name} was trained with a context of {trained} tokens, not {context_length}"
            )
        drafters = self._free_drafters(lookup, corpus, progress, notices)
        size = max_running + kept_sequences
        capacity_tokens = capacity_tokens or (context_length or trained) * max_running
        target, found = open_target(
            self.target,
            context_length or trained,
            max_sequences=size,
            capacity_tokens=capacity_tokens,
            bitwise=bitwise,
            measuring=measuring,
        )
        if found is not None and bitwise:
            notices.append(found.line(max_running))
        try:
            model = self._open_draft(target, draft_context_length, capacity_tokens, max_running)
            if model is not None and self.alignment is not None:
                drafters.append(ModelDrafter(model, self.alignment))
            learned = None
            if target.rewind == "none":
                policy = None if isinstance(policy, AutoSettings) else policy
            elif policy is None or isinstance(policy, AutoSettings):
                learned = Learned(policy or AutoSettings(), target, model, measuring)
                notices += learned.notices
                policy = learned.policy
            session = Session(
                target,
                drafters,
                policy,
                template=self.template,
                notices=notices,
                learned=learned,
                max_running=max_running,
                max_pause_s=max_pause_s,
            )
            session.bitwise_price = None if found is None else found.price
            return session
        except BaseException:
            target.close()
            raise

    def _open_draft(
        self, target: GgufModel | BitwiseModel, context_length: int, capacity_tokens: int, max_running: int
    ) -> GgufModel | None:
        """The draft's context beside the target's, for as many sequences, with room for their drafts; None
        where there is no draft."""
        if self.draft is None or self.alignment is None:
            return None
        size = target.max_sequences
        length = context_length or min(target.context_length, self.draft.trained_context)
        capacity = max(length, min(capacity_tokens + max_running * LONGEST_DRAFT, length * size))
        return self.draft.open(length, max_sequences=size, capacity_tokens=capacity)

    def _free_drafters(
        self,
        lookup: bool,
        corpus: Sequence[str | Path],
        progress: Progress | None,
        notices: list[str],
    ) -> list[Drafter]:
        """Those that call no model; the surest first."""
        drafters: list[Drafter] = [] if self.target.rewind == "none" else [PredictionDrafter()]
        if lookup:
            drafters += [SuffixDrafter(), EarlierDrafter()]
        if corpus and self.target.rewind == "none":
            notices.append(f"the corpus is not used: {self.target.name} cannot take rejected drafts back")
        elif corpus:
            indexed = open_corpus([Path(path) for path in corpus], self.target.vocabulary, progress)
            drafters.append(CorpusDrafter(indexed))
            notices += indexed.notices
        return drafters


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Who drafts and how far, as plain data."""
    if isinstance(policy, FixedPolicy):
        return {"kind": "fixed", **asdict(policy)}
    if isinstance(policy, AutoPolicy):
        return {
            "kind": "auto",
            "free": policy.free,
            "models": policy.models,
            "draft_max": policy.draft_max,
        }
    return {"kind": type(policy).__name__}


def settings_of(session: Session, request: Request, seed: int) -> dict[str, Any]:
    """The settings in force, read back from the loaded models rather than from what was asked."""
    target = session.target
    policy = session.engine.policy
    settings: dict[str, Any] = {
        "context_length": target.context_length,
        "rewind": target.rewind,
        "sampling": asdict(replace(request.sampling, seed=seed)),
        "verification": asdict(request.verification),
        "grammar": asdict(request.grammar) if request.grammar else None,
        "drafters": [drafter.name for drafter in session.engine.drafters],
        "policy": describe_policy(policy),
    }
    drafts = [drafter.model for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
    native = target.inner if isinstance(target, BitwiseModel) else target
    settings["bitwise"] = session.bitwise
    for role, model in (("target", native), *(("draft", draft) for draft in drafts)):
        if isinstance(model, GgufModel):
            context = (target if role == "target" else model).context_length
            settings[role] = _native_settings(model) | {"context_length": context}
    return settings


def _native_settings(model: GgufModel) -> dict[str, Any]:
    return asdict(model.options) | {
        "name": model.name,
        "build": model.weights.library.build_id,
        "path": str(model.weights.path),
        "batch_tokens": model.max_batch_tokens,
        "micro_batch_tokens": model.micro_batch_tokens,
        "threads": model.threads,
        "threads_batch": model.threads_batch,
    }
