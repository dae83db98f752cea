"""What the command line asked for, turned into the settings of the parts below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.backends.llama_cpp import LoadOptions
from outrider.core.data import SamplingParams
from outrider.core.errors import SettingError
from outrider.policy import FixedPolicy


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
    draft_max: int
    draft_min: int
    draft_p_min: float
    draft_sampling: str
    lookup: bool
    show_source: bool
    compare: bool
    repetitions: int
    json: bool
    trace: Path | None
    quiet: bool
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

    def sampling(self) -> SamplingParams:
        """The sampling settings. Raises SettingError."""
        return SamplingParams(
            temperature=self.temp,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == -1 else self.seed,
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

    def policy(self) -> FixedPolicy:
        """The draft lengths. Raises SettingError."""
        return FixedPolicy(self.draft_max, self.draft_min, self.draft_p_min)

    def sampled_drafts(self) -> bool:
        """Whether the draft model's tokens are drawn. Raises SettingError."""
        if self.draft_sampling not in ("greedy", "sampled"):
            raise SettingError(
                "--draft-sampling", f"{self.draft_sampling!r} is not known", "Choose greedy or sampled."
            )
        return self.draft_sampling == "sampled"

    def target_reference(self) -> str | None:
        """The target as one reference; None for the embedded default. Raises SettingError."""
        return _reference(self.model, self.hf_repo, "-m", "-hf")

    def draft_reference(self) -> str | None:
        """The draft as one reference; None for none. Raises SettingError."""
        return _reference(self.model_draft, self.hf_repo_draft, "-md", "-hfd")

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
            max_rows=max(128, self.draft_max + 1),
            extra_buffer_types=self.repack,
        )


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
