"""Where models are: from what a user names to the files of a target and its draft on this machine.

default, default-draft           the embedded model, and the draft that comes with it
path/to/model.gguf               a file
path/to/m-00001-of-00003.gguf    a split model, by any of its parts
hf:owner/repo                    the hub: the usual quantization of the repository
hf:owner/repo:Q5_K_M             the hub: this quantization
hf:owner/repo/folder/file.gguf   the hub: this file (also hf:owner/repo:file.gguf)
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from outrider.core.errors import HubError, ModelFileError
from outrider.core.params import NO_DRAFT
from outrider.models.embedded import embedded_default, embedded_draft
from outrider.models.hub import HubOptions, fetch, list_files

DEFAULT = "default"
"""The reference that means the embedded default model."""

DEFAULT_DRAFT = "default-draft"
"""As the draft's reference: the one that comes with the default, for its other quantizations and its kin."""

_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:/(?P<file>.+)|:(?P<choice>[^:]+))?", re.ASCII)
_USUAL = ("Q4_K_M", "Q4_0", "Q8_0")
"""What is taken when no quantization is named, in this order."""
_DRAFTERS = r"(?i:eagle3|dflash|dspark|gemma-?4[^/]*-assistant)"
_COMPANIONS = re.compile(rf"(?:mmproj|imatrix|mtp-|{_DRAFTERS})[^/]*$")
"""Files beside a model that are no model by themselves."""
_SIDECARS = re.compile(rf"(?:draft|mtp|{_DRAFTERS})[^/]*\.gguf$", re.IGNORECASE)
"""Files beside a model that draft for it, as their names say."""
_SHOWN = 12


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model and is none by itself."""
    return _COMPANIONS.search(name) is not None


def is_sidecar(name: str) -> bool:
    """Whether a file of this name says that it drafts for another."""
    return _SIDECARS.search(name) is not None


def repository_of(reference: str) -> str | None:
    """The hub repository that a reference names; None of a path. Raises HubError."""
    return _parse(reference)[0] if reference.startswith("hf:") else None


def resolve(reference: str, *, hub: HubOptions | None = None) -> Path:
    """The file to load for `reference`, fetched from the hub if it is there. For a split model that is the
    first part, and all others are there too. Raises ModelFileError or HubError."""
    if reference == DEFAULT:
        return embedded_default()
    if reference == DEFAULT_DRAFT:
        if (draft := embedded_draft()) is None:
            why = "this installation came without the embedded default's draft"
            raise ModelFileError(reference, why, "Install Outrider again, or name a draft of your own.")
        return draft
    if not reference.startswith("hf:"):
        return local_shards(Path(os.path.expanduser(reference)))[0]
    options, (repository, file, quantization) = hub or HubOptions(), _parse(reference)
    if file is None:
        file = choose_file(list_files(repository, options), quantization, what=reference)
    return fetch(repository, shard_names(file), options)[0]


def resolve_pair(model: str | None, draft: str | None, hub: HubOptions) -> tuple[Path, Path | None]:
    """The target's file and the draft's. `model` None or DEFAULT: the embedded default; its own draft goes
    with it unless another is named, or `NO_DRAFT`. Raises HubError and ModelFileError."""
    target = embedded_default() if model is None else resolve(model, hub=hub)
    if draft == NO_DRAFT:
        return target, None
    if draft is not None:
        return target, resolve(draft, hub=hub)
    return target, embedded_draft() if model in (None, DEFAULT) else None


def _parse(reference: str) -> tuple[str, str | None, str | None]:
    match = _HUB.fullmatch(reference.removeprefix("hf:"))
    file, choice = (match["file"], match["choice"]) if match else (None, None)
    if choice and choice.lower().endswith(".gguf"):
        file, choice = choice, None
    why = "" if match else "not a hub reference"
    if file and not file.lower().endswith(".gguf"):
        why = f"{file!r} is not a GGUF file"
    elif file and ".." in PurePosixPath(file).parts:
        why = "a repository has no folder named '..'"
    if why or not match:
        way_out = "Write hf:owner/repo, hf:owner/repo:Q4_K_M or hf:owner/repo/file.gguf."
        raise HubError(reference, why, way_out)
    return match["repo"], file, choice


def choose_file(
    names: Sequence[str], quantization: str | None = None, *, what: str = "the repository"
) -> str:
    """The model among a repository's files; of a split one, the first part. A named quantization must be
    there, in whatever case, as a whole word of the file's path. With none, the usual ones are tried and then
    the first model is taken, as llama.cpp does. Raises HubError with what there is instead."""
    files = [name for name in names if name.lower().endswith(".gguf") and name == shard_names(name)[0]]
    # A repository of drafters holds nothing else.
    models = [name for name in files if not is_companion(name)] or [n for n in files if is_sidecar(n)]
    if not models:
        way_out = "Look for one whose name ends in -GGUF, or convert it."
        raise HubError(what, "the repository holds no GGUF model", way_out)
    for wanted in (quantization,) if quantization else _USUAL:
        ranked = [(rank, name) for name in models if (rank := _rank(name, wanted)) is not None]
        if ranked:
            return min(ranked)[1]
    if not quantization:
        return models[0]
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    raise HubError(
        what, f"the repository has no {quantization}", f"It has: {', '.join(models[:_SHOWN])}{more}."
    )


def _rank(name: str, quantization: str) -> tuple[bool, bool] | None:
    """How far a file is from being plainly of this quantization; None when it is of another."""
    word = rf"(?<![A-Z0-9_])(UD-)?{re.escape(quantization.upper())}(?![A-Z0-9_])(?!-(?:XXS|XS|S|M|L|XL)\b)"
    stem = re.sub(r"(-\d{5}-OF-\d{5})?\.GGUF$", "", name.upper())
    matches = list(re.finditer(word, stem))
    if not matches:
        return None
    return any(match[1] for match in matches), matches[-1].end() != len(stem)


# Models that are split over several files: x-00001-of-00003.gguf and its siblings.

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def shard_names(name: str) -> tuple[str, ...]:
    """The file names of the model that `name` (with its folders) is a part of, the first part first.

    >>> shard_names("q8/m-00002-of-00002.gguf")
    ('q8/m-00001-of-00002.gguf', 'q8/m-00002-of-00002.gguf')
    """
    path = PurePosixPath(name)
    match = _SHARD.fullmatch(path.name)
    if not match:
        return (name,)
    index, count = int(match["index"]), int(match["count"])
    if not 1 <= index <= count:
        return (name,)
    parts = (f"{match['stem']}-{i:05d}-of-{match['count']}{match['suffix']}" for i in range(1, count + 1))
    return tuple(str(path.with_name(part)) for part in parts)


def local_shards(path: Path) -> tuple[Path, ...]:
    """The files of a model on this machine, the first part first. `path` names the model's file or any of its
    parts. Raises ModelFileError when some are missing."""
    _check_file(path)
    parts = tuple(path.with_name(name) for name in shard_names(path.name))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        reason = f"it is one of {len(parts)} parts, and {len(missing)} of them are missing: {names}"
        raise ModelFileError(str(path), reason, f"Put all parts into {path.parent}.")
    return parts


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        inside = sorted(child.name for child in path.glob("*.gguf")) if stat.S_ISDIR(mode) else []
    except PermissionError:
        raise ModelFileError(str(path), "no permission to read it", "Check those on its way.") from None
    except (OSError, ValueError):
        like_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", str(path)) and path.suffix != ".gguf"
        hint = f"; a repository of the hub is written hf:{path}" if like_hub else ""
        raise ModelFileError(str(path), "there is no such file", f"Check the path{hint}.") from None
    if stat.S_ISDIR(mode):
        names = f"Name a file in it: {', '.join(inside[:5])}." if inside else "Name a .gguf file."
        raise ModelFileError(str(path), "it is a directory", names)
    if not stat.S_ISREG(mode):
        raise ModelFileError(str(path), "it is a device or a pipe", "Name a .gguf file.")


# Names of quantizations, as they occur in the names of files and models.

_WORD = re.compile(
    r"""(?<![a-z0-9]) (?:ud[-_])?
    (?: i?q[1-8]_(?: k(?:_(?:xxs|xs|s|m|l|xl))? | [01](?:_[48]_[48])? | nl | xxs | xs | s | m | l )
      | tq[12]_0 | mxfp4(?:_moe)? | nvfp4 | bf16 | fp?16 | fp?32 )
    (?![a-z0-9])""",
    re.IGNORECASE | re.VERBOSE,
)
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.IGNORECASE)
_FORMAT = re.compile(r"(?<![a-z0-9])(?:gguf|ggml)(?![a-z0-9])", re.IGNORECASE)


def requantized_name(stem: str, quantization: str) -> str:
    """The name of a file, without its suffix, once it is of another quantization. The old one is replaced,
    in its own case; where there is none, the new one is appended to the name.

    >>> requantized_name("Tiny.Q4_K_M", "Q8_0"), requantized_name("tiny-q4_k_m-00001-of-00002", "IQ4_NL")
    ('Tiny.Q8_0', 'tiny-iq4_nl')
    >>> requantized_name("tiny", "Q8_0")
    'tiny.Q8_0'
    """
    stem = _PART.sub("", stem)
    matches = list(_WORD.finditer(stem))
    if not matches:
        return f"{stem}.{quantization}"
    last = matches[-1]
    written = quantization.lower() if last[0].islower() else quantization
    return stem[: last.start()] + written + stem[last.end() :]


def without_quantization(name: str) -> str:
    """A model's name as words in lower case, without its quantization: what its variants share.

    >>> without_quantization("Qwen2.5 Coder 1.5B GGUF"), without_quantization("qwen2.5-coder-1.5b-Q4_K_M")
    ('qwen2.5 coder 1.5b', 'qwen2.5 coder 1.5b')
    """
    bare = _FORMAT.sub(" ", _WORD.sub(" ", _PART.sub("", name)))
    words = (word.strip(".") for word in re.split(r"[\s_/-]+", bare.lower()))
    return " ".join(word for word in words if word)
