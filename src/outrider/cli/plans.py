"""Settings, checked before anything is loaded, become options of sessions and requests; models are loaded and
sessions opened by them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.backends.gguf.devices import experts_on_host
from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.options import ALL_LAYERS, LoadOptions
from outrider.cli.grammar import read_grammar
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.screen import Screen
from outrider.cli.settings import RunSettings, TextSettings
from outrider.core.data import Grammar, Request
from outrider.core.errors import InputError, SettingError
from outrider.core.files import list_files, read_text
from outrider.core.params import NO_DRAFT, Drafting, SamplingParams, Verification
from outrider.core.schema import values_for
from outrider.core.settings import (
    DraftSources,
    Hub,
    Loading,
    Models,
    PairSettings,
    Sampling,
    Target,
    sampling_params,
)
from outrider.costs.other_programs import look
from outrider.models.chat import ChatTemplate
from outrider.models.hub import HubOptions
from outrider.policy.fixed import FixedPolicy
from outrider.session.options import DEFAULT_CONTEXT_TOKENS, SessionOptions
from outrider.session.pair import Pair
from outrider.session.session import Session

UNLIMITED_TOKENS = 2048
"""room for an answer of unknown length"""
_MIN_ROWS = 128
"""rows of logits of a call; long drafts need more"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """What to load and open, and how drafts are verified. `target` and `draft` are references; None means the
    embedded default and its own draft."""

    settings: PairSettings
    target: str | None
    draft: str | None
    hub: HubOptions
    options: LoadOptions
    draft_options: LoadOptions
    opening: SessionOptions
    verification: Verification
    template: str | None = None
    """a chat template to use instead of the model's own"""
    notices: tuple[str, ...] = ()
    """about the settings"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What `run` or `chat` is to do, with these settings for every request."""

    settings: TextSettings
    pair: PairPlan
    sampling: SamplingParams
    max_tokens: int | None
    grammar: Grammar | None

    @property
    def answer_tokens(self) -> int:
        return (self.max_tokens or UNLIMITED_TOKENS) + 1

    def request(self, prompt: tuple[int, ...], session: Session) -> Request:
        """The request for a prompt. Raises SettingError for a bias on what is no token."""
        settings, size = self.settings, session.target.vocabulary.size
        if unknown := [token for token, _ in self.sampling.logit_bias if token >= size]:
            raise SettingError(f"-l {unknown[0]}", f"the vocabulary has {size} tokens", "Give a smaller id.")
        budget, message = settings.reasoning_budget, settings.reasoning_budget_message or ""
        limited = budget >= 0 and not (isinstance(settings, RunSettings) and settings.raw)
        return Request(
            prompt=prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=tuple(settings.stop),
            ignore_end=settings.ignore_eos,
            verification=self.pair.verification,
            grammar=self.grammar,
            thought=session.thought(prompt, budget, message) if limited else None,
        )


def plan_run(settings: TextSettings) -> RunPlan:
    """The plan of `run` or `chat`. Raises SettingError or GrammarError."""
    sampling = _sampling(settings)
    pair = plan_pair(settings, greedy=sampling.is_greedy)
    notices = list(pair.notices)
    drafts = drafting_policy(settings).draft_max != 0
    if drafts and (unrepeatable := pair.verification.unrepeatable(sampling)):
        notices.append(f"--seed {settings.seed}: {unrepeatable}")
    if settings.predict == -2:
        notices.append("-n -2: an answer ends with its text, at the latest with the context")
    verification = pair.verification.seeded(sampling)
    pair = replace(pair, verification=verification, notices=tuple(notices))
    if settings.explain and not drafts:
        raise SettingError("--explain", "nothing is drafted, so there is nothing to explain", "Leave it out.")
    if settings.predict == 0:
        raise SettingError("-n 0", "it asks for nothing", "Give 1 or more, or -1 for no limit.")
    max_tokens = settings.predict if settings.predict > 0 else None
    grammar = read_grammar(settings)
    return RunPlan(settings=settings, pair=pair, sampling=sampling, max_tokens=max_tokens, grammar=grammar)


