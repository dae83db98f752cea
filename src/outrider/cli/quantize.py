"""`outrider quantize`: other quantizations of a model file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from outrider.backends.gguf.quantizer import Quantized, check_output, quantize, read_type, requantizing
from outrider.cli.output import write_json
from outrider.cli.plans import hub_options
from outrider.cli.screen import Screen
from outrider.cli.settings import QuantizeSettings
from outrider.core.errors import SettingError
from outrider.core.numbers import gigabytes
from outrider.models.embedded import embedded_default
from outrider.models.reference import requantized_name, resolve


def quantize_model(settings: QuantizeSettings) -> int:
    """Make the files, and show them; returns the exit status. Foreseeable errors are raised before the first
    file."""
    errors = Screen(stderr=True, soft_wrap=True)
    types, threads, force = _types(settings.to), max(settings.threads, 0), settings.force
    model = settings.model
    source = embedded_default() if model is None else resolve(model, hub=hub_options(settings))
    outputs = {to: _folder(settings, source) / f"{requantized_name(source.stem, to)}.gguf" for to in types}
    for output in outputs.values():
        check_output(source, output, force=force)
    if warning := requantizing(source):
        errors.note(warning)
    made = []
    for to, output in outputs.items():
        with errors.progress() as report:
            progress = partial(report, output.name)
            made.append(quantize(source, to, output, threads=threads, force=force, progress=progress))
        errors.say(f"{output.name}: {gigabytes(made[-1].file_bytes)}, {made[-1].seconds:.1f} s")
    if settings.print_json:
        files = [asdict(one) | {"path": str(one.path), "source": str(one.source)} for one in made]
        write_json({"source": str(source), "files": files})
    else:
        _print(source, made)
    return 0


def _types(given: Sequence[str]) -> list[str]:
    names = [name for part in given for name in part.split(",") if name.strip()]
    if not names:
        raise SettingError("--to", "it names no type", "Write, for instance, --to Q8_0,Q4_K_M.")
    return list(dict.fromkeys(read_type(name) for name in names))


def _folder(settings: QuantizeSettings, source: Path) -> Path:
    if settings.out is None:
        is_local = settings.model is not None and not settings.model.startswith("hf:")
        return source.parent if is_local else Path()
    settings.out.mkdir(parents=True, exist_ok=True)
    return settings.out


def _print(source: Path, made: Sequence[Quantized]) -> None:
    rows = []
    for one in made:
        shown = [f"{name} {share:.0%}" for name, share in one.tensor_types.items() if share >= 0.01]
        types = ", ".join(shown) if len(shown) > 1 else next(iter(one.tensor_types), "")
        size, ratio = gigabytes(one.file_bytes), f"{one.file_bytes / one.source_bytes:.2f}x"
        rows.append((one.path.name, one.quantization, size, ratio, f"{one.seconds:.1f}", types))
    console = Screen(soft_wrap=True)
    console.say(f"made of {source.name} ({made[0].source_quantization})")
    left = ("file", "type", "weights in")
    console.table(("file", "type", "size", "ratio", "s", "weights in"), rows, left=left)
