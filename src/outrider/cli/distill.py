"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import show_log
from outrider.backends.gguf.quantizer import read_type
from outrider.cli.distill_settings import DistillSettings
from outrider.cli.output import INTERRUPTED, print_notes, readable, write, write_json
from outrider.cli.plans import hub_options
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.lab.distill.plan import DataPlan, DistillPlan, DraftPlan, Kind, Loss, TeacherKind, TrainingPlan
from outrider.lab.models import DEFAULT, ModelFile, find_model
from outrider.models.hub import HubOptions


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be done, for whom it is shown."""

    settings: DistillSettings
    file: ModelFile
    plan: DistillPlan
    errors: Console


def distill(settings: DistillSettings) -> int:
    """Distil, and say what came of it; returns the exit status. All that can be refused is refused before
    the first answer."""
    require_extra("outrider distill", "distill")
    if settings.ray is not None:
        require_extra("--ray", "ray", "leave --ray out")
    show_log(settings.verbose)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    file, plan = plan_of(settings)
    # PyTorch takes a second or two: a wrong option is refused before.
    from outrider.lab.distill.questions import asked

    asked(plan.data)
    work = _Work(settings, file, plan, errors)
    try:
        if settings.ray is not None:
            _answer_on_cluster(work, settings.ray)
        if settings.answers_only:
            _record(work)
        else:
            _distill(work)
    except KeyboardInterrupt:
        kept = f"what is done is kept in {plan.out}; the same command goes on from there"
        errors.print(Text(readable(f"interrupted: {kept}")))
        return INTERRUPTED
    return 0


def _answer_on_cluster(work: _Work, address: str) -> None:
    """Have the answers made there; what follows finds them."""
    from outrider.cli.distill_report import StepInterrupt, show_distilling
    from outrider.fleet.ray.answering import answer
    from outrider.fleet.ray.joining import joined

    with (
        joined(address),
        StepInterrupt() as interrupt,
        show_distilling(work.errors, interrupt) as progress,
    ):
        hub = hub_options(work.settings)
        notices = answer(work.file, work.plan, _reference(work.settings), hub, progress)
    print_notes(work.errors, notices)


def _record(work: _Work) -> None:
    from outrider.cli.distill_report import StepInterrupt, show_distilling
    from outrider.lab.distill.run import record

    with StepInterrupt() as interrupt, show_distilling(work.errors, interrupt) as progress:
        notices = record(work.file, work.plan, progress)
    print_notes(work.errors, notices)
    folder = work.plan.answers_folder
    count = sum(1 for _ in folder.glob("*.npz"))
    if work.settings.print_json:
        write_json({"schema": "outrider.distill.answers/1", "folder": str(folder), "answers": count})
    else:
        write(f"{count:,} answers in {folder}; the same command without --answers-only trains on them\n")


def _distill(work: _Work) -> None:
    from outrider.cli.distill_report import StepInterrupt, print_distilled, show_distilling
    from outrider.lab.distill.measure import learning_curve, measure_held_out
    from outrider.lab.distill.report import write_report
    from outrider.lab.distill.run import distill as run

    settings, file, plan = work.settings, work.file, work.plan
    with StepInterrupt() as interrupt, show_distilling(work.errors, interrupt) as progress:
        made = run(file, plan, progress)
        notices = list(made.report.notices)
        curve = learning_curve(made, plan, progress) if settings.learning_curve else None
        measured = None
        if not settings.no_report:
            measured = measure_held_out(file, plan, made, progress, notices)
        found = {"measured": measured, "learning_curve": curve, "notices": list(dict.fromkeys(notices))}
        report = made.report.model_copy(update=found)
        files = [] if settings.no_report else write_report(report, plan.out)
    print_notes(work.errors, report.notices)
    if settings.print_json:
        write(report.model_dump_json(by_alias=True) + "\n")
    else:
        reference = f"hf:{settings.hf_repo}" if settings.hf_repo is not None else settings.model
        console = Console(highlight=False, emoji=False, markup=False)
        print_distilled(console, report, reference, files)


# The settings of `distill` made into a plan; what excludes each other is refused.

_TAKEN_NAMES = ("first", "answers", "curve")
"""Files of a run have these."""


def plan_of(settings: DistillSettings) -> tuple[ModelFile, DistillPlan]:
    """The target, and what is to be done. Raises SettingError, ModelFileError or HubError."""
    _check_together(settings)
    data, training, context = _data(settings), _training(settings), _context(settings)
    file = _target(settings)
    name = f"{file.name}-draft" if settings.name is None else settings.name
    if not name or "/" in name or name.startswith(".") or name in _TAKEN_NAMES:
        raise SettingError(f"--name {name!r}", "it is no name for the draft's file", "Give another.")
    plan = DistillPlan(
        target=file.path,
        out=settings.out or Path(f"distilled-{name}"),
        name=name,
        data=data,
        draft=_draft(settings),
        training=training,
        threads=max(settings.threads, 0),
        context=context,
    )
    return file, plan


def _check_together(settings: DistillSettings) -> None:
    if settings.kind == "eagle3":
        _check_head(settings)
    if settings.go_on is not None:
        shaping = {
            "--base": settings.base is not None,
            "--random": settings.random,
            "--layers": settings.layers is not None,
            "--feed-forward": settings.feed_forward is not None,
        }
        if given := next((flag for flag, is_given in shaping.items() if is_given), None):
            _exclude("--continue", given, "a draft that is gone on with keeps its shape")
    if settings.steps is not None and settings.minutes is not None:
        _exclude("--steps", "--minutes", "both say how long to train")
    if settings.no_report and settings.learning_curve:
        _exclude("--no-report", "--learning-curve", "the learning curve is a part of the report")
    if settings.model is not None and settings.hf_repo is not None:
        _exclude("-m", "-hf", "both name the model")
    if settings.safetensors and settings.go_on is None and settings.vocabulary != 0:
        reason = "other engines need all of the target's tokens, and the draft would know some"
        raise SettingError("--safetensors", reason, "Add --vocabulary 0, or leave it out.")


def _check_head(settings: DistillSettings) -> None:
    usual = DistillSettings()
    of_models = ("layers", "feed_forward", "window", "base", "random", "go_on", "safetensors", "on_policy")
    for name in of_models:
        if getattr(settings, name) != getattr(usual, name):
            flag = "--continue" if name == "go_on" else f"--{name.replace('_', '-')}"
            _exclude("--kind eagle3", flag, "a head has one layer beside its target's, and begins as that")


def _exclude(one: str, other: str, reason: str) -> None:
    raise SettingError(f"{one} and {other}", reason, "Give one of them.")


def _data(settings: DistillSettings) -> DataPlan:
    if settings.teacher not in get_args(TeacherKind):
        known = ", ".join(get_args(TeacherKind))
        raise SettingError(f"--teacher {settings.teacher}", "it is not known", f"Choose one of {known}.")
    return DataPlan(
        prompts=tuple(dict.fromkeys(settings.prompts)),
        num_prompts=settings.num_prompts,
        temperatures=_temperatures(settings.temps),
        max_tokens=settings.max_tokens,
        folder=settings.answers,
        more=tuple(dict.fromkeys(settings.more_answers)),
        parallel=settings.parallel,
        teacher=cast(TeacherKind, settings.teacher),
    )


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingError(
            f"--temps {text}", "it is no list of numbers", "Give for instance 0,0.7."
        ) from None


def _training(settings: DistillSettings) -> TrainingPlan:
    minutes = TrainingPlan().minutes if settings.minutes is None else settings.minutes
    return TrainingPlan(
        steps=settings.steps,
        minutes=minutes,
        batch_tokens=settings.batch_tokens,
        learning_rate=settings.learning_rate,
        loss=cast(Loss, settings.loss),
        on_policy=settings.on_policy,
        seed=settings.seed,
    )


def _draft(settings: DistillSettings) -> DraftPlan:
    usual = DraftPlan()
    reference = settings.base if settings.go_on is None else settings.go_on
    return DraftPlan(
        kind=cast(Kind, settings.kind),
        start="continue" if settings.go_on is not None else "random" if settings.random else "prune",
        base=None if reference is None else _base(reference, hub_options(settings)),
        layers=usual.layers if settings.layers is None else settings.layers,
        feed_forward=settings.feed_forward,
        vocabulary=settings.vocabulary,
        window=settings.window,
        quantization=read_type(settings.quant),
        embedding_quantization=read_type(settings.embedding_quant),
        safetensors=settings.safetensors,
    )


def _base(reference: str, hub: HubOptions) -> Path:
    """A GGUF file, or what Hugging Face's layout has: a folder, or its safetensors."""
    path = Path(reference).expanduser()
    if path.is_dir() or (path.suffix == ".safetensors" and path.is_file()):
        return path
    return find_model(reference, hub=hub).path


def _target(settings: DistillSettings) -> ModelFile:
    return find_model(_reference(settings), hub=hub_options(settings))


def _reference(settings: DistillSettings) -> str:
    reference = f"hf:{settings.hf_repo}" if settings.hf_repo is not None else settings.model
    return DEFAULT if reference is None else reference


def _context(settings: DistillSettings) -> int:
    if settings.ctx_size <= settings.max_tokens:
        reason = f"answers of {settings.max_tokens} tokens leave no room for a prompt"
        raise SettingError(f"-c {settings.ctx_size}", reason, "Give more, or a smaller --max-tokens.")
    return settings.ctx_size
