"""Settings, checked before anything is loaded, become options of sessions and requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.backends.gguf.options import LoadOptions
from outrider.cli.grammar import read_grammar
from outrider.cli.load_options import load_options
from outrider.cli.prompt import encodable
from outrider.cli.settings import RunSettings
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar, Request
from outrider.core.errors import InputError, SettingError
from outrider.core.files import check_writable, list_files, read_text
from outrider.core.params import NO_DRAFT, SamplingParams, Verification
from outrider.core.settings import (
    Drafting,
    DraftModel,
    DraftSources,
    Hub,
    Lenience,
    PairSettings,
    Sampling,
    Target,
    sampling_params,
)
from outrider.models.chat import ChatTemplate
from outrider.models.hub import HubOptions
from outrider.policy.fixed import FixedPolicy
from outrider.session.options import AutoSettings, SessionOptions

if TYPE_CHECKING:
    from outrider.session import Session

UNLIMITED_TOKENS = 2048
"""room for an answer of unknown length"""


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

    @property
    def drafts(self) -> bool:
        policy = self.opening.policy
        return not (isinstance(policy, FixedPolicy) and policy.draft_max == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What `run` or `chat` is to do, with these settings for every request."""

    settings: RunSettings
    pair: PairPlan
    sampling: SamplingParams
    max_tokens: int | None
    grammar: Grammar | None

    @property
    def answer_tokens(self) -> int:
        return (self.max_tokens or UNLIMITED_TOKENS) + 1

    def request(self, prompt: tuple[int, ...], session: Session) -> Request:
        """The request for a prompt. Raises SettingError for tokens outside the vocabulary."""
        settings = self.settings
        budget, message = settings.reasoning_budget, settings.reasoning_budget_message or ""
        limited = budget >= 0 and not settings.raw
        return Request(
            prompt=prompt,
            sampling=_with_tokens(self.sampling, settings.ban, session.target.vocabulary),
            max_tokens=self.max_tokens,
            stop=tuple(settings.stop),
            ignore_end=settings.ignore_eos,
            verification=self.pair.verification,
            logprobs=settings.logprobs,
            grammar=self.grammar,
            thought=session.thought(prompt, budget, message) if limited else None,
        )


def plan_run(settings: RunSettings, stdin_gives: str | None) -> RunPlan:
    """The plan of `run` or `chat`. `stdin_gives` names what else needs standard input. Raises SettingError,
    PromptError or GrammarError."""
    sampling = _sampling(settings)
    pair = plan_pair(settings, greedy=sampling.is_greedy)
    notices = list(pair.notices)
    if pair.drafts and (unrepeatable := pair.verification.unrepeatable(sampling)):
        notices.append(f"--seed {settings.seed}: {unrepeatable}")
    if settings.predict == -2:
        notices.append("-n -2: an answer ends with its text, at the latest with the context")
    verification = pair.verification.seeded(sampling)
    pair = replace(pair, verification=verification, notices=tuple(notices))
    encodable(settings.system or "", "system message")
    if "" in settings.stop:
        raise SettingError("-r", "an empty text would end every answer at once", "Leave it out.")
    if settings.logprobs is not None and not settings.print_json:
        raise SettingError("--logprobs", "they are part of the JSON output", "Add --json.")
    if settings.explain and not isinstance(pair.opening.policy, AutoSettings):
        raise SettingError("--explain", "nothing is drafted, so there is nothing to explain", "Leave it out.")
    if settings.trace:
        check_writable(settings.trace, "trace")
    max_tokens = _max_tokens(settings.predict)
    grammar = read_grammar(settings, stdin_gives)
    if grammar is not None and settings.ignore_eos:
        why = "an output that is limited ends when it is complete"
        raise SettingError("--ignore-eos", why, "Leave it out.")
    return RunPlan(settings=settings, pair=pair, sampling=sampling, max_tokens=max_tokens, grammar=grammar)


