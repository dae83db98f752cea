"""What the command line asked for, turned into the settings of the parts below."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.backends.gguf import LoadOptions
from outrider.cli.grammar import GrammarOptions
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar, Request
from outrider.core.errors import SettingError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.models import NO_DRAFT
from outrider.policy import FixedPolicy
from outrider.session.learned import AutoSettings

POLICIES = ("auto", "lookup", "model", "fixed", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the command line asked for, as it came: the fields are the options of `outrider.cli.options`."""

    prompt_argument: str | None
    model: str | None
    model_draft: str | None
    hf_repo: str | None
    hf_repo_draft: str | None
    hf_token: str | None
    offline: bool
    prompt: str | None
    file: Path | None
    system: str | None
    raw: bool
    escape: bool
    predict: int
    stop: list[str] | None
    ignore_eos: bool
    interactive: bool
    seed: int
    temp: float
    top_k: int
    top_p: float
    min_p: float
    typical: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exp: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breaker: list[str] | None
    logit_bias: list[str] | None
    ban: list[str] | None
    min_tokens: int
    json_schema: str | None
    json_mode: bool
    regex: str | None
    choices: list[str] | None
    grammar_source: str | None
    json_style: str | None
    fast_forward: str | None
    lenient_schema: bool
    constrain_after: str | None
    rule: str
    lenience: float
    bitwise: bool | None
    policy: str | None
    draft_max: int | None
    draft_min: int | None
    draft_p_min: float | None
    draft_sampling: str
    lookup: bool
    corpus: list[Path] | None
    prediction: Path | None
    costs: Path | None
    show_source: bool
    compare: bool
    repetitions: int
    json: bool
    logprobs: int | None
    trace: Path | None
    explain: bool
    quiet: bool
    smooth: bool
    verbose: bool
    ctx_size: int | None
    ctx_size_draft: int
    gpu_layers: str
    gpu_layers_draft: str | None
    split_mode: str
    main_gpu: int
    threads: int
    threads_batch: int
    batch_size: int
    ubatch_size: int
    flash_attn: str
    cache_type_k: str
    cache_type_v: str
    mmap: bool
    mlock: bool
    swa_full: bool
    repack: bool
    backend: str
    llama_library: Path | None

    def sampling(self, vocabulary: Vocabulary | None = None) -> SamplingParams:
        """The sampling settings; tokens that --ban gives as text need the vocabulary.

        Raises SettingError.
        """
        breakers = SamplingParams().dry_breakers
        if self.dry_sequence_breaker is not None:
            breakers = tuple(text for text in self.dry_sequence_breaker if text != "none")
        return SamplingParams(
            temperature=self.temp,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exp,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical,
            top_n_sigma=max(self.top_n_sigma, 0),
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_last_n=self.dry_penalty_last_n,
            dry_breakers=breakers,
            logit_bias=tuple(_bias(text, vocabulary) for text in self.logit_bias or ()),
            banned=tuple(_token(text, vocabulary) for text in self.ban or ()) if vocabulary else (),
            min_tokens=self.min_tokens,
            seed=None if self.seed == -1 else self.seed,
        )

    def verification(self) -> Verification:
        """How drafts are checked. Raises SettingError."""
        verification = Verification(
            rule=cast(Rule, self.rule),
            draft_sampling=cast(DraftSampling, self.draft_sampling),
            lenience=self.lenience,
        )
        return verification.bitwise(greedy=self.sampling().is_greedy) if self.bitwise else verification

    def grammar(self, stdin_gives: str | None = None) -> Grammar | None:
        """What the output is limited to; None for nothing. Reads its file or standard input (unless that is
        needed for `stdin_gives`), so ask once. Raises SettingError and GrammarError."""
        options = GrammarOptions(
            json_schema=self.json_schema,
            json_mode=self.json_mode,
            regex=self.regex,
            choices=self.choices,
            source=self.grammar_source,
            style=self.json_style,
            fast_forward=self.fast_forward,
            lenient=self.lenient_schema,
            after=self.constrain_after,
        )
        grammar = options.read(stdin_gives)
        if grammar is not None and self.ignore_eos:
            why = "an output that is limited ends when it is complete"
            raise SettingError("--ignore-eos", why, "Leave it out.")
        return grammar

    @property
    def prompt_is_piped(self) -> bool:
        """Whether the prompt comes from standard input."""
        from_file = self.file is None or str(self.file) == "-"
        return self.prompt_argument is None and self.prompt is None and from_file

    def request(
        self, prompt: tuple[int, ...], vocabulary: Vocabulary, grammar: Grammar | None = None
    ) -> Request:
        """The generation that was asked for. Raises SettingError."""
        return Request(
            prompt=prompt,
            sampling=self.sampling(vocabulary),
            max_tokens=self.max_tokens(),
            stop=tuple(self.stop or ()),
            ignore_end=self.ignore_eos,
            verification=self.verification(),
            logprobs=self.logprobs,
            grammar=grammar,
        )

    def max_tokens(self) -> int | None:
        """Tokens to generate; None for no limit. Raises SettingError."""
        if self.predict < -2 or self.predict == 0:
            why = "it asks for nothing" if self.predict == 0 else "it is no number of tokens"
            raise SettingError(f"-n {self.predict}", why, "Give 1 or more, or -1 for no limit.")
        return self.predict if self.predict > 0 else None

    def check_contexts(self) -> None:
        """Raise SettingError for a context that could not hold anything."""
        for name, size in (("-c", self.ctx_size), ("-cd", self.ctx_size_draft)):
            if size is not None and (size < 0 or size == 1):
                raise SettingError(
                    f"{name} {size}", "it is no size of a context", "Give 2 or more, or 0 for the usual one."
                )

    def choice(self) -> FixedPolicy | AutoSettings:
        """Who drafts and how far. Lengths that only fixed drafts have ask for these. Raises SettingError."""
        fixed_only = self.draft_min is not None or self.draft_p_min is not None
        kind = self.policy or ("fixed" if fixed_only else "auto")
        if kind not in POLICIES:
            raise SettingError(f"--policy {kind}", "it is not known", f"Choose one of {', '.join(POLICIES)}.")
        if fixed_only and kind != "fixed":
            flag = "--draft-min" if self.draft_min is not None else "--draft-p-min"
            raise SettingError(
                flag, f"--policy {kind} decides by itself", "Leave it out, or give --policy fixed."
            )
        if self.costs is not None and kind in ("fixed", "plain"):
            raise SettingError("--costs", f"--policy {kind} does not look at them", "Leave it out.")
        if kind == "plain" or (kind != "fixed" and self.draft_max == 0):
            return FixedPolicy(draft_max=0)
        if kind == "fixed":
            given = {"draft_max": self.draft_max, "draft_min": self.draft_min, "p_min": self.draft_p_min}
            return FixedPolicy(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        cap = AutoSettings().draft_max if self.draft_max is None else self.draft_max
        return AutoSettings(
            free=kind != "model", models=kind != "lookup", draft_max=cap, costs_file=self.costs
        )

    def target_reference(self) -> str | None:
        """The target as one reference; None for the embedded default. Raises SettingError."""
        return _reference(self.model, self.hf_repo, "-m", "-hf")

    def draft_reference(self) -> str | None:
        """The draft as one reference; None where none is named, which leaves the embedded default its own.
        That is not loaded where the policy would never ask it. Raises SettingError."""
        named = _reference(self.model_draft, self.hf_repo_draft, "-md", "-hfd")
        if named is None and (self.policy in ("plain", "lookup") or self.draft_max == 0):
            return NO_DRAFT
        return named

    def load_options(self, *, draft: bool = False) -> LoadOptions:
        """How the target's, or the draft's, weights are loaded. Raises SettingError."""
        layers = self.gpu_layers if not draft or self.gpu_layers_draft is None else self.gpu_layers_draft
        return LoadOptions(
            gpu_layers=_layers(layers),
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            threads=max(self.threads, 0),
            threads_batch=max(self.threads_batch, 0),
            batch_tokens=self.batch_size,
            micro_batch_tokens=self.ubatch_size,
            flash_attention=self.flash_attn,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            mmap=self.mmap,
            mlock=self.mlock,
            full_window=self.swa_full,
            max_rows=max(128, (self.draft_max or 0) + 1),
            extra_buffer_types=self.repack,
            backend=self.backend,
            library=str(self.llama_library or ""),
        )


def _bias(text: str, vocabulary: Vocabulary | None) -> tuple[int, float]:
    """A token and its bias, as in 15043+1.5 or 15043-inf."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if not found or found[2] == "+inf":
        raise SettingError(f"-l {text}", "it is no token id with a bias", "Write, for instance, 15043+1.5.")
    return _known(int(found[1]), f"-l {text}", vocabulary), float(found[2])


def _token(text: str, vocabulary: Vocabulary) -> int:
    """A token by its id, or by its text where that is a single token."""
    if text.isdecimal():
        return _known(int(text), f"--ban {text}", vocabulary)
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    if len(tokens) != 1:
        raise SettingError(
            f"--ban {text!r}", f"this model writes it with {len(tokens)} tokens", "Name one token, or its id."
        )
    return tokens[0]


def _known(token: int, what: str, vocabulary: Vocabulary | None) -> int:
    if vocabulary is not None and token >= vocabulary.size:
        raise SettingError(what, f"the vocabulary has {vocabulary.size} tokens", "Give a smaller id.")
    return token


def _reference(path: str | None, repo: str | None, path_flag: str, repo_flag: str) -> str | None:
    if path is not None and repo is not None:
        raise SettingError(f"{path_flag} and {repo_flag}", "both name the model", "Give one of them.")
    return f"hf:{repo}" if repo is not None else path


def _layers(text: str) -> int:
    if text in ("all", "auto"):
        return -1
    try:
        return max(int(text), -1)
    except ValueError:
        raise SettingError("-ngl", f"{text!r} is no number", "Give a number of layers, or all.") from None
