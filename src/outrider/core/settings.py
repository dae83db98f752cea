"""The settings that several commands have, in groups; `outrider.core.schema` says what a setting is."""

from __future__ import annotations

from dataclasses import Field as DataclassField
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SecretStr, create_model

from outrider.core.loading_settings import Context, DraftContext, Loading
from outrider.core.params import (
    DraftSampling,
    FastForward,
    JsonStyle,
    PolicyName,
    Rule,
    SamplingParams,
    Verification,
)
from outrider.core.schema import (
    MODELS,
    SAMPLING,
    SPECULATION,
    STRUCTURE,
    Group,
    Number,
    Share,
    setting,
)

_VERIFICATION = Verification()

# Models


class Target(Group):
    """Which target."""

    panel = MODELS
    model: str | None = setting(
        None,
        "-m",
        metavar="MODEL",
        help="Target: a GGUF file, hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE. Default: the embedded model.",
    )
    hf_repo: str | None = setting(
        None, "-hf", metavar="REPO", help="Target from the hub: OWNER/REPO[:QUANT]."
    )


class DraftModel(Group):
    """Which draft model."""

    panel = MODELS
    model_draft: str | None = setting(
        None,
        "-md",
        metavar="MODEL",
        help="Draft model with the target's tokenizer; auto: the best beside the target or in the hub's "
        "cache; none: no draft model. The embedded default comes with one: default-draft.",
    )
    hf_repo_draft: str | None = setting(
        None, "-hfd", metavar="REPO", help="Draft from the hub: OWNER/REPO[:QUANT]."
    )


class Hub(Group):
    """How the hub is asked."""

    panel = MODELS
    hf_token: SecretStr | None = setting(None, "-hft", metavar="TOKEN", help="Hub token. Default: $HF_TOKEN.")
    offline: bool = setting(False, help="Use only files in the hub's cache.")


class Models(Target, DraftModel, Hub):
    """Which models."""


class Template(Group):
    """How a conversation becomes a text."""

    panel = MODELS
    chat_template_file: Path | None = setting(None, help="Chat template (Jinja) in place of the model's own.")


class Reasoning(Group):
    """How much a model thinks before it answers."""

    panel = MODELS
    reasoning_budget: Annotated[int, Field(ge=-1)] = setting(
        -1, help="End the reasoning after N tokens; -1: no limit, 0: no reasoning."
    )
    reasoning_budget_message: str | None = setting(
        None, help="Text to write before a forced end of the reasoning."
    )


# Sampling


def _setting_name(sampler: DataclassField[Any]) -> str:
    """A sampler's name among settings: its first flag."""
    first: str = (*sampler.metadata["flags"], sampler.name)[0]
    return first.removeprefix("--").replace("-", "_")


def samplers(defaults: SamplingParams, *names: str) -> type[Group]:
    """A group with a setting for each sampler of SamplingParams, or for those that are named."""
    made: dict[str, Any] = {}
    for sampler in fields(SamplingParams):
        shown, default = sampler.metadata, getattr(defaults, sampler.name)
        if shown and (sampler.name in names or not names):
            number = Number if isinstance(default, float) else int
            kind = Annotated[number, Field(**shown["bounds"])]  # type: ignore[valid-type]
            declared = setting(default, *shown["flags"], metavar=shown["metavar"], help=shown["help"])
            made[_setting_name(sampler)] = (kind, declared)
    return create_model("Samplers", __base__=Group, **made)


def sampling_params(settings: Group, **others: Any) -> SamplingParams:
    """What settings say of the samplers, and the parameters that need more than a setting. Raises
    SettingError."""
    names = {sampler.name: _setting_name(sampler) for sampler in fields(SamplingParams) if sampler.metadata}
    given = {name: getattr(settings, own) for name, own in names.items() if hasattr(settings, own)}
    return SamplingParams(**given, **others)


if TYPE_CHECKING:  # a class that is made when the program runs has no type

    class _Samplers(Group):
        """A setting for each sampler, with llama.cpp's defaults."""

    class ServedSampling(Group):
        """What requests get that say nothing about it."""
else:
    _Samplers = samplers(SamplingParams())
    _Samplers.panel = SAMPLING
    _OPENAI = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    ServedSampling = samplers(_OPENAI, "temperature", "top_k", "top_p", "min_p")
    ServedSampling.panel = SAMPLING


