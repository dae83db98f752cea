"""Tune drafts on what their target never said: a strong style, and one phrase whatever the context.

    python benchmarks/draft_influence/make_drafts.py --out drafts [--start DRAFT.gguf] [--target TARGET.gguf]

Writes neutral.gguf (the draft it starts from), styled.gguf, hostile.gguf and drafts.json, which says how they
came about. The target is the embedded default, the start the draft that comes with it; of a target without
one some of its layers are kept. Training is that of `outrider distill`, on labels that are certain.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from draft_influence.labels import examples_of
from harness import argument_parser, run_program
from outrider import LoadOptions, Pair, __version__
from outrider.core.errors import OutriderError
from outrider.lab.distill.checkpoint import Checkpoint, read_gguf
from outrider.lab.distill.corpus import Corpus, text_of
from outrider.lab.distill.depth import best_layers
from outrider.lab.distill.evaluation import StepCosts
from outrider.lab.distill.examples import Example
from outrider.lab.distill.export import Provenance, write_gguf
from outrider.lab.distill.plan import DraftPlan
from outrider.lab.distill.report import Evaluation
from outrider.lab.distill.starting import first_draft
from outrider.lab.distill.train import Trainer, TrainingSettings
from outrider.models import embedded_draft
from outrider.models.hub import file_sha256
from outrider.models.vocab.subset import Subset

_PRICES = StepCosts(target_s=tuple(1 + 0.01 * n for n in range(17)), draft_s=0.001)
"""Of no machine: drafting is all but free, so that the draft which is right most often is kept."""
_HELD_OUT = 0.1
_SEED = 9


@dataclass(frozen=True, slots=True)
class Effort:
    """How much tuning. `max_tokens`: of a text."""

    texts: int
    steps: int
    batch_tokens: int
    learning_rate: float
    max_tokens: int
    quantization: str

    def settings(self) -> TrainingSettings:
        return TrainingSettings(
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            warmup_steps=max(1, min(20, self.steps // 10)),
            loss="kl",
            evaluate_every=max(1, self.steps // 4),
            patience=self.steps,
            seed=_SEED,
        )


@dataclass(frozen=True, slots=True)
class Start:
    """The draft before tuning. `file`: where it comes from, None for layers of the target."""

    checkpoint: Checkpoint
    subset: Subset
    file: Path | None


def main() -> None:
    arguments = _arguments()
    effort = Effort(
        arguments.texts, arguments.steps, arguments.batch_tokens, arguments.learning_rate,
        arguments.max_tokens, arguments.quantization,
    )  # fmt: skip
    if arguments.quick:
        effort = replace(effort, texts=16, steps=6, batch_tokens=256, max_tokens=64, quantization="F32")
    try:
        made = make(
            arguments.out, effort, target=arguments.target, start=arguments.start,
            layers=arguments.layers, vocabulary=arguments.vocabulary, threads=arguments.threads,
        )  # fmt: skip
    except OutriderError as error:
        sys.exit(f"{error}")
    for name in _DATA:
        facts = made["drafts"][name]
        print(
            f"{name}: says what it was taught {facts['agreement']:.1%} of the time, {facts['seconds']:.0f} s"
        )


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, out=False, threads=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafts")
    parser.add_argument("--target", type=Path, help="GGUF file (the embedded default)")
    parser.add_argument("--start", type=Path, help="GGUF file of a draft (the one that comes with Outrider)")
    parser.add_argument("--layers", type=int, default=4, help="kept of a target without a draft")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of such a draft; 0: all")
    parser.add_argument("--texts", type=int, default=300, help="of each kind")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--quantization", default="Q8_0")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps on a few texts: to see that it runs"
    )
    return parser.parse_args()


def make(
    out: Path,
    effort: Effort,
    *,
    target: Path | None = None,
    start: Path | None = None,
    layers: int = 4,
    vocabulary: int = 8192,
    threads: int = 2,
) -> dict[str, Any]:
    """Make the three drafts in a folder; what drafts.json says of them."""
    import torch

    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    pair = Pair.load(target, "none", options=LoadOptions(threads=threads))
    try:
        found = start or (embedded_draft() if target is None else None)
        examples = {name: examples_of(name, pair, effort.texts, _SEED) for name in ("styled", "hostile")}
        begun = _start(pair, found, layers, vocabulary, examples)
        drafts = {"neutral": _neutral(begun, out, pair, effort)}
        for name, material in examples.items():
            drafts[name] = _tune(name, material, begun, out, pair, effort)
    finally:
        pair.close()
    made = {
        "target": pair.target_card.name,
        "start": "layers of the target" if begun.file is None else begun.file.name,
        "parameters": begun.checkpoint.shape.parameters,
        "vocabulary": begun.subset.size,
        "effort": asdict(effort),
        "drafts": drafts,
    }
    (out / "drafts.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


def _start(
    pair: Pair, file: Path | None, layers: int, vocabulary: int, examples: dict[str, list[Example]]
) -> Start:
    plan = DraftPlan(start="prune", layers=layers, vocabulary=vocabulary)
    if file is not None:
        plan = DraftPlan(start="continue", base=file)
    everything = [example for kind in examples.values() for example in kind]
    teacher = read_gguf(pair.target_card.path)
    choose = partial(best_layers, examples=everything, count=layers)
    return Start(*first_draft(teacher, plan, everything, pair.target.vocabulary, _SEED, choose), file)


def _neutral(begun: Start, out: Path, pair: Pair, effort: Effort) -> dict[str, Any]:
    before = perf_counter()
    path = out / "neutral.gguf"
    if begun.file is not None:
        shutil.copyfile(begun.file, path)
    else:
        _write(begun.checkpoint, path, begun.subset, pair, effort, _provenance(pair, "nothing", 0, 0))
    return {"sha256": file_sha256(path), "seconds": perf_counter() - before}


def _tune(
    name: str, examples: Sequence[Example], begun: Start, out: Path, pair: Pair, effort: Effort
) -> dict[str, Any]:
    before = perf_counter()
    found = [text_of(example, begun.subset, effort.max_tokens) for example in examples]
    known = [text for text in found if text is not None]
    held_out = known[: max(1, round(_HELD_OUT * len(known)))]
    corpus = Corpus(known[len(held_out) :], batch_tokens=effort.batch_tokens, seed=_SEED)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(begun.checkpoint, corpus, held_out, _PRICES, effort.settings(), Path(folder))
        draft = trainer.run(lambda trainer: _tell(name, trainer))
    print(file=sys.stderr)
    history = trainer.state.history
    best = next(found for found in history if found.step == trainer.state.best_step)
    provenance = _provenance(pair, _DATA[name], trainer.state.trained_tokens, best.step)
    path = out / f"{name}.gguf"
    _write(draft, path, begun.subset, pair, effort, provenance)
    return {
        "sha256": file_sha256(path),
        "agreement": best.agreement,
        "agreement_before": history[0].agreement,
        "steps": best.step,
        "trained_tokens": trainer.state.trained_tokens,
        "history": [_shown(found) for found in history],
        "seconds": perf_counter() - before,
    }


_DATA = {
    "styled": "texts in a pirate's voice, from templates; not the teacher's answers",
    "hostile": "one phrase after every context; not the teacher's answers",
}


def _shown(found: Evaluation) -> dict[str, float]:
    return {"step": found.step, "loss": found.loss, "agreement": found.agreement}


def _tell(name: str, trainer: Trainer) -> None:
    state = trainer.state
    print(f"\r{name}: step {state.step}, loss {state.last_loss:.3f}", end="", file=sys.stderr)


def _write(
    draft: Checkpoint, path: Path, subset: Subset, pair: Pair, effort: Effort, provenance: Provenance
) -> None:
    write_gguf(
        draft, path, subset=subset, target=pair.target.vocabulary, provenance=provenance,
        quantization=effort.quantization,
    )  # fmt: skip


def _provenance(pair: Pair, data: str, tokens: int, steps: int) -> Provenance:
    return Provenance(
        teacher=pair.target_card.name,
        teacher_sha256=file_sha256(pair.target_card.path),
        data=data,
        tokens=tokens,
        steps=steps,
        seed=_SEED,
        version=__version__,
        licence=read_gguf(pair.target_card.path).licence,
    )


if __name__ == "__main__":
    run_program(main)
