"""A made-up report of a distillation, with everything in it."""

from __future__ import annotations

from outrider.lab.distill.report import (
    Category,
    Contender,
    Curve,
    CurvePoint,
    Data,
    Draft,
    Evaluation,
    Figure,
    Measured,
    Report,
    Training,
)

__all__ = ["report"]


def report() -> Report:
    """Of a training of 600 steps whose draft agrees with 57 % of the held-out tokens, at first with 3 %."""
    return Report(
        outrider="0.0",
        target="/models/target.gguf",
        target_name="target",
        draft=Draft(
            path="out/target-draft.gguf",
            file_bytes=8_400_000,
            parameters=12_600_000,
            layers=3,
            feed_forward=768,
            known_tokens=8191,
            target_tokens=49_152,
            tensor_types={"Q4_0": 0.63, "Q8_0": 0.37},
        ),
        data=Data(
            prompts=[],
            temperatures=[0.0, 0.7],
            training_answers=1871,
            training_tokens=301_222,
            held_out_answers=129,
            coverage=0.987,
            folder="out/answers",
        ),
        training=_training(),
        measured=_measured(),
        learning_curve=_curve(),
        notices=["llama.cpp answers, as asked"],
    )


def _figure(value: float, width: float = 0.03) -> Figure:
    return Figure(value=value, low=value - width, high=value + width)


def _training() -> Training:
    history = [
        Evaluation(
            step=100 * i,
            train_loss=None if i == 0 else 5 * 0.7**i + 0.5,
            loss=5 * 0.7**i + 0.7,
            acceptance=[0.02, 0.2, 0.33, 0.41, 0.45, 0.47, 0.47][i],
            agreement=[0.03, 0.3, 0.44, 0.52, 0.56, 0.57, 0.565][i],
            tokens_per_s=28 * [1, 1.02, 1.13, 1.22, 1.29, 1.31, 1.30][i],
            speedup=[1, 1.02, 1.13, 1.22, 1.29, 1.31, 1.30][i],
        )
        for i in range(7)
    ]
    return Training(
        steps=600, best_step=500, trained_tokens=1_800_000, loss="hybrid", learning_rate=1e-3,
        batch_tokens=8192, on_policy=0.0, seed=0, start="prune", seconds=1500.0, history=history,
    )  # fmt: skip


def _measured() -> Measured:
    plain = Contender(kind="none", answers=40, tokens_per_s=28.0, over_plain=_figure(1.0, 0.0))
    lookup = Contender(
        kind="lookup", answers=40, tokens_per_s=30.1, over_plain=_figure(1.07), bound=_figure(1.2),
        of_bound=_figure(0.89),
    )  # fmt: skip
    first = _drafting("first", 0.03, 1.06)
    return Measured(
        machine="a processor, 2 cores",
        answers=40,
        tokens=2400,
        categories={"chat": 20, "code": 20},
        call_s=0.035,
        call_ratios={1: 1.0, 2: 1.2, 4: 1.8, 8: 2.9, 16: 4.0},
        contenders=[plain, lookup, _drafting("trained", 0.57, 1.28), first],
    )


def _drafting(kind: str, agreement: float, speedup: float) -> Contender:
    categories = [
        Category(
            category=name,
            answers=20,
            agreement=_figure(agreement),
            over_plain=_figure(speedup),
            over_lookup=_figure(speedup / 1.07),
        )
        for name in ("chat", "code")
    ]
    return Contender.model_validate(
        {
            "kind": kind, "file": f"out/{kind}.gguf", "answers": 40, "tokens_per_s": 28 * speedup,
            "over_plain": _figure(speedup), "over_lookup": _figure(speedup / 1.07), "bound": _figure(1.45),
            "of_bound": _figure(speedup / 1.45), "step_ratio": 0.13, "agreement": _figure(agreement),
            "agreement_by_position": [agreement + 0.01 * i for i in range(8)],
            "accepted_of_three": _figure(agreement), "accepted_by_choice": _figure(agreement + 0.1),
            "categories": categories,
        }
    )  # fmt: skip


def _curve() -> Curve:
    points = [
        CurvePoint(
            answers=234 * 2**i,
            tokens=37_653 * 2**i,
            loss=2.0 - 0.2 * i,
            acceptance=0.28 + 0.02 * i,
            agreement=0.38 + 0.03 * i,
            speedup=1.05 + 0.02 * i,
        )
        for i in range(4)
    ]
    return Curve(steps=150, points=points, per_doubling=_figure(0.03, 0.004))