def plan_pair(settings: PairSettings, *, greedy: bool) -> PairPlan:
    """The plan of a pair for `greedy` or sampled text. Raises SettingError."""
    sources = settings if isinstance(settings, DraftSources) else DraftSources()
    verification = Verification(settings.rule, sources.draft_sampling)
    draft = draft_reference(settings)
    notices: list[str] = []
    if settings.policy is None and settings.draft_p_min is not None:
        notices.append("--draft-p-min: lengths of drafts are fixed; without, Outrider chooses them")
    if settings.policy in ("plain", "lookup") or settings.draft_max == 0:
        if draft not in (None, NO_DRAFT):
            why = "--draft-max 0" if settings.draft_max == 0 else f"--policy {settings.policy}"
            notices.append(f"{draft} is not loaded: under {why} no draft model is asked")
        draft = NO_DRAFT
    plan = PairPlan(
        settings=settings,
        target=target_reference(settings),
        draft=draft,
        hub=hub_options(settings),
        options=load_options(settings, max_draft=settings.draft_max),
        draft_options=load_options(settings, draft=True, max_draft=settings.draft_max),
        opening=SessionOptions(
            settings.ctx_size,
            policy=drafting_policy(settings),
            lookup=settings.lookup,
            corpus=sources.corpus,
            bitwise=settings.bitwise,
        ),
        verification=verification.bitwise(greedy=greedy) if settings.bitwise else verification,
        template=_template(settings.chat_template_file),
        notices=tuple(notices),
    )
    list_files(sources.corpus)
    return plan


def _sampling(settings: Sampling) -> SamplingParams:
    given: dict[str, Any] = {"logit_bias": tuple(map(_bias, settings.logit_bias))}
    if settings.dry_sequence_breaker:
        breakers = (text for text in settings.dry_sequence_breaker if text != "none")
        given["dry_sequence_breakers"] = tuple(breakers)
    return sampling_params(settings, seed=None if settings.seed == -1 else settings.seed, **given)


def drafting_policy(settings: PairSettings) -> FixedPolicy | Drafting:
    """Who drafts, and how far; --draft-p-min implies fixed lengths. Raises SettingError."""
    is_fixed = settings.draft_p_min is not None
    kind = settings.policy or ("fixed" if is_fixed else "auto")
    if is_fixed and kind != "fixed":
        why = f"--policy {kind} decides by itself"
        raise SettingError("--draft-p-min", why, "Leave it out, or give --policy fixed.")
    if kind == "plain" or (kind != "fixed" and settings.draft_max == 0):
        return FixedPolicy(draft_max=0)
    if kind == "fixed":
        lengths: dict[str, Any] = {"draft_max": settings.draft_max, "p_min": settings.draft_p_min}
        return FixedPolicy(**{name: value for name, value in lengths.items() if value is not None})
    return Drafting(kind, settings.draft_max)


def target_reference(settings: Target) -> str | None:
    """The target as one reference; None for the embedded default. Raises SettingError."""
    return _reference(settings.model, settings.hf_repo, "-m", "-hf")


def draft_reference(settings: Models) -> str | None:
    """The draft as one reference; None if none is named. Raises SettingError."""
    return _reference(settings.model_draft, settings.hf_repo_draft, "-md", "-hfd")


def _reference(path: str | None, repo: str | None, path_flag: str, repo_flag: str) -> str | None:
    if path is not None and repo is not None:
        raise SettingError(f"{path_flag} and {repo_flag}", "both name the model", "Give one of them.")
    return f"hf:{repo}" if repo is not None else path


def hub_options(settings: Hub) -> HubOptions:
    """How the hub is asked."""
    token = None if settings.hf_token is None else settings.hf_token.get_secret_value()
    return HubOptions(token=token, offline=settings.offline)


def _template(path: Path | None) -> str | None:
    """A file's chat template, which compiles. Raises SettingError."""
    if path is None:
        return None
    text = read_text(path, "Name a file with a chat template (--chat-template-file).")
    try:
        ChatTemplate(text, bos="", eos="")
    except InputError as error:
        raise SettingError(str(path), error.why, "Correct it there.") from None
    return text


def _bias(text: str) -> tuple[int, float]:
    """A token and its bias: 15043+1.5 or 15043-inf."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if not found or found[2] == "+inf":
        raise SettingError(f"-l {text}", "not a token id with a bias", "Write, for instance, 15043+1.5.")
    return int(found[1]), float(found[2])


# Load options

_RENAMED = {
    "batch_tokens": "batch_size",
    "micro_batch_tokens": "ubatch_size",
    "flash_attention": "flash_attn",
    "full_window": "swa_full",
    "extra_buffer_types": "repack",
    "heads": "mtp",
}
"""Load options whose settings have llama.cpp's names"""


def load_options(settings: Loading, *, draft: bool = False, max_draft: int | None = None) -> LoadOptions:
    """The load options of the target or the draft, for drafts of up to `max_draft` tokens. Raises
    SettingError."""
    experts = experts_on_host(None if settings.cpu_moe else settings.n_cpu_moe)
    given = values_for(LoadOptions, settings, **_RENAMED) | {
        "gpu_layers": _layers(settings.gpu_layers),
        "devices": _names(settings.device),
        "tensor_split": _shares(settings.tensor_split),
        "tensor_overrides": _overrides(settings.override_tensor, experts),
        "adapters": _adapters(settings),
        "rope_freq_scale": _rope_freq_scale(settings),
        "threads": max(settings.threads, 0),
        "threads_batch": max(settings.threads_batch, 0),
        "max_rows": max(_MIN_ROWS, (max_draft or 0) + 1),
        "library": str(settings.llama_library or ""),
    }
    options = LoadOptions(**given)
    return _of_draft(options, settings) if draft else options


