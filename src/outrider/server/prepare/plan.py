"""What one HTTP request asks of the engine, and how its answers are to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.data import Grammar, Request, Thought
from outrider.core.errors import InputError
from outrider.core.params import Drafting
from outrider.drafters.prediction import PredictionDrafter
from outrider.formats import AnswerReader
from outrider.server.errors import invalid_field, problem_of
from outrider.server.prepare.parameters import sampler_notices, sampling_of, verification_of
from outrider.server.protocol.messages import Prediction, text_of
from outrider.server.protocol.requests import ChatRequest, TextRequest
from outrider.server.service import Service


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Requests, one for each choice, in the order of their indices.

    `policy` is who drafts, by name. `bitwise`: the texts are those of plain decoding, bit for bit.
    `notices` are lines that belong into the answer. `reader` makes what reads a choice's text; None: it is
    content from the first character to the last. `echoes` are the texts that the choices begin with (an
    echoed prompt). After `max_decode_s` an answer ends that has begun a new line.
    """

    requests: tuple[Request, ...]
    policy: str
    bitwise: bool
    notices: tuple[str, ...]
    choices_per_prompt: int
    show_sources: bool
    reader: Callable[[], AnswerReader] | None = None
    echoes: tuple[str, ...] = ()
    max_decode_s: float | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].logprobs is not None


def plan_of(
    service: Service,
    body: ChatRequest | TextRequest,
    prompts: Sequence[tuple[int, ...]],
    namespace: str,
    *,
    max_tokens: int | None,
    grammar: Grammar | None,
    notices: Sequence[str],
    logprobs: int | None,
    visible: tuple[int, ...] = (),
    thought: Thought | None = None,
    reader: Callable[[], AnswerReader] | None = None,
    echoes: tuple[str, ...] = (),
) -> GenerationPlan:
    """`body.n` choices for each prompt, in the cache namespace; `grammar` is compiled, `notices` say
    what of it is not enforced. Raises Problem."""
    speculation, bitwise = body.speculation, service.session.bitwise
    policy = (speculation and speculation.policy) or "auto"
    if policy == "model" and service.draft_name is None:
        why = "no draft model is loaded. Say auto or lookup, or start the server with one."
        raise invalid_field("speculation.policy", why)
    cap = speculation.max_draft if speculation else None
    drafting = Drafting() if policy == "plain" else Drafting(policy, cap)
    prediction, more = _predicted(service, body.prediction)
    sampling = sampling_of(body, service.defaults)
    verification = verification_of(body, service.verification, sampling, bitwise=bitwise)
    request = Request(
        prompt=prompts[0],
        sampling=sampling,
        max_tokens=max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        ignore_end=bool(body.ignore_eos),
        speculate=policy != "plain",
        verification=verification,
        logprobs=logprobs,
        grammar=grammar,
        drafting=drafting,
        prediction=prediction,
        scope=namespace,
        visible=visible,
        thought=thought,
    )
    number = body.n or 1
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(number)]
    keeps_text = policy == "plain" or verification.keeps_text(greedy=sampling.is_greedy)
    return GenerationPlan(
        requests=tuple(
            replace(request, prompt=prompt, sampling=replace(sampling, seed=seed))
            for prompt in prompts
            for seed in seeds
        ),
        policy=service.policy_name if policy == "auto" else policy,
        bitwise=bitwise and keeps_text,
        notices=(*notices, *more, *sampler_notices(body)),
        choices_per_prompt=number,
        show_sources=bool(speculation and speculation.show_sources),
        reader=reader,
        echoes=echoes,
    )


def _predicted(service: Service, asked: Prediction | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens of a text that an answer is expected to be like, and why they are of no use, if so. It
    is read as text, whatever it spells. No answer is longer than the context: what is after that is left
    out."""
    if asked is None:
        return (), ()
    followed = any(isinstance(d, PredictionDrafter) for d in service.session.engine.drafters)
    notices = () if followed else ("prediction: it is not used, for this model cannot follow one",)
    text = text_of(asked.content)[: service.max_characters]
    try:
        tokens = service.vocabulary.tokenize(text, add_special=False)
    except InputError as error:
        raise problem_of(error, "prediction") from None
    return tuple(tokens[: service.context_tokens]), notices


def compile_grammar(
    service: Service, body: ChatRequest | TextRequest, grammar: Grammar, field: str
) -> tuple[str, ...]:
    """Compile the grammar of a field; what of it is not enforced. Raises Problem."""
    if body.ignore_eos:
        why = f"{field} says where the answer ends. Leave one of the two out."
        raise invalid_field("ignore_eos", why)
    return service.compile(grammar, field)