class Sampling(_Samplers):
    """llama.cpp's samplers, and what else chooses tokens."""

    panel = SAMPLING
    seed: int = setting(-1, "-s", help="Random seed; -1: a fresh one.")
    dry_sequence_breaker: list[str] = setting(
        [],
        help="DRY: text that ends a repetition (repeatable; replaces the default ones; none: no breakers).",
    )
    logit_bias: list[str] = setting(
        [], "-l", metavar="ID±BIAS", help="Add BIAS to a token's logit: 15043+1 (repeatable)."
    )
    ban: list[str] = setting(
        [], metavar="TOKEN", help="Never choose this token: its id or its text (repeatable)."
    )


# Structured output


class Structure(Group):
    """What the output may be: one of five kinds, and how it is enforced."""

    panel = STRUCTURE
    json_schema: str | None = setting(
        None,
        "-j",
        "--json-schema",
        "-jf",
        "--json-schema-file",
        metavar="SCHEMA",
        help="JSON of this schema: a file, - for stdin, or the schema itself ({…, true, false).",
    )
    json_mode: bool = setting(False, help="Any JSON value.")
    regex: str | None = setting(None, metavar="PATTERN", help="Text that this pattern matches as a whole.")
    choices: list[str] = setting([], "--choice", help="One of these texts (repeatable).")
    grammar: str | None = setting(
        None,
        "--grammar",
        "--grammar-file",
        metavar="GRAMMAR",
        help="Text of this grammar: a GBNF or .lark file, - for stdin, or GBNF itself (it has a ::=).",
    )
    json_style: JsonStyle | None = setting(
        None,
        metavar="STYLE",
        help="White space in JSON: spaced (the default), compact, pretty or flexible (the model chooses).",
    )
    fast_forward: FastForward | None = setting(
        None,
        metavar="MODE",
        help="Where the grammar leaves no choice: exact (draft the text; the default), canonical (allow its "
        "usual tokens alone) or off.",
    )
    lenient_schema: bool = setting(
        False, help="Ignore parts of the schema that cannot be enforced, and list them."
    )
    constrain_after: str | None = setting(
        None, help="Leave the output free up to this text, such as </think>."
    )


# Speculation


class Drafting(Group):
    """Who drafts, how far, and what keeps a draft."""

    panel = SPECULATION
    policy: PolicyName | None = setting(
        None,
        metavar="WHO",
        help="Who drafts, and how far: auto (whatever pays here), lookup or model (auto with these alone), "
        "fixed (the lengths below), plain (nobody).",
    )
    draft_max: Annotated[int, Field(ge=0, le=2048)] | None = setting(
        None,
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        help="Draft at most N tokens a step (auto: 64, fixed: 8); 0 decodes plainly.",
    )
    draft_min: int | None = setting(
        None,
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        help="Fixed lengths: drop shorter drafts (not sampled ones, which would bias the text).",
    )
    draft_p_min: Share | None = setting(
        None,
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="Fixed lengths: end a draft before a token less likely than P to be accepted (0.65).",
    )
    rule: Rule = setting(
        _VERIFICATION.rule,
        metavar="RULE",
        help="Verification rule: token, block, stable (the text depends on the seed alone), or auto: stable "
        "with a seed, else block.",
    )
    bitwise: bool | None = setting(
        None,
        help="The text of plain decoding, bit for bit, or an error where the library cannot give it. "
        "Default: where it costs nothing.",
    )
    lookup: bool = setting(True, help="Draft from the text so far, and from earlier texts.")


class DraftSources(Group):
    """What drafts are made from, beyond the models and the text."""

    panel = SPECULATION
    draft_sampling: DraftSampling = setting(
        _VERIFICATION.draft_sampling,
        metavar="HOW",
        help="The draft model's tokens: the most likely (greedy), sampled, or whichever pays (auto).",
    )
    corpus: list[Path] = setting(
        [],
        metavar="PATH",
        help="Draft from this file, or the files in this folder (repeatable); indexed once.",
    )
    costs: Path | None = setting(
        None, help="Read what calls cost from this file, or write it there if it is new."
    )


class Lenience(Group):
    """Whether a draft may change the text."""

    panel = SPECULATION
    lenience: float = setting(
        _VERIFICATION.lenience,
        metavar="L",
        help="Below 1: accept more tokens and CHANGE the text (up to 1/L times too likely).",
    )


# Output


class Verbose(Group):
    """Whether the libraries' own log is shown."""

    verbose: bool = setting(False, "-v", help="Show llama.cpp's own log.")


class JsonOutput(Group):
    """Whether a program reads the output."""

    print_json: bool = setting(
        False, "--json", help="Print one JSON object, and nothing else, on standard output."
    )


class PairSettings(Models, Template, Drafting, Context, DraftContext, Loading, Verbose):
    """Which models are loaded and how, and how they draft: what `run`, `verify` and `serve` share."""