def _of_draft(options: LoadOptions, settings: Loading) -> LoadOptions:
    threads, threads_batch = settings.threads_draft, settings.threads_batch_draft
    if threads > 0:
        options = replace(options, threads=threads, threads_batch=0)
    layers = settings.gpu_layers_draft
    return replace(
        options,
        devices=_names(settings.device_draft) or options.devices,
        tensor_overrides=(),
        adapters=(),  # made for the target, as heads are for what is drafted for
        heads=False,
        gpu_layers=options.gpu_layers if layers is None else _layers(layers),
        threads_batch=threads_batch if threads_batch > 0 else options.threads_batch,
        cache_type_k=settings.cache_type_k_draft or options.cache_type_k,
        cache_type_v=settings.cache_type_v_draft or options.cache_type_v,
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _shares(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in re.split(r"[,/]+", text)) if text else ()
    except ValueError:
        raise SettingError(f"-ts {text}", "not a list of numbers", "Write, for instance, 3,1.") from None


def _overrides(texts: Sequence[str], more: tuple[str, ...]) -> tuple[str, ...]:
    """Each PATTERN=BUFFER of texts that may hold several; a comma before the = is part of the pattern."""
    found, pattern = [], ""
    for part in ",".join(texts).split(",") if texts else ():
        pattern += part if "=" in part else f"{part},"
        if "=" in part:
            found.append(pattern)
            pattern = ""
    return (*found, *([pattern.removesuffix(",")] if pattern else ()), *more)


def _adapters(settings: Loading) -> tuple[tuple[str, float], ...]:
    found = [(str(path), 1.0) for path in settings.lora]
    for text in (part for texts in settings.lora_scaled for part in texts.split(",")):
        path, colon, scale = text.rpartition(":")
        try:
            found.append((path, float(scale)))
        except ValueError:
            colon = ""
        if not (colon and path):
            raise SettingError(f"--lora-scaled {text}", "not FILE:SCALE", "Write, for instance, a.gguf:0.5.")
    return tuple(found)


def _rope_freq_scale(settings: Loading) -> float:
    if settings.rope_scale is not None and settings.rope_freq_scale:
        raise SettingError("--rope-scale and --rope-freq-scale", "one is 1 / the other", "Give one of them.")
    return 1 / settings.rope_scale if settings.rope_scale is not None else settings.rope_freq_scale


def _layers(text: str) -> int:
    if text in ("all", "auto"):
        return ALL_LAYERS if text == "all" else -1
    try:
        return max(int(text), -1)
    except ValueError:
        raise SettingError("-ngl", f"{text!r} is not a number", "Give a number of layers, or all.") from None


# Models are loaded, and sessions opened


def load_pair(plan: PairPlan, errors: Screen) -> Pair:
    """Load the models, after checking that the session to come fits in memory."""
    show_log(plan.settings.verbose)
    with LoadInterrupt(), errors.progress() as progress:
        progress("loading")
        return Pair.load(
            plan.target,
            plan.draft,
            options=plan.options,
            draft_options=plan.draft_options,
            hub=plan.hub,
            template=plan.template,
            opening=plan.opening,
            progress=progress,
        )


def open_session(plan: PairPlan, pair: Pair, tokens: int, errors: Screen) -> Session:
    """Open contexts of the given size, or else for `tokens`."""
    options = plan.opening
    if options.context_length is None:
        length = min(max(tokens, DEFAULT_CONTEXT_TOKENS), pair.target.trained_context)
        options = replace(options, context_length=length)
    with LoadInterrupt(), errors.progress() as progress:
        progress("opening")
        session = Session.open(pair, options, progress)
    session.notices[:0] = plan.notices
    return session


def measure_for_later(plan: PairPlan, errors: Screen) -> None:
    """After an answer, measure what it was made without: the faster library, costs, whether equal bits are
    free. Only in a terminal, where a person can interrupt it, and on a quiet machine."""
    if not errors.is_terminal or look().disturb(0.0):
        return
    errors.say("measuring once, for later runs, what calls cost here (Ctrl-C skips it)", "dim")
    with suppress(KeyboardInterrupt):
        later = replace(plan, opening=replace(plan.opening, corpus=(), measure=True))
        open_session(later, load_pair(later, errors), 0, errors).close()