def plan_pair(settings: PairSettings, *, greedy: bool) -> PairPlan:
    """The plan of a pair for `greedy` or sampled text. Raises SettingError."""
    sources = settings if isinstance(settings, DraftSources) else DraftSources()
    verification = Verification(
        rule=settings.rule,
        draft_sampling=sources.draft_sampling,
        lenience=settings.lenience if isinstance(settings, Lenience) else 1.0,
    )
    draft = draft_reference(settings)
    notices: list[str] = []
    if settings.policy in ("plain", "lookup") or settings.draft_max == 0:
        if draft not in (None, NO_DRAFT):
            why = "--draft-max 0" if settings.draft_max == 0 else f"--policy {settings.policy}"
            notices.append(f"{draft} is not loaded: under {why} no draft model is asked")
        draft = NO_DRAFT
    check_context("-c", settings.ctx_size)
    check_context("-cd", settings.ctx_size_draft)
    plan = PairPlan(
        settings=settings,
        target=target_reference(settings),
        draft=draft,
        hub=hub_options(settings),
        options=load_options(settings, max_draft=settings.draft_max),
        draft_options=load_options(settings, draft=True, max_draft=settings.draft_max),
        opening=SessionOptions(
            settings.ctx_size,
            settings.ctx_size_draft,
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
    """The samplers without --ban, which needs a vocabulary. Raises SettingError."""
    given: dict[str, Any] = {"logit_bias": tuple(map(_bias, settings.logit_bias))}
    if settings.dry_sequence_breaker:
        breakers = (text for text in settings.dry_sequence_breaker if text != "none")
        given["dry_sequence_breakers"] = tuple(breakers)
    return sampling_params(settings, seed=None if settings.seed == -1 else settings.seed, **given)


def drafting_policy(settings: Drafting) -> FixedPolicy | AutoSettings:
    """Who drafts, and how far; --draft-min and --draft-p-min imply fixed lengths. Raises SettingError."""
    fixed_only = settings.draft_min is not None or settings.draft_p_min is not None
    kind = settings.policy or ("fixed" if fixed_only else "auto")
    if fixed_only and kind != "fixed":
        flag = "--draft-min" if settings.draft_min is not None else "--draft-p-min"
        raise SettingError(
            flag, f"--policy {kind} decides by itself", "Leave it out, or give --policy fixed."
        )
    if kind == "plain" or (kind != "fixed" and settings.draft_max == 0):
        return FixedPolicy(draft_max=0)
    if kind == "fixed":
        lengths: dict[str, Any] = {
            "draft_max": settings.draft_max,
            "draft_min": settings.draft_min,
            "p_min": settings.draft_p_min,
        }
        fixed = FixedPolicy(**{name: value for name, value in lengths.items() if value is not None})
        return AutoSettings(fixed=fixed) if fixed.draft_max else fixed
    cap = AutoSettings().draft_max if settings.draft_max is None else settings.draft_max
    return AutoSettings(free=kind != "model", models=kind != "lookup", draft_max=cap)


def target_reference(settings: Target) -> str | None:
    """The target as one reference; None for the embedded default. Raises SettingError."""
    return _reference(settings.model, settings.hf_repo, "-m", "-hf")


def draft_reference(settings: DraftModel) -> str | None:
    """The draft as one reference; None if none is named. Raises SettingError."""
    return _reference(settings.model_draft, settings.hf_repo_draft, "-md", "-hfd")


def _reference(path: str | None, repo: str | None, path_flag: str, repo_flag: str) -> str | None:
    if path is not None and repo is not None:
        raise SettingError(f"{path_flag} and {repo_flag}", "both name the model", "Give one of them.")
    return f"hf:{repo}" if repo is not None else path


def hub_options(settings: Hub) -> HubOptions:
    """The options of the hub."""
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


def check_context(flag: str, size: int | None) -> None:
    """Raise SettingError for a context that is too small."""
    if size is not None and (size < 0 or size == 1):
        raise SettingError(f"{flag} {size}", "not a context size", "Give 2 or more, or 0 for the usual one.")


def _max_tokens(predict: int) -> int | None:
    if predict < -2 or predict == 0:
        why = "it asks for nothing" if predict == 0 else "not a number of tokens"
        raise SettingError(f"-n {predict}", why, "Give 1 or more, or -1 for no limit.")
    return predict if predict > 0 else None


def _bias(text: str) -> tuple[int, float]:
    """A token and its bias: 15043+1.5 or 15043-inf."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if not found or found[2] == "+inf":
        raise SettingError(f"-l {text}", "not a token id with a bias", "Write, for instance, 15043+1.5.")
    return int(found[1]), float(found[2])


def _with_tokens(params: SamplingParams, bans: Sequence[str], vocabulary: Vocabulary) -> SamplingParams:
    for token, bias in params.logit_bias:
        _known(token, f"-l {token}{bias:+g}", vocabulary)
    return replace(params, banned=tuple(_token(text, vocabulary) for text in bans))


def _token(text: str, vocabulary: Vocabulary) -> int:
    if text.isdecimal():
        return _known(int(text), f"--ban {text}", vocabulary)
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    if len(tokens) != 1:
        raise SettingError(
            f"--ban {text!r}", f"this model writes it with {len(tokens)} tokens", "Name one token, or its id."
        )
    return tokens[0]


def _known(token: int, what: str, vocabulary: Vocabulary) -> int:
    if token >= vocabulary.size:
        raise SettingError(what, f"the vocabulary has {vocabulary.size} tokens", "Give a smaller id.")
    return token
