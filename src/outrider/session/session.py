"""A session generates text with a target model and its drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf.head_model import HeadModel
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import is_on_gpu
from outrider.core.contracts import Drafter, Model, Policy
from outrider.core.data import Completion, Grammar, Request, Thought
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices, notify
from outrider.core.params import Drafting, SamplingParams, Verification
from outrider.costs.other_programs import OtherPrograms
from outrider.costs.store import BUSY, ESTIMATED
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.registry import build_drafters
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.engine.tiers import KvTiers
from outrider.models.chat import ChatTemplate
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.session.generation import Generation, Message, Schema, encode, parser_of, read_schema
from outrider.session.learned import SAVE_S, Learned, identity_of, open_tiers, policy_for
from outrider.session.options import Keeping, Progress, SessionOptions, no_progress
from outrider.session.pair import Pair

if TYPE_CHECKING:
    from outrider.constraints.compiler import Compiled, Compiler

_TAIL_TOKENS = 32
"""of a prompt, enough to see whether it ends by opening the reasoning"""
_MAX_NOTICES = 200
"""A session may see any number of grammars, each with something to say."""


class Session:
    """A target model and its drafters, ready to generate.

    >>> from outrider.backends.fake import FakeModel, FakeVocabulary, scripted_logits
    >>> from outrider.core.params import SamplingParams
    >>> from outrider.drafters.lookup import SuffixDrafter
    >>> vocabulary = FakeVocabulary("abcdefgh, ")
    >>> target = FakeModel(vocabulary, scripted_logits(vocabulary, "abc, "))
    >>> session = Session(target, [SuffixDrafter()])
    >>> completion = session.generate("abc, abc, ", max_tokens=12, sampling=SamplingParams(temperature=0))
    >>> completion.text
    'abc, abc, ab'
    >>> sum(record.kind == "decode" for record in completion.records)
    2

    `notices` are lines for the user, such as what was switched off and why.
    """

    def __init__(
        self,
        target: Model,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        *,
        template: ChatTemplate | None = None,
        learned: Learned | None = None,
        max_running: int | None = None,
        max_gap_s: float | None = None,
        prompt_tokens: int = PREFILL_CHUNK_TOKENS,
        kv_tiers: KvTiers | None = None,
        draft_kv_tiers: KvTiers | None = None,
    ) -> None:
        self.target = target
        self.kv_tiers = kv_tiers
        """where KV goes when it leaves the target"""
        self._draft_kv_tiers = draft_kv_tiers
        self.template = template
        self._drafters = tuple(drafters)
        self._learned = learned
        self._compiler: Compiler | None = None
        with collect_notices() as self.notices:
            self.engine = Engine(
                target,
                drafters,
                policy,
                constrain=lambda grammar: self.compile(grammar).start(),
                max_running=max_running,
                max_gap_s=max_gap_s,
                prompt_tokens=prompt_tokens,
                kv_store=kv_tiers,
                draft_kv_store=draft_kv_tiers,
            )

    @property
    def bitwise(self) -> bool:
        """Whether greedy and seed-stable text equals plain decoding's bit for bit, whatever else runs."""
        return isinstance(self.target, BitwiseModel)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        options: LoadOptions | None = None,
        **settings: Any,
    ) -> Session:
        """Load a target (None: the embedded default, with its own draft) and perhaps a draft model ("none":
        no draft at all), and open a session on them with these SessionOptions.

        References are paths, `hf:owner/repo[:quant]` or `hf:owner/repo/file.gguf`. Raises OutriderError.
        """
        opening = SessionOptions(**settings)
        pair = Pair.load(model, draft, options=options, opening=opening)
        try:
            return cls.open(pair, opening)
        except BaseException:
            pair.close()
            raise

    @classmethod
    def open(
        cls, pair: Pair, options: SessionOptions | None = None, progress: Progress = no_progress
    ) -> Session:
        """Open a session on a pair: KV caches, drafters, and what is known about costs and acceptance.

        Raises OutOfMemory, or SettingError for an unusable corpus or folder, or if the native library cannot
        give the `bitwise` text that is asked for.
        """
        options = options or SessionOptions()
        with collect_notices() as notices, ExitStack() as undo:
            target = pair.open_target(options, progress)
            undo.callback(target.close)
            draft = pair.open_draft(target, options)
            if draft is not None:
                undo.callback(draft[0].close)
            policy, learned = policy_for(
                options.policy, target, draft and draft[0], progress, measure=options.measure
            )
            keeping, of_draft = options.keeping, Keeping()
            if draft is not None and not isinstance(draft[0], HeadModel):
                keeping, of_draft = options.keeping.split()
            kv_tiers = open_tiers(target, keeping)
            drafters = build_drafters(
                target,
                lookup=options.lookup,
                corpus=[Path(path) for path in options.corpus],
                progress=lambda what: progress(f"indexing the corpus: {what}", None),
                draft=draft,
                recall=kv_tiers.recall if kv_tiers else lambda _scope: (),
            )
            for drafter in drafters:
                if isinstance(drafter, ModelDrafter) and drafter.longest_text < target.context_length:
                    notify(f"{drafter.model.name} drafts until a text has {drafter.longest_text} tokens")
            session = cls(
                target,
                drafters,
                policy,
                template=pair.template,
                learned=learned,
                max_running=options.max_running,
                max_gap_s=options.max_gap_s,
                # A long call of a GPU is over soon.
                prompt_tokens=target.max_batch_tokens if is_on_gpu(target) else PREFILL_CHUNK_TOKENS,
                kv_tiers=kv_tiers,
                draft_kv_tiers=open_tiers(draft[0], of_draft) if draft else None,
            )
            undo.pop_all()
        session.notices = list(dict.fromkeys((*pair.notices, *notices, *session.notices)))
        return session

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return encode(self.target.vocabulary, self.template, prompt)

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
        """Start generating from a text, a conversation or tokens, with the settings of Request.

        The answer is expected to resemble `prediction`. A `schema` limits the output to JSON and parses it
        into `Completion.parsed`: an object of a Pydantic model, or plain data. A `grammar` beside it says how
        (its `text` is ignored); with its `after`, what follows that is parsed. Raises GrammarError for what
        cannot be enforced, InputError for what makes no sense.
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
        sampling = sampling or SamplingParams()
        request = Request(
            prompt=encode(self.target.vocabulary, self.template, prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_end=ignore_end,
            speculate=speculate,
            verification=(verification or Verification()).seeded(sampling),
            logprobs=logprobs,
            grammar=grammar,
            prediction=self.read_prediction(prediction),
            from_text=isinstance(prompt, str) or isinstance(prompt[0], Mapping),
        )
        return Generation(self.engine, request, parse)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar for the target, or find it among the last ones. A notice says what of it is not
        enforced. Raises GrammarError."""
        from outrider.constraints.compiler import Compiler  # loads slowly, and few requests need it

        if self._compiler is None:
            self._compiler = Compiler(self.target.vocabulary)
        compiled = self._compiler.compile(grammar)
        new = [notice for notice in compiled.notices if notice not in self.notices]
        self.notices += new[: max(_MAX_NOTICES - len(self.notices), 0)]
        return compiled

    def thought(self, prompt: Sequence[int], budget: int, message: str) -> Thought | None:
        """A limit of `budget` tokens on the reasoning after a prompt, with `message` before a forced end;
        None if the model's template has no reasoning."""
        from outrider.formats import format_of  # loads slowly, and few requests need it

        vocabulary = self.target.vocabulary
        spelled = (
            vocabulary.spelling(token) if vocabulary.is_control(token) else vocabulary.piece(token)
            for token in prompt[-_TAIL_TOKENS:]
        )
        end = b"".join(spelled).decode("utf-8", errors="replace")
        thought = format_of(self.template, vocabulary).thought(end, message)
        return None if thought is None else replace(thought, budget=budget)

    def read_prediction(self, prediction: str | None) -> tuple[int, ...]:
        """The tokens of an expected answer, read as plain text. A notice says so if no drafter uses them."""
        if prediction is None:
            return ()
        notice = "the prediction is not used: no drafter of this session follows one"
        if not any(isinstance(drafter, PredictionDrafter) for drafter in self.engine.drafters):
            self.notices += [] if notice in self.notices else [notice]
        return tuple(self.target.vocabulary.tokenize(prediction, add_special=False))

    def generate(self, prompt: str | Sequence[Message] | Sequence[int], **settings: Any) -> Completion:
        return self.stream(prompt, **settings).completion

    @property
    def identity(self) -> str:
        """What KV belongs to: the target's content, the library's build, and the options that change KV."""
        return identity_of(self.target)

    @property
    def is_provisional(self) -> bool:
        """Whether the costs of calls were estimated, or measured on a busy machine (see `measure_again`)."""
        return self._learned is not None and self._learned.is_provisional

    def measure_again(self, others: OtherPrograms, progress: Progress) -> bool:
        """Measure the costs of calls, if nothing runs and `others` were quiet lately; takes some seconds and
        loses the KV. Returns whether it was done. An exception from `progress` aborts it and changes
        nothing."""
        if self._learned is None or self.engine.num_running or self._learned.is_disturbed(others):
            return False
        self.engine.reset(texts=False)
        with collect_notices() as notices:
            self._learned.measure_again(progress)
        self.notices = list(
            dict.fromkeys((*(line for line in self.notices if line not in (BUSY, ESTIMATED)), *notices))
        )
        return True

    @property
    def writes_kv(self) -> bool:
        return self.kv_tiers is not None and self.kv_tiers.disk is not None

    def close(self) -> None:
        """Store what was learned, and KV that outlives the session; free the models, weights included. Can be
        repeated."""
        tiers = [one for one in (self.kv_tiers, self._draft_kv_tiers) if one is not None]
        for one in tiers:
            one.will_close(monotonic() + SAVE_S)
        if self.kv_tiers is not None:
            self.engine.reset(texts=False)
        for one in tiers:
            one.close()
        self.kv_tiers = self._draft_kv_tiers = None
        if self._learned is not None:
            self._learned.keep()
            self._learned = None
        for drafter in self._drafters:  # the engine may have set some aside
            if isinstance(drafter, ModelDrafter):
                close_model(drafter.model)
        close_model(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def close_model(model: Model) -> None:
    """Free a model, weights included."""
    native = model.inner if isinstance(model, BitwiseModel) else model
    model.close()
    if isinstance(native, GgufModel):
        native.weights.close()


def describe_policy(policy: Policy) -> dict[str, Any]:
    """A policy as plain data."""
    limits = policy.limits if isinstance(policy, AutoPolicy) else policy
    if isinstance(limits, FixedPolicy):
        return {"kind": "fixed", **asdict(limits)}
    if isinstance(policy, AutoPolicy) and isinstance(limits, Drafting):
        return {"kind": limits.policy, "draft_max": policy.draft_max}
    return {"kind": type(policy).__name__}


def settings_of(session: Session, request: Request, seed: int) -> dict[str, Any]:
    """The settings in force, read from the loaded models."""
    target = session.target
    policy = session.engine.policy
    settings: dict[str, Any] = {
        "context_length": target.context_length,
        "rewind": target.rewinding.kind,
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
            settings[role] = in_force(model) | {
                "name": model.name,
                "build": model.weights.library.build_id,
                "path": str(model.weights.path),
                "context_length": (target if role == "target" else model).context_length,
            }
    return settings


def in_force(model: GgufModel) -> dict[str, Any]:
    """The load options of an open model, as they came out."""
    return asdict(model.options) | {
        "threads": model.threads,
        "threads_batch": model.threads_batch,
        "batch_tokens": model.max_batch_tokens,
        "micro_batch_tokens": model.micro_batch_tokens,
        "context_length": model.context_length,
    }
